// Forward attention in bf16: FlashAttention-2 (arXiv 2307.08691) over a forest, with a running
// maximum and sum.
//
// Threads: a block of 4 warps per tile of 128 packed rows of queries (64 at width 256) and pack of
// heads. Each warp owns 32 (16) rows of the tile; tiles of 64 keys and values pass through shared
// memory.
// Bytes: 4 · head_dim bytes per key that a tile sees; Q, out and log-sum-exp once.
#include "attention_tiles.cuh"

namespace {

template <int WIDTH> struct ForwardSizes {
    static constexpr int M = WIDTH <= 128 ? 2 : 1, ROWS = 16 * M * WARPS, KEYS = 64;
};

template <int WIDTH>
__device__ __forceinline__ void
forward(const uint32_t *__restrict__ tiles, const bf16 *__restrict__ q, int q_stride, const bf16 *__restrict__ k,
        int k_stride, const bf16 *__restrict__ v, int v_stride, bf16 *__restrict__ out, int out_stride,
        float *__restrict__ log_sum_exp, int lse_stride, int head_dim, int pack_heads, int group, float scale, float softcap,
        int window) {
    constexpr int M = ForwardSizes<WIDTH>::M, ROWS = ForwardSizes<WIDTH>::ROWS, KEYS = ForwardSizes<WIDTH>::KEYS, N = KEYS / 8;
    DYNAMIC_SHARED(memory);
    bf16 *const q_tile = reinterpret_cast<bf16 *>(memory);
    bf16 *const k_tile = q_tile + ROWS * WIDTH, *const v_tile = k_tile + KEYS * WIDTH;
    int *const rows = reinterpret_cast<int *>(v_tile + KEYS * WIDTH);

    const Queries tile(tiles);
    const Pack pack(pack_heads);
    const int first_head = int(blockIdx.y) * pack.heads;
    const int kv_column = first_head / group * head_dim;
    const bool wide = is_wide(q, q_stride, head_dim) && is_wide(k, k_stride, head_dim) && is_wide(v, v_stride, head_dim);
    const auto query_place = [&](int row) { return place_of(tile, pack, first_head, head_dim, row); };
    const auto key_places = [&](const int *rows) { return [=](int row) { return Place{rows[row], kv_column}; }; };

    KeyRows<KEYS> keys(tile);
    const int first = tile.first_key(window, KEYS), end = tile.end();
    // Rows of one tile of keys, and of the next: a tile begins at a multiple of its size.
    keys.find(first, rows + (first & KEYS));
    load_tile<WIDTH, ROWS>(q_tile, q, q_stride, query_place, head_dim, wide);
    __syncthreads();
    load_tile<WIDTH, KEYS>(k_tile, k, k_stride, key_places(rows + (first & KEYS)), head_dim, wide);
    commit_copies();

    const WarpRows<M> own(tile, pack);
    const Factors factors(scale, softcap);
    const bf16 *const own_q = q_tile + own.first * WIDTH;
    float sums[M][WIDTH / 8][4], largest[M][2], sum[M][2];
    clear(sums);
#pragma unroll
    for (int m = 0; m < M; m++) largest[m][0] = largest[m][1] = LOWEST, sum[m][0] = sum[m][1] = 0;

    for (int key = first; key < end; key += KEYS) {
        // Keys are there, and nobody needs the values before them.
        wait_copies<0>();
        __syncthreads();
        load_tile<WIDTH, KEYS>(v_tile, v, v_stride, key_places(rows + (key & KEYS)), head_dim, wide);
        commit_copies();
        keys.find(key + KEYS, rows + (~key & KEYS));
        const bool is_seen = own.see_any(key, KEYS, window);
        uint32_t weights[M][N / 2][4];
        if (is_seen) {
            float scores[M][N][4];
            multiply_rows<WIDTH, M, N>(scores, own_q, k_tile);
            if (factors.is_capped()) cap(factors, scores);
            if (!own.see_all(key, KEYS, window)) hide_unseen<true>(own, key, window, -INFINITY, scores);
            float shrink[M][2];
            weigh(factors.after, scores, largest, sum, shrink);
            scale_rows(sums, shrink);
            round_scores<M, N>(weights, scores);
        }
        // Values are there, and nobody needs the keys.
        wait_copies<0>();
        __syncthreads();
        if (key + KEYS < end) {
            load_tile<WIDTH, KEYS>(k_tile, k, k_stride, key_places(rows + (~key & KEYS)), head_dim, wide);
            commit_copies();
        }
        if (is_seen) multiply_columns<WIDTH, M, N / 2>(sums, weights, v_tile);
    }
    if (own.last_position < 0) return;

    const auto place = [&](int row) { return query_place(own.first + row); };
    float inverse[M][2];
    finish(tile, pack, own, factors, first_head, largest, sum, log_sum_exp, lse_stride, inverse);
    bf16 *const own_out = q_tile + own.first * WIDTH;
    write_rows<WIDTH, M>(own_out, sums, inverse, out, out_stride, place, head_dim);
}

} // namespace

#define FORWARD(width) ATTENTION_FORWARD(attention_forward_##width, bf16, THREADS, 2, width)

// A program needs one width, and compiling takes time: whoever compiles this for a GPU says which
// one.
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 16
FORWARD(16)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 32
FORWARD(32)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 64
FORWARD(64)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 80
FORWARD(80)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 96
FORWARD(96)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 128
FORWARD(128)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 256
FORWARD(256)
#endif
