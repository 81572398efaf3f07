// Feed-forward activations, plain and gated.
//
// Threads: blocks of 256 over vectors of 16 bytes of the matrix, 2 or 4 vectors per thread
// (`elements.cuh`).
// Bytes per element of h: gated 3 (forward) and 5 (backward) elements of the type; plain 2 and 3.
#include "elements.cuh"
#include "sigmoid.cuh"

namespace {

// The functions by their numbers in `activation.rs`.
enum { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED };

// x within ±bound. Written so that what is not a number stays so, as below.
__device__ __forceinline__ float bounded(float x, float bound) { return x > bound ? bound : x < -bound ? -bound : x; }

__device__ __forceinline__ void silu(float x, float &value, float &slope) {
    const float s = sigmoid(x);
    value = x * s;
    slope = s * (1.0f + x * (1.0f - s));
}

// x · Φ(x). With y = |x|/√2 and t = 1/(1 + 0.4 y), erfc(y) = t·P(t)·exp(-y²): the polynomial of
// `cpu/elementary.rs`, whose small values are as accurate as large ones.
__device__ __forceinline__ void gelu(float x, float &value, float &slope) {
    // Beyond 14 both Φ and its density are 0 or 1 in f32; the bound keeps squares finite.
    const float z = bounded(x, 14.0f), magnitude = fabsf(z);
    const float e = expf(-0.5f * z * z), t = reciprocal(1.0f + 0.282842712f * magnitude);
    float p = 0.073933475f;
    p = p * t - 0.38788512f;
    p = p * t + 0.65826994f;
    p = p * t - 0.32726818f;
    p = p * t + 0.36336336f;
    p = p * t + 0.16460477f;
    p = p * t + 0.22914778f;
    p = p * t + 0.22583398f;
    const float tail = 0.5f * p * t * e, cdf = x < 0.0f ? tail : 1.0f - tail;
    value = x * cdf;
    slope = cdf + z * (0.3989423f * e);
}

// With u = √(2/π)·(x + 0.044715 x³): (1 + tanh u)/2 = sigmoid(2u).
__device__ __forceinline__ void gelu_tanh(float x, float &value, float &slope) {
    const float twice_scale = 1.5957691216f;
    // Beyond 16 the function is 0 or x; the bound keeps powers finite.
    const float z = bounded(x, 16.0f), square = z * z;
    const float s = sigmoid(twice_scale * z * (1.0f + 0.044715f * square));
    const float du = twice_scale * (1.0f + 3.0f * 0.044715f * square);
    value = x * s;
    slope = s + z * s * (1.0f - s) * du;
}

__device__ __forceinline__ void relu(float x, float &value, float &slope) {
    value = x < 0.0f ? 0.0f : x;
    slope = x > 0.0f ? 1.0f : 0.0f;
}

__device__ __forceinline__ void relu_squared(float x, float &value, float &slope) {
    const float positive = x < 0.0f ? 0.0f : x;
    value = positive * positive;
    slope = 2.0f * positive;
}

template <int N, void (*F)(float, float &, float &)>
__device__ __forceinline__ void each(const float (&x)[N], float (&value)[N], float (&slope)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) F(x[j], value[j], slope[j]);
}

// f(x) and f'(x).
template <int N>
__device__ __forceinline__ void evaluate(int function, const float (&x)[N], float (&value)[N], float (&slope)[N]) {
    switch (function) {
    case SILU: return each<N, silu>(x, value, slope);
    case GELU: return each<N, gelu>(x, value, slope);
    case GELU_TANH: return each<N, gelu_tanh>(x, value, slope);
    case RELU: return each<N, relu>(x, value, slope);
    default: return each<N, relu_squared>(x, value, slope);
    }
}

// h = f(gate) · up; gate and up are the halves of a row.
template <int N, typename T>
__device__ __forceinline__ void gated(int function, const T *gu, size_t gu_stride, T *h, size_t h_stride, size_t rows, size_t cols) {
    Vector<T, N> gate[DEPTH<N>], up[DEPTH<N>];
    over_elements<N>(
        rows, cols,
        [&](int k, size_t row, size_t col) {
            gate[k] = fetch<N>(gu + row * gu_stride + col);
            up[k] = fetch<N>(gu + row * gu_stride + cols + col);
        },
        [&](int k, size_t row, size_t col) {
            float x[N], factor[N], value[N], slope[N];
            unpack(gate[k], x), unpack(up[k], factor);
            evaluate<N>(function, x, value, slope);
#pragma unroll
            for (int j = 0; j < N; j++) value[j] *= factor[j];
            put(h + row * h_stride + col, value);
        });
}

template <int N, typename T>
__device__ __forceinline__ void gated_backward(int function, const T *gu, size_t gu_stride, const T *dh, size_t dh_stride, T *dgu,
                                               size_t dgu_stride, size_t rows, size_t cols) {
    Vector<T, N> gate[DEPTH<N>], up[DEPTH<N>], d[DEPTH<N>];
    over_elements<N>(
        rows, cols,
        [&](int k, size_t row, size_t col) {
            gate[k] = fetch<N>(gu + row * gu_stride + col);
            up[k] = fetch<N>(gu + row * gu_stride + cols + col);
            d[k] = fetch<N>(dh + row * dh_stride + col);
        },
        [&](int k, size_t row, size_t col) {
            float x[N], factor[N], dy[N], value[N], slope[N];
            unpack(gate[k], x), unpack(up[k], factor), unpack(d[k], dy);
            evaluate<N>(function, x, value, slope);
#pragma unroll
            for (int j = 0; j < N; j++) slope[j] = slope[j] * factor[j] * dy[j], value[j] *= dy[j];
            put(dgu + row * dgu_stride + col, slope);
            put(dgu + row * dgu_stride + cols + col, value);
        });
}

template <int N, typename T>
__device__ __forceinline__ void activate(int function, const T *u, size_t u_stride, T *h, size_t h_stride, size_t rows, size_t cols) {
    Vector<T, N> given[DEPTH<N>];
    over_elements<N>(
        rows, cols, [&](int k, size_t row, size_t col) { given[k] = fetch<N>(u + row * u_stride + col); },
        [&](int k, size_t row, size_t col) {
            float x[N], value[N], slope[N];
            unpack(given[k], x);
            evaluate<N>(function, x, value, slope);
            put(h + row * h_stride + col, value);
        });
}

template <int N, typename T>
__device__ __forceinline__ void activate_backward(int function, const T *u, size_t u_stride, const T *dh, size_t dh_stride, T *du,
                                                  size_t du_stride, size_t rows, size_t cols) {
    Vector<T, N> given[DEPTH<N>], d[DEPTH<N>];
    over_elements<N>(
        rows, cols,
        [&](int k, size_t row, size_t col) {
            given[k] = fetch<N>(u + row * u_stride + col);
            d[k] = fetch<N>(dh + row * dh_stride + col);
        },
        [&](int k, size_t row, size_t col) {
            float x[N], dy[N], value[N], slope[N];
            unpack(given[k], x), unpack(d[k], dy);
            evaluate<N>(function, x, value, slope);
#pragma unroll
            for (int j = 0; j < N; j++) slope[j] *= dy[j];
            put(du + row * du_stride + col, slope);
        });
}

} // namespace

#define FORWARD(name, body, T)                                                                                          \
    KERNEL_BOUNDS(name, THREADS, 3, int function, const T *u, long long u_stride, T *h, long long h_stride,             \
                  long long rows, long long cols, int wide) {                                                           \
        if (wide) body<AT_ONCE<T>>(function, u, u_stride, h, h_stride, rows, cols);                                     \
        else body<1>(function, u, u_stride, h, h_stride, rows, cols);                                                   \
    }
FORWARD(gated_f32, gated, float)
FORWARD(gated_bf16, gated, bf16)
FORWARD(activate_f32, activate, float)
FORWARD(activate_bf16, activate, bf16)

#define BACKWARD(name, body, T)                                                                                         \
    KERNEL_BOUNDS(name, THREADS, 2, int function, const T *u, long long u_stride, const T *dh, long long dh_stride,     \
                  T *du, long long du_stride, long long rows, long long cols, int wide) {                               \
        if (wide) body<AT_ONCE<T>>(function, u, u_stride, dh, dh_stride, du, du_stride, rows, cols);                    \
        else body<1>(function, u, u_stride, dh, dh_stride, du, du_stride, rows, cols);                                  \
    }
BACKWARD(gated_backward_f32, gated_backward, float)
BACKWARD(gated_backward_bf16, gated_backward, bf16)
BACKWARD(activate_backward_f32, activate_backward, float)
BACKWARD(activate_backward_bf16, activate_backward, bf16)
