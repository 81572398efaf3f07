// Elementwise operations.
//
// Threads: blocks of 256 over vectors of the matrix, 2 or 4 vectors per thread (`elements.cuh`).
// Bytes per element: fill 1 write; square_root 1 read and 1 write; divide, weighted_sum and lerp 2 reads and 1 write
// (divide 3 reads where it adds); swap 2 reads and 2 writes.
#include "elements.cuh"

namespace {

template <int N, typename X> __device__ __forceinline__ void fill(X *x, size_t stride, float value, size_t rows, size_t cols) {
    float v[N];
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = value;
    over_elements<N>(
        rows, cols, [&](int, size_t row, size_t col) { put(x + row * stride + col, v); });
}

// y = a / b, or += if that is wanted.
template <int N> __device__ __forceinline__ void divide(const float *a, const float *b, float *y, bool add, size_t cols) {
    Vector<float, N> given[DEPTH<N>], divisor[DEPTH<N>], before[DEPTH<N>];
    over_elements<N>(
        1, cols,
        [&](int k, size_t, size_t col) {
            given[k] = fetch<N>(a + col);
            divisor[k] = fetch<N>(b + col);
            before[k] = {};
            if (add) before[k] = fetch<N>(y + col);
        },
        [&](int k, size_t, size_t col) {
            float v[N], by[N], sum[N];
            unpack(given[k], v), unpack(divisor[k], by), unpack(before[k], sum);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] = add ? sum[j] + v[j] / by[j] : v[j] / by[j];
            put(y + col, v);
        });
}

template <int N> __device__ __forceinline__ void square_root(float *x, size_t cols) {
    Vector<float, N> given[DEPTH<N>];
    over_elements<N>(
        1, cols, [&](int k, size_t, size_t col) { given[k] = fetch<N>(x + col); },
        [&](int k, size_t, size_t col) {
            float v[N];
            unpack(given[k], v);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] = sqrtf(v[j]);
            put(x + col, v);
        });
}

// y = of_x · x + of_y · y, every term rounded.
template <int N>
__device__ __forceinline__ void weighted_sum(const float *x, float of_x, float of_y, float *y, size_t cols) {
    Vector<float, N> given[DEPTH<N>], before[DEPTH<N>];
    over_elements<N>(
        1, cols,
        [&](int k, size_t, size_t col) {
            given[k] = fetch<N>(x + col);
            before[k] = fetch<N>(y + col);
        },
        [&](int k, size_t, size_t col) {
            float v[N], kept[N];
            unpack(given[k], v), unpack(before[k], kept);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] = __fadd_rn(__fmul_rn(of_x, v[j]), __fmul_rn(of_y, kept[j]));
            put(y + col, v);
        });
}

// y + weight · (end - y), from the nearer side, every term rounded; `rest` is 1 - weight.
template <int N>
__device__ __forceinline__ void lerp(const float *end, float weight, float rest, float *y, size_t cols) {
    const bool is_near = fabsf(weight) < 0.5f;
    Vector<float, N> given[DEPTH<N>], before[DEPTH<N>];
    over_elements<N>(
        1, cols,
        [&](int k, size_t, size_t col) {
            given[k] = fetch<N>(end + col);
            before[k] = fetch<N>(y + col);
        },
        [&](int k, size_t, size_t col) {
            float to[N], from[N];
            unpack(given[k], to), unpack(before[k], from);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float way = __fadd_rn(to[j], -from[j]);
                from[j] = is_near ? __fadd_rn(from[j], __fmul_rn(weight, way)) : __fadd_rn(to[j], -__fmul_rn(way, rest));
            }
            put(y + col, from);
        });
}

template <int N> __device__ __forceinline__ void swap(float *a, float *b, size_t cols) {
    Vector<float, N> of_a[DEPTH<N>], of_b[DEPTH<N>];
    over_elements<N>(
        1, cols,
        [&](int k, size_t, size_t col) {
            of_a[k] = fetch<N>(a + col);
            of_b[k] = fetch<N>(b + col);
        },
        [&](int k, size_t, size_t col) {
            float v[N], w[N];
            unpack(of_a[k], v), unpack(of_b[k], w);
            put(a + col, w);
            put(b + col, v);
        });
}

} // namespace

#define FILL(name, X)                                                                                                   \
    KERNEL_BOUNDS(name, THREADS, 4, X *x, long long stride, float value, long long rows, long long cols, int wide) {    \
        if (wide) fill<AT_ONCE<X>>(x, stride, value, rows, cols);                                                       \
        else fill<1>(x, stride, value, rows, cols);                                                                     \
    }
FILL(fill_f32, float)
FILL(fill_bf16, bf16)

KERNEL_BOUNDS(divide_f32, THREADS, 2, const float *a, const float *b, float *y, int add, long long cols, int wide) {
    if (wide) divide<4>(a, b, y, add, cols);
    else divide<1>(a, b, y, add, cols);
}

KERNEL_BOUNDS(square_root_f32, THREADS, 4, float *x, long long cols, int wide) {
    if (wide) square_root<4>(x, cols);
    else square_root<1>(x, cols);
}

KERNEL_BOUNDS(weighted_sum_f32, THREADS, 4, const float *x, float of_x, float of_y, float *y, long long cols, int wide) {
    if (wide) weighted_sum<4>(x, of_x, of_y, y, cols);
    else weighted_sum<1>(x, of_x, of_y, y, cols);
}

KERNEL_BOUNDS(lerp_f32, THREADS, 4, const float *end, float weight, float rest, float *y, long long cols, int wide) {
    if (wide) lerp<4>(end, weight, rest, y, cols);
    else lerp<1>(end, weight, rest, y, cols);
}

KERNEL_BOUNDS(swap_f32, THREADS, 4, float *a, float *b, long long cols, int wide) {
    if (wide) swap<4>(a, b, cols);
    else swap<1>(a, b, cols);
}
