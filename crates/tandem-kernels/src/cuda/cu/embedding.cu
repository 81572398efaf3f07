// Table look-up and its scatter.
//
// Threads: forward, blocks of 256 over vectors of the output (`elements.cuh`). Backward, a block of
// 128 threads per (distinct id, range of columns): one thread adds to each element of the table, in
// the order of tokens.
// Bytes per element of x: forward one table element and 4 bytes written (4 more where it adds);
// backward 4 bytes read, and 8 per element of each distinct row, as a sum in fixed point too.
#include "elements.cuh"
#include "exact.cuh"

namespace {

// What ids say of a token whose row is in another part of the table.
constexpr uint32_t ELSEWHERE = 0xffffffffu;

// x[t] = scale · table[ids[t]], or += if that is wanted.
template <int N, typename T>
__device__ __forceinline__ void embedding(const T *table, size_t table_stride, const uint32_t *ids, float scale, float *x,
                                          size_t x_stride, bool accumulate, size_t rows, size_t cols) {
    uint32_t id[DEPTH<N>];
    Vector<T, N> given[DEPTH<N>];
    Vector<float, N> before[DEPTH<N>];
    over_elements<N>(
        rows, cols, [&](int k, size_t row, size_t) { id[k] = ids[row]; },
        [&](int k, size_t row, size_t col) {
            given[k] = {}, before[k] = {};
            if (id[k] != ELSEWHERE) given[k] = fetch<N>(table + id[k] * table_stride + col);
            if (accumulate) before[k] = fetch<N>(x + row * x_stride + col);
        },
        [&](int k, size_t row, size_t col) {
            float v[N], sum[N];
            unpack(given[k], v), unpack(before[k], sum);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float scaled = __fmul_rn(scale, v[j]);
                v[j] = accumulate ? __fadd_rn(sum[j], scaled) : scaled;
            }
            put(x + row * x_stride + col, v);
        });
}

// Threads of a block of the scatter, and rows of dx that a thread has under way at once.
constexpr int COLUMN_THREADS = 128;
constexpr int AHEAD = 8;

// A block adds what the tokens of one id have to some columns of that id's row, in order. `runs`
// has where each id's tokens begin and where the last one's end; then the ids; then the tokens,
// those of one id together. EXACT sums what the tokens have first, and adds that in fixed point to the
// table's only term; `out_of_range` becomes 1 if it is not below the limit.
template <int N, bool EXACT>
__device__ __forceinline__ void embedding_backward(const uint32_t *__restrict__ runs, int num_runs, float scale,
                                                   const float *__restrict__ dx, size_t dx_stride, float *dtable,
                                                   size_t dtable_stride, long long cols, float limit,
                                                   unsigned *out_of_range) {
    const long long col = N * ((long long)(blockIdx.y) * COLUMN_THREADS + threadIdx.x);
    if (col >= cols) return;
    const uint32_t run = blockIdx.x, first = runs[run], end = runs[run + 1], id = runs[num_runs + 1 + run];
    const uint32_t *const tokens = runs + 2 * size_t(num_runs) + 1;
    float *const to = dtable + id * dtable_stride + col;
    float before[N], sum[N];
    load_many(to, before);
#pragma unroll
    for (int j = 0; j < N; j++) sum[j] = EXACT ? 0.0f : before[j];
    for (uint32_t start = first; start < end; start += AHEAD) {
        uint32_t token[AHEAD];
        float v[AHEAD][N];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) token[k] = tokens[min(start + k, end - 1)];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (start + k < end) load_many(dx + token[k] * dx_stride + col, v[k]);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (start + k >= end) break;
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] = __fadd_rn(sum[j], __fmul_rn(scale, v[k][j]));
        }
    }
    if constexpr (EXACT) {
        bool good = true;
#pragma unroll
        for (int j = 0; j < N; j++) {
            // Not-a-number is not below the limit.
            good = good && fabsf(sum[j]) < limit;
            sum[j] = nearest(plus(fixed(before[j]), fixed(sum[j])));
        }
        if (!good) atomicOr(out_of_range, 1u);
    }
    put(to, sum);
}

} // namespace

#define EMBEDDING(name, T)                                                                                              \
    KERNEL_BOUNDS(name, THREADS, 4, const T *table, long long table_stride, const uint32_t *ids, float scale, float *x, \
                  long long x_stride, int accumulate, long long rows, long long cols, int wide) {                       \
        if (wide) embedding<4>(table, table_stride, ids, scale, x, x_stride, accumulate, rows, cols);                   \
        else embedding<1>(table, table_stride, ids, scale, x, x_stride, accumulate, rows, cols);                        \
    }
EMBEDDING(embedding_f32, float)
EMBEDDING(embedding_bf16, bf16)

KERNEL_BOUNDS(embedding_backward_f32, COLUMN_THREADS, 6, const uint32_t *runs, int num_runs, float scale, const float *dx,
              long long dx_stride, float *dtable, long long dtable_stride, long long cols, int wide) {
    if (wide) embedding_backward<4, false>(runs, num_runs, scale, dx, dx_stride, dtable, dtable_stride, cols, 0.0f, nullptr);
    else embedding_backward<1, false>(runs, num_runs, scale, dx, dx_stride, dtable, dtable_stride, cols, 0.0f, nullptr);
}

KERNEL_BOUNDS(embedding_backward_exact, COLUMN_THREADS, 6, const uint32_t *runs, int num_runs, float scale, const float *dx,
              long long dx_stride, float *dtable, long long dtable_stride, long long cols, int wide, float limit,
              unsigned *out_of_range) {
    if (wide) embedding_backward<4, true>(runs, num_runs, scale, dx, dx_stride, dtable, dtable_stride, cols, limit, out_of_range);
    else embedding_backward<1, true>(runs, num_runs, scale, dx, dx_stride, dtable, dtable_stride, cols, limit, out_of_range);
}
