// Numbers of fixed-point sums: a term as an integer, and a sum as f32.
#pragma once
#include "common.cuh"

// Rounds towards zero; what is out of range saturates, and not-a-number becomes 0. The product is
// exact: f32 reaches further than sums do.
__device__ __forceinline__ int64_t fixed(float x) {
    const float scaled = __fmul_rn(x, 0x1p48f);
    if (fabsf(scaled) < 0x1p63f) return int64_t(scaled);
    return scaled > 0 ? 0x7fffffffffffffffll : scaled < 0 ? -0x7fffffffffffffffll - 1 : 0;
}

// Where a term was out of range the sum may be too: it wraps.
__device__ __forceinline__ int64_t plus(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }

// The nearest f32 of a sum, rounded twice, by way of f64.
__device__ __forceinline__ float nearest(int64_t sum) { return float(double(sum) * 0x1p-48); }
