// Row norms of a matrix with a low-rank term.
//
// Threads: a block of 256 per 8 rows. Each thread forms its columns' elements of all 8 rows, so one
// read of the second factor serves all rows.
// Bytes: w once; a (`rank × k`) once per block of rows, from a cache; b once.
#include "common.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

// Rows of a block, and as many of the term's factors as shared memory holds at once.
constexpr int ROWS = 8;
constexpr int DEPTH = 256;

// out = ‖w + scale · b · a‖ of each row, or its square: elements and squares in f32, squares of a thread's columns
// summed in f32, those of all threads in f64. A thread's columns do not depend on how they are loaded, so
// that the bits do not depend on a part's place in a larger matrix.
template <typename W, typename A>
__device__ __forceinline__ void row_norms(const W *__restrict__ w, int w_stride, const A *__restrict__ a, int a_stride,
                                          const void *__restrict__ b, int b_stride, int b_is_f32, float scale,
                                          float *__restrict__ out, int n, int k, int rank, int takes_root) {
    SHARED(float, factors, DEPTH *ROWS);
    SHARED(double, of_warps, ROWS *WARPS);
    const int first_row = blockIdx.x * ROWS, rows = min(ROWS, n - first_row);
    const bool wide = k % 4 == 0 && w_stride % 4 == 0 && a_stride % 4 == 0 && is_aligned<4>(w) && is_aligned<4>(a);
    w += size_t(first_row) * w_stride;
    float squares[ROWS] = {};
    for (int start = 0; start < k; start += 4 * THREADS) {
        // This thread's four columns; rows and columns that are not there are 0.
        int column[4];
#pragma unroll
        for (int j = 0; j < 4; j++) column[j] = start + 4 * threadIdx.x + j;
        float x[ROWS][4] = {};
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (i >= rows) continue;
            const W *row = w + size_t(i) * w_stride;
            if (wide) {
                if (column[0] < k) load_many(row + column[0], x[i]);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) x[i][j] = column[j] < k ? load(row + column[j]) : 0.0f;
            }
        }
        for (int p0 = 0; p0 < rank; p0 += DEPTH) {
            const int depth = min(DEPTH, rank - p0);
            // All that there are stay from the first columns on.
            if (start == 0 || rank > DEPTH) {
                __syncthreads();
                for (int i = threadIdx.x; i < depth * ROWS; i += THREADS) {
                    const int row = i % ROWS, p = i / ROWS;
                    const size_t at = size_t(first_row + row) * b_stride + p0 + p;
                    factors[i] = 0;
                    if (row < rows) factors[i] = scale * (b_is_f32 ? load((const float *)b + at) : load((const bf16 *)b + at));
                }
                __syncthreads();
            }
#pragma unroll 4
            for (int p = 0; p < depth; p++) {
                const A *row = a + size_t(p0 + p) * a_stride;
                float of_a[4] = {0, 0, 0, 0};
                if (wide) {
                    if (column[0] < k) load_many(row + column[0], of_a);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; j++) of_a[j] = column[j] < k ? load(row + column[j]) : 0.0f;
                }
#pragma unroll
                for (int i = 0; i < ROWS; i += 4) {
                    float factor[4];
                    load_many(factors + p * ROWS + i, factor);
#pragma unroll
                    for (int j = 0; j < 16; j++) x[i + j / 4][j % 4] = fmaf(factor[j / 4], of_a[j % 4], x[i + j / 4][j % 4]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) squares[i] = fmaf(x[i][j], x[i][j], squares[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const double sum = warp_sum(double(squares[i]));
        if (threadIdx.x % WARP == 0) of_warps[i * WARPS + threadIdx.x / WARP] = sum;
    }
    __syncthreads();
    if (int(threadIdx.x) < rows) {
        double sum = 0;
        for (int warp = 0; warp < WARPS; warp++) sum += of_warps[threadIdx.x * WARPS + warp];
        out[first_row + threadIdx.x] = float(takes_root ? sqrt(sum) : sum);
    }
}

} // namespace

#define ROW_NORMS(name, W, A)                                                                                           \
    KERNEL_BOUNDS(name, THREADS, 2, const W *w, int w_stride, const A *a, int a_stride, const void *b, int b_stride,    \
                  int b_is_f32, float scale, float *out, int n, int k, int rank, int takes_root) {                      \
        row_norms(w, w_stride, a, a_stride, b, b_stride, b_is_f32, scale, out, n, k, rank, takes_root);                 \
    }
FOR_TYPES(ROW_NORMS, row_norms)
