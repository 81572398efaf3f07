// Dropout: the mask is hashed from the key and each element's index on the fly.
//
// Threads: blocks of 256 over vectors of the matrix, 2 or 4 vectors per thread (`elements.cuh`).
// Bytes per element: the source's and the destination's, the destination twice where it is added to.
#include "elements.cuh"

namespace {

// The increment of SplitMix64, as in `numerics/random.rs`.
constexpr uint64_t STEP = 0x9e3779b97f4a7c15ull;

// Its finaliser: each bit of the result depends on every bit of `x`.
__device__ __forceinline__ uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// y = x ⊙ mask · factor, or += if that is wanted. A number of 64 bits decides about two neighbours,
// the first of which has an even index; an element is dropped if its 32 bits are below the bound.
template <int N, typename X, typename Y>
__device__ __forceinline__ void dropout(const X *x, size_t x_stride, Y *y, size_t y_stride, uint64_t start, uint32_t bound,
                                        float factor, bool add, size_t rows, size_t cols) {
    Vector<X, N> given[DEPTH<N>];
    Vector<Y, N> before[DEPTH<N>];
    over_elements<N>(
        rows, cols,
        [&](int k, size_t row, size_t col) {
            given[k] = fetch<N>(x + row * x_stride + col);
            before[k] = {};
            if (add) before[k] = fetch<N>(y + row * y_stride + col);
        },
        [&](int k, size_t row, size_t col) {
            float v[N], sum[N];
            unpack(given[k], v), unpack(before[k], sum);
            // Vectors of several elements begin at even indices: as many columns as they have
            // elements divide a row.
            const uint64_t index = uint64_t(row) * cols + col;
#pragma unroll
            for (int j = 0; j < N; j += 2) {
                const uint64_t bits = mixed(start + (index / 2 + j / 2) * STEP);
#pragma unroll
                for (int i = j; i < N && i < j + 2; i++) {
                    const bool is_second = N == 1 ? index % 2 : i % 2;
                    const uint32_t half = is_second ? uint32_t(bits >> 32) : uint32_t(bits);
                    const float kept = __fmul_rn(v[i], half < bound ? 0.0f : factor);
                    // Not fused: the same bits as on a CPU.
                    v[i] = add ? __fadd_rn(sum[i], kept) : kept;
                }
            }
            put(y + row * y_stride + col, v);
        });
}

// Adds uniform noise to each row; `table` has the halves of its key and its largest value.
template <int N>
__device__ __forceinline__ void noise(float *x, size_t stride, const uint32_t *table, size_t rows, size_t cols) {
    Vector<float, N> before[DEPTH<N>];
    over_elements<N>(
        rows, cols, [&](int k, size_t row, size_t col) { before[k] = fetch<N>(x + row * stride + col); },
        [&](int k, size_t row, size_t col) {
            const uint64_t key = uint64_t(table[3 * row + 1]) << 32 | table[3 * row];
            const float scale = __uint_as_float(table[3 * row + 2]);
            float v[N];
            unpack(before[k], v);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const size_t index = col + j;
                const uint64_t bits = mixed(key + index / 2 * STEP);
                const int32_t half = int32_t(index % 2 ? uint32_t(bits >> 32) : uint32_t(bits));
                // Not fused: the same bits as on a CPU.
                v[j] = __fadd_rn(v[j], __fmul_rn(scale, __fmul_rn(float(half), 0x1p-31f)));
            }
            put(x + row * stride + col, v);
        });
}

} // namespace

KERNEL_BOUNDS(add_noise_f32, THREADS, 3, float *x, long long stride, const uint32_t *table, long long rows, long long cols, int wide) {
    if (wide) noise<4>(x, stride, table, rows, cols);
    else noise<1>(x, stride, table, rows, cols);
}

#define DROPOUT(name, X, Y)                                                                                             \
    KERNEL_BOUNDS(name, THREADS, 3, const X *x, long long x_stride, Y *y, long long y_stride, uint64_t start,           \
                  uint32_t bound, float factor, int add, long long rows, long long cols, int wide) {                    \
        if (wide) dropout<AT_ONCE<X, Y>>(x, x_stride, y, y_stride, start, bound, factor, add, rows, cols);              \
        else dropout<1>(x, x_stride, y, y_stride, start, bound, factor, add, rows, cols);                               \
    }
FOR_TYPES(DROPOUT, dropout)
