// Rows by groups of threads, for kernels that sum over each row.
//
// Threads: a multiple of 16 threads (lanes) takes a row, and a block has several rows where they are
// short; `rows.rs` chooses the numbers. A lane holds `VECTORS` vectors of `N` elements in registers,
// so that all loads are in flight at once and each is read once. The rest of a longer row is read
// again, from a cache.
#pragma once
#include "vectors.cuh"

namespace {

// Most threads of a block.
constexpr int THREADS = 512;
// Lanes whose vectors are adjacent.
constexpr int STRIP = 16;
// Vectors per lane: 16 elements forward, and 8 of each operand backward.
template <int N> constexpr int FORWARD_VECTORS = N == 8 ? 2 : 4;
constexpr int BACKWARD_VECTORS = 2;

// One lane's part of a row.
template <int N, int VECTORS> struct RowLane {
    // Lanes per row, this lane, and this group of lanes among the groups of the block.
    int lanes, lane, group, groups;
    // Elements of the row: none if it does not exist. Its lanes take part in warp operations all the
    // same.
    int limit;

    __device__ __forceinline__ explicit RowLane(int lanes)
        : lanes(lanes), lane(threadIdx.x % lanes), group(threadIdx.x / lanes), groups(blockDim.x / lanes), limit(0) {}

    // Calls `held(k, i)` for each vector in registers: the k-th, from column i on.
    template <typename Held> __device__ __forceinline__ void in_registers(Held held) const {
        const int first = from();
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (first + k * STRIP * N < limit) held(k, first + k * STRIP * N);
        }
    }

    // Calls `beyond(i)` for each further vector of the lane.
    template <typename Beyond> __device__ __forceinline__ void beyond_registers(Beyond beyond) const {
        for (int first = from() + lanes * VECTORS * N; first < limit; first += lanes * VECTORS * N) {
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                if (first + k * STRIP * N < limit) beyond(first + k * STRIP * N);
            }
        }
    }

    // Loads the vectors in registers: all loads are in flight before the first is unpacked.
    template <typename X> __device__ __forceinline__ void load_registers(const X *x, float (&v)[VECTORS][N]) const {
        Vector<X, N> given[VECTORS];
        in_registers([&](int k, int i) { given[k] = fetch<N>(x + i); });
        in_registers([&](int k, int) { unpack(given[k], v[k]); });
    }

    // Calls `step(i, u)` for each vector of the lane, from column i on: those in registers, then the
    // further ones, read from `x`.
    template <typename X, typename Step>
    __device__ __forceinline__ void over(const X *x, float (&v)[VECTORS][N], Step step) const {
        in_registers([&](int k, int i) { step(i, v[k]); });
        beyond_registers([&](int i) {
            float u[N];
            load_many(x + i, u);
            step(i, u);
        });
    }

    // Calls `step(i, u, t)` likewise for each vector of two rows.
    template <typename X, typename Y, typename Step>
    __device__ __forceinline__ void over(const X *x, float (&v)[VECTORS][N], const Y *y, float (&g)[VECTORS][N],
                                         Step step) const {
        in_registers([&](int k, int i) { step(i, v[k], g[k]); });
        beyond_registers([&](int i) {
            float u[N], t[N];
            load_many(x + i, u);
            load_many(y + i, t);
            step(i, u, t);
        });
    }

    __device__ __forceinline__ int from() const {
        return (lane / STRIP * (STRIP * VECTORS) + lane % STRIP) * N;
    }

    // Sums over the row's lanes in a fixed order.
    __device__ __forceinline__ float sum(float x) const {
        SHARED(float, of_warps, THREADS / WARP);
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2) {
            const float other = __shfl_xor_sync(ALL, x, by);
            if (by < lanes) x += other;
        }
        if (lanes <= WARP) return x;
        // Readers of the last call may not be done.
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

// Sums of the weight gradients of a block's rows, `columns` numbers: in shared memory per group of
// lanes, or in the block's row of `partial` if that is too small. Unused without `partial`.
struct WeightSums {
    float *own, *shared, *partial;
    int columns;
    bool is_wanted, in_shared;

    // `lanes` threads form a group.
    __device__ __forceinline__ WeightSums(char *memory, float *partials, int columns, int lanes, bool in_shared)
        : shared(reinterpret_cast<float *>(memory)), partial(partials + size_t(blockIdx.x) * columns), columns(columns),
          is_wanted(partials != nullptr), in_shared(in_shared) {
        own = in_shared ? shared + threadIdx.x / lanes * columns : partial;
    }

    // Called before the first row.
    template <typename Lane> __device__ __forceinline__ void clear(const Lane &part) const {
        if (!is_wanted) return;
        for (int i = part.lane; i < columns; i += part.lanes) own[i] = 0;
        __syncthreads();
    }

    // Called after the last row: adds up the groups in order.
    template <typename Lane> __device__ __forceinline__ void write(const Lane &part) const {
        if (!is_wanted || !in_shared) return;
        __syncthreads();
        for (int i = threadIdx.x; i < columns; i += blockDim.x) {
            float sum = shared[i];
            for (int group = 1; group < part.groups; group++) sum += shared[group * columns + i];
            partial[i] = sum;
        }
    }
};

} // namespace
