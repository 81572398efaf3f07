// The head's logits: statistics of a row's strip, and their gradient.
//
// Threads: a block per row of a strip, 128 threads for a narrow strip and 256 for a wide one. A
// thread holds 32 logits in registers, read once, 16 bytes at a time.
// Bytes per logit: statistics 4 read (8 more per row and prediction); gradient 4 read, 4 or 2
// written; the bias 4 more.
#include "common.cuh"

namespace {

// Logits of a thread; 16 bytes at a time.
constexpr int GROUPS = 8;

// Numbers of a row: as in `ops/head_parts.rs`.
constexpr int NUMBERS = 5;

// What is known of a target: as in `ops/head_parts.rs`.
constexpr double NOT_HERE = 0, PASSED_OVER = 1, FIRST = 2;

// Scale and softcap of the logits (none if it is 0), and the bias that is added before.
struct Shape {
    float scale, cap, inverse_cap;
};

// Each product and sum is rounded by itself, so that a logit is the same number wherever it is
// looked at.
__device__ __forceinline__ float shaped(float logit, float bias, const Shape &shape) {
    const float scaled = __fmul_rn(__fadd_rn(logit, bias), shape.scale);
    return shape.cap > 0 ? __fmul_rn(tanhf(__fmul_rn(scaled, shape.inverse_cap)), shape.cap) : scaled;
}

// Which columns of a strip are a thread's.
template <int THREADS> struct Columns {
    int count;
    bool wide;

    __device__ __forceinline__ Columns(const float *logits, const float *bias, int count)
        : count(count), wide(count % 4 == 0 && is_aligned<4>(logits) && is_aligned<4>(bias)) {}
    // The thread's `i`th column of group `group`.
    __device__ __forceinline__ int at(int group, int i) const {
        return wide ? 4 * (threadIdx.x + group * THREADS) + i : threadIdx.x + (4 * group + i) * THREADS;
    }
    __device__ __forceinline__ bool has(int group, int i) const { return at(group, i) < count; }
    // The thread that has a column, and the column's place among those that it has.
    __device__ __forceinline__ int owner(int column) const { return (wide ? column / 4 : column) % THREADS; }
    __device__ __forceinline__ int place(int column) const {
        return wide ? column / 4 / THREADS * 4 + column % 4 : column / THREADS;
    }
};

// Loads what is there of a row, all of it under way at once. The rest is left as it is.
template <int THREADS>
__device__ __forceinline__ void load_row(const float *row, const Columns<THREADS> &columns, float (&x)[GROUPS][4]) {
    if (columns.wide) {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            if (columns.has(group, 0)) load_many(row + columns.at(group, 0), x[group]);
        }
    } else {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (columns.has(group, i)) x[group][i] = row[columns.at(group, i)];
            }
        }
    }
}

// Applies bias, scale and softcap.
template <int THREADS>
__device__ __forceinline__ void shape_row(const float *bias, const Columns<THREADS> &columns, const Shape &shape,
                                          float (&x)[GROUPS][4]) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (!columns.has(group, 0)) break;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (columns.has(group, i)) x[group][i] = shaped(x[group][i], bias ? bias[columns.at(group, i)] : 0.0f, shape);
        }
    }
}

// Brings what is known of a row up to a strip, whose numbers are given; `row` has m, Σ exp(l − m),
// Σ exp(l − m)·(l − m), Σ l, Σ exp(l − m)².
__device__ __forceinline__ void merge(double (&row)[NUMBERS], bool is_first, const double (&own)[NUMBERS]) {
    if (is_first || row[1] == 0) {
        for (int i = 0; i < NUMBERS; i++) row[i] = own[i];
        return;
    }
    const double both = row[0] > own[0] ? row[0] : own[0];
    // Of the two differences from the larger of them, one is 0.
    const double below = row[0] - both, own_below = own[0] - both;
    const double factor = below == 0 ? 1 : exp(below), own_factor = own_below == 0 ? 1 : exp(own_below);
    row[0] = both;
    row[2] = factor * (row[2] + row[1] * below) + own_factor * (own[2] + own[1] * own_below);
    row[1] = factor * row[1] + own_factor * own[1];
    row[3] += own[3];
    row[4] = factor * factor * row[4] + own_factor * own_factor * own[4];
}

// Of a row's strip of logits, the first of which is token `first`: merges their numbers into those
// of the row, and says of the row's targets where they stand. `starts` are the first predictions of
// each row.
template <int THREADS>
__device__ __forceinline__ void statistics(const float *__restrict__ logits, long long stride, int count,
                                           const float *__restrict__ bias, const Shape &shape, int first_row, int first,
                                           const uint32_t *__restrict__ starts, const uint32_t *__restrict__ targets,
                                           double *of_rows, double *of_predictions) {
    constexpr int WARPS = THREADS / WARP;
    SHARED(float, of_warps, NUMBERS * WARPS);
    const int row = first_row + blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    logits += size_t(blockIdx.x) * stride;
    of_rows += size_t(NUMBERS) * row;
    const Columns<THREADS> columns(logits, bias, count);
    float l[GROUPS][4];
    load_row(logits, columns, l);
    // Loads that follow from one another, while the logits are under way: of the row, of its first
    // target, and of that one's logit.
    const double before = first == 0 ? -INFINITY : of_rows[0];
    const uint32_t start = starts[row], end = starts[row + 1];
    const int first_target = start < end ? int(targets[start]) - first : -1;
    const float first_logit = first_target >= 0 && first_target < count ? logits[first_target] : 0.0f;
    // A lane for each number.
    const double known = first != 0 && threadIdx.x < NUMBERS ? of_rows[threadIdx.x] : 0;
    shape_row(bias, columns, shape, l);
    // What is no number is passed over here, and shows in the sums.
    float largest = -INFINITY;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (!columns.has(group, 0)) break;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (columns.has(group, i)) largest = fmaxf(largest, l[group][i]);
        }
    }
    largest = warp_max(largest);
    if (lane == 0) of_warps[warp] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, of_warps[w]);
    float sum = 0, weighted = 0, total = 0, squares = 0;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (!columns.has(group, 0)) break;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!columns.has(group, i)) continue;
            const float below = __fsub_rn(l[group][i], largest), e = expf(below);
            sum += e, weighted = fmaf(e, below, weighted), total += l[group][i], squares = fmaf(e, e, squares);
        }
    }
    sum = warp_sum(sum), weighted = warp_sum(weighted), total = warp_sum(total), squares = warp_sum(squares);
    if (lane == 0) {
        of_warps[WARPS + warp] = sum, of_warps[2 * WARPS + warp] = weighted, of_warps[3 * WARPS + warp] = total;
        of_warps[4 * WARPS + warp] = squares;
    }
    __syncthreads();
    for (uint32_t i = start; i < end; i++) {
        // The same for all threads.
        double *place = of_predictions + size_t(2) * i;
        const int column = i == start ? first_target : int(targets[i]) - first;
        if (column >= 0 && column < count) {
            const float own = shaped(i == start ? first_logit : logits[column], bias ? bias[column] : 0.0f, shape);
            bool is_first = own == largest && before < own;
            if (is_first) {
                float earlier = 0;
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        if (columns.has(group, k) && columns.at(group, k) < column && l[group][k] == largest) earlier = 1;
                    }
                }
                is_first = block_sum<THREADS>(earlier) == 0;
            }
            if (threadIdx.x == 0) place[0] = is_first ? FIRST : PASSED_OVER, place[1] = own;
        } else if (threadIdx.x == 0) {
            if (first == 0) place[0] = NOT_HERE, place[1] = 0;
            else if (place[0] == FIRST && largest > place[1]) place[0] = PASSED_OVER;
        }
    }
    if (warp != 0) return;
    double row_numbers[NUMBERS], own[NUMBERS] = {largest, 0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) row_numbers[i] = __shfl_sync(ALL, known, i);
    if (lane != 0) return;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
#pragma unroll
        for (int i = 1; i < NUMBERS; i++) own[i] += of_warps[i * WARPS + w];
    }
    merge(row_numbers, first == 0, own);
    for (int i = 0; i < NUMBERS; i++) of_rows[i] = row_numbers[i];
}

// The gradient of `Σ d · log_prob` with respect to the raw logits of a row's strip, in their place;
// bf16 in the first half of it.
template <int THREADS, typename G>
__device__ __forceinline__ void gradient(float *logits, long long stride, int count, const float *__restrict__ bias,
                                         const Shape &shape, int first_row, int first, const uint32_t *__restrict__ starts,
                                         const uint32_t *__restrict__ targets, const float *__restrict__ d,
                                         const float *__restrict__ log_sum_exp) {
    const int row = first_row + blockIdx.x;
    logits += size_t(blockIdx.x) * stride;
    const Columns<THREADS> columns(logits, bias, count);
    float g[GROUPS][4];
    load_row(logits, columns, g);
    const uint32_t start = starts[row], end = starts[row + 1];
    const float lse = log_sum_exp[row];
    float total = 0;
    for (uint32_t i = start; i < end; i++) total += d[i];
    shape_row(bias, columns, shape, g);
    // A capped logit is cap · t: the slope is that of tanh.
    const auto slope = [&](float logit) {
        const float t = shape.cap > 0 ? logit * shape.inverse_cap : 0.0f;
        return shape.scale * (1.0f - t * t);
    };
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (!columns.has(group, 0)) break;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (columns.has(group, i)) g[group][i] = -total * expf(g[group][i] - lse) * slope(g[group][i]);
        }
    }
    // At a target the two terms nearly cancel where the model is sure: they meet in f32, before any
    // rounding.
    for (uint32_t i = start; i < end; i++) {
        const long long column = (long long)targets[i] - first;
        if (column < 0 || column >= count || unsigned(columns.owner(column)) != threadIdx.x) continue;
        const float logit = shaped(logits[column], bias ? bias[column] : 0.0f, shape);
        float asked = 0;
        for (uint32_t j = start; j < end; j++) asked += targets[j] == targets[i] ? d[j] : 0.0f;
        const float both = (asked - total * expf(logit - lse)) * slope(logit);
        const int place = columns.place(column);
#pragma unroll
        for (int k = 0; k < 4 * GROUPS; k++) {
            if (k == place) g[k / 4][k % 4] = both;
        }
    }
    // Narrow numbers come where others' logits lie.
    if (sizeof(G) < sizeof(float)) __syncthreads();
    G *to = reinterpret_cast<G *>(logits);
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (columns.wide) {
            if (columns.has(group, 0)) store_many(to + columns.at(group, 0), g[group]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (columns.has(group, i)) store(to + columns.at(group, i), g[group][i]);
            }
        }
    }
}

} // namespace

// So many threads that four blocks, each with its strip under way, keep a multiprocessor's memory
// busy while others are at their ends, where one thread works.
#define STATISTICS(name, THREADS)                                                                                       \
    KERNEL_BOUNDS(name, THREADS, RESIDENT_THREADS / THREADS, const float *logits, long long stride, int count,          \
                  const float *bias, float scale, float cap, float inverse_cap, int first_row, int first,              \
                  const uint32_t *starts, const uint32_t *targets, double *of_rows, double *of_predictions) {           \
        const Shape shape = {scale, cap, inverse_cap};                                                                  \
        statistics<THREADS>(logits, stride, count, bias, shape, first_row, first, starts, targets, of_rows,             \
                            of_predictions);                                                                            \
    }
STATISTICS(head_statistics_128, 128)
STATISTICS(head_statistics_256, 256)

#define GRADIENT(name, THREADS, G)                                                                                      \
    KERNEL_BOUNDS(name, THREADS, RESIDENT_THREADS / THREADS, float *logits, long long stride, int count,                \
                  const float *bias, float scale, float cap, float inverse_cap, int first_row, int first,              \
                  const uint32_t *starts, const uint32_t *targets, const float *d, const float *log_sum_exp) {          \
        const Shape shape = {scale, cap, inverse_cap};                                                                  \
        gradient<THREADS, G>(logits, stride, count, bias, shape, first_row, first, starts, targets, d, log_sum_exp);    \
    }
GRADIENT(head_gradient_f32_128, 128, float)
GRADIENT(head_gradient_f32_256, 256, float)
GRADIENT(head_gradient_bf16_128, 128, bf16)
GRADIENT(head_gradient_bf16_256, 256, bf16)
