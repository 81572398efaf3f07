// Frozen weights, unpacked into the compute type. `numerics/format.rs` describes units. The bits are
// the CPU's: products and sums are rounded one by one.
//
// Threads: nf4 has a block of 256 per unit of 16384 weights; int8 and fp8 have a block of 256 per row
// and range of 8192 columns. A thread writes 8 weights at a time.
// Bytes per weight: nf4 0.52, int8 and fp8 1 read; 4 or 2 written.
#include "common.cuh"
#include "e4m3.cuh"

namespace {

constexpr int THREADS = 256;
// Weights that a thread writes at a time.
constexpr int RUN = 8;

constexpr int NF4_BLOCK = 64;
constexpr int NF4_BLOCKS = 256;
constexpr int NF4_UNIT = NF4_BLOCK * NF4_BLOCKS;
constexpr int NF4_UNIT_LEN = 8512;
// Where a unit's scales begin, their factor and their mean.
constexpr int SCALES = NF4_UNIT / 2;
constexpr int LARGEST = SCALES + NF4_BLOCKS;
constexpr int MEAN = LARGEST + 4;

// Runs of a thread.
constexpr int NF4_RUNS = NF4_UNIT / (RUN * THREADS);
constexpr int ROW_RUNS = 4;

static_assert(THREADS == NF4_BLOCKS, "each thread has a scale");

__device__ __forceinline__ void put(float *to, const float (&x)[RUN]) {
    store_many(to, {x[0], x[1], x[2], x[3]});
    store_many(to + 4, {x[4], x[5], x[6], x[7]});
}
__device__ __forceinline__ void put(bf16 *to, const float (&x)[RUN]) {
    check_alignment<RUN>(to, 16);
    *reinterpret_cast<uint4 *>(to) =
        make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

// Of a run the first `count` weights, at once where all are wanted and aligned.
template <typename T> __device__ __forceinline__ void write(T *to, const float (&x)[RUN], long long count, bool wide) {
    if (wide && count >= RUN) {
        put(to, x);
    } else {
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            if (i < count) store(to + i, x[i]);
        }
    }
}

// A block of threads takes a unit. `tables` are the numbers that 4 bits stand for, and those that a
// byte of a scale does.
template <typename T>
__device__ __forceinline__ void unpack_nf4(const uint8_t *packed, const float *tables, T *values, long long n) {
    SHARED(float, numbers, 16);
    SHARED(float, scales, NF4_BLOCKS);
    const uint8_t *unit = packed + size_t(blockIdx.x) * NF4_UNIT_LEN;
    // Codes are on their way before scales are computed.
    uint32_t codes[NF4_RUNS];
#pragma unroll
    for (int run = 0; run < NF4_RUNS; run++) codes[run] = reinterpret_cast<const uint32_t *>(unit)[run * THREADS + threadIdx.x];
    const float largest = *reinterpret_cast<const float *>(unit + LARGEST);
    const float mean = *reinterpret_cast<const float *>(unit + MEAN);
    if (threadIdx.x < 16) numbers[threadIdx.x] = tables[threadIdx.x];
    scales[threadIdx.x] = __fadd_rn(__fmul_rn(tables[16 + unit[SCALES + threadIdx.x]], largest), mean);
    __syncthreads();
    const bool wide = is_aligned<RUN>(values);
#pragma unroll
    for (int run = 0; run < NF4_RUNS; run++) {
        const int place = RUN * (run * THREADS + threadIdx.x);
        const float scale = scales[place / NF4_BLOCK];
        float x[RUN];
#pragma unroll
        for (int i = 0; i < RUN / 2; i++) {
            // The first weight of a pair is in the high half of its byte.
            x[2 * i] = __fmul_rn(numbers[codes[run] >> (8 * i + 4) & 15u], scale);
            x[2 * i + 1] = __fmul_rn(numbers[codes[run] >> 8 * i & 15u], scale);
        }
        const size_t at = size_t(blockIdx.x) * NF4_UNIT + place;
        write(values + at, x, n - (long long)at, wide);
    }
}

struct Int8 {
    static __device__ __forceinline__ float weight(uint32_t code, float scale) {
        return __fmul_rn(__fmul_rn(float(int8_t(code)), scale), 1.0f / 127.0f);
    }
};
struct Fp8 {
    static __device__ __forceinline__ float weight(uint32_t code, float scale) { return __fmul_rn(from_e4m3(code), scale); }
};

// A row of blocks takes a row of weights, whose scale follows its codes.
template <typename Code, typename T>
__device__ __forceinline__ void unpack_rows(const uint8_t *packed, long long unit_len, T *values, long long cols) {
    const uint8_t *unit = packed + size_t(blockIdx.x) * unit_len;
    values += size_t(blockIdx.x) * cols;
    const bool wide = is_aligned<RUN>(values);
    const long long first = (long long)blockIdx.y * (ROW_RUNS * RUN * THREADS) + RUN * threadIdx.x;
    uint2 codes[ROW_RUNS] = {};
#pragma unroll
    for (int run = 0; run < ROW_RUNS; run++) {
        // A unit begins at a multiple of 64 bytes, and is as long: eight bytes from a weight's on
        // are inside.
        const long long at = first + run * (RUN * THREADS);
        if (at < cols) codes[run] = *reinterpret_cast<const uint2 *>(unit + at);
    }
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) bits |= uint32_t(unit[cols + i]) << 8 * i;
    const float scale = __uint_as_float(bits);
#pragma unroll
    for (int run = 0; run < ROW_RUNS; run++) {
        const long long at = first + run * (RUN * THREADS);
        float x[RUN];
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            x[i] = Code::weight((i < 4 ? codes[run].x : codes[run].y) >> 8 * (i % 4) & 0xffu, scale);
        }
        if (at < cols) write(values + at, x, cols - at, wide);
    }
}

} // namespace

KERNEL_BOUNDS(unpack_nf4_f32, THREADS, 4, const uint8_t *packed, const float *tables, float *values, long long n) {
    unpack_nf4(packed, tables, values, n);
}
KERNEL_BOUNDS(unpack_nf4_bf16, THREADS, 4, const uint8_t *packed, const float *tables, bf16 *values, long long n) {
    unpack_nf4(packed, tables, values, n);
}
KERNEL_BOUNDS(unpack_int8_f32, THREADS, 4, const uint8_t *packed, long long unit_len, float *values, long long cols) {
    unpack_rows<Int8>(packed, unit_len, values, cols);
}
KERNEL_BOUNDS(unpack_int8_bf16, THREADS, 4, const uint8_t *packed, long long unit_len, bf16 *values, long long cols) {
    unpack_rows<Int8>(packed, unit_len, values, cols);
}
KERNEL_BOUNDS(unpack_fp8_f32, THREADS, 4, const uint8_t *packed, long long unit_len, float *values, long long cols) {
    unpack_rows<Fp8>(packed, unit_len, values, cols);
}
KERNEL_BOUNDS(unpack_fp8_bf16, THREADS, 4, const uint8_t *packed, long long unit_len, bf16 *values, long long cols) {
    unpack_rows<Fp8>(packed, unit_len, values, cols);
}
