// Tiles of f32 in shared memory, and their products.
//
// 128 threads take a tile of packed rows of queries, or of keys, as a grid of 8 × 16: a thread has
// `ROWS` of the tile's rows, the same ones throughout, and every 16th row of a tile of the other
// side.
#pragma once
#include "attention.cuh"

namespace {

constexpr int THREADS = 128, DOWN = 8, ACROSS = 16;

template <int WIDTH> struct Sizes {
    // Of a thread: rows of its own side, and of the other side.
    static constexpr int ROWS = WIDTH <= 128 ? 4 : 2, OTHERS = WIDTH <= 128 ? 2 : 1;
    // Of a tile.
    static constexpr int TILE = DOWN * ROWS, OTHER = ACROSS * OTHERS;
    // From one row of a tile to the next: 16 bytes more than it has, so that rows begin in
    // different banks.
    static constexpr int PITCH = WIDTH + 4, SCORES = OTHER + 4;
    // Columns that a thread sums: so many side by side, in every run of `16 · BESIDE`.
    static constexpr int BESIDE = WIDTH >= 64 ? 4 : 2, RUNS = WIDTH / (ACROSS * BESIDE);
};

// Begins to bring `COUNT` rows into a tile; those that are not there are zeros.
template <int WIDTH, int COUNT, typename PlaceOf>
__device__ __forceinline__ void load_tile(float *tile, const float *from, int stride, PlaceOf place_of, int head_dim,
                                          bool wide) {
    constexpr int PARTS = WIDTH / 4;
    for (int i = threadIdx.x; i < COUNT * PARTS; i += THREADS) {
        const int row = i / PARTS, column = i % PARTS * 4;
        const Place place = place_of(row);
        const bool is_there = place.row >= 0 && column < head_dim;
        const size_t at = is_there ? size_t(place.row) * stride + place.column + column : 0;
        float *to = tile + row * Sizes<WIDTH>::PITCH + column;
        if (wide) {
            copy_later(to, from + at, is_there);
        } else {
            for (int n = 0; n < 4; n++) to[n] = is_there && column + n < head_dim ? from[at + n] : 0.0f;
        }
    }
}

// All that was begun is there, for every thread.
__device__ __forceinline__ void arrive() {
    commit_copies();
    wait_copies<0>();
    __syncthreads();
}

// d = own rows · other rows.
template <int WIDTH>
__device__ __forceinline__ void multiply_rows(float (&d)[Sizes<WIDTH>::ROWS][Sizes<WIDTH>::OTHERS], const float *tile,
                                              const float *other) {
    using S = Sizes<WIDTH>;
    const int down = threadIdx.x / ACROSS, across = threadIdx.x % ACROSS;
    tile += down * S::ROWS * S::PITCH, other += across * S::PITCH;
#pragma unroll
    for (int i = 0; i < S::ROWS; i++)
#pragma unroll
        for (int j = 0; j < S::OTHERS; j++) d[i][j] = 0;
#pragma unroll 2
    for (int c = 0; c < WIDTH; c += 4) {
        float a[S::ROWS][4], b[S::OTHERS][4];
#pragma unroll
        for (int i = 0; i < S::ROWS; i++) load_many(tile + i * S::PITCH + c, a[i]);
#pragma unroll
        for (int j = 0; j < S::OTHERS; j++) load_many(other + j * ACROSS * S::PITCH + c, b[j]);
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < S::ROWS; i++)
#pragma unroll
                for (int j = 0; j < S::OTHERS; j++) d[i][j] += a[i][n] * b[j][n];
    }
}

// Scores of own rows in shared memory, where the 16 threads of those rows, which are of one warp,
// find them.
template <int WIDTH>
__device__ __forceinline__ void put_scores(float *to, const float (&x)[Sizes<WIDTH>::ROWS][Sizes<WIDTH>::OTHERS]) {
    using S = Sizes<WIDTH>;
    const int down = threadIdx.x / ACROSS, across = threadIdx.x % ACROSS;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < S::ROWS; i++)
#pragma unroll
        for (int j = 0; j < S::OTHERS; j++) to[(down * S::ROWS + i) * S::SCORES + across + j * ACROSS] = x[i][j];
    __syncwarp();
}

template <int WIDTH> using Sums = float[Sizes<WIDTH>::ROWS][Sizes<WIDTH>::RUNS][Sizes<WIDTH>::BESIDE];

template <int WIDTH> __device__ __forceinline__ void clear(Sums<WIDTH> &sums) {
    using S = Sizes<WIDTH>;
#pragma unroll
    for (int i = 0; i < S::ROWS; i++)
#pragma unroll
        for (int run = 0; run < S::RUNS; run++)
#pragma unroll
            for (int n = 0; n < S::BESIDE; n++) sums[i][run][n] = 0;
}

// sums += scores · other rows.
template <int WIDTH>
__device__ __forceinline__ void multiply_columns(Sums<WIDTH> &sums, const float *scores, const float *other) {
    using S = Sizes<WIDTH>;
    const int down = threadIdx.x / ACROSS, across = threadIdx.x % ACROSS;
    scores += down * S::ROWS * S::SCORES, other += across * S::BESIDE;
#pragma unroll 1
    for (int row = 0; row < S::OTHER; row += 4) {
        float weights[S::ROWS][4];
#pragma unroll
        for (int i = 0; i < S::ROWS; i++) load_many(scores + i * S::SCORES + row, weights[i]);
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int run = 0; run < S::RUNS; run++) {
                const float *from = other + (row + k) * S::PITCH + run * ACROSS * S::BESIDE;
                float x[4];
                if (S::BESIDE == 4) {
                    load_many(from, x);
                } else {
                    const float2 pair = *reinterpret_cast<const float2 *>(from);
                    x[0] = pair.x, x[1] = pair.y;
                }
#pragma unroll
                for (int i = 0; i < S::ROWS; i++)
#pragma unroll
                    for (int n = 0; n < S::BESIDE; n++) sums[i][run][n] += weights[i][k] * x[n];
            }
    }
}

// A row's sums times a factor, to memory.
template <int WIDTH>
__device__ __forceinline__ void store_row(const float (&sums)[Sizes<WIDTH>::RUNS][Sizes<WIDTH>::BESIDE], float factor, float *to,
                                          int head_dim) {
    using S = Sizes<WIDTH>;
#pragma unroll
    for (int run = 0; run < S::RUNS; run++)
#pragma unroll
        for (int n = 0; n < S::BESIDE; n++) {
            const int column = (run * ACROSS + int(threadIdx.x) % ACROSS) * S::BESIDE + n;
            if (column < head_dim) to[column] = sums[run][n] * factor;
        }
}

// Over the 16 threads of a row; each has the result.
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
    for (int by = ACROSS / 2; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, by));
    return x;
}
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int by = ACROSS / 2; by > 0; by /= 2) x += __shfl_xor_sync(ALL, x, by);
    return x;
}

} // namespace
