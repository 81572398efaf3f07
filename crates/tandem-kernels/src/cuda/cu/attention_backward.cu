// Backward attention in bf16: with P from the saved log-sum-exp, `dP = dO Vᵀ`, `dS = P ∘ (dP −
// rowsum(dO ∘ O))`, `dQ = dS K`, `dK = dSᵀ Q`, `dV = Pᵀ dO` (FlashAttention-2, arXiv 2307.08691,
// algorithm 2). One kernel for queries and one for keys each recompute P, so that no sum is shared
// between blocks.
//
// Threads: a block of 4 warps per tile of 128 packed rows of queries and pack of heads (dQ; 64 rows
// at width 256), or per tile of 64 keys and key/value head (dK, dV; 32 keys at width 256). Each warp
// has 32 (16) rows of the tile, so that what it loads of the other side serves two (one) products.
// For keys two warps share each 32 rows, since a warp has registers for one of their gradients: one
// warp computes P and dV, the other dS and dK. Tiles of the other side pass through shared memory.
// Bytes: a tile of queries reads K and V of the keys it sees, 4 · head_dim bytes per key; a tile of
// keys reads Q, dO (4 · head_dim bytes) and 8 bytes of statistics per query and head.
#include "attention_tiles.cuh"

namespace {

template <int WIDTH> struct QueriesSizes {
    static constexpr int M = WIDTH <= 128 ? 2 : 1, ROWS = 16 * M * WARPS, KEYS = 32;
    // Tiles of keys and values: where there is room for two, they come while others are multiplied.
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
    constexpr int M = Sizes::M, ROWS = Sizes::ROWS, KEYS = Sizes::KEYS, STAGES = Sizes::STAGES, N = KEYS / 8;
    DYNAMIC_SHARED(memory);
    bf16 *const q_tile = reinterpret_cast<bf16 *>(memory), *const d_out_tile = q_tile + ROWS * WIDTH;
    // Keys and values of each stage.
    bf16 *const kv_tiles = d_out_tile + ROWS * WIDTH;
    int *const rows = reinterpret_cast<int *>(kv_tiles + STAGES * 2 * KEYS * WIDTH);

    const Queries tile(tiles);
    const Pack pack(pack_heads);
    const int first_head = int(blockIdx.y) * pack.heads;
    const int kv_column = first_head / group * head_dim;
    const bool wide = is_wide(q, q_stride, head_dim) && is_wide(k, k_stride, head_dim) && is_wide(v, v_stride, head_dim) &&
                      is_wide(d_out, d_out_stride, head_dim);
    const auto query_place = [&](int row) { return place_of(tile, pack, first_head, head_dim, row); };
    // Every other tile of keys has the same rows' numbers and, of two stages, the same tiles: a tile
    // begins at a multiple of its size.
    const auto kv_tile = [&](int key) { return kv_tiles + (STAGES == 2 ? (key & KEYS) * 2 * WIDTH : 0); };
    const auto load = [&](int key) {
        const auto place = [&](int row) { return Place{rows[(key & KEYS) + row], kv_column}; };
        load_tile<WIDTH, KEYS>(kv_tile(key), k, k_stride, place, head_dim, wide);
        load_tile<WIDTH, KEYS>(kv_tile(key) + KEYS * WIDTH, v, v_stride, place, head_dim, wide);
        commit_copies();
    };

    KeyRows<KEYS> keys(tile);
    const int first = tile.first_key(window, KEYS), end = tile.end();
    keys.find(first, rows + (first & KEYS));
    keys.find(first + KEYS, rows + (~first & KEYS));
    load_tile<WIDTH, ROWS>(q_tile, q, q_stride, query_place, head_dim, wide);
    load_tile<WIDTH, ROWS>(d_out_tile, d_out, d_out_stride, query_place, head_dim, wide);
    __syncthreads();
    load(first);

    const WarpRows<M> own(tile, pack);
    const Factors factors(scale, softcap);
    const bf16 *const own_q = q_tile + own.first * WIDTH, *const own_d_out = d_out_tile + own.first * WIDTH;
    float less[M][2], mean[M][2];
    load_statistics(tile, pack, own, first_head, log_sum_exp, lse_stride, delta, heads, less, mean);
    float sums[M][WIDTH / 8][4];
    clear(sums);

    for (int key = first; key < end; key += KEYS) {
        const bool is_more = key + KEYS < end;
        // Keys and values are there, and nobody needs those before them.
        wait_copies<0>();
        __syncthreads();
        if (STAGES == 2 && is_more) load(key + KEYS);
        keys.find(key + 2 * KEYS, rows + (key & KEYS));
        if (own.see_any(key, KEYS, window)) {
            const bf16 *const k_tile = kv_tile(key);
            float scores[M][N][4], gradient[M][N][4];
            multiply_rows<WIDTH, M, N>(scores, own_q, k_tile);
            multiply_rows<WIDTH, M, N>(gradient, own_d_out, k_tile + KEYS * WIDTH);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) gradient[m][n][i] -= mean[m][i / 2];
            if (factors.is_capped()) {
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const float ratio = tanh_fast(scores[m][n][i] * factors.before);
                            scores[m][n][i] = factors.cap * ratio, gradient[m][n][i] *= 1.0f - ratio * ratio;
                        }
            }
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        gradient[m][n][i] *= exp2_fast(scores[m][n][i] * factors.after - less[m][i / 2]);
            // Keys that a row does not see have no weight, and their scores no gradient, even if the row's own
            // are no numbers.
            if (!own.see_all(key, KEYS, window)) hide_unseen<false>(own, key, window, 0, gradient);
            uint32_t rounded[M][N / 2][4];
            round_scores<M, N>(rounded, gradient);
            multiply_columns<WIDTH, M, N / 2>(sums, rounded, k_tile);
        }
        if (STAGES == 1 && is_more) {
            __syncthreads();
            load(key + KEYS);
        }
    }
    if (own.last_position < 0) return;
    float factor[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) factor[m][0] = factor[m][1] = scale;
    bf16 *const own_dq = q_tile + own.first * WIDTH;
    const auto place = [&](int row) { return query_place(own.first + row); };
    write_rows<WIDTH, M>(own_dq, sums, factor, dq, dq_stride, place, head_dim);
}

template <int WIDTH> struct KeysSizes {
    static constexpr int M = WIDTH <= 128 ? 2 : 1, KEYS = 16 * M * (WARPS / 2), ROWS = WIDTH <= 128 ? 64 : 32;
};

// Numbers that the two warps of a pair hand over: lanes find theirs where the same lanes of the other
// warp have put them, since fragments of both have the same rows and columns.
template <int M, int K> struct Exchange {
    uint4 *at;

    __device__ __forceinline__ uint4 *of(int m, int k) const { return at + (m * K + k) * WARP + threadIdx.x % WARP; }
    __device__ __forceinline__ void put(int m, int k, const uint32_t (&words)[4]) const {
        *of(m, k) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    __device__ __forceinline__ void get(int m, int k, uint32_t (&words)[4]) const {
        const uint4 all = *of(m, k);
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    }
};

// `s ← cap · tanh(s · before)`, and the gradient of that is handed to `put_weights`.
template <int M, int N>
__device__ __forceinline__ void cap(const Factors &factors, float (&scores)[M][N][4], const Exchange<M, N / 2> &exchange) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float slope[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float &score = scores[m][n + i / 2][i % 2 * 2 + j];
                    const float ratio = tanh_fast(score * factors.before);
                    score = factors.cap * ratio, slope[j] = 1.0f - ratio * ratio;
                }
                words[i] = pack_bf16(slope[0], slope[1]);
            }
            exchange.put(m, n / 2, words);
        }
}

// Weights for the other warp: with the cap's gradient where there is a cap.
template <int M, int N>
__device__ __forceinline__ void put_weights(bool is_capped, const float (&scores)[M][N][4], const uint32_t (&weights)[M][N / 2][4],
                                            const Exchange<M, N / 2> &exchange) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            if (!is_capped) {
                exchange.put(m, n / 2, weights[m][n / 2]);
                continue;
            }
            uint32_t words[4];
            exchange.get(m, n / 2, words);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *const pair = scores[m][n + i / 2] + i % 2 * 2;
                words[i] = pack_bf16(pair[0] * low_float(words[i]), pair[1] * high_float(words[i]));
            }
            exchange.put(m, n / 2, words);
        }
}

// `dS = P ∘ (dP − mean)`, of what the other warp has put. With `HAS_HIDDEN` scores without weight have
// no gradient, even if a row's own are no numbers.
template <bool HAS_HIDDEN, int M, int N>
__device__ __forceinline__ void differentiate(uint32_t (&to)[M][N / 2][4], const float (&gradient)[M][N][4], const float *mean,
                                              const Exchange<M, N / 2> &exchange) {
    mean += threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        const float2 means[2] = {*reinterpret_cast<const float2 *>(mean + 8 * n), *reinterpret_cast<const float2 *>(mean + 8 * n + 8)};
#pragma unroll
        for (int m = 0; m < M; m++) {
            uint32_t words[4];
            exchange.get(m, n / 2, words);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float first = low_float(words[i]), second = high_float(words[i]);
                const float *const pair = gradient[m][n + i / 2] + i % 2 * 2;
                const float x = first * (pair[0] - means[i / 2].x), y = second * (pair[1] - means[i / 2].y);
                to[m][n / 2][i] = pack_bf16(HAS_HIDDEN && first == 0 ? 0 : x, HAS_HIDDEN && second == 0 ? 0 : y);
            }
        }
    }
}

// The gradients of keys and values. Scores are `[keys, rows]`.
//
// Of a pair of warps one is half a step ahead: while it computes P, the other multiplies the step
// before's dS and Q; while it multiplies P and dO, the other computes dS. So exponentials of one warp
// pass beside products of others, and both barriers of a step leave a tile time to come.
template <int WIDTH>
__device__ __forceinline__ void
backward_keys(const uint32_t *__restrict__ tiles, const bf16 *__restrict__ q, int q_stride, const bf16 *__restrict__ k,
              int k_stride, const bf16 *__restrict__ v, int v_stride, const bf16 *__restrict__ d_out, int d_out_stride,
              const float *__restrict__ log_sum_exp, int lse_stride, const float *__restrict__ delta, int heads,
              bf16 *__restrict__ dk, int dk_stride, bf16 *__restrict__ dv, int dv_stride, int head_dim, int pack_heads,
              int group, float scale, float softcap, int window) {
    using Sizes = KeysSizes<WIDTH>;
    constexpr int M = Sizes::M, ROWS = Sizes::ROWS, KEYS = Sizes::KEYS, N = ROWS / 8;
    static_assert(2 * ROWS <= THREADS, "a thread for each statistic");
    DYNAMIC_SHARED(memory);
    bf16 *const k_tile = reinterpret_cast<bf16 *>(memory), *const v_tile = k_tile + KEYS * WIDTH;
    bf16 *const q_tiles = v_tile + KEYS * WIDTH, *const d_out_tile = q_tiles + 2 * ROWS * WIDTH;
    uint4 *const exchanged = reinterpret_cast<uint4 *>(d_out_tile + ROWS * WIDTH);
    // Of two steps: what is subtracted from scores and from gradients of weights, rows, and their
    // positions.
    float *const statistics = reinterpret_cast<float *>(exchanged + KEYS * ROWS / 8);
    int *const rows = reinterpret_cast<int *>(statistics + 4 * ROWS), *const positions = rows + 2 * ROWS;
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
    QueryRows<ROWS> queries(tiles, tile, pack);
    const int per_tile = queries.per_tile;
    const auto find = [&](int slot) { queries.find(pack, is_windowed, rows + slot * ROWS, positions + slot * ROWS); };
    const auto fetch = [&](int slot, int first_head) {
        return statistic_of<ROWS>(rows + slot * ROWS, pack, first_head, log_sum_exp, lse_stride, delta, heads);
    };
    const auto put = [&](int slot, float statistic) {
        if (int(threadIdx.x) < 2 * ROWS) statistics[2 * slot * ROWS + threadIdx.x] = statistic;
    };

    int head = kv_head * group, first_query = 0;
    find(0), find(1);
    load_tile<WIDTH, KEYS>(k_tile, k, k_stride, key_place, head_dim, wide);
    load_tile<WIDTH, KEYS>(v_tile, v, v_stride, key_place, head_dim, wide);
    __syncthreads();
    load_tile<WIDTH, ROWS>(q_tiles, q, q_stride, query_places(rows, head), head_dim, wide);
    commit_copies();
    put(0, fetch(0, head));

    const Factors factors(scale, softcap);
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int pair = threadIdx.x / WARP % (WARPS / 2), own = pair * 16 * M;
    const bool is_of_values = threadIdx.x / WARP < WARPS / 2;
    // A warp that has no keys is seen from no query on.
    const int seen_from = own < tile.count ? own : NO_WINDOW;
    // Keys for scores, or values for the gradients of weights.
    bf16 *const own_rows = (is_of_values ? k_tile : v_tile) + own * WIDTH;
    const Exchange<M, N / 2> exchange{exchanged + pair * (M * N / 2) * WARP};
    float sums[M][WIDTH / 8][4];
    clear(sums);

    // Weights, or the gradients of scores, as a factor of the next product.
    uint32_t rounded[M][N / 2][4];
    bool is_more = true, was_seen = false;
    int turn = 0;
    for (; is_more; turn ^= 1) {
        bf16 *const q_tile = q_tiles + turn * ROWS * WIDTH, *const other_q_tile = q_tiles + (turn ^ 1) * ROWS * WIDTH;
        // Queries are numbered from the tile's first key on, so keys of this segment are seen by
        // queries of no smaller number. Those of its descendants have numbers beyond all of it.
        const bool is_seen = first_query + per_tile > seen_from, is_diagonal = first_query < own + 16 * M - 1;
        // Queries are there, and nobody needs the gradients and weights before them.
        wait_copies<0>();
        __syncthreads();
        load_tile<WIDTH, ROWS>(d_out_tile, d_out, d_out_stride, query_places(rows + turn * ROWS, head), head_dim, wide);
        commit_copies();
        if (is_of_values && is_seen) {
            float scores[M][N][4];
            multiply_rows<WIDTH, M, N>(scores, own_rows, q_tile);
            if (factors.is_capped()) cap<M, N>(factors, scores, exchange);
            const float *const less = statistics + 2 * turn * ROWS + 2 * t;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float2 of_rows = *reinterpret_cast<const float2 *>(less + 8 * n);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        scores[m][n][i] = exp2_fast(scores[m][n][i] * factors.after - (i % 2 ? of_rows.y : of_rows.x));
            }
            if (is_diagonal) {
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int number = first_query + pack.query(8 * n + 2 * t + i) - (own + g);
#pragma unroll
                        for (int m = 0; m < M; m++)
#pragma unroll
                            for (int half = 0; half < 2; half++)
                                if (number < 16 * m + 8 * half) scores[m][n][2 * half + i] = 0;
                    }
            }
            if (is_windowed) {
                const int *const of_rows = positions + turn * ROWS + 2 * t;
                int farthest = 0;
#pragma unroll
                for (int n = 0; n < N; n++) farthest = max(farthest, max(of_rows[8 * n], of_rows[8 * n + 1]));
                if (__ballot_sync(ALL, farthest - (tile.position + own) >= window)) {
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const int distance = of_rows[8 * n + i] - (tile.position + own + g);
#pragma unroll
                            for (int m = 0; m < M; m++)
#pragma unroll
                                for (int half = 0; half < 2; half++)
                                    if (distance - (16 * m + 8 * half) >= window) scores[m][n][2 * half + i] = 0;
                        }
                }
            }
            round_scores<M, N>(rounded, scores);
            put_weights<M, N>(factors.is_capped(), scores, rounded, exchange);
        }
        if (!is_of_values && was_seen) multiply_columns<WIDTH, M, N / 2>(sums, rounded, other_q_tile);

        first_query += per_tile;
        if (first_query >= tile.queries) first_query = 0, head += pack.heads;
        is_more = head < (kv_head + 1) * group;
        // Gradients and weights are there, and nobody needs the queries before these.
        wait_copies<0>();
        __syncthreads();
        float statistic = 0;
        if (is_more) {
            load_tile<WIDTH, ROWS>(other_q_tile, q, q_stride, query_places(rows + (turn ^ 1) * ROWS, head), head_dim, wide);
            commit_copies();
            statistic = fetch(turn ^ 1, head);
        }
        find(turn);
        if (is_of_values && is_seen) multiply_columns<WIDTH, M, N / 2>(sums, rounded, d_out_tile);
        if (!is_of_values && is_seen) {
            float gradient[M][N][4];
            multiply_rows<WIDTH, M, N>(gradient, own_rows, d_out_tile);
            const float *const mean = statistics + (2 * turn + 1) * ROWS;
            if (is_diagonal || is_windowed)
                differentiate<true, M, N>(rounded, gradient, mean, exchange);
            else
                differentiate<false, M, N>(rounded, gradient, mean, exchange);
        }
        if (is_more) put(turn ^ 1, statistic);
        was_seen = is_seen;
    }
    if (!is_of_values && was_seen) multiply_columns<WIDTH, M, N / 2>(sums, rounded, q_tiles + (turn ^ 1) * ROWS * WIDTH);
    if (own >= tile.count) return;
    float factor[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) factor[m][0] = factor[m][1] = is_of_values ? 1 : scale;
    // No other warp reads these rows.
    const auto place = [&](int row) { return key_place(own + row); };
    write_rows<WIDTH, M>(own_rows, sums, factor, is_of_values ? dv : dk, is_of_values ? dv_stride : dk_stride, place, head_dim);
}

} // namespace

#define BACKWARD(width)                                                                                                    \
    ATTENTION_BACKWARD_QUERIES(attention_backward_queries_##width, bf16, THREADS, 2, width)                                 \
    ATTENTION_BACKWARD_KEYS(attention_backward_keys_##width, bf16, THREADS, 2, width)

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
BACKWARD(256)
#endif
