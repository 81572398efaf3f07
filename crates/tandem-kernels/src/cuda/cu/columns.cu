// Column sums, dot products and factors: bound by memory.
//
// Threads: a grid of blocks of rows × tiles of 128 columns; a block of 256 threads has 8 warps that
// take turns with the rows, and a lane owns four columns (`columns.cuh`).
// Bytes per element: sums 1 and dots 2 elements read; factors one element read and one written.
#include "columns.cuh"

namespace {

// Of each block of rows and each column `Σ a` or, with DOTS, `Σ a · b`: a row of `out`, or added to
// it.
template <bool DOTS, typename A, typename B>
__device__ __forceinline__ void sums(const A *__restrict__ a, int a_stride, const B *__restrict__ b, int b_stride, int rows,
                                     int cols, int block_rows, float *__restrict__ out, int out_stride, int add) {
    SHARED(float, of_warps, COLUMN_WARPS *TILE_COLUMNS);
    const int first = blockIdx.y * TILE_COLUMNS, warp = threadIdx.x / WARP;
    const bool wide = cols % 4 == 0 && rows_are_aligned(a, a_stride) && (!DOTS || rows_are_aligned(b, b_stride));
    const int start = blockIdx.x * block_rows, end = min(rows, start + block_rows);
    cols -= first;
    float sum[4] = {0, 0, 0, 0};
#pragma unroll(DOTS ? 4 : 8)
    for (int row = start + warp; row < end; row += COLUMN_WARPS) {
        float x[4], y[4] = {1, 1, 1, 1};
        load_columns(a + size_t(row) * a_stride + first, cols, wide, x);
        if (DOTS) load_columns(b + size_t(row) * b_stride + first, cols, wide, y);
#pragma unroll
        for (int k = 0; k < 4; k++) sum[k] = fmaf(x[k], y[k], sum[k]);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) of_warps[warp * TILE_COLUMNS + column_of(wide, k)] = sum[k];
    __syncthreads();
    const int column = threadIdx.x;
    if (column < TILE_COLUMNS && column < cols) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < COLUMN_WARPS; w++) total += of_warps[w * TILE_COLUMNS + column];
        float *to = out + size_t(blockIdx.x) * out_stride + first + column;
        *to = add ? *to + total : total;
    }
}

// Rows of a block of `scale`, of which so many are under way at once.
constexpr int SCALED_ROWS = 64;
constexpr int AT_ONCE = 4;

// y = x ⊙ factors (+ bias); `y` may be `x`.
template <typename X, typename Y>
__device__ __forceinline__ void scale(const X *x, int x_stride, const float *__restrict__ factors,
                                      const float *__restrict__ bias, Y *y, int y_stride, int rows, int cols) {
    const int first = blockIdx.y * TILE_COLUMNS;
    const bool wide = cols % 4 == 0 && rows_are_aligned(x, x_stride) && rows_are_aligned(y, y_stride) &&
                      is_aligned<4>(factors) && is_aligned<4>(bias);
    const int start = blockIdx.x * SCALED_ROWS, end = min(rows, start + SCALED_ROWS);
    cols -= first;
    float factor[4], plus[4] = {0, 0, 0, 0};
    load_columns(factors + first, cols, wide, factor);
    if (bias) load_columns(bias + first, cols, wide, plus);
    for (int row = start + threadIdx.x / WARP; row < end; row += AT_ONCE * COLUMN_WARPS) {
        float v[AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = row + i * COLUMN_WARPS;
            if (at < end) load_columns(x + size_t(at) * x_stride + first, cols, wide, v[i]);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = row + i * COLUMN_WARPS;
            if (at >= end) break;
#pragma unroll
            for (int k = 0; k < 4; k++) v[i][k] = bias ? fmaf(v[i][k], factor[k], plus[k]) : v[i][k] * factor[k];
            store_columns(y + size_t(at) * y_stride + first, cols, wide, v[i]);
        }
    }
}

} // namespace

#define COLUMN_SUMS(name, A)                                                                                            \
    KERNEL_BOUNDS(name, COLUMN_THREADS, 4, const A *a, int a_stride, int rows, int cols, int block_rows, float *out,    \
                  int out_stride, int add) {                                                                            \
        sums<false>(a, a_stride, (const float *)nullptr, 0, rows, cols, block_rows, out, out_stride, add);              \
    }
COLUMN_SUMS(column_sums_f32, float)
COLUMN_SUMS(column_sums_bf16, bf16)

#define COLUMN_DOTS(name, A, B)                                                                                         \
    KERNEL_BOUNDS(name, COLUMN_THREADS, 4, const A *a, int a_stride, const B *b, int b_stride, int rows, int cols,      \
                  int block_rows, float *out, int out_stride, int add) {                                                \
        sums<true>(a, a_stride, b, b_stride, rows, cols, block_rows, out, out_stride, add);                             \
    }
FOR_TYPES(COLUMN_DOTS, column_dots)

#define SCALE_COLUMNS(name, X, Y)                                                                                       \
    KERNEL_BOUNDS(name, COLUMN_THREADS, 4, const X *x, int x_stride, const float *factors, const float *bias, Y *y,     \
                  int y_stride, int rows, int cols) {                                                                   \
        scale(x, x_stride, factors, bias, y, y_stride, rows, cols);                                                     \
    }
FOR_TYPES(SCALE_COLUMNS, scale_columns)
