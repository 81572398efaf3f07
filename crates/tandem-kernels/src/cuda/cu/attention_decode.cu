// Attention of single tokens over a key/value cache: bound by reading the cache, once for up to
// eight heads.
//
// A query's keys are cut into *parts* of 128. If a query has several parts, each part writes its sum
// of values, largest score and sum of weights, and a second kernel combines parts in order. Parts
// count from a query's first key, so its result does not depend on other queries.
//
// Threads: `attention_decode` has a block of 128 threads per (part, pack of heads); `lanes` threads
// read a row of 16-byte vectors. `attention_combine` has a block per (query, head).
// Bytes: 2 · head_dim elements per visible cache row and key/value head; `head_dim + 2` f32 per part
// and head, if a query has several parts.
#include "attention.cuh"

namespace {

constexpr int THREADS = 128, WARPS = THREADS / WARP, PART = 128, WIDEST = 256;

// Elements of 16 bytes, which are moved at once.
template <typename T> constexpr int SIDE = 16 / sizeof(T);

// A row's elements from `column` on; zeros beyond the head, and where there is no row.
template <typename T>
__device__ __forceinline__ void load_side(const T *row, int column, int head_dim, bool wide, float (&x)[SIDE<T>]) {
    constexpr int N = SIDE<T>;
    if (wide && column < head_dim) {
        const uint4 words = *reinterpret_cast<const uint4 *>(row + column);
        const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (N == 4) x[i] = __uint_as_float(all[i]);
            else x[2 * i % N] = low_float(all[i]), x[(2 * i + 1) % N] = high_float(all[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = column + i < head_dim ? load(row + column + i) : 0.0f;
    }
}

// The sum over `lanes` neighbours, which each has.
__device__ __forceinline__ float sum_of(float x, int lanes) {
    for (int by = lanes / 2; by > 0; by /= 2) x += __shfl_xor_sync(ALL, x, by);
    return x;
}

// `parts` are (query, number of keys, first key's number, pieces) each; the last may have no keys. `lanes` neighbouring
// threads, a power of two, take a row.
template <typename T, int PACK>
__device__ __forceinline__ void
decode(const uint32_t *__restrict__ parts, const T *__restrict__ q, int q_stride, const T *__restrict__ k, int k_stride,
       const T *__restrict__ v, int v_stride, T *__restrict__ out, int out_stride, float *__restrict__ partial, int heads,
       int head_dim, int pack, int group, float scale, float softcap, int lanes) {
    constexpr int N = SIDE<T>, AT_ONCE = 4;
    SHARED(int, rows, PART);
    SHARED(float, weights, PACK * PART);
    SHARED(float, queries, PACK * WIDEST);
    SHARED(float, of_warps, WARPS * PACK * WARP * N);
    SHARED(float, statistics, 2 * PACK);

    const uint4 *const all = reinterpret_cast<const uint4 *>(parts);
    const uint4 part = all[blockIdx.x];
    const int query = int(part.x), count = int(part.y), thread = threadIdx.x, first_head = int(blockIdx.y) * pack;
    if (count == 0) return;
    k += first_head / group * head_dim, v += first_head / group * head_dim;
    if (thread < count) {
        Axis axis(all + part.w);
        axis.reach(part.z + thread);
        rows[thread] = int(part.z + thread + axis.row);
    }
    for (int i = thread; i < PACK * WIDEST; i += THREADS) {
        const int head = i / WIDEST, column = i % WIDEST;
        const bool is_there = head < pack && column < head_dim;
        queries[i] = is_there ? load(q + size_t(query) * q_stride + (first_head + head) * head_dim + column) : 0.0f;
    }
    __syncthreads();

    // Products: four rows at once for each group of lanes, so that enough is under way.
    const int lane = thread % lanes, row_of_block = thread / lanes, rows_at_once = THREADS / lanes;
    const bool wide = is_wide(k, k_stride, head_dim) && is_wide(v, v_stride, head_dim);
    for (int first = 0; first < count; first += AT_ONCE * rows_at_once) {
        float products[AT_ONCE][PACK] = {};
        for (int column = lane * N; column < head_dim; column += lanes * N) {
            float x[AT_ONCE][N];
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) {
                const int key = first + r * rows_at_once + row_of_block;
                load_side(k + size_t(rows[min(key, count - 1)]) * k_stride, column, head_dim, wide, x[r]);
            }
#pragma unroll
            for (int head = 0; head < PACK; head++)
#pragma unroll
                for (int i = 0; i < N; i += 4) {
                    float y[4];
                    load_many(queries + head * WIDEST + column + i, y);
#pragma unroll
                    for (int r = 0; r < AT_ONCE; r++)
#pragma unroll
                        for (int n = 0; n < 4; n++) products[r][head] += x[r][i + n] * y[n];
                }
        }
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
            const int key = first + r * rows_at_once + row_of_block;
#pragma unroll
            for (int head = 0; head < PACK; head++) {
                const float product = sum_of(products[r][head], lanes);
                if (lane == 0 && key < count) weights[head * PART + key] = product;
            }
        }
    }
    __syncthreads();

    // Weights: a warp for each head.
    for (int head = thread / WARP; head < pack; head += WARPS) {
        float scores[PART / WARP], largest = -INFINITY, sum = 0;
#pragma unroll
        for (int i = 0; i < PART / WARP; i++) {
            const int key = i * WARP + thread % WARP;
            scores[i] = key < count ? weights[head * PART + key] * scale : -INFINITY;
            if (softcap > 0 && key < count) scores[i] = softcap * tanhf(scores[i] / softcap);
            largest = fmaxf(largest, scores[i]);
        }
        // A finite one, if all are not numbers.
        largest = fmaxf(warp_max(largest), LOWEST);
#pragma unroll
        for (int i = 0; i < PART / WARP; i++) {
            const float weight = exp2_fast((scores[i] - largest) * LOG2E);
            weights[head * PART + i * WARP + thread % WARP] = weight;
            sum += weight;
        }
        sum = warp_sum(sum);
        if (thread % WARP == 0) statistics[2 * head] = largest, statistics[2 * head + 1] = sum;
    }
    __syncthreads();

    // Values: a group of lanes adds every `rows_at_once`-th row; then groups are added, those of a
    // warp, then warps in order.
    for (int first = 0; first < head_dim; first += lanes * N) {
        float sums[PACK][N] = {};
        const int column = first + lane * N;
#pragma unroll 4
        for (int key = row_of_block; key < count; key += rows_at_once) {
            float x[N];
            load_side(v + size_t(rows[key]) * v_stride, column, head_dim, wide, x);
#pragma unroll
            for (int head = 0; head < PACK; head++) {
                const float weight = head < pack ? weights[head * PART + key] : 0.0f;
#pragma unroll
                for (int i = 0; i < N; i++) sums[head][i] += weight * x[i];
            }
        }
        __syncthreads();
#pragma unroll
        for (int head = 0; head < PACK; head++)
#pragma unroll
            for (int i = 0; i < N; i++) {
                for (int by = lanes; by < WARP; by *= 2) sums[head][i] += __shfl_xor_sync(ALL, sums[head][i], by);
                if (thread % WARP < lanes) of_warps[((thread / WARP * PACK + head) * WARP + lane) * N + i] = sums[head][i];
            }
        __syncthreads();
        for (int i = thread; i < pack * lanes * N; i += THREADS) {
            const int head = i / (lanes * N), at = i % (lanes * N);
            if (first + at >= head_dim) continue;
            float sum = 0;
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++) sum += of_warps[(warp * PACK + head) * WARP * N + at];
            if (partial)
                partial[(size_t(blockIdx.x) * heads + first_head + head) * (head_dim + 2) + first + at] = sum;
            else
                store(out + size_t(query) * out_stride + (first_head + head) * head_dim + first + at,
                      sum / statistics[2 * head + 1]);
        }
    }
    if (partial && thread < 2 * pack)
        partial[(size_t(blockIdx.x) * heads + first_head + thread / 2) * (head_dim + 2) + head_dim + thread % 2] =
            statistics[thread];
}

// A block for each query and head: `queries` are (first part, number of parts) each.
template <typename T>
__device__ __forceinline__ void combine(const uint32_t *__restrict__ queries, const float *__restrict__ partial,
                                        T *__restrict__ out, int out_stride, int heads, int head_dim) {
    const int query = blockIdx.x, head = blockIdx.y, width = head_dim + 2;
    const int first = int(queries[2 * query]), count = int(queries[2 * query + 1]);
    partial += (size_t(first) * heads + head) * width;
    const size_t next = size_t(heads) * width;
    float largest = LOWEST;
    for (int part = 0; part < count; part++) largest = fmaxf(largest, partial[part * next + head_dim]);
    for (int column = threadIdx.x; column < head_dim; column += THREADS) {
        float sum = 0, weights = 0;
        for (int part = 0; part < count; part++) {
            const float *of = partial + part * next;
            const float weight = exp2_fast((of[head_dim] - largest) * LOG2E);
            sum += weight * of[column], weights += weight * of[head_dim + 1];
        }
        store(out + size_t(query) * out_stride + head * head_dim + column, sum / weights);
    }
}

} // namespace

#define DECODE(name, T, PACK)                                                                                              \
    KERNEL_BOUNDS(name, THREADS, 4, const uint32_t *parts, const T *q, int q_stride, const T *k, int k_stride, const T *v,  \
                  int v_stride, T *out, int out_stride, float *partial, int heads, int head_dim, int pack, int group,      \
                  float scale, float softcap, int lanes) {                                                                 \
        decode<T, PACK>(parts, q, q_stride, k, k_stride, v, v_stride, out, out_stride, partial, heads, head_dim, pack,      \
                        group, scale, softcap, lanes);                                                                     \
    }
#define COMBINE(name, T)                                                                                                   \
    KERNEL_BOUNDS(name, THREADS, 4, const uint32_t *queries, const float *partial, T *out, int out_stride, int heads,       \
                  int head_dim) {                                                                                          \
        combine(queries, partial, out, out_stride, heads, head_dim);                                                       \
    }
#define ALL_KERNELS(type, T)                                                                                               \
    DECODE(attention_decode_1_##type, T, 1)                                                                                \
    DECODE(attention_decode_2_##type, T, 2)                                                                                \
    DECODE(attention_decode_4_##type, T, 4)                                                                                \
    DECODE(attention_decode_8_##type, T, 8)                                                                                \
    COMBINE(attention_combine_##type, T)
ALL_KERNELS(f32, float)
ALL_KERNELS(bf16, bf16)
