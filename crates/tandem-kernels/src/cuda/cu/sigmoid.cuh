// The logistic function, of activations and gates.
#pragma once
#include "common.cuh"

// 1 / x for x from 1 to infinity, within one unit in the last place: a division that rounds right
// takes longer than the rest.
__device__ __forceinline__ float reciprocal(float x) {
#ifdef TANDEM_HOST
    return 1.0f / x;
#else
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

// 1 / (1 + e^-x).
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }
