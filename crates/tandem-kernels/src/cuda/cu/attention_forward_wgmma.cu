// Forward attention in bf16 as `attention_forward.cu` has it, for Hopper's products of a warpgroup:
// FlashAttention-2 (arXiv 2307.08691) over a forest, where a tile's scores are multiplied beside the
// values of the tile before, as in FlashAttention-3 (arXiv 2407.08608).
//
// Threads: a block of 2 warpgroups per tile of 128 packed rows of queries and pack of heads (3 and 192
// at width 64); tiles of 128 keys and values (64) pass through shared memory, two of each at a time.
// Bytes: 4 · head_dim bytes per key that a tile sees; Q, out and log-sum-exp once.
#include "attention_wgmma.cuh"

namespace {

template <int WIDTH> struct ForwardSizes {
    static constexpr int GROUPS = WIDTH <= 64 ? 3 : 2, THREADS = GROUPS * GROUP, ROWS = GROUPS * GROUP_ROWS, KEYS = WIDTH <= 64 ? 64 : 128;
};

template <int WIDTH>
__device__ __forceinline__ void
forward(const uint32_t *__restrict__ tiles, const bf16 *__restrict__ q, int q_stride, const bf16 *__restrict__ k,
        int k_stride, const bf16 *__restrict__ v, int v_stride, bf16 *__restrict__ out, int out_stride,
        float *__restrict__ log_sum_exp, int lse_stride, int head_dim, int pack_heads, int group, float scale, float softcap,
        int window) {
    using Sizes = ForwardSizes<WIDTH>;
    constexpr int THREADS = Sizes::THREADS, ROWS = Sizes::ROWS, KEYS = Sizes::KEYS, N = KEYS / 8;
    constexpr int SIZE = KEYS * WIDTH;
    PANELS_SHARED(memory);
    bf16 *const q_tile = reinterpret_cast<bf16 *>(memory);
    // Of two stages.
    bf16 *const k_tiles = q_tile + ROWS * WIDTH, *const v_tiles = k_tiles + 2 * SIZE;
    // Of four tiles of keys.
    int *const rows = reinterpret_cast<int *>(v_tiles + 2 * SIZE);

    const Queries tile(tiles);
    const Pack pack(pack_heads);
    const int first_head = int(blockIdx.y) * pack.heads;
    const int kv_column = first_head / group * head_dim;
    const bool wide = is_wide(q, q_stride, head_dim) && is_wide(k, k_stride, head_dim) && is_wide(v, v_stride, head_dim);
    const auto query_place = [&](int row) { return place_of(tile, pack, first_head, head_dim, row); };
    // A tile begins at a multiple of its size.
    const auto rows_of = [&](int key) { return rows + (key & 3 * KEYS); };
    const auto stage_of = [&](bf16 *stages, int key) { return stages + (key & KEYS ? SIZE : 0); };
    const auto load = [&](bf16 *stages, const bf16 *from, int stride, int key) {
        const int *const of_tile = rows_of(key);
        load_panels<WIDTH, KEYS, THREADS>(stage_of(stages, key), from, stride,
                                          [=](int row) { return Place{of_tile[row], kv_column}; }, head_dim, wide);
    };

    KeyRows<KEYS> keys(tile);
    const int first = tile.first_key(window, KEYS), end = tile.end();
#pragma unroll
    for (int n = 0; n < 3; n++) keys.find(first + n * KEYS, rows_of(first + n * KEYS));
    load_panels<WIDTH, ROWS, THREADS>(q_tile, q, q_stride, query_place, head_dim, wide);
    __syncthreads();
    load(k_tiles, k, k_stride, first);
    commit_copies();
    arrive();
    if (first + KEYS < end) load(k_tiles, k, k_stride, first + KEYS);
    load(v_tiles, v, v_stride, first);
    commit_copies();

    const WarpRows<1> own(tile, pack);
    const Factors factors(scale, softcap);
    const bf16 *const group_q = q_tile + int(threadIdx.x) / GROUP * (GROUP_ROWS * PANEL);
    float sums[1][WIDTH / 8][4], scores[1][N][4], largest[1][2] = {{LOWEST, LOWEST}}, sum[1][2] = {{0, 0}}, shrink[1][2];
    uint32_t weights[1][N / 2][4];
    clear(sums);
    const auto begin_scores = [&](int key) {
        multiply_rows_later<WIDTH, ROWS>(scores[0], group_q, stage_of(k_tiles, key));
        commit_products();
    };
    const auto begin_sums = [&](int key) {
        multiply_columns_later(sums[0], weights[0], stage_of(v_tiles, key));
        commit_products();
    };
    const auto weigh_scores = [&](int key) {
        hold(scores[0]);
        if (factors.is_capped()) cap(factors, scores);
        if (!own.see_all(key, KEYS, window)) hide_unseen<true>(own, key, window, -INFINITY, scores);
        weigh(factors.after, scores, largest, sum, shrink);
    };

    hold(scores[0]);
    begin_products();
    begin_scores(first);
    wait_products<0>();
    weigh_scores(first);
    round_scores(weights, scores);
    int key = first;
    for (; key + KEYS < end; key += KEYS) {
        // The next keys and these values are there, and nobody needs these keys and the values before.
        arrive();
        if (key + 2 * KEYS < end) load(k_tiles, k, k_stride, key + 2 * KEYS);
        load(v_tiles, v, v_stride, key + KEYS);
        commit_copies();
        keys.find(key + 3 * KEYS, rows_of(key + 3 * KEYS));
        hold(scores[0]), hold(sums[0]), hold(weights[0]);
        begin_products();
        begin_scores(key + KEYS);
        begin_sums(key);
        wait_products<1>();
        weigh_scores(key + KEYS);
        wait_products<0>();
        hold(sums[0]), hold(weights[0]);
        scale_rows(sums, shrink);
        round_scores(weights, scores);
    }
    arrive();
    hold(sums[0]), hold(weights[0]);
    begin_products();
    begin_sums(key);
    wait_products<0>();
    hold(sums[0]);
    // Nobody multiplies queries any more, whose rows are written over.
    __syncthreads();
    if (own.last_position < 0) return;

    float inverse[1][2];
    finish(tile, pack, own, factors, first_head, largest, sum, log_sum_exp, lse_stride, inverse);
    bf16 *const own_out = q_tile + own.first * PANEL;
    const auto place = [&](int row) { return query_place(own.first + row); };
    write_rows<WIDTH, 1, Panels<WIDTH, ROWS>>(own_out, sums, inverse, out, out_stride, place, head_dim);
}

} // namespace

#define FORWARD(width)                                                                                                     \
    ATTENTION_FORWARD(attention_forward_wgmma_##width, bf16, ForwardSizes<width>::THREADS, 1, width)

#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 64
FORWARD(64)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 128
FORWARD(128)
#endif
