// Backward attention in bf16: with P from the saved log-sum-exp, `dP = dO Vᵀ`, `dS = P ∘ (dP −
// rowsum(dO ∘ O))`, `dQ = dS K`, `dK = dSᵀ Q`, `dV = Pᵀ dO` (FlashAttention-2, arXiv 2307.08691,
// algorithm 2). One kernel for queries and one for keys each recompute P, so that no sum is shared
// between blocks.
//
// Threads: a block of 4 warps per tile of 64 packed rows of queries and pack of heads (dQ), or per
// tile of 64 keys and key/value head (dK, dV). Each warp owns 16 rows of the tile; tiles of the
// other side pass through shared memory.
// Bytes: a tile of queries reads K and V of the keys it sees, 4 · head_dim bytes per key; a tile of
// keys reads Q, dO (4 · head_dim bytes) and 8 bytes of statistics per query and head.
#include "attention_tiles.cuh"

namespace {

// `s ← cap · tanh(s · before)`, and the gradient of what comes out becomes that of what goes in.
template <bool HAS_GRADIENT, int N>
__device__ __forceinline__ void cap(const Factors &factors, float (&scores)[1][N][4], float (&gradient)[1][N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float ratio = tanh_fast(scores[0][n][i] * factors.before);
            scores[0][n][i] = factors.cap * ratio;
            if (HAS_GRADIENT) gradient[0][n][i] *= 1.0f - ratio * ratio;
        }
}

// Keys that a row does not see have no weight, and their scores no gradient, even if the row's own
// are no numbers.
template <int N>
__device__ __forceinline__ void hide_unseen(const WarpRows<1> &own, int key, int window, float (&gradient)[1][N][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int position = own.position_of(0, half);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++)
                if (!sees(position, key + 8 * n + 2 * int(threadIdx.x % 4) + i % 2, window))
                    gradient[0][n][i] = 0;
    }
}

template <int WIDTH> struct QueriesSizes {
    static constexpr int ROWS = 16 * WARPS, KEYS = WIDTH <= 128 ? 64 : 32;
    // Tiles of keys: where there is room for two, one comes while the other is multiplied.
    static constexpr int STAGES = WIDTH <= 128 ? 2 : 1;
};

// The gradient of queries.
template <int WIDTH>
__device__ __forceinline__ void
backward_queries(const uint32_t *__restrict__ tiles, const bf16 *__restrict__ q, int q_stride, const bf16 *__restrict__ k,
                 int k_stride, const bf16 *__restrict__ v, int v_stride, const bf16 *__restrict__ d_out, int d_out_stride,
                 const float *__restrict__ log_sum_exp, int lse_stride, const float *__restrict__ delta, int heads,
                 bf16 *__restrict__ dq, int dq_stride, int head_dim, int pack_heads, int group, float scale, float softcap,
                 int window) {
    using Sizes = QueriesSizes<WIDTH>;
    constexpr int ROWS = Sizes::ROWS, KEYS = Sizes::KEYS, STAGES = Sizes::STAGES, N = KEYS / 8;
    DYNAMIC_SHARED(memory);
    bf16 *const q_tile = reinterpret_cast<bf16 *>(memory), *const d_out_tile = q_tile + ROWS * WIDTH;
    bf16 *const k_tiles = d_out_tile + ROWS * WIDTH, *const v_tile = k_tiles + STAGES * KEYS * WIDTH;
    int *const rows = reinterpret_cast<int *>(v_tile + KEYS * WIDTH);

    const Queries tile(tiles);
    const Pack pack(pack_heads);
    const int first_head = int(blockIdx.y) * pack.heads;
    const int kv_column = first_head / group * head_dim;
    const bool wide = is_wide(q, q_stride, head_dim) && is_wide(k, k_stride, head_dim) && is_wide(v, v_stride, head_dim) &&
                      is_wide(d_out, d_out_stride, head_dim);
    const auto query_place = [&](int row) { return place_of(tile, pack, first_head, head_dim, row); };
    const auto key_places = [&](const int *rows) { return [=](int row) { return Place{rows[row], kv_column}; }; };

    KeyRows<KEYS> keys(tile);
    const int first = tile.first_key(window, KEYS), end = tile.end();
    keys.find(first, rows);
    keys.find(first + KEYS, rows + KEYS);
    load_tile<WIDTH, ROWS>(q_tile, q, q_stride, query_place, head_dim, wide);
    load_tile<WIDTH, ROWS>(d_out_tile, d_out, d_out_stride, query_place, head_dim, wide);
    __syncthreads();
    load_tile<WIDTH, KEYS>(k_tiles, k, k_stride, key_places(rows), head_dim, wide);
    load_tile<WIDTH, KEYS>(v_tile, v, v_stride, key_places(rows), head_dim, wide);
    commit_copies();

    const WarpRows<1> own(tile, pack);
    const Factors factors(scale, softcap);
    const int g = threadIdx.x % WARP / 4;
    const bf16 *const own_q = q_tile + own.first * WIDTH, *const own_d_out = d_out_tile + own.first * WIDTH;
    // Rows that are not there have weights of zero.
    float less[2], mean[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = own.first + 8 * half + g, query = pack.query(row);
        less[half] = INFINITY, mean[half] = 0;
        if (query < tile.count) {
            const size_t at = tile.row + query;
            const int head = first_head + pack.head(row);
            less[half] = log_sum_exp[at * lse_stride + head] * LOG2E, mean[half] = delta[at * heads + head];
        }
    }
    float sums[1][WIDTH / 8][4];
    clear(sums);

    for (int key = first, turn = 0; key < end; key += KEYS, turn ^= 1) {
        const bool is_more = key + KEYS < end;
        bf16 *const k_tile = k_tiles + (STAGES - 1) * turn * KEYS * WIDTH;
        int *const next_rows = rows + (turn ^ 1) * KEYS;
        // Keys and values are there, and nobody needs the keys before them.
        wait_copies<0>();
        __syncthreads();
        if (STAGES == 2 && is_more) {
            load_tile<WIDTH, KEYS>(k_tiles + (turn ^ 1) * KEYS * WIDTH, k, k_stride, key_places(next_rows), head_dim, wide);
            commit_copies();
        }
        keys.find(key + 2 * KEYS, rows + turn * KEYS);
        const bool is_seen = own.see_any(key, KEYS, window);
        float scores[1][N][4], gradient[1][N][4];
        if (is_seen) {
            multiply_rows<WIDTH, 1, N>(scores, own_q, k_tile);
            multiply_rows<WIDTH, 1, N>(gradient, own_d_out, v_tile);
        }
        // Nobody needs the values.
        __syncthreads();
        if (is_more) {
            load_tile<WIDTH, KEYS>(v_tile, v, v_stride, key_places(next_rows), head_dim, wide);
            commit_copies();
        }
        if (is_seen) {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) gradient[0][n][i] -= mean[i / 2];
            if (factors.is_capped()) cap<true>(factors, scores, gradient);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    gradient[0][n][i] *= exp2_fast(scores[0][n][i] * factors.after - less[i / 2]);
            if (!own.see_all(key, KEYS, window)) hide_unseen(own, key, window, gradient);
            uint32_t rounded[1][N / 2][4];
            round_scores<1, N>(rounded, gradient);
            multiply_columns<WIDTH, 1, N / 2>(sums, rounded, k_tile);
        }
        if (STAGES == 1 && is_more) {
            __syncthreads();
            load_tile<WIDTH, KEYS>(k_tiles, k, k_stride, key_places(next_rows), head_dim, wide);
            commit_copies();
        }
    }
    if (own.last_position < 0) return;
    const float factor[1][2] = {{scale, scale}};
    bf16 *const own_dq = q_tile + own.first * WIDTH;
    put_rows<WIDTH, 1>(own_dq, sums, factor);
    store_rows<WIDTH, 16>(own_dq, dq, dq_stride, [&](int row) { return query_place(own.first + row); }, head_dim);
}

template <int WIDTH> struct KeysSizes {
    static constexpr int KEYS = 16 * WARPS, ROWS = WIDTH <= 128 ? 64 : 32, STAGES = WIDTH <= 128 ? 2 : 1;
};

// The gradients of keys and values, or of one of them, where registers do not hold both. Scores are
// `[keys, rows]`.
template <int WIDTH, bool OF_KEYS, bool OF_VALUES>
__device__ __forceinline__ void
backward_keys(const uint32_t *__restrict__ tiles, const bf16 *__restrict__ q, int q_stride, const bf16 *__restrict__ k,
              int k_stride, const bf16 *__restrict__ v, int v_stride, const bf16 *__restrict__ d_out, int d_out_stride,
              const float *__restrict__ log_sum_exp, int lse_stride, const float *__restrict__ delta, int heads,
              bf16 *__restrict__ dk, int dk_stride, bf16 *__restrict__ dv, int dv_stride, int head_dim, int pack_heads,
              int group, float scale, float softcap, int window) {
    using Sizes = KeysSizes<WIDTH>;
    constexpr int ROWS = Sizes::ROWS, KEYS = Sizes::KEYS, STAGES = Sizes::STAGES, N = ROWS / 8;
    DYNAMIC_SHARED(memory);
    bf16 *const k_tile = reinterpret_cast<bf16 *>(memory), *const v_tile = k_tile + KEYS * WIDTH;
    bf16 *const q_tiles = v_tile + KEYS * WIDTH, *const d_out_tile = q_tiles + STAGES * ROWS * WIDTH;
    int *const rows = reinterpret_cast<int *>(d_out_tile + ROWS * WIDTH);
    float *const less = reinterpret_cast<float *>(rows + 2 * ROWS), *const mean = less + ROWS;
    // Of four steps, where there is a window.
    int *const positions = reinterpret_cast<int *>(mean + ROWS);
    const bool is_windowed = window != NO_WINDOW;

    const Keys tile(tiles);
    const Pack pack(pack_heads);
    const int kv_head = blockIdx.y;
    const bool wide = is_wide(q, q_stride, head_dim) && is_wide(k, k_stride, head_dim) && is_wide(v, v_stride, head_dim) &&
                      is_wide(d_out, d_out_stride, head_dim);
    const auto key_place = [&](int row) { return Place{row < tile.count ? tile.row + row : -1, kv_head * head_dim}; };
    const auto query_places = [&](const int *rows, int first_head) {
        return [=, &pack](int row) { return Place{rows[row], (first_head + pack.head(row)) * head_dim}; };
    };

    // All queries for the first heads, then for the next: a step is one tile of them. Rows are
    // found two steps ahead.
    const int per_tile = ROWS / pack.heads;
    Axis axis(tile.pieces);
    int found = 0;
    const auto find = [&](int step) {
        if (int(threadIdx.x) < ROWS) {
            const int query = found + pack.query(threadIdx.x);
            const bool is_there = query < tile.queries && pack.query(threadIdx.x) < per_tile;
            if (is_there) axis.reach(query);
            rows[step % 2 * ROWS + threadIdx.x] = is_there ? int(query + axis.row) : -1;
            if (is_windowed) positions[step % 4 * ROWS + threadIdx.x] = is_there ? int(query + axis.position) : 0;
        }
        // As in `KeyRows::find`.
        __syncwarp();
        found += per_tile;
        // Read again, for a register that would be kept spills.
        if (found >= tile.queries) found = 0, axis = Axis(Keys(tiles).pieces);
    };
    // Statistics of a row: those that are not there have weights of zero.
    float next_less = INFINITY, next_mean = 0;
    const auto fetch = [&](const int *rows, int first_head) {
        next_less = INFINITY, next_mean = 0;
        if (int(threadIdx.x) < ROWS && rows[threadIdx.x] >= 0) {
            const size_t row = rows[threadIdx.x];
            const int head = first_head + pack.head(threadIdx.x);
            next_less = log_sum_exp[row * lse_stride + head] * LOG2E, next_mean = delta[row * heads + head];
        }
        // Lanes without a row meet the others again: products follow, which need a whole warp.
        __syncwarp();
    };
    const auto put = [&] {
        if (int(threadIdx.x) < ROWS) less[threadIdx.x] = next_less, mean[threadIdx.x] = next_mean;
    };

    int next_head = kv_head * group, next_query = 0;
    find(0), find(1);
    load_tile<WIDTH, KEYS>(k_tile, k, k_stride, key_place, head_dim, wide);
    if (OF_KEYS) load_tile<WIDTH, KEYS>(v_tile, v, v_stride, key_place, head_dim, wide);
    __syncthreads();
    load_tile<WIDTH, ROWS>(q_tiles, q, q_stride, query_places(rows, next_head), head_dim, wide);
    load_tile<WIDTH, ROWS>(d_out_tile, d_out, d_out_stride, query_places(rows, next_head), head_dim, wide);
    commit_copies();
    fetch(rows, next_head);
    put();

    const Factors factors(scale, softcap);
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, own = threadIdx.x / WARP * 16;
    // A warp that has no keys is seen from no query on.
    const int seen_from = own < tile.count ? own : NO_WINDOW;
    const bf16 *const own_k = k_tile + own * WIDTH, *const own_v = v_tile + own * WIDTH;
    float sum_k[1][WIDTH / 8][4], sum_v[1][WIDTH / 8][4];
    if (OF_KEYS) clear(sum_k);
    if (OF_VALUES) clear(sum_v);

    bool is_more = true;
    for (int step = 0; is_more; step++) {
        const int turn = step % 2, first_query = next_query;
        next_query += per_tile;
        if (next_query >= tile.queries) next_query = 0, next_head += pack.heads;
        is_more = next_head < (kv_head + 1) * group;
        const bf16 *const q_tile = q_tiles + (STAGES - 1) * turn * ROWS * WIDTH;
        const int *const next_rows = rows + (turn ^ 1) * ROWS;
        // Queries and their gradients are there, and nobody needs the queries before them.
        wait_copies<0>();
        __syncthreads();
        if (STAGES == 2 && is_more) {
            load_tile<WIDTH, ROWS>(q_tiles + (turn ^ 1) * ROWS * WIDTH, q, q_stride, query_places(next_rows, next_head),
                                   head_dim, wide);
            commit_copies();
        }
        find(step + 2);
        // Queries are numbered from the tile's first key on, so keys of this segment are seen by
        // queries of no smaller number. Those of its descendants have numbers beyond all of it.
        const bool is_seen = first_query + per_tile > seen_from;
        uint32_t weights[1][N / 2][4], rounded[1][N / 2][4];
        if (is_seen) {
            float scores[1][N][4], gradient[1][N][4];
            multiply_rows<WIDTH, 1, N>(scores, own_k, q_tile);
            if (OF_KEYS) multiply_rows<WIDTH, 1, N>(gradient, own_v, d_out_tile);
            if (OF_KEYS) {
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const float2 of_rows = *reinterpret_cast<const float2 *>(mean + 8 * n + 2 * t);
#pragma unroll
                    for (int i = 0; i < 4; i++) gradient[0][n][i] -= i % 2 ? of_rows.y : of_rows.x;
                }
            }
            if (factors.is_capped()) cap<OF_KEYS>(factors, scores, gradient);
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float2 of_rows = *reinterpret_cast<const float2 *>(less + 8 * n + 2 * t);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[0][n][i] = exp2_fast(scores[0][n][i] * factors.after - (i % 2 ? of_rows.y : of_rows.x));
                    if (OF_KEYS) gradient[0][n][i] *= scores[0][n][i];
                }
            }
            if (first_query < own + 15) {
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (first_query + pack.query(8 * n + 2 * t + i % 2) < own + g + i / 2 * 8) {
                            scores[0][n][i] = 0;
                            if (OF_KEYS) gradient[0][n][i] = 0;
                        }
            }
            if (is_windowed) {
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int position = positions[step % 4 * ROWS + 8 * n + 2 * t + i % 2];
                        const bool is_near = position - (tile.position + own + g + i / 2 * 8) < window;
                        scores[0][n][i] = is_near ? scores[0][n][i] : 0;
                        if (OF_KEYS) gradient[0][n][i] = is_near ? gradient[0][n][i] : 0;
                    }
            }
            if (OF_VALUES) round_scores<1, N>(weights, scores);
            if (OF_KEYS) round_scores<1, N>(rounded, gradient);
        }
        if (is_more) fetch(next_rows, next_head);
        if (OF_VALUES && is_seen) multiply_columns<WIDTH, 1, N / 2>(sum_v, weights, d_out_tile);
        // Nobody needs these gradients and statistics.
        __syncthreads();
        if (is_more) {
            put();
            load_tile<WIDTH, ROWS>(d_out_tile, d_out, d_out_stride, query_places(next_rows, next_head), head_dim, wide);
            commit_copies();
        }
        if (OF_KEYS && is_seen) multiply_columns<WIDTH, 1, N / 2>(sum_k, rounded, q_tile);
        if (STAGES == 1 && is_more) {
            __syncthreads();
            load_tile<WIDTH, ROWS>(q_tiles, q, q_stride, query_places(next_rows, next_head), head_dim, wide);
            commit_copies();
        }
    }
    if (own >= tile.count) return;
    const auto own_place = [&](int row) { return key_place(own + row); };
    if (OF_KEYS) {
        const float factor[1][2] = {{scale, scale}};
        put_rows<WIDTH, 1>(k_tile + own * WIDTH, sum_k, factor);
        store_rows<WIDTH, 16>(k_tile + own * WIDTH, dk, dk_stride, own_place, head_dim);
    }
    if (OF_VALUES) {
        const float factor[1][2] = {{1, 1}};
        put_rows<WIDTH, 1>(v_tile + own * WIDTH, sum_v, factor);
        store_rows<WIDTH, 16>(v_tile + own * WIDTH, dv, dv_stride, own_place, head_dim);
    }
}

} // namespace

#define BACKWARD_QUERIES(width)                                                                                            \
    KERNEL_BOUNDS(attention_backward_queries_##width, THREADS, 2, const uint32_t *tiles, const bf16 *q, int q_stride,       \
                  const bf16 *k, int k_stride, const bf16 *v, int v_stride, const bf16 *d_out, int d_out_stride,           \
                  const float *log_sum_exp, int lse_stride, const float *delta, int heads, bf16 *dq, int dq_stride,        \
                  int head_dim, int pack, int group, float scale, float softcap, int window) {                              \
        backward_queries<width>(tiles, q, q_stride, k, k_stride, v, v_stride, d_out, d_out_stride, log_sum_exp, lse_stride,  \
                                delta, heads, dq, dq_stride, head_dim, pack, group, scale, softcap, window);               \
    }
#define BACKWARD_KEYS(name, width, of_keys, of_values)                                                                     \
    KERNEL_BOUNDS(name, THREADS, 2, const uint32_t *tiles, const bf16 *q, int q_stride, const bf16 *k, int k_stride,        \
                  const bf16 *v, int v_stride, const bf16 *d_out, int d_out_stride, const float *log_sum_exp,              \
                  int lse_stride, const float *delta, int heads, bf16 *dk, int dk_stride, bf16 *dv, int dv_stride,          \
                  int head_dim, int pack, int group, float scale, float softcap, int window) {                              \
        backward_keys<width, of_keys, of_values>(tiles, q, q_stride, k, k_stride, v, v_stride, d_out, d_out_stride,          \
                                                 log_sum_exp, lse_stride, delta, heads, dk, dk_stride, dv, dv_stride,       \
                                                 head_dim, pack, group, scale, softcap, window);                           \
    }
#define BACKWARD(width)                                                                                                    \
    BACKWARD_QUERIES(width)                                                                                                \
    BACKWARD_KEYS(attention_backward_keys_##width, width, true, true)

// A program needs one width, and compiling takes time: whoever compiles this for a GPU says which
// one.
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 16
BACKWARD(16)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 32
BACKWARD(32)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 64
BACKWARD(64)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 80
BACKWARD(80)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 96
BACKWARD(96)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 128
BACKWARD(128)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 256
BACKWARD_QUERIES(256)
BACKWARD_KEYS(attention_backward_keys_256, 256, true, false)
BACKWARD_KEYS(attention_backward_values_256, 256, false, true)
#endif
