// The last step of both norms' weight gradients: sums the blocks' partial sums.
//
// Threads: a block of 32 warps per 32 columns; a lane owns a column, and a warp adds every 32nd row.
// Bytes: 4 per partial sum, 8 per column.
#include "common.cuh"

namespace {

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP;

} // namespace

// first[i] += Σ_r partial[r, i] for the first `width` columns, and second, unless it is null,
// likewise for the next ones. Each of a block's 32 warps adds every 32nd row, and then their sums follow one another.
KERNEL_BOUNDS(add_norm_sums, THREADS, 1, const float *partial, int rows, int columns, float *first, float *second, int width) {
    SHARED(float, of_warps, THREADS);
    const int i = blockIdx.x * WARP + threadIdx.x % WARP;
    float sum = 0;
    if (i < columns) {
#pragma unroll 8
        for (int row = threadIdx.x / WARP; row < rows; row += WARPS) sum += partial[size_t(row) * columns + i];
    }
    of_warps[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= WARP || i >= columns || (i >= width && !second)) return;
    for (int warp = 1; warp < WARPS; warp++) sum += of_warps[warp * WARP + threadIdx.x];
    float *const to = i < width ? first + i : second + (i - width);
    *to += sum;
}
