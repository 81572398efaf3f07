// Backward attention in bf16 as `attention_backward.cu` has it, for Hopper's products of a warpgroup.
//
// Threads: a block of 2 warpgroups per tile of 128 packed rows of queries and pack of heads (dQ; 3 and
// 192 at width 64), or of 2 per tile of 128 keys and key/value head (dK, dV). Tiles of 64 rows of the
// other side pass through shared memory, in three stages: one is multiplied, one comes, and the last
// sums of one may still be under way.
// Bytes: a tile of queries reads K and V of the keys it sees, 4 · head_dim bytes per key; a tile of
// keys reads Q, dO (4 · head_dim bytes) and 8 bytes of statistics per query and head.
#include "attention_wgmma.cuh"

namespace {

constexpr int STAGES = 3;

// The stage after one.
__device__ __forceinline__ int next_stage(int stage) { return stage + 1 == STAGES ? 0 : stage + 1; }

template <int WIDTH> struct QueriesSizes {
    static constexpr int GROUPS = WIDTH <= 64 ? 3 : 2, THREADS = GROUPS * GROUP, ROWS = GROUPS * GROUP_ROWS, KEYS = 64;
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
    constexpr int THREADS = Sizes::THREADS, ROWS = Sizes::ROWS, KEYS = Sizes::KEYS, N = KEYS / 8, SIZE = KEYS * WIDTH;
    PANELS_SHARED(memory);
    bf16 *const q_tile = reinterpret_cast<bf16 *>(memory), *const d_out_tile = q_tile + ROWS * WIDTH;
    // Keys and values of each stage.
    bf16 *const kv_tiles = d_out_tile + ROWS * WIDTH;
    // Of four tiles of keys.
    int *const rows = reinterpret_cast<int *>(kv_tiles + STAGES * 2 * SIZE);

    const Queries tile(tiles);
    const Pack pack(pack_heads);
    const int first_head = int(blockIdx.y) * pack.heads;
    const int kv_column = first_head / group * head_dim;
    const bool wide = is_wide(q, q_stride, head_dim) && is_wide(k, k_stride, head_dim) && is_wide(v, v_stride, head_dim) &&
                      is_wide(d_out, d_out_stride, head_dim);
    const auto query_place = [&](int row) { return place_of(tile, pack, first_head, head_dim, row); };
    // A tile begins at a multiple of its size.
    const auto rows_of = [&](int key) { return rows + (key & 3 * KEYS); };
    const auto load = [&](int key, int stage) {
        const int *const of_tile = rows_of(key);
        const auto place = [=](int row) { return Place{of_tile[row], kv_column}; };
        bf16 *const to = kv_tiles + stage * 2 * SIZE;
        load_panels<WIDTH, KEYS, THREADS>(to, k, k_stride, place, head_dim, wide);
        load_panels<WIDTH, KEYS, THREADS>(to + SIZE, v, v_stride, place, head_dim, wide);
        commit_copies();
    };

    KeyRows<KEYS> keys(tile);
    const int first = tile.first_key(window, KEYS), end = tile.end();
#pragma unroll
    for (int n = 0; n < 2; n++) keys.find(first + n * KEYS, rows_of(first + n * KEYS));
    load_panels<WIDTH, ROWS, THREADS>(q_tile, q, q_stride, query_place, head_dim, wide);
    load_panels<WIDTH, ROWS, THREADS>(d_out_tile, d_out, d_out_stride, query_place, head_dim, wide);
    __syncthreads();
    load(first, 0);

    const WarpRows<1> own(tile, pack);
    const Factors factors(scale, softcap);
    const int group_offset = int(threadIdx.x) / GROUP * (GROUP_ROWS * PANEL);
    float less[1][2], mean[1][2];
    load_statistics(tile, pack, own, first_head, log_sum_exp, lse_stride, delta, heads, less, mean);
    // Lanes without a row meet the others again.
    __syncwarp();
    float sums[1][WIDTH / 8][4], scores[1][N][4], gradient[1][N][4];
    uint32_t rounded[1][N / 2][4];
    clear(sums);

    for (int key = first, stage = 0; key < end; key += KEYS, stage = next_stage(stage)) {
        // Keys and values are there, and all sums but the last are.
        arrive();
        if (key + KEYS < end) load(key + KEYS, next_stage(stage));
        keys.find(key + 2 * KEYS, rows_of(key + 2 * KEYS));
        const bf16 *const k_tile = kv_tiles + stage * 2 * SIZE;
        hold(scores[0]), hold(gradient[0]);
        begin_products();
        multiply_rows_later<WIDTH, ROWS>(scores[0], q_tile + group_offset, k_tile);
        commit_products();
        multiply_rows_later<WIDTH, ROWS>(gradient[0], d_out_tile + group_offset, k_tile + SIZE);
        commit_products();
        // Scores are there, and so are the sums of the turn before.
        wait_products<1>();
        hold(scores[0]), hold(sums[0]), hold(rounded[0]);
        // Weights, with the cap's gradient where there is a cap.
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float &x = scores[0][n][i];
                if (factors.is_capped()) {
                    const float ratio = tanh_fast(x * factors.before);
                    x = exp2_fast(factors.cap * ratio * factors.after - less[0][i / 2]) * (1.0f - ratio * ratio);
                } else {
                    x = exp2_fast(x * factors.after - less[0][i / 2]);
                }
            }
        wait_products<0>();
        hold(gradient[0]);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) gradient[0][n][i] = scores[0][n][i] * (gradient[0][n][i] - mean[0][i / 2]);
        // Keys that a row does not see have no weight, and their scores no gradient, even if the row's own
        // are no numbers.
        if (!own.see_all(key, KEYS, window)) hide_unseen<false>(own, key, window, 0, gradient);
        round_scores(rounded, gradient);
        hold(sums[0]), hold(rounded[0]);
        begin_products();
        multiply_columns_later(sums[0], rounded[0], k_tile);
        commit_products();
    }
    wait_products<0>();
    hold(sums[0]);
    // Nobody multiplies queries any more, whose rows are written over.
    __syncthreads();
    if (own.last_position < 0) return;
    const float factor[1][2] = {{scale, scale}};
    const auto place = [&](int row) { return query_place(own.first + row); };
    write_rows<WIDTH, 1, Panels<WIDTH, ROWS>>(q_tile + own.first * PANEL, sums, factor, dq, dq_stride, place, head_dim);
}

struct KeysSizes {
    static constexpr int GROUPS = 2, THREADS = GROUPS * GROUP, KEYS = GROUPS * GROUP_ROWS, ROWS = 64;
};

// The gradients of keys and values. Scores are `[keys, rows]`.
template <int WIDTH>
__device__ __forceinline__ void
backward_keys(const uint32_t *__restrict__ tiles, const bf16 *__restrict__ q, int q_stride, const bf16 *__restrict__ k,
              int k_stride, const bf16 *__restrict__ v, int v_stride, const bf16 *__restrict__ d_out, int d_out_stride,
              const float *__restrict__ log_sum_exp, int lse_stride, const float *__restrict__ delta, int heads,
              bf16 *__restrict__ dk, int dk_stride, bf16 *__restrict__ dv, int dv_stride, int head_dim, int pack_heads,
              int group, float scale, float softcap, int window) {
    using Sizes = KeysSizes;
    constexpr int THREADS = Sizes::THREADS, ROWS = Sizes::ROWS, KEYS = Sizes::KEYS, N = ROWS / 8, SIZE = ROWS * WIDTH;
    static_assert(2 * ROWS <= THREADS, "a thread for each statistic");
    PANELS_SHARED(memory);
    bf16 *const k_tile = reinterpret_cast<bf16 *>(memory), *const v_tile = k_tile + KEYS * WIDTH;
    // Queries and gradients of each stage.
    bf16 *const q_tiles = v_tile + KEYS * WIDTH;
    // Of each stage: what is subtracted from scores and from gradients of weights, rows, and their
    // positions.
    float *const statistics = reinterpret_cast<float *>(q_tiles + STAGES * 2 * SIZE);
    int *const rows = reinterpret_cast<int *>(statistics + STAGES * 2 * ROWS), *const positions = rows + STAGES * ROWS;
    const bool is_windowed = window != NO_WINDOW;

    const Keys tile(tiles);
    const Pack pack(pack_heads);
    const int kv_head = blockIdx.y;
    const bool wide = is_wide(q, q_stride, head_dim) && is_wide(k, k_stride, head_dim) && is_wide(v, v_stride, head_dim) &&
                      is_wide(d_out, d_out_stride, head_dim);
    const auto key_place = [&](int row) { return Place{row < tile.count ? tile.row + row : -1, kv_head * head_dim}; };

    // All queries for the first heads, then for the next: a turn is one tile of them. Rows are found
    // two turns ahead.
    QueryRows<ROWS> queries(tiles, tile, pack);
    const int per_tile = queries.per_tile;
    const auto find = [&](int stage) { queries.find(pack, is_windowed, rows + stage * ROWS, positions + stage * ROWS); };
    // Begins to bring a turn's tiles, and brings its statistics.
    const auto load = [&](int stage, int first_head) {
        const int *const of_stage = rows + stage * ROWS;
        const auto place = [=, &pack](int row) { return Place{of_stage[row], (first_head + pack.head(row)) * head_dim}; };
        bf16 *const to = q_tiles + stage * 2 * SIZE;
        load_panels<WIDTH, ROWS, THREADS>(to, q, q_stride, place, head_dim, wide);
        load_panels<WIDTH, ROWS, THREADS>(to + SIZE, d_out, d_out_stride, place, head_dim, wide);
        commit_copies();
        const float statistic = statistic_of<ROWS>(of_stage, pack, first_head, log_sum_exp, lse_stride, delta, heads);
        if (int(threadIdx.x) < 2 * ROWS) statistics[stage * 2 * ROWS + threadIdx.x] = statistic;
    };

    int head = kv_head * group, first_query = 0;
    find(0), find(1);
    load_panels<WIDTH, KEYS, THREADS>(k_tile, k, k_stride, key_place, head_dim, wide);
    load_panels<WIDTH, KEYS, THREADS>(v_tile, v, v_stride, key_place, head_dim, wide);
    __syncthreads();
    load(0, head);

    const Factors factors(scale, softcap);
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, own = int(threadIdx.x) / WARP * 16;
    const int group_offset = int(threadIdx.x) / GROUP * (GROUP_ROWS * PANEL);
    float key_sums[1][WIDTH / 8][4], value_sums[1][WIDTH / 8][4], scores[1][N][4], gradient[1][N][4];
    uint32_t weights[1][N / 2][4], rounded[1][N / 2][4];
    clear(key_sums), clear(value_sums);

    bool is_more = true;
    for (int stage = 0; is_more; stage = next_stage(stage)) {
        // Queries, gradients and statistics are there, and all sums but the last are.
        arrive();
        // Queries are numbered from the tile's first key on, so keys of this segment are seen by
        // queries of no smaller number. Those of its descendants have numbers beyond all of it.
        const bool is_diagonal = first_query < own + 16 - 1;
        // Rows from here on see the thread's keys, of which the upper one is eight further on.
        const int seen_from = is_diagonal ? (own + g - first_query) * pack.heads : -THREADS * THREADS;
        first_query += per_tile;
        if (first_query >= tile.queries) first_query = 0, head += pack.heads;
        is_more = head < (kv_head + 1) * group;
        if (is_more) load(next_stage(stage), head);
        find(next_stage(next_stage(stage)));

        const bf16 *const q_stage = q_tiles + stage * 2 * SIZE, *const d_out_stage = q_stage + SIZE;
        hold(scores[0]), hold(gradient[0]);
        begin_products();
        multiply_rows_later<WIDTH, KEYS>(scores[0], k_tile + group_offset, q_stage);
        commit_products();
        multiply_rows_later<WIDTH, KEYS>(gradient[0], v_tile + group_offset, d_out_stage);
        commit_products();
        // Scores are there, and so are the sums of the turn before.
        wait_products<1>();
        hold(scores[0]), hold(key_sums[0]), hold(value_sums[0]), hold(weights[0]), hold(rounded[0]);
        const float *const less = statistics + stage * 2 * ROWS + 2 * t;
        const int *const at = positions + stage * ROWS + 2 * t;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 of_rows = *reinterpret_cast<const float2 *>(less + 8 * n);
            // Keys that a query does not see are those behind it, or of the window's far side.
            const auto weight = [&](float exponent, int i) {
                const float x = exp2_fast(exponent - (i % 2 ? of_rows.y : of_rows.x));
                const int row = own + g + i / 2 * 8;
                const bool is_hidden = 8 * n + 2 * t + i % 2 < seen_from + i / 2 * 8 * pack.heads ||
                                       (is_windowed && at[8 * n + i % 2] - (tile.position + row) >= window);
                return is_hidden ? 0.0f : x;
            };
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float &score = scores[0][n][i];
                if (factors.is_capped()) {
                    const float ratio = tanh_fast(score * factors.before);
                    x[i] = weight(factors.cap * ratio * factors.after, i), score = x[i] * (1.0f - ratio * ratio);
                } else {
                    score = x[i] = weight(score * factors.after, i);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) weights[0][n / 2][n % 2 * 2 + half] = pack_bf16(x[2 * half], x[2 * half + 1]);
        }
        hold(value_sums[0]), hold(weights[0]);
        begin_products();
        multiply_columns_later(value_sums[0], weights[0], d_out_stage);
        commit_products();
        wait_products<1>();
        hold(gradient[0]);
        const float *const mean = less + ROWS;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 of_rows = *reinterpret_cast<const float2 *>(mean + 8 * n);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float weight = scores[0][n][i], x = weight * (gradient[0][n][i] - (i % 2 ? of_rows.y : of_rows.x));
                // Scores without weight have no gradient, even if a row's own are no numbers.
                gradient[0][n][i] = (is_diagonal || is_windowed) && weight == 0 ? 0 : x;
            }
        }
        round_scores(rounded, gradient);
        hold(key_sums[0]), hold(rounded[0]);
        begin_products();
        multiply_columns_later(key_sums[0], rounded[0], q_stage);
        commit_products();
    }
    wait_products<0>();
    hold(key_sums[0]), hold(value_sums[0]);
    // Nobody multiplies keys and values any more, whose rows are written over.
    __syncthreads();
    if (own >= tile.count) return;
    using Layout = Panels<WIDTH, KEYS>;
    const auto place = [&](int row) { return key_place(own + row); };
    const float of_keys[1][2] = {{scale, scale}}, of_values[1][2] = {{1, 1}};
    write_rows<WIDTH, 1, Layout>(k_tile + own * PANEL, key_sums, of_keys, dk, dk_stride, place, head_dim);
    write_rows<WIDTH, 1, Layout>(v_tile + own * PANEL, value_sums, of_values, dv, dv_stride, place, head_dim);
}

} // namespace

#define BACKWARD(width)                                                                                                    \
    ATTENTION_BACKWARD_QUERIES(attention_backward_queries_wgmma_##width, bf16, QueriesSizes<width>::THREADS, 1, width)       \
    ATTENTION_BACKWARD_KEYS(attention_backward_keys_wgmma_##width, bf16, KeysSizes::THREADS, 1, width)

#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 64
BACKWARD(64)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 128
BACKWARD(128)
#endif
