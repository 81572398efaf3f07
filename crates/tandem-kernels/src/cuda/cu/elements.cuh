// Iteration of a kernel over the elements of matrices of one shape: `N` adjacent ones at a time,
// and a thread takes a few such vectors, so that as many loads are under way at once.
// `elements.rs` says how many blocks that makes.
#pragma once
#include "vectors.cuh"

namespace {

constexpr int THREADS = 256;
// Vectors of a thread, and of a block.
template <int N> constexpr int DEPTH = N == 8 ? 2 : 4;
template <int N> constexpr int TILE = THREADS * DEPTH<N>;

// Calls `step(k, row, column)` for each of the thread's vectors, then the next step for each. So
// what one step fetches is all under way when another waits for it; and results may lie where
// operands do.
template <int N, typename... Steps>
__device__ __forceinline__ void over_elements(size_t rows, size_t cols, Steps... steps) {
    const size_t width = cols / N, first = size_t(blockIdx.x) * TILE<N>;
    const size_t first_row = first / width, first_vector = first - first_row * width;
    size_t row[DEPTH<N>], col[DEPTH<N>];
#pragma unroll
    for (int k = 0; k < DEPTH<N>; k++) {
        size_t vector = first_vector + k * THREADS + threadIdx.x;
        row[k] = first_row;
        if (vector >= width) {
            // A row that is no shorter than a tile is followed by one more at most. Else these are
            // small numbers.
            const uint32_t further = width >= TILE<N> ? 1 : uint32_t(vector) / uint32_t(width);
            row[k] += further;
            vector -= further * width;
        }
        col[k] = N * vector;
    }
    const auto each = [&](auto step) {
#pragma unroll
        for (int k = 0; k < DEPTH<N>; k++) {
            if (row[k] < rows) step(k, row[k], col[k]);
        }
    };
    (each(steps), ...);
}

} // namespace
