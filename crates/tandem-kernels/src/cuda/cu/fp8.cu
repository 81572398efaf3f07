// FP8 products of frozen weights: rounding of an activation or gradient to E4M3, transposition of the
// weights for the gradient of the input, and scaling of the sums.
//
// Threads: `quantise_rows` has a warp per row in blocks of 256, whose lanes take four elements at a
// time; `transpose_codes` has a thread per 16 × 16 codes in blocks of 256; `scale_sums` has a grid of
// blocks of 64 rows × tiles of 128 columns (`columns.cuh`).
// Bytes per element: an activation is read twice, the second time from a cache, and 1 is written; a code
// is read and written once; 4 of a sum are read, from a cache, and the result is written, and read before
// where it is added to.
#include "columns.cuh"
#include "e4m3.cuh"

namespace {

// Rows of a block of `scale_sums`, of which so many are under way at once.
constexpr int ROWS = 64;
constexpr int AT_ONCE = 4;

// Threads of a block of `transpose_codes`, across the rows of the weights and down their columns.
constexpr int TURNED_ACROSS = 8;
constexpr int TURNED_DOWN = COLUMN_THREADS / TURNED_ACROSS;

constexpr float LEAST_SCALE = 1.17549435e-38f;

// Four elements from column `i` on.
template <typename X> __device__ __forceinline__ void take(const X *row, int i, bool wide, float (&x)[4]) {
    if (wide) {
        load_many(row + i, x);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = load(row + i + k);
    }
}

// Four elements of a row, each times the factor of its column if there are factors.
template <typename X>
__device__ __forceinline__ void take_scaled(const X *row, const float *of_columns, int i, bool wide, float (&x)[4]) {
    take(row, i, wide, x);
    if (!of_columns) return;
    const float4 by = *reinterpret_cast<const float4 *>(of_columns + i);
    x[0] *= by.x;
    x[1] *= by.y;
    x[2] *= by.z;
    x[3] *= by.w;
}

// codes = nearest to x / scale, with scale = largest of the row / 448, as weights are packed; x is taken times
// the aligned factors of its columns, unless they are null. `cols` is a multiple of 16, and rows of codes lie
// side by side. A NaN keeps its code; infinity makes the scale so.
template <typename X>
__device__ __forceinline__ void quantise_rows(const X *x, int x_stride, const float *of_columns, uint8_t *codes, float *scales,
                                              int rows, int cols) {
    const int row = blockIdx.x * COLUMN_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    x += size_t(row) * x_stride;
    codes += size_t(row) * cols;
    const bool wide = is_aligned<4>(x);
    float largest = 0;
    for (int i = 4 * lane; i < cols; i += 4 * WARP) {
        float v[4];
        take_scaled(x, of_columns, i, wide, v);
#pragma unroll
        for (int k = 0; k < 4; k++) largest = fmaxf(largest, fabsf(v[k]));
    }
    largest = warp_max(largest);
    float scale = __fdiv_rn(largest, E4M3_MAX);
    if (scale < LEAST_SCALE) scale = 0;
    for (int i = 4 * lane; i < cols; i += 4 * WARP) {
        float v[4];
        take_scaled(x, of_columns, i, wide, v);
        uint32_t four = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t code = to_e4m3(__fdiv_rn(v[k], scale));
            // Of a row that is too small to scale all are zeros, but a NaN.
            four |= (scale == 0 && v[k] == v[k] ? 0 : code) << 8 * k;
        }
        *reinterpret_cast<uint32_t *>(codes + i) = four;
    }
    if (lane == 0) scales[row] = scale;
}

// codes[col] = the column's code of each row, `rows` side by side; scales[row] = the scale behind the codes of
// the row, `unit_len` bytes after that of the row before. Rows and columns are multiples of 16, and both matrices
// are aligned to 16 bytes. A warp reads 64 bytes of a row, and writes 128 of a column.
__device__ __forceinline__ void transpose(const uint8_t *weights, long long unit_len, uint8_t *codes, float *scales, int rows,
                                          int cols) {
    const int row = 16 * (blockIdx.x * TURNED_ACROSS + threadIdx.x % TURNED_ACROSS);
    const int col = 16 * (blockIdx.y * TURNED_DOWN + threadIdx.x / TURNED_ACROSS);
    if (row >= rows || col >= cols) return;
    weights += row * unit_len;
    uint32_t in[16][4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const uint4 of_row = *reinterpret_cast<const uint4 *>(weights + i * unit_len + col);
        in[i][0] = of_row.x;
        in[i][1] = of_row.y;
        in[i][2] = of_row.z;
        in[i][3] = of_row.w;
    }
    if (col == 0) {
#pragma unroll
        for (int i = 0; i < 16; i++) scales[row + i] = *reinterpret_cast<const float *>(weights + i * unit_len + cols);
    }
#pragma unroll
    for (int j = 0; j < 16; j++) {
        uint32_t out[4];
#pragma unroll
        for (int q = 0; q < 4; q++) {
            out[q] = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) out[q] |= (in[4 * q + i][j / 4] >> 8 * (j % 4) & 0xff) << 8 * i;
        }
        *reinterpret_cast<uint4 *>(codes + size_t(col + j) * rows + row) = make_uint4(out[0], out[1], out[2], out[3]);
    }
}

// c = sums · (scale of the row) · (scale of the column) + bias + residual, or added to c: in f32, rounded
// once. Scales of columns lie `unit_len` bytes apart; they are 1 if null. What else is null is 0. `cols` is a
// multiple of 16.
template <typename C>
__device__ __forceinline__ void scale(const float *sums, int sums_stride, const float *of_rows, const uint8_t *column_scales,
                                      long long unit_len, const float *residual, int residual_stride, const float *bias,
                                      int accumulate, C *c, int c_stride, int rows, int cols) {
    const int first = blockIdx.y * TILE_COLUMNS;
    const bool wide = rows_are_aligned(residual, residual_stride) && is_aligned<4>(bias) && rows_are_aligned(c, c_stride);
    const int start = blockIdx.x * ROWS, end = min(rows, start + ROWS);
    if (column_scales) column_scales += first * unit_len;
    cols -= first;
    float of_columns[4], plus[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int col = column_of(wide, k);
        of_columns[k] = 1;
        if (column_scales && col < cols) of_columns[k] = *reinterpret_cast<const float *>(column_scales + col * unit_len);
    }
    if (bias) load_columns(bias + first, cols, wide, plus);
    for (int row = start + threadIdx.x / WARP; row < end; row += AT_ONCE * COLUMN_WARPS) {
        float sum[AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = row + i * COLUMN_WARPS;
            float of_row = 0, of_residual[4] = {0, 0, 0, 0}, of_c[4] = {0, 0, 0, 0};
#pragma unroll
            for (int k = 0; k < 4; k++) sum[i][k] = 0;
            if (at < end) {
                of_row = of_rows[at];
                load_columns(sums + size_t(at) * sums_stride + first, cols, wide, sum[i]);
                if (residual) load_columns(residual + size_t(at) * residual_stride + first, cols, wide, of_residual);
                if (accumulate) load_columns(c + size_t(at) * c_stride + first, cols, wide, of_c);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) sum[i][k] = sum[i][k] * of_row * of_columns[k] + plus[k] + of_residual[k] + of_c[k];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = row + i * COLUMN_WARPS;
            if (at < end) store_columns(c + size_t(at) * c_stride + first, cols, wide, sum[i]);
        }
    }
}

} // namespace

#define QUANTISE(name, X)                                                                                               \
    KERNEL_BOUNDS(name, COLUMN_THREADS, 4, const X *x, int x_stride, const float *of_columns, uint8_t *codes,           \
                  float *scales, int rows, int cols) {                                                                  \
        quantise_rows(x, x_stride, of_columns, codes, scales, rows, cols);                                              \
    }
QUANTISE(quantise_rows_f32, float)
QUANTISE(quantise_rows_bf16, bf16)

KERNEL_BOUNDS(transpose_codes, COLUMN_THREADS, 2, const uint8_t *weights, long long unit_len, uint8_t *codes, float *scales,
              int rows, int cols) {
    transpose(weights, unit_len, codes, scales, rows, cols);
}

#define SCALE(name, C)                                                                                                  \
    KERNEL_BOUNDS(name, COLUMN_THREADS, 4, const float *sums, int sums_stride, const float *of_rows,                    \
                  const uint8_t *column_scales, long long unit_len, const float *residual, int residual_stride,         \
                  const float *bias, int accumulate, C *c, int c_stride, int rows, int cols) {                          \
        scale(sums, sums_stride, of_rows, column_scales, unit_len, residual, residual_stride, bias, accumulate, c,      \
              c_stride, rows, cols);                                                                                    \
    }
SCALE(scale_sums_f32, float)
SCALE(scale_sums_bf16, bf16)
