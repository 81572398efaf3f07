// Gates on heads: x ⊙ f(gate), where the gates of a head lie `step` columns after those of the one
// before.
//
// Threads: blocks of 256 over vectors of 16 bytes of x, 2 or 4 vectors per thread (`elements.cuh`).
// Bytes per element of x: 3 (forward) and 5 (backward) elements of the type.
#include "elements.cuh"
#include "sigmoid.cuh"

namespace {

// Heads and the places of their gates, with the function's number in `head_gate.rs`.
struct Gates {
    int is_silu;
    uint32_t head_dim, step, offset;

    // The gate's column of a column of x.
    __device__ __forceinline__ size_t place(size_t col) const {
        const uint32_t head = uint32_t(col) / head_dim;
        return offset + size_t(head) * step + (uint32_t(col) - head * head_dim);
    }
    // f(x) and f'(x).
    __device__ __forceinline__ void evaluate(float x, float &value, float &slope) const {
        const float s = sigmoid(x), rest = 1.0f - s;
        value = is_silu ? x * s : s;
        slope = is_silu ? s * (1.0f + x * rest) : s * rest;
    }
};

template <int N, typename T>
__device__ __forceinline__ void forward(const Gates gates, const T *x, size_t x_stride, T *h, size_t h_stride, const T *gate,
                                        size_t gate_stride, size_t rows, size_t cols) {
    Vector<T, N> given[DEPTH<N>], of_gate[DEPTH<N>];
    over_elements<N>(
        rows, cols,
        [&](int k, size_t row, size_t col) {
            given[k] = fetch<N>(x + row * x_stride + col);
            of_gate[k] = fetch<N>(gate + row * gate_stride + gates.place(col));
        },
        [&](int k, size_t row, size_t col) {
            float factor[N], g[N], value[N], slope;
            unpack(given[k], factor), unpack(of_gate[k], g);
#pragma unroll
            for (int j = 0; j < N; j++) gates.evaluate(g[j], value[j], slope), value[j] *= factor[j];
            put(h + row * h_stride + col, value);
        });
}

template <int N, typename T>
__device__ __forceinline__ void backward(const Gates gates, const T *x, size_t x_stride, const T *dh, size_t dh_stride, T *dx,
                                         size_t dx_stride, const T *gate, size_t gate_stride, T *d_gate, size_t d_gate_stride,
                                         size_t rows, size_t cols) {
    Vector<T, N> given[DEPTH<N>], of_gate[DEPTH<N>], d[DEPTH<N>];
    over_elements<N>(
        rows, cols,
        [&](int k, size_t row, size_t col) {
            given[k] = fetch<N>(x + row * x_stride + col);
            of_gate[k] = fetch<N>(gate + row * gate_stride + gates.place(col));
            d[k] = fetch<N>(dh + row * dh_stride + col);
        },
        [&](int k, size_t row, size_t col) {
            float factor[N], g[N], dy[N], value[N], slope[N];
            unpack(given[k], factor), unpack(of_gate[k], g), unpack(d[k], dy);
#pragma unroll
            for (int j = 0; j < N; j++) {
                gates.evaluate(g[j], value[j], slope[j]);
                value[j] *= dy[j], slope[j] = slope[j] * factor[j] * dy[j];
            }
            put(dx + row * dx_stride + col, value);
            put(d_gate + row * d_gate_stride + gates.place(col), slope);
        });
}

} // namespace

#define FORWARD(name, T)                                                                                                \
    KERNEL_BOUNDS(name, THREADS, 3, int is_silu, int head_dim, int step, int offset, const T *x, long long x_stride,    \
                  T *h, long long h_stride, const T *gate, long long gate_stride, long long rows, long long cols,       \
                  int wide) {                                                                                           \
        const Gates gates = {is_silu, uint32_t(head_dim), uint32_t(step), uint32_t(offset)};                            \
        if (wide) forward<AT_ONCE<T>>(gates, x, x_stride, h, h_stride, gate, gate_stride, rows, cols);                  \
        else forward<1>(gates, x, x_stride, h, h_stride, gate, gate_stride, rows, cols);                                \
    }
FORWARD(head_gate_f32, float)
FORWARD(head_gate_bf16, bf16)

#define BACKWARD(name, T)                                                                                               \
    KERNEL_BOUNDS(name, THREADS, 2, int is_silu, int head_dim, int step, int offset, const T *x, long long x_stride,    \
                  const T *dh, long long dh_stride, T *dx, long long dx_stride, const T *gate, long long gate_stride,   \
                  T *d_gate, long long d_gate_stride, long long rows, long long cols, int wide) {                       \
        const Gates gates = {is_silu, uint32_t(head_dim), uint32_t(step), uint32_t(offset)};                            \
        if (wide)                                                                                                       \
            backward<AT_ONCE<T>>(gates, x, x_stride, dh, dh_stride, dx, dx_stride, gate, gate_stride, d_gate,           \
                                 d_gate_stride, rows, cols);                                                            \
        else                                                                                                            \
            backward<1>(gates, x, x_stride, dh, dh_stride, dx, dx_stride, gate, gate_stride, d_gate, d_gate_stride,     \
                        rows, cols);                                                                                    \
    }
BACKWARD(head_gate_backward_f32, float)
BACKWARD(head_gate_backward_bf16, bf16)
