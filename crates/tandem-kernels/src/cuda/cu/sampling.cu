// A token from each row of logits: the likeliest, or one drawn by its weight.
//
// Threads: a block of 512 per row. Logits are read from memory once for the largest and, from the cache of a
// GPU, once more for the weights' sums.
// Bytes per logit: 4 read, 8 where a token is drawn.
#include "common.cuh"

namespace {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
// Logits whose weights a warp sums at once, and those of a lane.
constexpr int CHUNK = 512;
constexpr int OF_LANE = CHUNK / WARP;
// Stands for a row of which no token can be drawn: as in `ops/sampling.rs`.
constexpr uint32_t NOT_FINITE = 0xffffffffu;

struct Shape {
    float scale, cap, inverse_cap;
};

__device__ __forceinline__ float shaped(float logit, const Shape &shape) {
    const float scaled = __fmul_rn(logit, shape.scale);
    return shape.cap > 0 ? __fmul_rn(tanhf(__fmul_rn(scaled, shape.inverse_cap)), shape.cap) : scaled;
}

// A token and its logit: the larger one, of equals the one with the smaller number.
struct Best {
    float logit;
    int token;

    __device__ __forceinline__ void see(float other, int its_token) {
        if (other > logit || (other == logit && its_token < token)) logit = other, token = its_token;
    }
};

// Over all threads of a block; every thread has the result.
__device__ __forceinline__ Best block_best(Best best) {
    SHARED(float, logits, WARPS);
    SHARED(int, tokens, WARPS);
#pragma unroll
    for (int by = WARP / 2; by > 0; by /= 2) {
        const float logit = __shfl_xor_sync(ALL, best.logit, by);
        const int token = __shfl_xor_sync(ALL, best.token, by);
        best.see(logit, token);
    }
    if (threadIdx.x % WARP == 0) logits[threadIdx.x / WARP] = best.logit, tokens[threadIdx.x / WARP] = best.token;
    __syncthreads();
    best.logit = logits[0], best.token = tokens[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) best.see(logits[warp], tokens[warp]);
    return best;
}

// Weights of a row, relative to its largest.
struct Weights {
    Shape shape;
    float largest, factor;

    __device__ __forceinline__ float of(float logit) const { return expf((shaped(logit, shape) - largest) * factor); }
};

// The last token of a chunk with a weight; a chunk with a sum has one.
__device__ __forceinline__ uint32_t last_with_weight(const float *logits, const Weights &weights, int start, int end) {
    int token = end - 1;
    while (token > start && !(weights.of(logits[token]) > 0.0f)) token--;
    return uint32_t(token);
}

} // namespace

// `temperatures` are 0 where the likeliest token is wanted; `uniforms` are at least 0 and less than 1. The dynamic
// shared memory has a sum for each chunk.
KERNEL_BOUNDS(sample_rows, THREADS, 2, const float *logits, long long stride, int count, float scale, float cap, float inverse_cap,
              const float *temperatures, const double *uniforms, uint32_t *tokens) {
    DYNAMIC_SHARED(memory);
    SHARED(double, of_lanes, WARP);
    SHARED(int, picked, 1);
    SHARED(double, left_over, 1);
    double *const sums = reinterpret_cast<double *>(memory);
    const size_t row = blockIdx.x;
    logits += row * stride;
    const int lane = threadIdx.x % WARP, chunks = (count + CHUNK - 1) / CHUNK;

    Best best = {-INFINITY, count};
    float num_bad = 0;
    for (int token = int(threadIdx.x); token < count; token += THREADS) {
        const float logit = logits[token];
        if (!(logit < INFINITY)) num_bad = 1;
        best.see(logit, token);
    }
    best = block_best(best);
    num_bad = block_sum<THREADS>(num_bad);
    const float temperature = temperatures[row];
    if (num_bad > 0 || best.logit == -INFINITY || temperature == 0.0f) {
        const bool is_good = num_bad == 0 && best.logit > -INFINITY;
        if (threadIdx.x == 0) tokens[row] = is_good ? uint32_t(best.token) : NOT_FINITE;
        return;
    }

    const Shape shape = {scale, cap, inverse_cap};
    const Weights weights = {shape, shaped(best.logit, shape), 1.0f / temperature};
    for (int chunk = int(threadIdx.x) / WARP; chunk < chunks; chunk += WARPS) {
        double sum = 0;
#pragma unroll 4
        for (int i = 0; i < OF_LANE; i++) {
            const int token = chunk * CHUNK + i * WARP + lane;
            if (token < count) sum += weights.of(logits[token]);
        }
        sum = warp_sum(sum);
        if (lane == 0) sums[chunk] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0;
        int last = 0;
        for (int chunk = 0; chunk < chunks; chunk++) {
            total += sums[chunk];
            if (sums[chunk] > 0) last = chunk;
        }
        double left = uniforms[row] * total;
        int chunk = 0;
        while (chunk < last && left >= sums[chunk]) left -= sums[chunk++];
        picked[0] = chunk, left_over[0] = left;
    }
    __syncthreads();
    if (threadIdx.x >= WARP) return;

    // Of the chunk a lane takes neighbouring tokens.
    const int start = picked[0] * CHUNK, end = min(start + CHUNK, count);
    double sum = 0;
    for (int i = 0; i < OF_LANE; i++) {
        const int token = start + lane * OF_LANE + i;
        if (token < end) sum += weights.of(logits[token]);
    }
    of_lanes[lane] = sum;
    __syncwarp();
    if (lane > 0) return;
    double left = left_over[0];
    int other = 0;
    while (other < WARP && left >= of_lanes[other]) left -= of_lanes[other++];
    // Rounding may leave a remainder.
    uint32_t token = last_with_weight(logits, weights, start, other < WARP ? min(start + (other + 1) * OF_LANE, end) : end);
    for (int i = 0; other < WARP && i < OF_LANE; i++) {
        const int at = start + other * OF_LANE + i;
        if (at >= end) break;
        left -= weights.of(logits[at]);
        if (left < 0) {
            token = uint32_t(at);
            break;
        }
    }
    tokens[row] = token;
}
