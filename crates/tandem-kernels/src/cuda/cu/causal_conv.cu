// Causal convolution along each text, channel by channel: bound by memory.
//
// Threads: a grid of blocks of rows × tiles of 128 channels; a block of 256 threads has 8 warps that
// take turns with the rows, and a lane owns four channels (`columns.cuh`). So what a row reads is the
// same for a warp, and a tile's weights stay in shared memory.
// Bytes per element: forward and dx read a row W times, all but once from a cache, and write one;
// dw reads as much of x, and dy.
#include "columns.cuh"

namespace {

constexpr int WIDEST = 16;
constexpr uint32_t NO_TAP = 0xffffffffu;

// Copies a tile's weights `[C, W]` to `[W, 128]` of shared memory.
__device__ __forceinline__ void fetch_weights(const float *__restrict__ w, int cols, int width, float *weights) {
    for (int i = threadIdx.x; i < TILE_COLUMNS * width; i += COLUMN_THREADS) {
        const int column = i / width, j = i - column * width;
        weights[j * TILE_COLUMNS + column] = column < cols ? w[i] : 0.0f;
    }
    __syncthreads();
}

// The sum over `count` rows of their elements times the weights of a tap, where `row_of(i, tap)` is
// the i-th.
template <typename T, typename Row>
__device__ __forceinline__ void combine(int count, Row row_of, int cols, bool wide, const float *weights, float (&sum)[4]) {
    sum[0] = sum[1] = sum[2] = sum[3] = 0;
    for (int i = 0; i < count; i++) {
        int tap;
        const T *const row = row_of(i, tap);
        if (!row) continue;
        float x[4];
        load_columns(row, cols, wide, x);
#pragma unroll
        for (int k = 0; k < 4; k++) sum[k] = fmaf(x[k], weights[tap * TILE_COLUMNS + column_of(wide, k)], sum[k]);
    }
}

// Row number `rows + i` is row i of the history.
template <typename T>
__device__ __forceinline__ const T *row_at(const T *x, size_t stride, const T *history, size_t history_stride, uint32_t rows,
                                           uint32_t row) {
    return row < rows ? x + row * stride : history + (row - rows) * history_stride;
}

template <typename T>
__device__ __forceinline__ void forward(const T *__restrict__ x, int x_stride, const float *__restrict__ w, int width,
                                        const uint32_t *__restrict__ taps, const T *__restrict__ history, int history_stride,
                                        T *__restrict__ y, int y_stride, int rows, int cols, int block_rows) {
    SHARED(float, weights, WIDEST *TILE_COLUMNS);
    const int first = blockIdx.y * TILE_COLUMNS;
    const bool wide = cols % 4 == 0 && rows_are_aligned(x, x_stride) && rows_are_aligned(y, y_stride) &&
                      (!history || rows_are_aligned(history, history_stride));
    const int start = blockIdx.x * block_rows, end = min(rows, start + block_rows);
    cols -= first;
    fetch_weights(w + size_t(first) * width, cols, width, weights);
    for (int row = start + threadIdx.x / WARP; row < end; row += COLUMN_WARPS) {
        float sum[4];
        const uint32_t *const of_row = taps + size_t(row) * width;
        combine<T>(
            width,
            [&](int i, int &tap) -> const T * {
                tap = i;
                const uint32_t at = of_row[i];
                return at == NO_TAP ? nullptr : row_at<T>(x, x_stride, history, history_stride, rows, at) + first;
            },
            cols, wide, weights, sum);
        store_columns(y + size_t(row) * y_stride + first, cols, wide, sum);
    }
}

// Keeps the last inputs of runs: a block for each group of runs and tile of channels. `kept` are
// (last row, slot) each, of a group from its last run to its first: a run may continue a slot in
// which the first keeps its own.
template <typename T>
__device__ __forceinline__ void keep(const T *__restrict__ x, int x_stride, int width, const uint32_t *__restrict__ taps,
                                     const uint32_t *__restrict__ starts, const uint32_t *__restrict__ kept, T *history,
                                     int history_stride, int rows, int cols) {
    const int column = blockIdx.y * COLUMN_THREADS + threadIdx.x;
    if (column >= cols) return;
    for (uint32_t i = starts[blockIdx.x]; i < starts[blockIdx.x + 1]; i++) {
        const uint32_t *const of_row = taps + size_t(kept[2 * i]) * width + 1;
        T *const slot = history + size_t(kept[2 * i + 1]) * (width - 1) * history_stride + column;
        // What a slot keeps of its own moves up: it is read before it is overwritten.
        for (int j = 0; j < width - 1; j++) {
            const uint32_t at = of_row[j];
            const T *const row = at == NO_TAP ? nullptr : row_at<T>(x, x_stride, history, history_stride, rows, at);
            slot[size_t(j) * history_stride] = row ? row[column] : from_float<T>(0.0f);
        }
    }
}

// Row s is read by rows `readers[starts[s]..starts[s + 1]]`, as (row, tap) each.
template <typename T>
__device__ __forceinline__ void backward(const T *__restrict__ dy, int dy_stride, const float *__restrict__ w, int width,
                                         const uint32_t *__restrict__ starts, const uint32_t *__restrict__ readers,
                                         T *__restrict__ dx, int dx_stride, int rows, int cols, int block_rows) {
    SHARED(float, weights, WIDEST *TILE_COLUMNS);
    const int first = blockIdx.y * TILE_COLUMNS;
    const bool wide = cols % 4 == 0 && rows_are_aligned(dy, dy_stride) && rows_are_aligned(dx, dx_stride);
    const int start = blockIdx.x * block_rows, end = min(rows, start + block_rows);
    cols -= first;
    fetch_weights(w + size_t(first) * width, cols, width, weights);
    for (int row = start + threadIdx.x / WARP; row < end; row += COLUMN_WARPS) {
        float sum[4];
        const uint32_t *const of_row = readers + 2 * size_t(starts[row]);
        combine<T>(
            int(starts[row + 1] - starts[row]),
            [&](int i, int &tap) -> const T * {
                tap = int(of_row[2 * i + 1]);
                return dy + size_t(of_row[2 * i]) * dy_stride + first;
            },
            cols, wide, weights, sum);
        store_columns(dx + size_t(row) * dx_stride + first, cols, wide, sum);
    }
}

// Of each block of rows `Σ_t dy[t, c] · x[tap j of t, c]`: a row `[W, C]` of `partial`. Warps are
// added in order.
template <int MOST, typename T>
__device__ __forceinline__ void weights_backward(const T *__restrict__ x, int x_stride, const T *__restrict__ dy, int dy_stride,
                                                 int width, const uint32_t *__restrict__ taps, float *__restrict__ partial,
                                                 int rows, int cols, int block_rows) {
    SHARED(float, of_warps, COLUMN_WARPS *TILE_COLUMNS);
    const int first = blockIdx.y * TILE_COLUMNS, warp = threadIdx.x / WARP, channels = cols;
    const bool wide = cols % 4 == 0 && rows_are_aligned(x, x_stride) && rows_are_aligned(dy, dy_stride);
    const int start = blockIdx.x * block_rows, end = min(rows, start + block_rows);
    cols -= first;
    float sums[MOST][4] = {};
    for (int row = start + warp; row < end; row += COLUMN_WARPS) {
        float d[4];
        load_columns(dy + size_t(row) * dy_stride + first, cols, wide, d);
#pragma unroll
        for (int j = 0; j < MOST; j++) {
            const uint32_t at = j < width ? taps[size_t(row) * width + j] : NO_TAP;
            if (at == NO_TAP) continue;
            float v[4];
            load_columns(x + size_t(at) * x_stride + first, cols, wide, v);
#pragma unroll
            for (int k = 0; k < 4; k++) sums[j][k] = fmaf(d[k], v[k], sums[j][k]);
        }
    }
    const int column = threadIdx.x;
#pragma unroll
    for (int j = 0; j < MOST; j++) {
        if (j >= width) break;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 4; k++) of_warps[warp * TILE_COLUMNS + column_of(wide, k)] = sums[j][k];
        __syncthreads();
        if (column < TILE_COLUMNS && column < cols) {
            float total = 0;
#pragma unroll
            for (int w = 0; w < COLUMN_WARPS; w++) total += of_warps[w * TILE_COLUMNS + column];
            partial[(size_t(blockIdx.x) * width + j) * channels + first + column] = total;
        }
    }
}

} // namespace

#define CAUSAL_CONV(type, T)                                                                                               \
    KERNEL_BOUNDS(causal_conv_##type, COLUMN_THREADS, 4, const T *x, int x_stride, const float *w, int width,              \
                  const uint32_t *taps, const T *history, int history_stride, T *y, int y_stride, int rows, int cols,      \
                  int block_rows) {                                                                                        \
        forward(x, x_stride, w, width, taps, history, history_stride, y, y_stride, rows, cols, block_rows);                \
    }                                                                                                                      \
    KERNEL_BOUNDS(causal_conv_keep_##type, COLUMN_THREADS, 4, const T *x, int x_stride, int width, const uint32_t *taps,   \
                  const uint32_t *starts, const uint32_t *kept, T *history, int history_stride, int rows, int cols) {      \
        keep(x, x_stride, width, taps, starts, kept, history, history_stride, rows, cols);                                 \
    }                                                                                                                      \
    KERNEL_BOUNDS(causal_conv_backward_##type, COLUMN_THREADS, 4, const T *dy, int dy_stride, const float *w, int width,   \
                  const uint32_t *starts, const uint32_t *readers, T *dx, int dx_stride, int rows, int cols,               \
                  int block_rows) {                                                                                        \
        backward(dy, dy_stride, w, width, starts, readers, dx, dx_stride, rows, cols, block_rows);                         \
    }                                                                                                                      \
    KERNEL_BOUNDS(causal_conv_weights_##type, COLUMN_THREADS, 2, const T *x, int x_stride, const T *dy, int dy_stride,     \
                  int width, const uint32_t *taps, float *partial, int rows, int cols, int block_rows) {                   \
        if (width <= 4)                                                                                                    \
            weights_backward<4>(x, x_stride, dy, dy_stride, width, taps, partial, rows, cols, block_rows);                 \
        else                                                                                                               \
            weights_backward<WIDEST>(x, x_stride, dy, dy_stride, width, taps, partial, rows, cols, block_rows);            \
    }
CAUSAL_CONV(f32, float)
CAUSAL_CONV(bf16, bf16)

// dw += the sums of blocks of rows, in order: a thread for each weight.
KERNEL_BOUNDS(causal_conv_sum, COLUMN_THREADS, 4, const float *partial, int blocks, float *dw, int dw_stride, int cols,
              int width) {
    const int i = blockIdx.x * COLUMN_THREADS + threadIdx.x;
    if (i >= cols * width) return;
    const int j = i / cols, column = i - j * cols;
    float sum = 0;
    for (int block = 0; block < blocks; block++) sum += partial[size_t(block) * cols * width + i];
    dw[size_t(column) * dw_stride + j] += sum;
}
