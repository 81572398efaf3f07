// Shared parts of the attention kernels.
//
// A token sees the tokens on the path from its tree's root to itself. Positions count along that
// path, so keys are numbered by position, and whether a query sees a key is a matter of their
// positions alone: `key <= query` and `query - key < window`. Where numbered rows lie is said by
// *pieces*: runs of numbers that lie side by side in memory. So a tile of keys may cross segments
// of any length, and the same bits come out wherever a tree lies.
//
// Heads that share keys are *packed*: a row of a tile of queries is a query and one of `pack`
// heads, all heads of one query following one another.
#pragma once
#include "mma.cuh"

namespace {

constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

// What is passed for a window where every query sees all of its path.
constexpr int NO_WINDOW = 0x7fffffff;

// Below every score, and finite, so that the difference of two of them is no NaN.
constexpr float LOWEST = -1e30f;

// A piece: numbers below `end` have the row `number + row` and the position `number + position`,
// modulo 2^32.
struct Axis {
    const uint4 *next;
    uint32_t end, row, position;

    __device__ __forceinline__ explicit Axis(const uint4 *pieces) : next(pieces), end(0), row(0), position(0) {}

    // Goes on to the piece that holds a number; those asked for never become smaller.
    __device__ __forceinline__ void reach(uint32_t number) {
        while (number >= end) {
            const uint4 piece = *next++;
            end = piece.x, row = piece.y, position = piece.z;
        }
    }
};

// Packed rows: `row / pack` and `row % pack` of rows below 128.
struct Pack {
    int heads, inverse;

    // Exact for up to 64 heads.
    __device__ __forceinline__ explicit Pack(int heads) : heads(heads), inverse(65536 / heads + 1) {}
    __device__ __forceinline__ int query(int row) const { return row * inverse >> 16; }
    __device__ __forceinline__ int head(int row) const { return row - query(row) * heads; }
};

// Where a row of a tile begins in memory. There is none where `row` is negative.
struct Place {
    int row, column;
};

// A tile of queries.
struct Queries {
    int row, count, position;
    const uint4 *pieces;

    __device__ __forceinline__ explicit Queries(const uint32_t *tiles) {
        const uint4 *all = reinterpret_cast<const uint4 *>(tiles);
        const uint4 tile = all[blockIdx.x];
        row = int(tile.x), count = int(tile.y), position = int(tile.z);
        pieces = all + tile.w;
    }
    // Keys from 0 to here are on the path.
    __device__ __forceinline__ int end() const { return position + count; }
    // The first key that one of them sees, down to a multiple of a tile of keys.
    __device__ __forceinline__ int first_key(int window, int keys) const {
        return max(0, position - window + 1) / keys * keys;
    }
};

// Where a packed row of a tile of queries begins in memory.
__device__ __forceinline__ Place place_of(const Queries &tile, const Pack &pack, int first_head, int head_dim, int row) {
    const int query = pack.query(row);
    return Place{query < tile.count ? tile.row + query : -1, (first_head + pack.head(row)) * head_dim};
}

// The rows of a tile of keys on a path, found by as many threads, each of which goes along the
// path; -1 beyond its end.
template <int KEYS> struct KeyRows {
    Axis axis;
    int end;

    __device__ __forceinline__ explicit KeyRows(const Queries &tile) : axis(tile.pieces), end(tile.end()) {}

    // All threads call this. Those of a warp look at different numbers of pieces, and meet again at the
    // end: what loads and multiplies matrices needs a whole warp.
    __device__ __forceinline__ void find(int first, int *rows) {
        if (int(threadIdx.x) < KEYS) {
            const int key = first + int(threadIdx.x);
            if (key < end) axis.reach(key);
            rows[threadIdx.x] = key < end ? int(key + axis.row) : -1;
        }
        __syncwarp();
    }
};

// A tile of keys, and the numbered queries that see some of them.
struct Keys {
    int row, count, position, queries;
    const uint4 *pieces;

    __device__ __forceinline__ explicit Keys(const uint32_t *tiles) {
        const uint4 *all = reinterpret_cast<const uint4 *>(tiles);
        const uint4 tile = all[2 * blockIdx.x];
        row = int(tile.x), count = int(tile.y), position = int(tile.z);
        pieces = all + tile.w;
        queries = int(all[2 * blockIdx.x + 1].x);
    }
};

// The rows of a tile of the queries that see a tile of keys, found by as many threads, each of which goes
// along the queries; -1 beyond their end, and then from the first one again.
template <int ROWS> struct QueryRows {
    const uint32_t *tiles;
    Axis axis;
    int queries, per_tile, found;

    __device__ __forceinline__ QueryRows(const uint32_t *tiles, const Keys &tile, const Pack &pack)
        : tiles(tiles), axis(tile.pieces), queries(tile.queries), per_tile(ROWS / pack.heads), found(0) {}

    // All threads call this, and those of a warp meet again at the end, as in `KeyRows::find`.
    __device__ __forceinline__ void find(const Pack &pack, bool is_windowed, int *rows, int *positions) {
        if (int(threadIdx.x) < ROWS) {
            const int query = found + pack.query(threadIdx.x);
            const bool is_there = query < queries && pack.query(threadIdx.x) < per_tile;
            if (is_there) axis.reach(query);
            rows[threadIdx.x] = is_there ? int(query + axis.row) : -1;
            if (is_windowed) positions[threadIdx.x] = is_there ? int(query + axis.position) : 0;
        }
        __syncwarp();
        found += per_tile;
        // Read again, for a register that would be kept spills.
        if (found >= queries) found = 0, axis = Axis(Keys(tiles).pieces);
    }
};

__device__ __forceinline__ bool sees(int query, int key, int window) { return key <= query && query - key < window; }

// Whether every row begins where 16 bytes can be moved at once, and ends so too.
template <typename T> __device__ __forceinline__ bool is_wide(const T *at, int stride, int head_dim) {
    constexpr int N = 16 / sizeof(T);
    return is_aligned<N>(at) && stride % N == 0 && head_dim % N == 0;
}

} // namespace

// Kernels of a type, each of which calls the function of its pass.
#define ATTENTION_FORWARD(name, T, threads, blocks, width)                                                                 \
    KERNEL_BOUNDS(name, threads, blocks, const uint32_t *tiles, const T *q, int q_stride, const T *k, int k_stride,         \
                  const T *v, int v_stride, T *out, int out_stride, float *log_sum_exp, int lse_stride, int head_dim,        \
                  int pack, int group, float scale, float softcap, int window) {                                           \
        forward<width>(tiles, q, q_stride, k, k_stride, v, v_stride, out, out_stride, log_sum_exp, lse_stride, head_dim,     \
                       pack, group, scale, softcap, window);                                                               \
    }
#define ATTENTION_BACKWARD_QUERIES(name, T, threads, blocks, width)                                                        \
    KERNEL_BOUNDS(name, threads, blocks, const uint32_t *tiles, const T *q, int q_stride, const T *k, int k_stride,         \
                  const T *v, int v_stride, const T *d_out, int d_out_stride, const float *log_sum_exp, int lse_stride,      \
                  const float *delta, int heads, T *dq, int dq_stride, int head_dim, int pack, int group, float scale,       \
                  float softcap, int window) {                                                                             \
        backward_queries<width>(tiles, q, q_stride, k, k_stride, v, v_stride, d_out, d_out_stride, log_sum_exp, lse_stride,  \
                                delta, heads, dq, dq_stride, head_dim, pack, group, scale, softcap, window);               \
    }
#define ATTENTION_BACKWARD_KEYS(name, T, threads, blocks, width)                                                           \
    KERNEL_BOUNDS(name, threads, blocks, const uint32_t *tiles, const T *q, int q_stride, const T *k, int k_stride,         \
                  const T *v, int v_stride, const T *d_out, int d_out_stride, const float *log_sum_exp, int lse_stride,      \
                  const float *delta, int heads, T *dk, int dk_stride, T *dv, int dv_stride, int head_dim, int pack,         \
                  int group, float scale, float softcap, int window) {                                                     \
        backward_keys<width>(tiles, q, q_stride, k, k_stride, v, v_stride, d_out, d_out_stride, log_sum_exp, lse_stride,     \
                             delta, heads, dk, dk_stride, dv, dv_stride, head_dim, pack, group, scale, softcap, window);   \
    }
