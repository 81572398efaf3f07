// Additions around a GEMM: bias and residual, and f32 sums that become bf16.
//
// Threads: a grid of blocks of 64 rows × tiles of 128 columns; a block of 256 threads, a lane owns
// four columns (`columns.cuh`).
// Bytes per element: 4 per f32 term, the result once, or twice where it is added to.
#include "columns.cuh"

namespace {

// Rows of a block, of which so many are under way at once.
constexpr int ROWS = 64;
constexpr int AT_ONCE = 4;

// c = x + bias + y, or added to c: in f32, rounded once. What is null is 0. The grid is blocks of
// rows by tiles of columns.
template <typename C>
__device__ __forceinline__ void add(const float *x, int x_stride, const float *y, int y_stride,
                                    const float *__restrict__ bias, int accumulate, C *c, int c_stride, int rows, int cols) {
    const int first = blockIdx.y * TILE_COLUMNS;
    const bool wide = cols % 4 == 0 && rows_are_aligned(x, x_stride) && rows_are_aligned(y, y_stride) &&
                      is_aligned<4>(bias) && rows_are_aligned(c, c_stride);
    const int start = blockIdx.x * ROWS, end = min(rows, start + ROWS);
    cols -= first;
    float plus[4] = {0, 0, 0, 0};
    if (bias) load_columns(bias + first, cols, wide, plus);
    for (int row = start + threadIdx.x / WARP; row < end; row += AT_ONCE * COLUMN_WARPS) {
        float sum[AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = row + i * COLUMN_WARPS;
            float of_x[4] = {0, 0, 0, 0}, of_y[4] = {0, 0, 0, 0}, of_c[4] = {0, 0, 0, 0};
            if (at < end) {
                if (x) load_columns(x + size_t(at) * x_stride + first, cols, wide, of_x);
                if (y) load_columns(y + size_t(at) * y_stride + first, cols, wide, of_y);
                if (accumulate) load_columns(c + size_t(at) * c_stride + first, cols, wide, of_c);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) sum[i][k] = of_x[k] + plus[k] + of_y[k] + of_c[k];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = row + i * COLUMN_WARPS;
            if (at < end) store_columns(c + size_t(at) * c_stride + first, cols, wide, sum[i]);
        }
    }
}

} // namespace

#define ADD(name, C)                                                                                                    \
    KERNEL_BOUNDS(name, COLUMN_THREADS, 4, const float *x, int x_stride, const float *y, int y_stride,                  \
                  const float *bias, int accumulate, C *c, int c_stride, int rows, int cols) {                          \
        add(x, x_stride, y, y_stride, bias, accumulate, c, c_stride, rows, cols);                                       \
    }
ADD(product_add_f32, float)
ADD(product_add_bf16, bf16)
