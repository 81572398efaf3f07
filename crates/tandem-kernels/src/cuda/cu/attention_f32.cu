// Attention in f32, forward and backward, without tensor cores. `attention.cuh` says how rows are
// numbered, and `attention_forward.cu` and `attention_backward.cu` what is computed.
//
// Threads: a block of 128 threads, a grid of 8 × 16, takes a tile of `TILE` packed rows of queries
// (forward and dQ: grid of tiles × packs) or of keys (dK, dV: grid of tiles × key/value heads).
// Tiles of the other side pass through shared memory.
// Bytes: each tile of queries reads all keys and values that it sees once, 8 · head_dim bytes per
// key; a tile of keys likewise reads queries and output gradients.
#include "attention_f32_tiles.cuh"

namespace {

template <int WIDTH>
__device__ __forceinline__ void
forward(const uint32_t *__restrict__ tiles, const float *__restrict__ q, int q_stride, const float *__restrict__ k,
        int k_stride, const float *__restrict__ v, int v_stride, float *__restrict__ out, int out_stride,
        float *__restrict__ log_sum_exp, int lse_stride, int head_dim, int pack_heads, int group, float scale, float softcap,
        int window) {
    using S = Sizes<WIDTH>;
    DYNAMIC_SHARED(memory);
    float *const q_tile = reinterpret_cast<float *>(memory), *const kv_tile = q_tile + S::TILE * S::PITCH;
    float *const weights = kv_tile + S::OTHER * S::PITCH;
    int *const rows = reinterpret_cast<int *>(weights + S::TILE * S::SCORES);

    const Queries tile(tiles);
    const Pack pack(pack_heads);
    const int first_head = int(blockIdx.y) * pack.heads, down = threadIdx.x / ACROSS, across = threadIdx.x % ACROSS;
    const bool wide = is_wide(q, q_stride, head_dim) && is_wide(k, k_stride, head_dim) && is_wide(v, v_stride, head_dim);
    const int kv_column = first_head / group * head_dim;
    const auto query_place = [&](int row) { return place_of(tile, pack, first_head, head_dim, row); };
    const auto key_place = [&](int row) { return Place{rows[row], kv_column}; };
    load_tile<WIDTH, S::TILE>(q_tile, q, q_stride, query_place, head_dim, wide);

    Sums<WIDTH> sums;
    float largest[S::ROWS], sum[S::ROWS];
    clear<WIDTH>(sums);
#pragma unroll
    for (int i = 0; i < S::ROWS; i++) largest[i] = LOWEST, sum[i] = 0;
    KeyRows<S::OTHER> path(tile);
    const int end = tile.end();
    for (int key = tile.first_key(window, S::OTHER); key < end; key += S::OTHER) {
        __syncthreads();
        path.find(key, rows);
        __syncthreads();
        load_tile<WIDTH, S::OTHER>(kv_tile, k, k_stride, key_place, head_dim, wide);
        arrive();
        float scores[S::ROWS][S::OTHERS];
        multiply_rows<WIDTH>(scores, q_tile, kv_tile);
        __syncthreads();
        load_tile<WIDTH, S::OTHER>(kv_tile, v, v_stride, key_place, head_dim, wide);
#pragma unroll
        for (int i = 0; i < S::ROWS; i++) {
            const int query = tile.position + pack.query(down * S::ROWS + i);
            float now = largest[i];
#pragma unroll
            for (int j = 0; j < S::OTHERS; j++) {
                scores[i][j] *= scale;
                if (softcap > 0) scores[i][j] = softcap * tanhf(scores[i][j] / softcap);
                if (!sees(query, key + across + j * ACROSS, window)) scores[i][j] = -INFINITY;
                now = fmaxf(now, scores[i][j]);
            }
            now = row_max(now);
            const float shrink = exp2_fast((largest[i] - now) * LOG2E);
            float total = 0;
#pragma unroll
            for (int j = 0; j < S::OTHERS; j++) {
                scores[i][j] = exp2_fast((scores[i][j] - now) * LOG2E);
                total += scores[i][j];
            }
            largest[i] = now, sum[i] = sum[i] * shrink + row_sum(total);
#pragma unroll
            for (int run = 0; run < S::RUNS; run++)
#pragma unroll
                for (int n = 0; n < S::BESIDE; n++) sums[i][run][n] *= shrink;
        }
        put_scores<WIDTH>(weights, scores);
        arrive();
        multiply_columns<WIDTH>(sums, weights, kv_tile);
    }
#pragma unroll
    for (int i = 0; i < S::ROWS; i++) {
        const int row = down * S::ROWS + i, query = pack.query(row);
        if (query >= tile.count) continue;
        const size_t at = tile.row + query;
        const int head = first_head + pack.head(row);
        store_row<WIDTH>(sums[i], 1.0f / sum[i], out + at * out_stride + head * head_dim, head_dim);
        if (across == 0) log_sum_exp[at * lse_stride + head] = largest[i] + logf(sum[i]);
    }
}

// From products to weights, and from the gradient of weights to that of products.
struct Derivative {
    float scale, cap;

    __device__ __forceinline__ void operator()(float &score, float &gradient, float less, float mean, bool is_seen) const {
        score *= scale, gradient -= mean;
        if (cap > 0) {
            const float ratio = tanhf(score / cap);
            score = cap * ratio, gradient *= 1.0f - ratio * ratio;
        }
        score = is_seen ? exp2_fast((score - less) * LOG2E) : 0.0f;
        gradient = is_seen ? gradient * score : 0.0f;
    }
};

template <int WIDTH>
__device__ __forceinline__ void
backward_queries(const uint32_t *__restrict__ tiles, const float *__restrict__ q, int q_stride, const float *__restrict__ k,
                 int k_stride, const float *__restrict__ v, int v_stride, const float *__restrict__ d_out, int d_out_stride,
                 const float *__restrict__ log_sum_exp, int lse_stride, const float *__restrict__ delta, int heads,
                 float *__restrict__ dq, int dq_stride, int head_dim, int pack_heads, int group, float scale, float softcap,
                 int window) {
    using S = Sizes<WIDTH>;
    DYNAMIC_SHARED(memory);
    float *const q_tile = reinterpret_cast<float *>(memory), *const d_out_tile = q_tile + S::TILE * S::PITCH;
    float *const kv_tile = d_out_tile + S::TILE * S::PITCH, *const of_scores = kv_tile + S::OTHER * S::PITCH;
    int *const rows = reinterpret_cast<int *>(of_scores + S::TILE * S::SCORES);

    const Queries tile(tiles);
    const Pack pack(pack_heads);
    const int first_head = int(blockIdx.y) * pack.heads, down = threadIdx.x / ACROSS, across = threadIdx.x % ACROSS;
    const bool wide = is_wide(q, q_stride, head_dim) && is_wide(k, k_stride, head_dim) && is_wide(v, v_stride, head_dim) &&
                      is_wide(d_out, d_out_stride, head_dim);
    const int kv_column = first_head / group * head_dim;
    const auto query_place = [&](int row) { return place_of(tile, pack, first_head, head_dim, row); };
    const auto key_place = [&](int row) { return Place{rows[row], kv_column}; };
    load_tile<WIDTH, S::TILE>(q_tile, q, q_stride, query_place, head_dim, wide);
    load_tile<WIDTH, S::TILE>(d_out_tile, d_out, d_out_stride, query_place, head_dim, wide);

    const Derivative differentiate{scale, softcap};
    Sums<WIDTH> sums;
    clear<WIDTH>(sums);
    float less[S::ROWS], mean[S::ROWS];
#pragma unroll
    for (int i = 0; i < S::ROWS; i++) {
        const int row = down * S::ROWS + i, query = pack.query(row);
        less[i] = INFINITY, mean[i] = 0;
        if (query >= tile.count) continue;
        const size_t at = tile.row + query;
        const int head = first_head + pack.head(row);
        less[i] = log_sum_exp[at * lse_stride + head], mean[i] = delta[at * heads + head];
    }
    KeyRows<S::OTHER> path(tile);
    const int end = tile.end();
    for (int key = tile.first_key(window, S::OTHER); key < end; key += S::OTHER) {
        __syncthreads();
        path.find(key, rows);
        __syncthreads();
        // Values first: keys are needed for scores and once more.
        load_tile<WIDTH, S::OTHER>(kv_tile, v, v_stride, key_place, head_dim, wide);
        arrive();
        float scores[S::ROWS][S::OTHERS], gradient[S::ROWS][S::OTHERS];
        multiply_rows<WIDTH>(gradient, d_out_tile, kv_tile);
        __syncthreads();
        load_tile<WIDTH, S::OTHER>(kv_tile, k, k_stride, key_place, head_dim, wide);
        arrive();
        multiply_rows<WIDTH>(scores, q_tile, kv_tile);
#pragma unroll
        for (int i = 0; i < S::ROWS; i++) {
            const int query = tile.position + pack.query(down * S::ROWS + i);
#pragma unroll
            for (int j = 0; j < S::OTHERS; j++)
                differentiate(scores[i][j], gradient[i][j], less[i], mean[i], sees(query, key + across + j * ACROSS, window));
        }
        put_scores<WIDTH>(of_scores, gradient);
        multiply_columns<WIDTH>(sums, of_scores, kv_tile);
    }
#pragma unroll
    for (int i = 0; i < S::ROWS; i++) {
        const int row = down * S::ROWS + i, query = pack.query(row);
        if (query >= tile.count) continue;
        const Place place = query_place(row);
        store_row<WIDTH>(sums[i], scale, dq + size_t(place.row) * dq_stride + place.column, head_dim);
    }
}

template <int WIDTH>
__device__ __forceinline__ void
backward_keys(const uint32_t *__restrict__ tiles, const float *__restrict__ q, int q_stride, const float *__restrict__ k,
              int k_stride, const float *__restrict__ v, int v_stride, const float *__restrict__ d_out, int d_out_stride,
              const float *__restrict__ log_sum_exp, int lse_stride, const float *__restrict__ delta, int heads,
              float *__restrict__ dk, int dk_stride, float *__restrict__ dv, int dv_stride, int head_dim, int pack_heads,
              int group, float scale, float softcap, int window) {
    using S = Sizes<WIDTH>;
    DYNAMIC_SHARED(memory);
    float *const k_tile = reinterpret_cast<float *>(memory), *const v_tile = k_tile + S::TILE * S::PITCH;
    float *const q_tile = v_tile + S::TILE * S::PITCH, *const d_out_tile = q_tile + S::OTHER * S::PITCH;
    float *const of_keys = d_out_tile + S::OTHER * S::PITCH, *const of_values = of_keys + S::TILE * S::SCORES;
    float *const less = of_values + S::TILE * S::SCORES, *const mean = less + S::OTHER;
    int *const rows = reinterpret_cast<int *>(mean + S::OTHER), *const positions = rows + S::OTHER;

    const Keys tile(tiles);
    const Pack pack(pack_heads);
    const int kv_head = blockIdx.y, down = threadIdx.x / ACROSS, across = threadIdx.x % ACROSS;
    const bool wide = is_wide(q, q_stride, head_dim) && is_wide(k, k_stride, head_dim) && is_wide(v, v_stride, head_dim) &&
                      is_wide(d_out, d_out_stride, head_dim);
    const auto key_place = [&](int row) { return Place{row < tile.count ? tile.row + row : -1, kv_head * head_dim}; };
    load_tile<WIDTH, S::TILE>(k_tile, k, k_stride, key_place, head_dim, wide);
    load_tile<WIDTH, S::TILE>(v_tile, v, v_stride, key_place, head_dim, wide);

    const Derivative differentiate{scale, softcap};
    Sums<WIDTH> sum_k, sum_v;
    clear<WIDTH>(sum_k), clear<WIDTH>(sum_v);
    const int per_tile = S::OTHER / pack.heads;
    for (int first_head = kv_head * group; first_head < (kv_head + 1) * group; first_head += pack.heads) {
        Axis axis(tile.pieces);
        const auto query_place = [&](int row) { return Place{rows[row], (first_head + pack.head(row)) * head_dim}; };
        for (int first = 0; first < tile.queries; first += per_tile) {
            __syncthreads();
            if (int(threadIdx.x) < S::OTHER) {
                const int row = threadIdx.x, query = first + pack.query(row);
                rows[row] = -1, positions[row] = -1, less[row] = INFINITY, mean[row] = 0;
                if (query < tile.queries && pack.query(row) < per_tile) {
                    axis.reach(query);
                    const size_t at = query + axis.row;
                    const int head = first_head + pack.head(row);
                    rows[row] = int(at), positions[row] = int(query + axis.position);
                    less[row] = log_sum_exp[at * lse_stride + head], mean[row] = delta[at * heads + head];
                }
            }
            __syncthreads();
            load_tile<WIDTH, S::OTHER>(q_tile, q, q_stride, query_place, head_dim, wide);
            load_tile<WIDTH, S::OTHER>(d_out_tile, d_out, d_out_stride, query_place, head_dim, wide);
            arrive();
            float scores[S::ROWS][S::OTHERS], gradient[S::ROWS][S::OTHERS];
            multiply_rows<WIDTH>(scores, k_tile, q_tile);
            multiply_rows<WIDTH>(gradient, v_tile, d_out_tile);
#pragma unroll
            for (int i = 0; i < S::ROWS; i++)
#pragma unroll
                for (int j = 0; j < S::OTHERS; j++) {
                    const int row = across + j * ACROSS, key = tile.position + down * S::ROWS + i;
                    differentiate(scores[i][j], gradient[i][j], less[row], mean[row], sees(positions[row], key, window));
                }
            put_scores<WIDTH>(of_keys, gradient);
            put_scores<WIDTH>(of_values, scores);
            multiply_columns<WIDTH>(sum_k, of_keys, q_tile);
            multiply_columns<WIDTH>(sum_v, of_values, d_out_tile);
        }
    }
#pragma unroll
    for (int i = 0; i < S::ROWS; i++) {
        const int row = down * S::ROWS + i;
        if (row >= tile.count) continue;
        const Place place = key_place(row);
        store_row<WIDTH>(sum_k[i], scale, dk + size_t(place.row) * dk_stride + place.column, head_dim);
        store_row<WIDTH>(sum_v[i], 1, dv + size_t(place.row) * dv_stride + place.column, head_dim);
    }
}

} // namespace

#define ALL_KERNELS(width)                                                                                                 \
    ATTENTION_FORWARD(attention_f32_forward_##width, float, THREADS, 2, width)                                              \
    ATTENTION_BACKWARD_QUERIES(attention_f32_backward_queries_##width, float, THREADS, 2, width)                            \
    ATTENTION_BACKWARD_KEYS(attention_f32_backward_keys_##width, float, THREADS, 2, width)

// As in `attention_forward.cu`.
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 32
ALL_KERNELS(32)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 64
ALL_KERNELS(64)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 128
ALL_KERNELS(128)
#endif
#if !defined(ONLY_WIDTH) || ONLY_WIDTH == 256
ALL_KERNELS(256)
#endif
