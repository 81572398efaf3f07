// E4M3, an 8-bit floating-point type, by integer arithmetic with the bits of `numerics/e4m3.rs`: GPUs
// before sm_89 have no instruction for it.
#pragma once
#include "common.cuh"

constexpr float E4M3_MAX = 448;
constexpr uint32_t E4M3_NAN = 0x7f;
// Bits of f32 to the right of the mantissa, and the difference of the exponents' biases.
constexpr int E4M3_SHIFT = 20;
constexpr uint32_t E4M3_WIDE_BIAS = 120u << 23;
constexpr float E4M3_MIN_NORMAL = 1.0f / 64.0f;

// The nearest code, ties to even. Larger numbers than `E4M3_MAX` become it; NaN stays.
__device__ __forceinline__ uint32_t to_e4m3(float x) {
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    const uint32_t half = (1u << (E4M3_SHIFT - 1)) - 1 + (magnitude >> E4M3_SHIFT & 1u);
    const uint32_t normal = ((magnitude + half) >> E4M3_SHIFT) - (E4M3_WIDE_BIAS >> E4M3_SHIFT);
    // Neighbours of 2^14 are 2^-9 apart, as subnormal numbers are.
    const float steps = 16384;
    const uint32_t subnormal = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), steps)) - __float_as_uint(steps);
    uint32_t code = magnitude < __float_as_uint(E4M3_MIN_NORMAL) ? subnormal : normal;
    code = code < E4M3_NAN ? code : E4M3_NAN - 1;
    code = magnitude > 0x7f800000u ? E4M3_NAN : code;
    return code | (bits >> 24 & 0x80u);
}

// The number of a code, which f32 holds exactly.
__device__ __forceinline__ float from_e4m3(uint32_t code) {
    const uint32_t magnitude = code & 0x7fu;
    const uint32_t normal = (magnitude << E4M3_SHIFT) + E4M3_WIDE_BIAS;
    const uint32_t subnormal = __float_as_uint(__fsub_rn(__uint_as_float(normal + (1u << 23)), E4M3_MIN_NORMAL));
    const uint32_t bits = magnitude == E4M3_NAN ? 0x7fc00000u : magnitude < 8 ? subnormal : normal;
    return __uint_as_float(bits | (code & 0x80u) << 24);
}
