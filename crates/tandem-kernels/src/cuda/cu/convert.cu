// Copies and conversions of whole matrices.
//
// Threads: blocks of 256 over vectors of the matrix, 2 or 4 vectors per thread (`elements.cuh`).
// Bytes per element: the source's and the destination's, the destination twice where it is added to.
#include "elements.cuh"

namespace {

// What a table of rows says of one that no row is for.
constexpr uint32_t NO_ROW = 0xffffffffu;

template <int N, typename X, typename Y>
__device__ __forceinline__ void cast(const X *x, size_t x_stride, Y *y, size_t y_stride, size_t rows, size_t cols) {
    Vector<X, N> given[DEPTH<N>];
    over_elements<N>(
        rows, cols, [&](int k, size_t row, size_t col) { given[k] = fetch<N>(x + row * x_stride + col); },
        [&](int k, size_t row, size_t col) {
            float v[N];
            unpack(given[k], v);
            put(y + row * y_stride + col, v);
        });
}

template <int N, typename X>
__device__ __forceinline__ void add(const X *x, size_t x_stride, float *y, size_t y_stride, size_t rows, size_t cols) {
    Vector<X, N> given[DEPTH<N>];
    Vector<float, N> before[DEPTH<N>];
    over_elements<N>(
        rows, cols,
        [&](int k, size_t row, size_t col) {
            given[k] = fetch<N>(x + row * x_stride + col);
            before[k] = fetch<N>(y + row * y_stride + col);
        },
        [&](int k, size_t row, size_t col) {
            float v[N], sum[N];
            unpack(given[k], v), unpack(before[k], sum);
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] += v[j];
            put(y + row * y_stride + col, sum);
        });
}

template <int N, typename X>
__device__ __forceinline__ void scale(X *x, size_t stride, float factor, size_t rows, size_t cols) {
    Vector<X, N> given[DEPTH<N>];
    over_elements<N>(
        rows, cols, [&](int k, size_t row, size_t col) { given[k] = fetch<N>(x + row * stride + col); },
        [&](int k, size_t row, size_t col) {
            float v[N];
            unpack(given[k], v);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] *= factor;
            put(x + row * stride + col, v);
        });
}

// y[i] = x[from[i]], or zero where that is no row.
template <int N, typename X, typename Y>
__device__ __forceinline__ void take_rows(const X *x, size_t x_stride, const uint32_t *from, Y *y, size_t y_stride, size_t rows,
                                          size_t cols) {
    uint32_t source[DEPTH<N>];
    Vector<X, N> given[DEPTH<N>];
    over_elements<N>(
        rows, cols, [&](int k, size_t row, size_t) { source[k] = from[row]; },
        [&](int k, size_t, size_t col) {
            given[k] = {};
            if (source[k] != NO_ROW) given[k] = fetch<N>(x + source[k] * x_stride + col);
        },
        [&](int k, size_t row, size_t col) {
            float v[N];
            unpack(given[k], v);
            put(y + row * y_stride + col, v);
        });
}

// y[to[i]] = x[i].
template <int N, typename X, typename Y>
__device__ __forceinline__ void put_rows(const X *x, size_t x_stride, const uint32_t *to, Y *y, size_t y_stride, size_t rows,
                                         size_t cols) {
    uint32_t place[DEPTH<N>];
    Vector<X, N> given[DEPTH<N>];
    over_elements<N>(
        rows, cols,
        [&](int k, size_t row, size_t col) {
            place[k] = to[row];
            given[k] = fetch<N>(x + row * x_stride + col);
        },
        [&](int k, size_t, size_t col) {
            float v[N];
            unpack(given[k], v);
            put(y + place[k] * y_stride + col, v);
        });
}

} // namespace

#define CAST(name, X, Y)                                                                                                \
    KERNEL_BOUNDS(name, THREADS, 4, const X *x, long long x_stride, Y *y, long long y_stride, long long rows,           \
                  long long cols, int wide) {                                                                           \
        if (wide) cast<AT_ONCE<X, Y>>(x, x_stride, y, y_stride, rows, cols);                                            \
        else cast<1>(x, x_stride, y, y_stride, rows, cols);                                                             \
    }
// Between equal types the driver copies.
CAST(cast_f32_bf16, float, bf16)
CAST(cast_bf16_f32, bf16, float)

#define ADD(name, X)                                                                                                    \
    KERNEL_BOUNDS(name, THREADS, 4, const X *x, long long x_stride, float *y, long long y_stride, long long rows,       \
                  long long cols, int wide) {                                                                           \
        if (wide) add<4>(x, x_stride, y, y_stride, rows, cols);                                                         \
        else add<1>(x, x_stride, y, y_stride, rows, cols);                                                              \
    }
ADD(add_f32, float)
ADD(add_bf16, bf16)

#define SCALE(name, X)                                                                                                  \
    KERNEL_BOUNDS(name, THREADS, 4, X *x, long long stride, float factor, long long rows, long long cols, int wide) {   \
        if (wide) scale<AT_ONCE<X>>(x, stride, factor, rows, cols);                                                     \
        else scale<1>(x, stride, factor, rows, cols);                                                                   \
    }
SCALE(scale_f32, float)
SCALE(scale_bf16, bf16)

#define TAKE_ROWS(name, X, Y)                                                                                           \
    KERNEL_BOUNDS(name, THREADS, 4, const X *x, long long x_stride, const uint32_t *from, Y *y, long long y_stride,     \
                  long long rows, long long cols, int wide) {                                                           \
        if (wide) take_rows<AT_ONCE<X, Y>>(x, x_stride, from, y, y_stride, rows, cols);                                 \
        else take_rows<1>(x, x_stride, from, y, y_stride, rows, cols);                                                  \
    }
FOR_TYPES(TAKE_ROWS, take_rows)

#define PUT_ROWS(name, X, Y)                                                                                            \
    KERNEL_BOUNDS(name, THREADS, 4, const X *x, long long x_stride, const uint32_t *to, Y *y, long long y_stride,       \
                  long long rows, long long cols, int wide) {                                                           \
        if (wide) put_rows<AT_ONCE<X, Y>>(x, x_stride, to, y, y_stride, rows, cols);                                    \
        else put_rows<1>(x, x_stride, to, y, y_stride, rows, cols);                                                     \
    }
FOR_TYPES(PUT_ROWS, put_rows)
