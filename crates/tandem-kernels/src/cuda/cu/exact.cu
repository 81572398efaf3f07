// Fixed-point sums of gradients.
//
// Threads: blocks of 256; a thread takes 2 vectors of four elements, and the vectors of a block lie
// side by side.
// Bytes per element: a term 4 read and 8 written (8 more read where it adds); a merge 16 (24); a check 4.
#include "exact.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int RUN = 4;
// Runs of a thread: so many loads are under way at a time.
constexpr int RUNS = 2;

// A run of `n` elements: where it begins, and how many there are of it.
struct Run {
    size_t at;
    int count;
};

__device__ __forceinline__ Run run_of(int index, long long n) {
    const size_t at = (size_t(blockIdx.x) * RUNS + index) * (RUN * THREADS) + RUN * threadIdx.x;
    return {at, int(max(0ll, min((long long)RUN, n - (long long)at)))};
}

// What is missing of a run is zeros.
__device__ __forceinline__ void read(const int64_t *from, Run run, bool wide, int64_t (&x)[RUN]) {
    if (wide && run.count == RUN) {
        int64_t first[2], second[2];
        load_many(from + run.at, first);
        load_many(from + run.at + 2, second);
        x[0] = first[0], x[1] = first[1], x[2] = second[0], x[3] = second[1];
    } else {
#pragma unroll
        for (int i = 0; i < RUN; i++) x[i] = i < run.count ? from[run.at + i] : 0;
    }
}

__device__ __forceinline__ void read(const float *from, Run run, bool wide, float (&x)[RUN]) {
    if (wide && run.count == RUN) {
        load_many(from + run.at, x);
    } else {
#pragma unroll
        for (int i = 0; i < RUN; i++) x[i] = i < run.count ? from[run.at + i] : 0.0f;
    }
}

// Sums begin at a multiple of 16 bytes.
__device__ __forceinline__ void write(int64_t *to, Run run, const int64_t (&x)[RUN]) {
    if (run.count == RUN) {
        store_many(to + run.at, {x[0], x[1]});
        store_many(to + run.at + 2, {x[2], x[3]});
    } else {
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            if (i < run.count) to[run.at + i] = x[i];
        }
    }
}

} // namespace

// `out_of_range` becomes 1 if a term is not below the limit, and stays as it is otherwise.
KERNEL_BOUNDS(exact_sum, THREADS, 4, const float *terms, int64_t *sums, long long n, int add, float limit,
              unsigned *out_of_range) {
    const bool wide = is_aligned<RUN>(terms);
    float x[RUNS][RUN];
    int64_t old[RUNS][RUN] = {};
#pragma unroll
    for (int index = 0; index < RUNS; index++) {
        const Run run = run_of(index, n);
        read(terms, run, wide, x[index]);
        if (add) read(sums, run, true, old[index]);
    }
    bool good = true;
#pragma unroll
    for (int index = 0; index < RUNS; index++) {
        int64_t values[RUN];
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            // Not-a-number is not below the limit.
            good = good && fabsf(x[index][i]) < limit;
            values[i] = plus(old[index][i], fixed(x[index][i]));
        }
        write(sums, run_of(index, n), values);
    }
    if (!good) atomicOr(out_of_range, 1u);
}

// As `exact_sum`, of terms that stay the only ones of their sums.
KERNEL_BOUNDS(check_terms, THREADS, 4, const float *terms, long long n, float limit, unsigned *out_of_range) {
    const bool wide = is_aligned<RUN>(terms);
    float x[RUNS][RUN];
#pragma unroll
    for (int index = 0; index < RUNS; index++) read(terms, run_of(index, n), wide, x[index]);
    bool good = true;
#pragma unroll
    for (int index = 0; index < RUNS; index++) {
#pragma unroll
        for (int i = 0; i < RUN; i++) good = good && fabsf(x[index][i]) < limit;
    }
    if (!good) atomicOr(out_of_range, 1u);
}

KERNEL_BOUNDS(exact_merge, THREADS, 4, const int64_t *other, int64_t *sums, long long n, int add) {
    const bool wide = is_aligned<2>(other);
    int64_t x[RUNS][RUN], old[RUNS][RUN] = {};
#pragma unroll
    for (int index = 0; index < RUNS; index++) {
        const Run run = run_of(index, n);
        read(other, run, wide, x[index]);
        if (add) read(sums, run, true, old[index]);
    }
#pragma unroll
    for (int index = 0; index < RUNS; index++) {
        int64_t values[RUN];
#pragma unroll
        for (int i = 0; i < RUN; i++) values[i] = plus(old[index][i], x[index][i]);
        write(sums, run_of(index, n), values);
    }
}
