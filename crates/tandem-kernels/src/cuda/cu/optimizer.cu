// Optimiser steps over flat buffers, and sums of squares.
//
// Steps match the bits of the CPU (`cpu/optimizer.rs`, `cpu/states.rs`): operations are rounded one
// by one, in that order. The compiler finds no product to fuse with a sum, except exact ones.
//
// Threads: blocks of 256, 8 warps; a warp takes 256 consecutive elements (one block of 8-bit states),
// a lane two vectors of four (`states.cuh`). `block_squares` has a block per 16384 elements.
// Bytes per element: gradient 4 (8 as a fixed-point sum), master 8, copy 4 or 2, each state twice
// its size (8, 4 or 2 + 1/32). `block_squares` reads 4 or 8.
#include "states.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

// The nearest f32 of a fixed-point sum, rounded twice, by way of f64.
__device__ __forceinline__ float nearest(int64_t sum) { return float(double(sum) * 0x1p-48); }

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

// Reads the gradient from one representation; the other is null.
__device__ __forceinline__ void read_gradient(const float *grad, const int64_t *sums, float scale, const LaneRange &range,
                                              LaneValues &g) {
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
        for (int i = 0; i < VECTOR; i++) g[vec][i] = __fmul_rn(g[vec][i], scale);
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

// The scalars of a step.
struct AdamW {
    float decay, one_minus_beta1, beta2, one_minus_beta2, root_correction2, eps, minus_step_size;

    __device__ __forceinline__ void step(float g, float &w, float &m, float &v) const {
        m = __fmaf_rn(__fadd_rn(g, -m), one_minus_beta1, m);
        v = __fmaf_rn(__fmul_rn(g, one_minus_beta2), g, __fmul_rn(v, beta2));
        const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), root_correction2), eps);
        w = __fadd_rn(__fmul_rn(w, decay), __fdiv_rn(__fmul_rn(m, minus_step_size), root));
    }
};

struct RmsProp {
    float weight_decay, alpha, one_minus_alpha, eps, minus_learning_rate;

    __device__ __forceinline__ void step(float g, float &w, float &v) const {
        g = __fmaf_rn(w, weight_decay, g);
        v = __fmaf_rn(__fmul_rn(g, one_minus_alpha), g, __fmul_rn(v, alpha));
        const float root = __fadd_rn(__fsqrt_rn(v), eps);
        w = __fadd_rn(w, __fdiv_rn(__fmul_rn(g, minus_learning_rate), root));
    }
};

template <int M, int V>
__device__ __forceinline__ void adamw(const float *grad, const int64_t *sums, float grad_scale, const Weights &weights,
                                      States<M> m_states, States<V> v_states, const AdamW &adamw, long long n) {
    SHARED(float, m_values, M == SIGNED ? 256 : 1);
    SHARED(float, v_values, V == UNSIGNED ? 256 : 1);
    m_states.values = m_values, v_states.values = v_values;
    const bool wide = is_aligned<VECTOR>(grad) && is_aligned<2>(sums) && weights.is_wide() && m_states.is_wide() && v_states.is_wide();
    const LaneRange range = lane_range(wide, n);
    LaneValues g, w, m, v;
    read_gradient(grad, sums, grad_scale, range, g);
    read(weights.master, range, w);
    load_map<M>(m_values);
    load_map<V>(v_values);
    if (M == SIGNED || V == UNSIGNED) __syncthreads();
    if (range.start >= range.n) return;
    m_states.load_states(range, m);
    v_states.load_states(range, v);
#pragma unroll
    for (int vec = 0; vec < VECTORS; vec++) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) adamw.step(g[vec][i], w[vec][i], m[vec][i], v[vec][i]);
    }
    weights.store_all(range, w);
    m_states.store_states(range, m);
    v_states.store_states(range, v);
}

template <int V>
__device__ __forceinline__ void rmsprop(const float *grad, const int64_t *sums, float grad_scale, const Weights &weights,
                                        States<V> v_states, const RmsProp &rmsprop, long long n) {
    SHARED(float, v_values, V == UNSIGNED ? 256 : 1);
    v_states.values = v_values;
    const bool wide = is_aligned<VECTOR>(grad) && is_aligned<2>(sums) && weights.is_wide() && v_states.is_wide();
    const LaneRange range = lane_range(wide, n);
    LaneValues g, w, v;
    read_gradient(grad, sums, grad_scale, range, g);
    read(weights.master, range, w);
    load_map<V>(v_values);
    if (V == UNSIGNED) __syncthreads();
    if (range.start >= range.n) return;
    v_states.load_states(range, v);
#pragma unroll
    for (int vec = 0; vec < VECTORS; vec++) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) rmsprop.step(g[vec][i], w[vec][i], v[vec][i]);
    }
    weights.store_all(range, w);
    v_states.store_states(range, v);
}

} // namespace

#define ADAMW(name, M, V)                                                                                               \
    KERNEL_BOUNDS(name, THREADS, 4, const float *grad, const int64_t *sums, float grad_scale, float *master,            \
                  float *f32_copy, bf16 *bf16_copy, void *m, float *m_scales, uint32_t m_key, uint32_t m_first,         \
                  uint32_t m_width, uint32_t m_stride, uint32_t m_skipped, void *v, float *v_scales, uint32_t v_key,    \
                  uint32_t v_first, uint32_t v_width, uint32_t v_stride, uint32_t v_skipped, float decay,               \
                  float one_minus_beta1,                                                                                \
                  float beta2, float one_minus_beta2, float root_correction2, float eps, float minus_step_size,         \
                  long long n) {                                                                                        \
        adamw<M, V>(grad, sums, grad_scale, {master, f32_copy, bf16_copy},                                              \
                    {m, m_scales, nullptr, m_key, m_first, m_width, m_stride, m_skipped},                               \
                    {v, v_scales, nullptr, v_key, v_first, v_width, v_stride, v_skipped},                               \
                    {decay, one_minus_beta1, beta2, one_minus_beta2, root_correction2, eps, minus_step_size}, n);       \
    }
ADAMW(adamw_f32_f32, F32, F32)
ADAMW(adamw_f32_bf16, F32, BF16)
ADAMW(adamw_f32_8bit, F32, UNSIGNED)
ADAMW(adamw_bf16_f32, BF16, F32)
ADAMW(adamw_bf16_bf16, BF16, BF16)
ADAMW(adamw_bf16_8bit, BF16, UNSIGNED)
ADAMW(adamw_8bit_f32, SIGNED, F32)
ADAMW(adamw_8bit_bf16, SIGNED, BF16)
ADAMW(adamw_8bit_8bit, SIGNED, UNSIGNED)

#define RMSPROP(name, V)                                                                                                \
    KERNEL_BOUNDS(name, THREADS, 4, const float *grad, const int64_t *sums, float grad_scale, float *master,            \
                  float *f32_copy, bf16 *bf16_copy, void *v, float *v_scales, uint32_t v_key, uint32_t v_first,         \
                  uint32_t v_width, uint32_t v_stride, uint32_t v_skipped,                                              \
                  float weight_decay, float alpha, float one_minus_alpha, float eps, float minus_learning_rate,         \
                  long long n) {                                                                                        \
        rmsprop<V>(grad, sums, grad_scale, {master, f32_copy, bf16_copy},                                               \
                   {v, v_scales, nullptr, v_key, v_first, v_width, v_stride, v_skipped},                                \
                   {weight_decay, alpha, one_minus_alpha, eps, minus_learning_rate}, n);                                \
    }
RMSPROP(rmsprop_f32, F32)
RMSPROP(rmsprop_bf16, BF16)
RMSPROP(rmsprop_8bit, UNSIGNED)

// The nearest integer of a number below 2⁵¹; its bits, less the rounder's, are added to `sum`.
__device__ __forceinline__ double to_integer(double x, long long &sum) {
    constexpr double ROUNDER = 6755399441055744.0;
    const double nearest = (x + ROUNDER) - ROUNDER;
    sum += (long long)nearest;
    return nearest;
}

// Σ x² of each 16384 elements: a block of threads for each. A square is cut into multiples of 2⁻¹⁰, 2⁻⁵⁰
// and 2⁻⁹⁰, which are summed as integers; squares from 2³⁸ on, and NaN, are summed in f64. All products
// below are exact.
KERNEL_BOUNDS(block_squares, THREADS, 4, const float *x, const int64_t *sums, long long *squares, long long n) {
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
            const double square = double(values[i]) * double(values[i]);
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
