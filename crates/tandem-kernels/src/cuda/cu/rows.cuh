// How rows are shared among threads where a kernel sums over each: 16 threads or a multiple have a row, and a block has several rows
// where they are short. `rows.rs` says how many. A thread holds `HELD` vectors of `N` elements in registers, so that all are under way
// at once and are read once; of longer rows, what lies beyond is read again, from a cache.
#pragma once
#include "vectors.cuh"

namespace {

// At most, in a block.
constexpr int THREADS = 512;
// Threads whose vectors lie side by side.
constexpr int STRIP = 16;
// Vectors that a thread holds: 16 elements forward, and 8 of each operand backward.
template <int N> constexpr int HELD_FORWARD = N == 8 ? 2 : 4;
constexpr int HELD_BACKWARD = 2;

// A thread's share of a row.
template <int N, int HELD> struct Share {
    // How many threads have a row, and which of them, and of those in a block, this one is and belongs to.
    int lanes, lane, group, groups;
    // Elements of the row: none if it is not there. Its threads take part in what their warp does all the same.
    int limit;

    __device__ __forceinline__ explicit Share(int lanes)
        : lanes(lanes), lane(threadIdx.x % lanes), group(threadIdx.x / lanes), groups(blockDim.x / lanes), limit(0) {}

    // Calls `held(k, i)` for each vector that the thread holds: the k-th, from column i on.
    template <typename Held> __device__ __forceinline__ void each(Held held) const {
        const int first = from();
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            if (first + k * STRIP * N < limit) held(k, first + k * STRIP * N);
        }
    }

    // Calls `beyond(i)` for each vector that it has, but does not hold.
    template <typename Beyond> __device__ __forceinline__ void rest(Beyond beyond) const {
        for (int first = from() + lanes * HELD * N; first < limit; first += lanes * HELD * N) {
#pragma unroll
            for (int k = 0; k < HELD; k++) {
                if (first + k * STRIP * N < limit) beyond(first + k * STRIP * N);
            }
        }
    }

    __device__ __forceinline__ int from() const {
        return (lane / STRIP * (STRIP * HELD) + lane % STRIP) * N;
    }

    // Over the row's threads, in one order.
    __device__ __forceinline__ float sum(float x) const {
        SHARED(float, of_warps, THREADS / WARP);
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2) {
            const float other = __shfl_xor_sync(ALL, x, by);
            if (by < lanes) x += other;
        }
        if (lanes <= WARP) return x;
        // The last call's readers may still be at it.
        __syncthreads();
        if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = x;
        __syncthreads();
        const int warp = threadIdx.x % (THREADS / WARP);
        x = warp < lanes / WARP ? of_warps[warp] : 0.0f;
#pragma unroll
        for (int by = THREADS / WARP / 2; by > 0; by /= 2) x += __shfl_xor_sync(ALL, x, by);
        return x;
    }
};

template <int N> __device__ __forceinline__ void add_to(float *at, const float (&x)[N]) {
    float sum[N];
    load_many(at, sum);
#pragma unroll
    for (int j = 0; j < N; j++) sum[j] += x[j];
    store_many(at, sum);
}

// Where threads add up what their rows contribute to the gradients of weights, `columns` numbers: in shared memory, each group of
// threads for itself, or where that is too small in the block's row of `partial`. Nothing if there is no `partial`.
struct Sums {
    float *own, *shared, *partial;
    int columns;
    bool is_wanted, in_shared;

    // `lanes` threads are a group.
    __device__ __forceinline__ Sums(char *memory, float *partials, int columns, int lanes, bool in_shared)
        : shared(reinterpret_cast<float *>(memory)), partial(partials + size_t(blockIdx.x) * columns), columns(columns),
          is_wanted(partials != nullptr), in_shared(in_shared) {
        own = in_shared ? shared + threadIdx.x / lanes * columns : partial;
    }

    // Before the first row.
    template <typename Share> __device__ __forceinline__ void clear(const Share &share) const {
        if (!is_wanted) return;
        for (int i = share.lane; i < columns; i += share.lanes) own[i] = 0;
        __syncthreads();
    }

    // After the last row: what the groups have, in their order.
    template <typename Share> __device__ __forceinline__ void write(const Share &share) const {
        if (!is_wanted || !in_shared) return;
        __syncthreads();
        for (int i = threadIdx.x; i < columns; i += blockDim.x) {
            float sum = shared[i];
            for (int group = 1; group < share.groups; group++) sum += shared[group * columns + i];
            partial[i] = sum;
        }
    }
};

} // namespace
