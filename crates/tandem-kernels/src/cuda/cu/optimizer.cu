// Optimiser steps over flat buffers, and sums of squares.
//
// Steps match the bits of the CPU (`cpu/optimizer.rs`, `cpu/states.rs`): operations are rounded one
// by one, in that order. The compiler finds no product to fuse with a sum, except exact ones.
//
// Threads: blocks of 256, 8 warps; a warp takes 256 consecutive elements (one block of 8-bit states),
// a lane two vectors of four (`states.cuh`). `block_squares` has a block per 16384 elements.
// Bytes per element: gradient 4 (8 as fixed-point sums of several terms), master 8, copy 4 or 2, each state twice
// its size (8, 4 or 2 + 1/32). `block_squares` reads 4 or 8.
#include "exact.cuh"
#include "states.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

__device__ __forceinline__ void read_sums(const int64_t *at, bool is_whole, int count, float (&x)[VECTOR]) {
    if (is_whole) {
        int64_t first[2], second[2];
        load_many(at, first);
        load_many(at + 2, second);
        x[0] = nearest(first[0]), x[1] = nearest(first[1]), x[2] = nearest(second[0]), x[3] = nearest(second[1]);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) x[i] = i < count ? nearest(at[i]) : 0.0f;
    }
}

// The f32 that a sum of one term is read as: whole multiples of its last place, which f32 holds.
__device__ __forceinline__ float of_one_term(float term) { return __fmul_rn(truncf(__fmul_rn(term, 0x1p48f)), 0x1p-48f); }

// Reads the gradient from one representation; the other is null. `are_terms` says that f32 numbers are the
// only terms of sums.
__device__ __forceinline__ void read_gradient(const float *grad, const int64_t *sums, bool are_terms, float scale,
                                              const LaneRange &range, LaneValues &g) {
    if (sums) {
#pragma unroll
        for (int vec = 0; vec < VECTORS; vec++) {
            read_sums(sums + range.at(vec), range.is_whole(vec), range.count(vec), g[vec]);
        }
    } else {
        read(grad, range, g);
    }
#pragma unroll
    for (int vec = 0; vec < VECTORS; vec++) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            g[vec][i] = __fmul_rn(are_terms ? of_one_term(g[vec][i]) : g[vec][i], scale);
        }
    }
}

// The weights, and a copy in either type or none.
struct Weights {
    float *master;
    float *f32_copy;
    bf16 *bf16_copy;

    __device__ __forceinline__ void store_all(const LaneRange &range, const LaneValues &w) const {
        write(master, range, w);
        if (f32_copy) write(f32_copy, range, w);
        if (bf16_copy) write(bf16_copy, range, w);
    }
    __device__ __forceinline__ bool is_wide() const {
        return is_aligned<VECTOR>(master) && is_aligned<VECTOR>(f32_copy) && is_aligned<VECTOR>(bf16_copy);
    }
};

// The elements of this lane; none beyond the last.
__device__ __forceinline__ LaneRange lane_range(bool wide, long long n) {
    return {(size_t(blockIdx.x) * WARPS + threadIdx.x / WARP) * STATE_BLOCK, size_t(n), wide};
}

// The rules, as in `ops/optimizer`: a step moves a weight and its states by the gradient. `n` has the
// step's numbers in the order of `Rule::numbers`.
constexpr int NUMBERS = 9;
typedef float Numbers[NUMBERS];

struct AdamW {
    // Decay, 1 - beta1, beta2, 1 - beta2, root of the second correction, eps, minus the step size.
    static __device__ __forceinline__ void step(const Numbers &n, float g, float &w, float &m, float &v) {
        m = __fmaf_rn(__fadd_rn(g, -m), n[1], m);
        v = __fmaf_rn(__fmul_rn(g, n[3]), g, __fmul_rn(v, n[2]));
        const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), n[4]), n[5]);
        w = __fadd_rn(__fmul_rn(w, n[0]), __fdiv_rn(__fmul_rn(m, n[6]), root));
    }
};

struct RmsProp {
    // Weight decay, alpha, 1 - alpha, eps, minus the learning rate.
    static __device__ __forceinline__ void step(const Numbers &n, float g, float &w, float &v, float &) {
        g = __fmaf_rn(w, n[0], g);
        v = __fmaf_rn(__fmul_rn(g, n[2]), g, __fmul_rn(v, n[1]));
        w = __fadd_rn(w, __fdiv_rn(__fmul_rn(g, n[4]), __fadd_rn(__fsqrt_rn(v), n[3])));
    }
};

struct Lion {
    // Decay, beta1, 1 - beta1, beta2, 1 - beta2, minus the learning rate.
    static __device__ __forceinline__ void step(const Numbers &n, float g, float &w, float &m, float &) {
        const float direction = __fmaf_rn(g, n[2], __fmul_rn(m, n[1]));
        const float sign = direction < 0.0f ? -1.0f : 0.0f < direction ? 1.0f : 0.0f;
        m = __fmaf_rn(g, n[4], __fmul_rn(m, n[3]));
        w = __fmaf_rn(sign, n[5], __fmul_rn(w, n[0]));
    }
};

struct Sgd {
    // Weight decay, minus the learning rate.
    static __device__ __forceinline__ void step(const Numbers &n, float g, float &w, float &, float &) {
        w = __fmaf_rn(__fmaf_rn(w, n[0], g), n[1], w);
    }
};

struct Momentum {
    // Weight decay, momentum, share of the gradient, of the buffer and of the gradient in the direction,
    // minus the learning rate.
    static __device__ __forceinline__ void step(const Numbers &n, float g, float &w, float &buffer, float &) {
        g = __fmaf_rn(w, n[0], g);
        buffer = __fmaf_rn(g, n[2], __fmul_rn(buffer, n[1]));
        w = __fmaf_rn(__fmaf_rn(buffer, n[3], __fmul_rn(g, n[4])), n[5], w);
    }
};

struct ScheduleFreeAdamW {
    // Whether z is the nearer of y and z, the way from it, beta2, 1 - beta2, the second correction, eps,
    // weight decay, factors of the direction for y and z.
    static __device__ __forceinline__ void step(const Numbers &n, float g, float &y, float &z, float &v) {
        v = __fmaf_rn(__fmul_rn(g, n[3]), g, __fmul_rn(v, n[2]));
        float direction = __fdiv_rn(g, __fadd_rn(__fsqrt_rn(__fdiv_rn(v, n[4])), n[5]));
        direction = __fmaf_rn(y, n[6], direction);
        y = __fmaf_rn(__fadd_rn(z, -y), n[1], 0.0f < n[0] ? z : y);
        y = __fmaf_rn(direction, n[7], y);
        z = __fmaf_rn(direction, n[8], z);
    }
};

struct MuonMomentum {
    // Of the new average and of the direction: whether the second end is the nearer one, the way from it.
    static __device__ __forceinline__ void step(const Numbers &n, float g, float &direction, float &m, float &) {
        m = __fmaf_rn(__fadd_rn(g, -m), n[1], 0.0f < n[0] ? g : m);
        direction = __fmaf_rn(__fadd_rn(m, -g), n[3], 0.0f < n[2] ? m : g);
    }
};

struct DecayedUpdate {
    // What stays of the weights, minus the learning rate.
    static __device__ __forceinline__ void step(const Numbers &n, float direction, float &w, float &, float &) {
        w = __fmaf_rn(direction, n[1], __fmul_rn(w, n[0]));
    }
};

struct ScaledGradient {
    static __device__ __forceinline__ void step(const Numbers &, float g, float &w, float &, float &) { w = g; }
};

// A step with states of two formats; `NONE` for those that the rule has not.
template <typename Rule, int A, int B>
__device__ __forceinline__ void update(const float *grad, const int64_t *sums, bool are_terms, float grad_scale, const Weights &weights,
                                       States<A> a_states, States<B> b_states, const Numbers &numbers, long long n) {
    SHARED(float, a_values, A == SIGNED || A == UNSIGNED ? 256 : 1);
    SHARED(float, b_values, B == SIGNED || B == UNSIGNED ? 256 : 1);
    a_states.values = a_values, b_states.values = b_values;
    const bool wide = is_aligned<VECTOR>(grad) && is_aligned<2>(sums) && weights.is_wide() && a_states.is_wide() && b_states.is_wide();
    const LaneRange range = lane_range(wide, n);
    LaneValues g, w, a, b;
    read_gradient(grad, sums, are_terms, grad_scale, range, g);
    read(weights.master, range, w);
    load_map<A>(a_values);
    load_map<B>(b_values);
    if (A == SIGNED || A == UNSIGNED || B == SIGNED || B == UNSIGNED) __syncthreads();
    if (range.start >= range.n) return;
    a_states.load_states(range, a);
    b_states.load_states(range, b);
#pragma unroll
    for (int vec = 0; vec < VECTORS; vec++) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) Rule::step(numbers, g[vec][i], w[vec][i], a[vec][i], b[vec][i]);
    }
    weights.store_all(range, w);
    a_states.store_states(range, a);
    b_states.store_states(range, b);
}

} // namespace

#define UPDATE_PARAMETERS                                                                                               \
    const float *grad, const int64_t *sums, int are_terms, float grad_scale, float *master, float *f32_copy, bf16 *bf16_copy
#define STATE_PARAMETERS(s)                                                                                             \
    void *s, float *s##_scales, uint32_t s##_key, uint32_t s##_first, uint32_t s##_width, uint32_t s##_stride,          \
        uint32_t s##_skipped
#define STATE(s) {s, s##_scales, nullptr, s##_key, s##_first, s##_width, s##_stride, s##_skipped}
#define NUMBER_PARAMETERS                                                                                               \
    float n0, float n1, float n2, float n3, float n4, float n5, float n6, float n7, float n8, long long n
#define ALL_NUMBERS {n0, n1, n2, n3, n4, n5, n6, n7, n8}

#define WITHOUT_STATES(name, Rule)                                                                                      \
    KERNEL_BOUNDS(name, THREADS, 4, UPDATE_PARAMETERS, NUMBER_PARAMETERS) {                                             \
        const Numbers numbers = ALL_NUMBERS;                                                                            \
        update<Rule, NONE, NONE>(grad, sums, are_terms, grad_scale, {master, f32_copy, bf16_copy}, {}, {}, numbers, n);            \
    }
#define WITH_STATE(name, Rule, A)                                                                                       \
    KERNEL_BOUNDS(name, THREADS, 4, UPDATE_PARAMETERS, STATE_PARAMETERS(a), NUMBER_PARAMETERS) {                        \
        const Numbers numbers = ALL_NUMBERS;                                                                            \
        update<Rule, A, NONE>(grad, sums, are_terms, grad_scale, {master, f32_copy, bf16_copy}, STATE(a), {}, numbers, n);         \
    }
#define WITH_STATES(name, Rule, A, B)                                                                                   \
    KERNEL_BOUNDS(name, THREADS, 4, UPDATE_PARAMETERS, STATE_PARAMETERS(a), STATE_PARAMETERS(b), NUMBER_PARAMETERS) {   \
        const Numbers numbers = ALL_NUMBERS;                                                                            \
        update<Rule, A, B>(grad, sums, are_terms, grad_scale, {master, f32_copy, bf16_copy}, STATE(a), STATE(b), numbers, n);      \
    }

WITH_STATES(adamw_f32_f32, AdamW, F32, F32)
WITH_STATES(adamw_f32_bf16, AdamW, F32, BF16)
WITH_STATES(adamw_f32_8bit, AdamW, F32, UNSIGNED)
WITH_STATES(adamw_bf16_f32, AdamW, BF16, F32)
WITH_STATES(adamw_bf16_bf16, AdamW, BF16, BF16)
WITH_STATES(adamw_bf16_8bit, AdamW, BF16, UNSIGNED)
WITH_STATES(adamw_8bit_f32, AdamW, SIGNED, F32)
WITH_STATES(adamw_8bit_bf16, AdamW, SIGNED, BF16)
WITH_STATES(adamw_8bit_8bit, AdamW, SIGNED, UNSIGNED)

WITH_STATE(rmsprop_f32, RmsProp, F32)
WITH_STATE(rmsprop_bf16, RmsProp, BF16)
WITH_STATE(rmsprop_8bit, RmsProp, UNSIGNED)

WITH_STATE(lion_f32, Lion, F32)
WITH_STATE(lion_bf16, Lion, BF16)
WITH_STATE(lion_8bit, Lion, SIGNED)

WITH_STATES(schedule_free_adamw_f32_f32, ScheduleFreeAdamW, F32, F32)
WITH_STATES(schedule_free_adamw_f32_bf16, ScheduleFreeAdamW, F32, BF16)
WITH_STATES(schedule_free_adamw_f32_8bit, ScheduleFreeAdamW, F32, UNSIGNED)

WITH_STATE(muon_momentum_f32, MuonMomentum, F32)
WITH_STATE(muon_momentum_bf16, MuonMomentum, BF16)
WITH_STATE(muon_momentum_8bit, MuonMomentum, SIGNED)
WITHOUT_STATES(decayed_update, DecayedUpdate)

WITHOUT_STATES(scaled_gradient, ScaledGradient)

WITHOUT_STATES(sgd, Sgd)
WITH_STATE(momentum_f32, Momentum, F32)
WITH_STATE(momentum_bf16, Momentum, BF16)
WITH_STATE(momentum_8bit, Momentum, SIGNED)


namespace {

// The nearest integer of a number below 2⁵¹; its bits, less the rounder's, are added to `sum`.
__device__ __forceinline__ double to_integer(double x, long long &sum) {
    constexpr double ROUNDER = 6755399441055744.0;
    const double nearest = (x + ROUNDER) - ROUNDER;
    sum += (long long)nearest;
    return nearest;
}

} // namespace

// Σ x² of each 16384 elements: a block of threads for each. A square is cut into multiples of 2⁻¹⁰, 2⁻⁵⁰
// and 2⁻⁹⁰, which are summed as integers; squares from 2³⁸ on, and NaN, are summed in f64. All products
// below are exact.
KERNEL_BOUNDS(block_squares, THREADS, 4, const float *x, const int64_t *sums, int are_terms, long long *squares, long long n) {
    constexpr int SQUARES_BLOCK = 1 << 14;
    const bool wide = is_aligned<VECTOR>(x) && is_aligned<2>(sums);
    const size_t start = size_t(blockIdx.x) * SQUARES_BLOCK;
    long long parts[3] = {};
    double large = 0;
#pragma unroll 4
    for (int first = 0; first < SQUARES_BLOCK; first += VECTOR * THREADS) {
        const size_t at = start + first + VECTOR * threadIdx.x;
        const int count = int(max(0ll, min((long long)VECTOR, n - (long long)at)));
        const bool is_whole = wide && count == VECTOR;
        float values[VECTOR];
        if (sums) {
            read_sums(sums + at, is_whole, count, values);
        } else if (is_whole) {
            load_many(x + at, values);
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) values[i] = i < count ? x[at + i] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            const double value = are_terms ? of_one_term(values[i]) : values[i];
            const double square = value * value;
            const bool is_small = square < 0x1p38;
            if (!is_small) large += square;
            const double small = is_small ? square : 0.0;
            const double high = to_integer(small * 0x1p10, parts[0]);
            const double rest = (small - high * 0x1p-10) * 0x1p50;
            const double middle = to_integer(rest, parts[1]);
            to_integer((rest - middle) * 0x1p40, parts[2]);
        }
    }
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const long long total = block_sum<THREADS>(parts[i]);
        if (threadIdx.x == 0) squares[size_t(4) * blockIdx.x + i] = total;
    }
    const double of_large = block_sum<THREADS>(large);
    if (threadIdx.x == 0) reinterpret_cast<double *>(squares)[size_t(4) * blockIdx.x + 3] = of_large;
}
