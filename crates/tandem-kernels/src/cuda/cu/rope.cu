// Rotary position embedding, in place.
//
// Threads: blocks of 256; a thread rotates one vector of pairs in 2 or 4 heads of a row, which share
// their angles.
// Bytes: each rotated element read and written once; cosines and sines once per thread.
#include "vectors.cuh"

namespace {

constexpr int THREADS = 256;
// Heads that a thread rotates: their angles are the same, and their loads are under way at once.
template <int N> constexpr int HEADS = N == 8 ? 2 : 4;

// Within each head, pair i is of elements i * step and i * step + gap; vectors of pairs need step 1. `table` has
// the cosines of its rows, and after them as many sines; `token_row` has each token's row.
template <int N, typename T>
__device__ __forceinline__ void rope(T *x, size_t stride, const uint32_t *__restrict__ token_row,
                                     const float *__restrict__ table, size_t table_rows, size_t rows, int heads,
                                     int head_dim, int half, int step, int gap, float sign) {
    const uint32_t vectors = half / N, per_row = (heads + HEADS<N> - 1) / HEADS<N> * vectors;
    const size_t item = size_t(blockIdx.x) * THREADS + threadIdx.x, row = item / per_row;
    if (row >= rows) return;
    const uint32_t in_row = uint32_t(item - row * per_row);
    const int first = in_row / vectors * HEADS<N>, i = in_row % vectors * N;
    T *const at = x + row * stride + size_t(first) * head_dim + i * step;
    Vector<T, N> lows[HEADS<N>], highs[HEADS<N>];
#pragma unroll
    for (int k = 0; k < HEADS<N>; k++) {
        if (first + k < heads) {
            lows[k] = fetch<N>(at + k * head_dim);
            highs[k] = fetch<N>(at + k * head_dim + gap);
        }
    }
    const float *const angles = table + size_t(token_row[row]) * half + i;
    float cos[N], sin[N];
    load_many(angles, cos);
    load_many(angles + table_rows * half, sin);
#pragma unroll
    for (int k = 0; k < HEADS<N>; k++) {
        if (first + k >= heads) break;
        float a[N], b[N], low[N], high[N];
        unpack(lows[k], a), unpack(highs[k], b);
#pragma unroll
        for (int j = 0; j < N; j++) {
            low[j] = a[j] * cos[j] - b[j] * (sign * sin[j]);
            high[j] = b[j] * cos[j] + a[j] * (sign * sin[j]);
        }
        put(at + k * head_dim, low);
        put(at + k * head_dim + gap, high);
    }
}

} // namespace

#define ROPE(name, T)                                                                                                   \
    KERNEL_BOUNDS(name, THREADS, 3, T *x, long long stride, const uint32_t *token_row, const float *table,              \
                  long long table_rows, long long rows, int heads, int head_dim, int half, int step, int gap,           \
                  float sign, int wide) {                                                                               \
        if (wide)                                                                                                       \
            rope<AT_ONCE<T>>(x, stride, token_row, table, table_rows, rows, heads, head_dim, half, step, gap, sign);    \
        else                                                                                                            \
            rope<1>(x, stride, token_row, table, table_rows, rows, heads, head_dim, half, step, gap, sign);             \
    }
ROPE(rope_f32, float)
ROPE(rope_bf16, bf16)
