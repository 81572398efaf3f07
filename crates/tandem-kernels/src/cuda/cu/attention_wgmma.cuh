// Shared parts of the attention kernels for Hopper's products of a warpgroup.
//
// Each warpgroup has 64 rows of a block's tile to itself, and each of its warps 16 of them. Tiles of
// the other side come to shared memory one or two turns before they are multiplied, into one of
// several *stages*.
#pragma once
#include "attention_tiles.cuh"
#include "wgmma.cuh"

namespace {

constexpr int GROUP = 4 * WARP, GROUP_ROWS = 64;

// Begins to bring `ROWS` rows into a tile; those that are not there are zeros.
template <int WIDTH, int ROWS, int THREADS, typename PlaceOf>
__device__ __forceinline__ void load_panels(bf16 *tile, const bf16 *from, int stride, PlaceOf place_of, int head_dim, bool wide) {
    // A thread copies one part of every `STEP`-th row, and all of them are permuted alike.
    constexpr int PARTS = WIDTH / 8, STEP = THREADS / PARTS;
    static_assert(THREADS % PARTS == 0 && STEP % 8 == 0, "a thread's rows are permuted alike");
    using Layout = Panels<WIDTH, ROWS>;
    if (wide) {
        const int thread = anew(threadIdx.x), part = thread % PARTS, first = thread / PARTS;
        const bool has_part = 8 * part < head_dim;
        bf16 *const to = tile + Layout::place(first, part);
#pragma unroll
        for (int n = 0; n * STEP < ROWS; n++) {
            const int row = first + n * STEP;
            if (ROWS % STEP && row >= ROWS) break;
            const Place place = place_of(row);
            const bool is_there = place.row >= 0 && has_part;
            // In parts, of which 2^32 are 64 GiB.
            const uint32_t at = uint32_t(max(place.row, 0)) * (uint32_t(stride) / 8) + uint32_t(place.column) / 8 + part;
            copy_later(to + n * STEP * PANEL, from + 8 * size_t(has_part ? at : 0), is_there);
        }
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * PARTS; i += THREADS) {
            const int row = i / PARTS, part = i % PARTS;
            load_part(tile + Layout::place(row, part), from, stride, place_of(row), 8 * part, head_dim);
        }
    }
    // Lanes that part at a row meet again: products need whole warps.
    __syncwarp();
}

// Waits for copies, and shows them to the products of all threads. Nobody is at what came before.
__device__ __forceinline__ void arrive() {
    wait_copies<0>();
    show_to_products();
    __syncthreads();
}

} // namespace
