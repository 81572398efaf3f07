// Tiles of bf16 in shared memory, and their products on tensor cores.
//
// Four warps take a tile of 64 or 128 packed rows of queries, and each has 16 or 32 of its rows to
// itself; of a tile of keys, two warps have as many. What a warp computes for them stays in its
// registers, and scores go from one product into the next without leaving them. Tiles of the other side come to shared memory one
// after another, while others are multiplied.
#pragma once
#include "attention.cuh"

namespace {

constexpr int THREADS = 128, WARPS = THREADS / WARP;

// A tile of bf16 in shared memory, row after row. Parts of 16 bytes are permuted within a row, so
// that those of eight rows at one column lie in different banks.
template <int WIDTH> struct Tile {
    static constexpr int PARTS = WIDTH / 8;
    static constexpr int BITS = PARTS % 8 == 0 ? 3 : PARTS % 4 == 0 ? 2 : 1;

    static __device__ __forceinline__ int flip(int row) { return row >> (3 - BITS) & ((1 << BITS) - 1); }
    // Where a part is in its row. Parts that are eight apart are so after it: their places are one,
    // and a constant more.
    static __device__ __forceinline__ int place_in_row(int part, int flip) { return part / 8 * 64 + ((part % 8 ^ flip) << 3); }
    static __device__ __forceinline__ int place(int row, int part) { return row * WIDTH + place_in_row(part, flip(row)); }
};

// Eight numbers of a row from a column on, one by one; those that are not there are zeros.
__device__ __forceinline__ void load_part(bf16 *to, const bf16 *from, int stride, Place place, int first, int head_dim) {
    const size_t offset = size_t(place.row) * stride + place.column;
    uint32_t words[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int column = first + 2 * n;
        const uint32_t low = place.row >= 0 && column < head_dim ? from[offset + column].bits : 0;
        const uint32_t high = place.row >= 0 && column + 1 < head_dim ? from[offset + column + 1].bits : 0;
        words[n] = low | high << 16;
    }
    *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Begins to bring `ROWS` rows into a tile; those that are not there are zeros.
template <int WIDTH, int ROWS, typename PlaceOf>
__device__ __forceinline__ void load_tile(bf16 *tile, const bf16 *from, int stride, PlaceOf place_of, int head_dim, bool wide) {
    constexpr int PARTS = WIDTH / 8;
    if (wide) {
        // A thread copies one part of every `STEP`-th row. Parts of rows that are a multiple of eight apart
        // are permuted alike.
        constexpr int LANES = PARTS <= 2 ? 2 : PARTS <= 4 ? 4 : PARTS <= 8 ? 8 : PARTS <= 16 ? 16 : 32, STEP = THREADS / LANES;
        static_assert(ROWS % STEP == 0 || ROWS < STEP, "every thread that copies does so as often");
        const int thread = anew(threadIdx.x), part = thread % LANES, first = thread / LANES;
        if (part < PARTS && first < ROWS) {
            bf16 *const to = tile + Tile<WIDTH>::place(first, part);
            const bool has_part = 8 * part < head_dim;
#pragma unroll(ROWS / STEP > 8 ? 4 : 8)
            for (int n = 0; n * STEP < ROWS; n++) {
                const int row = first + n * STEP;
                const Place place = place_of(row);
                const bool is_there = place.row >= 0 && has_part;
                // In parts, of which 2^32 are 64 GiB.
                const uint32_t at = uint32_t(max(place.row, 0)) * (uint32_t(stride) / 8) + uint32_t(place.column) / 8 + part;
                copy_later(STEP % 8 ? tile + Tile<WIDTH>::place(row, part) : to + n * STEP * WIDTH,
                           from + 8 * size_t(has_part ? at : 0), is_there);
            }
        }
        // Lanes that copy nothing meet the others again.
        __syncwarp();
        return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * PARTS; i += THREADS) {
        const int row = i / PARTS, part = i % PARTS;
        const Place place = place_of(row);
        load_part(tile + Tile<WIDTH>::place(row, part), from, stride, place, 8 * part, head_dim);
    }
    // Lanes part at rows that are not there, and products follow without a barrier.
    __syncwarp();
}

// A warp's numbers, times a factor for each row, into `16 · M` rows of a tile that no other warp
// uses.
template <int WIDTH, int M, typename Layout = Tile<WIDTH>>
__device__ __forceinline__ void put_rows(bf16 *tile, const float (&x)[M][WIDTH / 8][4], const float (&factor)[M][2]) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int part = 0; part < WIDTH / 8; part++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = 16 * m + 8 * half + g;
                *reinterpret_cast<uint32_t *>(tile + Layout::place(row, part) + 2 * t) =
                    pack_bf16(x[m][part][2 * half] * factor[m][half], x[m][part][2 * half + 1] * factor[m][half]);
            }
    __syncwarp();
}

// From there to memory.
template <int WIDTH, int ROWS, typename Layout = Tile<WIDTH>, typename PlaceOf>
__device__ __forceinline__ void store_rows(const bf16 *tile, bf16 *to, int stride, PlaceOf place_of, int head_dim) {
    constexpr int PARTS = WIDTH / 8;
    const bool wide = is_wide(to, stride, head_dim);
#pragma unroll 1
    for (int i = threadIdx.x % WARP; i < ROWS * PARTS; i += WARP) {
        const int row = i / PARTS, part = i % PARTS;
        const Place place = place_of(row);
        if (place.row < 0) continue;
        const size_t offset = size_t(place.row) * stride + place.column;
        const bf16 *from = tile + Layout::place(row, part);
        if (wide) {
            if (8 * part < head_dim)
                *reinterpret_cast<uint4 *>(to + offset + 8 * part) = *reinterpret_cast<const uint4 *>(from);
        } else {
            for (int n = 0; n < 8 && 8 * part + n < head_dim; n++) to[offset + 8 * part + n] = from[n];
        }
    }
}

// Both: a warp's numbers, times a factor for each row, by way of a tile's own rows to memory.
template <int WIDTH, int M, typename Layout = Tile<WIDTH>, typename PlaceOf>
__device__ __forceinline__ void write_rows(bf16 *tile, const float (&x)[M][WIDTH / 8][4], const float (&factor)[M][2], bf16 *to,
                                           int stride, PlaceOf place_of, int head_dim) {
    put_rows<WIDTH, M, Layout>(tile, x, factor);
    store_rows<WIDTH, 16 * M, Layout>(tile, to, stride, place_of, head_dim);
}

template <int M, int N> __device__ __forceinline__ void clear(float (&x)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[m][n][i] = 0;
}

// d = a · bᵀ of `16 · M` rows of one tile, and `8 · N` of another.
template <int WIDTH, int M, int N>
__device__ __forceinline__ void multiply_rows(float (&d)[M][N][4], const bf16 *a, const bf16 *b) {
    const int lane = anew(threadIdx.x) % WARP;
    const int a_row = lane % 16, a_flip = Tile<WIDTH>::flip(a_row) ^ lane >> 4;
    const int b_row = lane % 8 + (lane >> 4) * 8, b_flip = Tile<WIDTH>::flip(b_row) ^ (lane >> 3 & 1);
    a += a_row * WIDTH, b += b_row * WIDTH;
    clear(d);
#pragma unroll
    for (int step = 0; step < WIDTH / 16; step++) {
        uint32_t of_a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_matrices(of_a[m], a + m * 16 * WIDTH + Tile<WIDTH>::place_in_row(2 * step, a_flip));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t of_b[4];
            load_matrices(of_b, b + n * 8 * WIDTH + Tile<WIDTH>::place_in_row(2 * step, b_flip));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add(d[m][n], of_a[m], of_b[0], of_b[1]);
                multiply_add(d[m][n + 1], of_a[m], of_b[2], of_b[3]);
            }
        }
    }
}

// d += a · b, where `a` is fragments of `16 · M` rows and `16 · K` columns, and `b` as many rows of
// a tile.
template <int WIDTH, int M, int K>
__device__ __forceinline__ void multiply_columns(float (&d)[M][WIDTH / 8][4], const uint32_t (&a)[M][K][4], const bf16 *b) {
    const int lane = anew(threadIdx.x) % WARP, row = lane % 16, flip = Tile<WIDTH>::flip(row) ^ lane >> 4;
    b += row * WIDTH;
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int part = 0; part < WIDTH / 8; part += 2) {
            uint32_t of_b[4];
            load_matrices_across(of_b, b + k * 16 * WIDTH + Tile<WIDTH>::place_in_row(part, flip));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add(d[m][part], a[m][k], of_b[0], of_b[1]);
                multiply_add(d[m][part + 1], a[m][k], of_b[2], of_b[3]);
            }
        }
}

// Scores as a factor of the next product.
template <int M, int N>
__device__ __forceinline__ void round_scores(uint32_t (&to)[M][N / 2][4], const float (&x)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n += 2)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int pair = i % 2 * 2;
                to[m][n / 2][i] = pack_bf16(x[m][n + i / 2][pair], x[m][n + i / 2][pair + 1]);
            }
}

// What a product of a query and a key is multiplied by before and after the cap, if there is one;
// after it in base 2.
struct Factors {
    float before, cap, after;

    __device__ __forceinline__ Factors(float scale, float softcap)
        : before(softcap > 0 ? scale / softcap : 0), cap(softcap), after(softcap > 0 ? LOG2E : scale * LOG2E) {}
    __device__ __forceinline__ bool is_capped() const { return cap > 0; }
};

// The rows of a tile of queries that a warp has, and the numbers of the keys that they see.
template <int M> struct WarpRows {
    const Pack &pack;
    // The last position is that before 0 where a warp has no row.
    int first, tile_position, position, last_position;

    __device__ __forceinline__ WarpRows(const Queries &tile, const Pack &pack) : pack(pack), tile_position(tile.position) {
        first = threadIdx.x / WARP * (16 * M);
        const int end = tile.count * pack.heads;
        position = tile.position + pack.query(first);
        last_position = first < end ? tile.position + pack.query(min(first + 16 * M, end) - 1) : -1;
    }
    // That of a row that a thread of the warp has a part of.
    __device__ __forceinline__ int position_of(int thread, int m, int half) const {
        return tile_position + pack.query(first + 16 * m + 8 * half + thread % WARP / 4);
    }
    // Whether some row sees some of these keys.
    __device__ __forceinline__ bool see_any(int key, int keys, int window) const {
        return key <= last_position && position - (key + keys - 1) < window;
    }
    // Whether every row sees all of them.
    __device__ __forceinline__ bool see_all(int key, int keys, int window) const {
        return key + keys - 1 <= position && last_position - key < window;
    }
};

// Numbers of keys that a row does not see become `hidden`. `ANEW`: registers are scarce, see `anew`.
template <bool ANEW, int M, int N>
__device__ __forceinline__ void hide_unseen(const WarpRows<M> &own, int key, int window, float hidden, float (&x)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int thread = ANEW ? anew(threadIdx.x) : int(threadIdx.x), position = own.position_of(thread, m, half);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (!sees(position, key + 8 * n + 2 * (thread % 4) + i, window)) x[m][n][2 * half + i] = hidden;
        }
}

template <int M, int N> __device__ __forceinline__ void cap(const Factors &factors, float (&scores)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[m][n][i] = factors.cap * tanh_fast(scores[m][n][i] * factors.before);
}

// Turns scores into weights below the largest so far, which and whose sum (each thread its own
// part) are kept by row. What was summed before is to be shrunk.
template <int M, int N>
__device__ __forceinline__ void weigh(float factor, float (&scores)[M][N][4], float (&largest)[M][2], float (&sum)[M][2],
                                      float (&shrink)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float before = largest[m][half];
            float now = before;
#pragma unroll
            for (int n = 0; n < N; n++) now = fmaxf(now, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            now = fmaxf(now, __shfl_xor_sync(ALL, now, 1));
            now = fmaxf(now, __shfl_xor_sync(ALL, now, 2));
            largest[m][half] = now;
            // The difference first: of two products the compiler would round only one, and what is left of
            // `LOWEST`, where a row has seen no key yet, is beyond every exponent.
            const float less = now * factor;
            shrink[m][half] = exp2_fast((before - now) * factor);
            float total = sum[m][half] * shrink[m][half];
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[m][n][i] = exp2_fast(scores[m][n][i] * factor - less);
                    total += scores[m][n][i];
                }
            sum[m][half] = total;
        }
}

template <int M, int N> __device__ __forceinline__ void scale_rows(float (&x)[M][N][4], const float (&factor)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[m][n][i] *= factor[m][i / 2];
}

// Stores each row's log-sum-exp, and gives the inverse of its sum.
template <int M>
__device__ __forceinline__ void finish(const Queries &tile, const Pack &pack, const WarpRows<M> &own, const Factors &factors,
                                       int first_head, const float (&largest)[M][2], const float (&sum)[M][2], float *log_sum_exp,
                                       int lse_stride, float (&inverse)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = sum[m][half];
            total += __shfl_xor_sync(ALL, total, 1);
            total += __shfl_xor_sync(ALL, total, 2);
            inverse[m][half] = 1.0f / total;
            const int row = own.first + 16 * m + 8 * half + threadIdx.x % WARP / 4, query = pack.query(row);
            if (threadIdx.x % 4 == 0 && query < tile.count)
                log_sum_exp[size_t(tile.row + query) * lse_stride + first_head + pack.head(row)] =
                    (largest[m][half] * factors.after + log2f(total)) * LN2;
        }
}

// Statistics of a warp's rows of queries: what is subtracted from scores and from gradients of weights. Rows
// that are not there have weights of zero.
template <int M>
__device__ __forceinline__ void load_statistics(const Queries &tile, const Pack &pack, const WarpRows<M> &own, int first_head,
                                                const float *log_sum_exp, int lse_stride, const float *delta, int heads,
                                                float (&less)[M][2], float (&mean)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = own.first + 16 * m + 8 * half + int(threadIdx.x) % WARP / 4, query = pack.query(row);
            less[m][half] = INFINITY, mean[m][half] = 0;
            if (query < tile.count) {
                const size_t at = tile.row + query;
                const int head = first_head + pack.head(row);
                less[m][half] = log_sum_exp[at * lse_stride + head] * LOG2E, mean[m][half] = delta[at * heads + head];
            }
        }
}

// A thread's statistic of a tile of `ROWS` rows of queries: what is subtracted from scores, then from
// gradients of weights. Rows that are not there have none and need none: all else of them is zero.
template <int ROWS>
__device__ __forceinline__ float statistic_of(const int *rows, const Pack &pack, int first_head, const float *log_sum_exp,
                                              int lse_stride, const float *delta, int heads) {
    const int row = int(threadIdx.x) % ROWS, at = rows[row];
    float statistic = 0;
    if (int(threadIdx.x) < 2 * ROWS && at >= 0) {
        const int head = first_head + pack.head(row);
        statistic = int(threadIdx.x) < ROWS ? log_sum_exp[size_t(at) * lse_stride + head] * LOG2E : delta[size_t(at) * heads + head];
    }
    // Lanes without a row meet the others again: products follow, which need a whole warp.
    __syncwarp();
    return statistic;
}

} // namespace
