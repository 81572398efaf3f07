// Optimiser steps over flat buffers, and sums of squares.
//
// Steps have the bits of the processor's (`src/cpu/optimizer.rs`, `src/cpu/states.rs`): operations are rounded one by one, in that
// order. So a compiler finds no product here that it could fuse with a sum, but for those that are exact.
#include "states.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

// The nearest f32 of a fixed-point sum, rounded twice, by way of f64.
__device__ __forceinline__ float nearest(int64_t sum) { return float(double(sum) * 0x1p-48); }

__device__ __forceinline__ void read_sums(const int64_t *at, bool is_whole, int count, float (&x)[RUN]) {
    if (is_whole) {
        int64_t first[2], second[2];
        load_many(at, first);
        load_many(at + 2, second);
        x[0] = nearest(first[0]), x[1] = nearest(first[1]), x[2] = nearest(second[0]), x[3] = nearest(second[1]);
    } else {
#pragma unroll
        for (int i = 0; i < RUN; i++) x[i] = i < count ? nearest(at[i]) : 0.0f;
    }
}

// One of the two forms of a gradient, and null for the other.
__device__ __forceinline__ void read_gradient(const float *grad, const int64_t *sums, float scale, const Place &place,
                                              Elements &g) {
    if (sums) {
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            read_sums(sums + place.at(run), place.is_whole(run), place.count(run), g[run]);
        }
    } else {
        read(grad, place, g);
    }
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
#pragma unroll
        for (int i = 0; i < RUN; i++) g[run][i] = __fmul_rn(g[run][i], scale);
    }
}

// The weights, and a copy in either type or none.
struct Weights {
    float *master;
    float *f32_copy;
    bf16 *bf16_copy;

    __device__ __forceinline__ void put(const Place &place, const Elements &w) const {
        write(master, place, w);
        if (f32_copy) write(f32_copy, place, w);
        if (bf16_copy) write(bf16_copy, place, w);
    }
    __device__ __forceinline__ bool is_wide() const {
        return is_aligned<RUN>(master) && is_aligned<RUN>(f32_copy) && is_aligned<RUN>(bf16_copy);
    }
};

// Where a warp's elements are; beyond the last there are none.
__device__ __forceinline__ Place place_of(bool wide, long long n) {
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
    const bool wide = is_aligned<RUN>(grad) && is_aligned<2>(sums) && weights.is_wide() && m_states.is_wide() && v_states.is_wide();
    const Place place = place_of(wide, n);
    Elements g, w, m, v;
    read_gradient(grad, sums, grad_scale, place, g);
    read(weights.master, place, w);
    bring_values<M>(m_values);
    bring_values<V>(v_values);
    if (M == SIGNED || V == UNSIGNED) __syncthreads();
    if (place.start >= place.n) return;
    m_states.open(place, m);
    v_states.open(place, v);
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
#pragma unroll
        for (int i = 0; i < RUN; i++) adamw.step(g[run][i], w[run][i], m[run][i], v[run][i]);
    }
    weights.put(place, w);
    m_states.close(place, m);
    v_states.close(place, v);
}

template <int V>
__device__ __forceinline__ void rmsprop(const float *grad, const int64_t *sums, float grad_scale, const Weights &weights,
                                        States<V> v_states, const RmsProp &rmsprop, long long n) {
    SHARED(float, v_values, V == UNSIGNED ? 256 : 1);
    v_states.values = v_values;
    const bool wide = is_aligned<RUN>(grad) && is_aligned<2>(sums) && weights.is_wide() && v_states.is_wide();
    const Place place = place_of(wide, n);
    Elements g, w, v;
    read_gradient(grad, sums, grad_scale, place, g);
    read(weights.master, place, w);
    bring_values<V>(v_values);
    if (V == UNSIGNED) __syncthreads();
    if (place.start >= place.n) return;
    v_states.open(place, v);
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
#pragma unroll
        for (int i = 0; i < RUN; i++) rmsprop.step(g[run][i], w[run][i], v[run][i]);
    }
    weights.put(place, w);
    v_states.close(place, v);
}

} // namespace

#define ADAMW(name, M, V)                                                                                               \
    KERNEL_BOUNDS(name, THREADS, 4, const float *grad, const int64_t *sums, float grad_scale, float *master,            \
                  float *f32_copy, bf16 *bf16_copy, void *m, float *m_scales, uint32_t m_key, uint32_t m_first,         \
                  void *v, float *v_scales, uint32_t v_key, uint32_t v_first, float decay, float one_minus_beta1,       \
                  float beta2, float one_minus_beta2, float root_correction2, float eps, float minus_step_size,         \
                  long long n) {                                                                                        \
        adamw<M, V>(grad, sums, grad_scale, {master, f32_copy, bf16_copy}, {m, m_scales, nullptr, m_key, m_first},      \
                    {v, v_scales, nullptr, v_key, v_first},                                                             \
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
                  float weight_decay, float alpha, float one_minus_alpha, float eps, float minus_learning_rate,         \
                  long long n) {                                                                                        \
        rmsprop<V>(grad, sums, grad_scale, {master, f32_copy, bf16_copy}, {v, v_scales, nullptr, v_key, v_first},       \
                   {weight_decay, alpha, one_minus_alpha, eps, minus_learning_rate}, n);                                \
    }
RMSPROP(rmsprop_f32, F32)
RMSPROP(rmsprop_bf16, BF16)
RMSPROP(rmsprop_8bit, UNSIGNED)

// Σ x² of each 16384 elements, in f64: a block of threads for each.
KERNEL_BOUNDS(block_squares, THREADS, 4, const float *x, const int64_t *sums, double *squares, long long n) {
    constexpr int SQUARES_BLOCK = 1 << 14;
    const bool wide = is_aligned<RUN>(x) && is_aligned<2>(sums);
    const size_t start = size_t(blockIdx.x) * SQUARES_BLOCK;
    double sum[RUN] = {};
#pragma unroll 4
    for (int first = 0; first < SQUARES_BLOCK; first += RUN * THREADS) {
        const size_t at = start + first + RUN * threadIdx.x;
        const int count = int(max(0ll, min((long long)RUN, n - (long long)at)));
        const bool is_whole = wide && count == RUN;
        float values[RUN];
        if (sums) {
            read_sums(sums + at, is_whole, count, values);
        } else if (is_whole) {
            load_many(x + at, values);
        } else {
#pragma unroll
            for (int i = 0; i < RUN; i++) values[i] = i < count ? x[at + i] : 0.0f;
        }
        // Squares of f32 are exact in f64.
#pragma unroll
        for (int i = 0; i < RUN; i++) sum[i] += double(values[i]) * double(values[i]);
    }
    const double total = block_sum<THREADS>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    if (threadIdx.x == 0) squares[blockIdx.x] = total;
}
