// Shared parts of all kernel files: element types, memory access, sums over warps and blocks.
//
// Kernels are compiled by NVRTC for a GPU, and as C++ for the host, where `host.h` stands for
// CUDA's language (TANDEM_HOST). So
// * a kernel is `KERNEL(name, parameters) { … }` or `KERNEL_BOUNDS(name, threads, blocks a
//   multiprocessor, parameters)`, blocks are one-dimensional, and pointers are parameters of their
//   own, never inside a struct;
// * shared memory is `SHARED(type, name, count)` at the top of a function, or
//   `DYNAMIC_SHARED(name)`;
// * what only a GPU has (PTX) stands in a function here or in `mma.cuh` beside what the host does
//   instead;
// * sizes are `long long` where Rust passes a `usize`, `int` where it passes an `i32`.
#pragma once

#ifndef TANDEM_HOST
#define KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#define KERNEL_BOUNDS(name, threads, blocks, ...) extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) char name[]
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#endif

// Calls `kernel(name, X, Y)` for every pair of element types.
#define FOR_TYPES(kernel, name)               \
    kernel(name##_f32_f32, float, float)      \
    kernel(name##_f32_bf16, float, bf16)      \
    kernel(name##_bf16_f32, bf16, float)      \
    kernel(name##_bf16_bf16, bf16, bf16)

// Threads of a multiprocessor for which kernels are compiled that hold a row in registers: 64 registers each. From
// sm_100 on the compiler needs more for the same.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int RESIDENT_THREADS = 768;
#else
constexpr int RESIDENT_THREADS = 1024;
#endif

constexpr int WARP = 32;
constexpr unsigned ALL = 0xffffffffu;

// bfloat16: the upper half of an f32.
struct bf16 {
    uint16_t bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

// To nearest even; not-a-number stays so.
__device__ __forceinline__ bf16 to_bf16(float x) {
    uint32_t u = __float_as_uint(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bf16 result;
    result.bits = uint16_t(x != x ? (u >> 16) | 0x40u : rounded);
    return result;
}

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return to_bf16(x); }

template <typename T> __device__ __forceinline__ float load(const T *at) { return to_float(*at); }
template <typename T> __device__ __forceinline__ void store(T *at, float x) { *at = from_float<T>(x); }

// Two f32 as a pair of bf16, the first in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
#ifdef TANDEM_HOST
    return uint32_t(to_bf16(low).bits) | uint32_t(to_bf16(high).bits) << 16;
#else
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}
__device__ __forceinline__ float low_float(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Whether `N` elements can be moved at once from there: `at` must be aligned for them.
template <int N, typename T> __device__ __forceinline__ bool is_aligned(const T *at) {
    return (reinterpret_cast<size_t>(at) & (N * sizeof(T) - 1)) == 0;
}

// `N` elements that lie side by side, moved at once: 4, 8 or 16 bytes, aligned to as many.
template <int N> __device__ __forceinline__ void check_alignment(const void *at, size_t bytes) {
#ifdef TANDEM_HOST
    if (reinterpret_cast<size_t>(at) % bytes) tandem_host::fail("a wide access is not aligned");
#endif
}
__device__ __forceinline__ void load_many(const float *at, float (&x)[4]) {
    check_alignment<4>(at, 16);
    const float4 v = *reinterpret_cast<const float4 *>(at);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
__device__ __forceinline__ void load_many(const bf16 *at, float (&x)[4]) {
    check_alignment<4>(at, 8);
    const uint2 v = *reinterpret_cast<const uint2 *>(at);
    x[0] = low_float(v.x), x[1] = high_float(v.x), x[2] = low_float(v.y), x[3] = high_float(v.y);
}
__device__ __forceinline__ void store_many(float *at, const float (&x)[4]) {
    check_alignment<4>(at, 16);
    *reinterpret_cast<float4 *>(at) = make_float4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void store_many(bf16 *at, const float (&x)[4]) {
    check_alignment<4>(at, 8);
    *reinterpret_cast<uint2 *>(at) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
}

__device__ __forceinline__ void load_many(const int64_t *at, int64_t (&x)[2]) {
    check_alignment<2>(at, 16);
    const uint4 v = *reinterpret_cast<const uint4 *>(at);
    x[0] = int64_t(uint64_t(v.y) << 32 | v.x), x[1] = int64_t(uint64_t(v.w) << 32 | v.z);
}
__device__ __forceinline__ void store_many(int64_t *at, const int64_t (&x)[2]) {
    check_alignment<2>(at, 16);
    *reinterpret_cast<uint4 *>(at) = make_uint4(uint32_t(x[0]), uint32_t(uint64_t(x[0]) >> 32), uint32_t(x[1]),
                                                uint32_t(uint64_t(x[1]) >> 32));
}

// Every lane has the result.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int by = WARP / 2; by > 0; by /= 2) x += __shfl_xor_sync(ALL, x, by);
    return x;
}
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int by = WARP / 2; by > 0; by /= 2) x += __shfl_xor_sync(ALL, x, by);
    return x;
}
__device__ __forceinline__ long long warp_sum(long long x) {
#pragma unroll
    for (int by = WARP / 2; by > 0; by /= 2) x += __shfl_xor_sync(ALL, x, by);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int by = WARP / 2; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, by));
    return x;
}

// Over all threads of a block, in one order; every thread has the result. May be called again at
// once.
template <int THREADS, typename T> __device__ __forceinline__ T block_sum(T x) {
    constexpr int WARPS = THREADS / WARP;
    SHARED(T, of_warps, 2 * WARPS);
    x = warp_sum(x);
    if (WARPS == 1) return x;
    // The last call's readers may still be at it.
    __syncthreads();
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = x;
    __syncthreads();
    T sum = of_warps[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) sum += of_warps[warp];
    return sum;
}
