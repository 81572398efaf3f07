// RMSNorm over rows.
//
// Threads: 16 to 512 lanes per row by its width, several rows per block where they are short
// (`rows.cuh`). Forward has one row per group of lanes; backward has `block_rows` rows per block,
// whose weight gradients it sums in shared memory and writes as one row of `partial`.
// Bytes per element: forward x and y once; backward x and dy once, dx read and written (8).
#include "rows.cuh"

namespace {

// y = x / rms(x) · (w + offset), and 1 / rms(x).
template <int N, typename X, typename Y>
__device__ __forceinline__ void forward(const X *__restrict__ x, size_t x_stride, const float *__restrict__ w, float offset, float eps,
                                        Y *__restrict__ y, size_t y_stride, float *__restrict__ inverse_rms, size_t rows,
                                        int width, int lanes) {
    constexpr int VECTORS = FORWARD_VECTORS<N>;
    RowLane<N, VECTORS> part(lanes);
    const size_t row = size_t(blockIdx.x) * part.groups + part.group;
    part.limit = row < rows ? width : 0;
    x += row * x_stride, y += row * y_stride;
    float v[VECTORS][N], sum = 0;
    part.load_registers(x, v);
    part.over(x, v, [&](int, const float (&u)[N]) {
        float squares = 0;
#pragma unroll
        for (int j = 0; j < N; j++) squares += u[j] * u[j];
        sum += squares;
    });
    const float inverse = 1.0f / sqrtf(part.sum(sum) / width + eps);
    if (part.lane == 0 && part.limit > 0) inverse_rms[row] = inverse;
    part.over(x, v, [&](int i, const float (&u)[N]) {
        float g[N];
        load_many(w + i, g);
#pragma unroll
        for (int j = 0; j < N; j++) g[j] = u[j] * inverse * (g[j] + offset);
        put(y + i, g);
    });
}

// dx += dy · (w + offset) / rms − x · mean(x · dy · (w + offset)) / rms³ for the block's rows, and
// the sums of dy · x / rms over them.
template <int N, typename X, typename Y>
__device__ __forceinline__ void backward(const X *__restrict__ x, size_t x_stride, const float *__restrict__ w, float offset,
                                         const float *__restrict__ inverse_rms, const Y *__restrict__ dy, size_t dy_stride,
                                         float *__restrict__ dx, size_t dx_stride, const WeightSums sums, size_t rows, int width,
                                         int lanes, int block_rows) {
    constexpr int VECTORS = BACKWARD_VECTORS;
    RowLane<N, VECTORS> part(lanes);
    const size_t first = size_t(blockIdx.x) * block_rows, end = first + block_rows < rows ? first + block_rows : rows;
    sums.clear(part);
    for (size_t start = first; start < end; start += part.groups) {
        const size_t row = start + part.group;
        part.limit = row < end ? width : 0;
        const X *const from = x + row * x_stride;
        const Y *const d = dy + row * dy_stride;
        float *const to = dx + row * dx_stride;
        const float inverse = part.limit > 0 ? inverse_rms[row] : 0.0f;
        float v[VECTORS][N], g[VECTORS][N], dot = 0;
        part.in_registers([&](int k, int i) {
            load_many(from + i, v[k]);
            load_many(d + i, g[k]);
        });
        // Of x and dy, which becomes dy · (w + offset).
        part.over(from, v, d, g, [&](int i, const float (&v)[N], float (&g)[N]) {
            float weight[N], dw[N];
            load_many(w + i, weight);
#pragma unroll
            for (int j = 0; j < N; j++) {
                dw[j] = g[j] * (v[j] * inverse);
                g[j] *= weight[j] + offset;
                dot += v[j] * g[j];
            }
            if (sums.is_wanted) add_to(sums.own + i, dw);
        });
        const float shift = -part.sum(dot) * inverse * inverse * inverse / width;
        float sum[VECTORS][N];
        part.in_registers([&](int k, int i) { load_many(to + i, sum[k]); });
        part.in_registers([&](int k, int i) {
#pragma unroll
            for (int j = 0; j < N; j++) sum[k][j] += g[k][j] * inverse + v[k][j] * shift;
            put(to + i, sum[k]);
        });
        part.beyond_registers([&](int i) {
            float u[N], t[N], weight[N];
            load_many(from + i, u);
            load_many(d + i, t);
            load_many(w + i, weight);
#pragma unroll
            for (int j = 0; j < N; j++) u[j] = t[j] * (weight[j] + offset) * inverse + u[j] * shift;
            add_to(to + i, u);
        });
    }
    sums.write(part);
}

} // namespace

#define FORWARD(name, X, Y)                                                                                             \
    KERNEL_BOUNDS(name, THREADS, 2, const X *x, long long x_stride, const float *w, float offset, float eps, Y *y,      \
                  long long y_stride, float *inverse_rms, long long rows, int width, int lanes, int wide) {             \
        if (wide) forward<AT_ONCE<X, Y>>(x, x_stride, w, offset, eps, y, y_stride, inverse_rms, rows, width, lanes);    \
        else forward<1>(x, x_stride, w, offset, eps, y, y_stride, inverse_rms, rows, width, lanes);                     \
    }
FOR_TYPES(FORWARD, rms_norm)

#define BACKWARD(name, X, Y)                                                                                            \
    KERNEL_BOUNDS(name, THREADS, RESIDENT_THREADS / THREADS, const X *x, long long x_stride, const float *w, float offset, \
                  const float *inverse_rms, const Y *dy, long long dy_stride, float *dx, long long dx_stride,           \
                  float *partial, int in_shared, long long rows, int width, int lanes, int block_rows, int wide) {      \
        DYNAMIC_SHARED(memory);                                                                                         \
        const WeightSums sums(memory, partial, width, lanes, in_shared);                                                \
        if (wide) {                                                                                                     \
            backward<4>(x, x_stride, w, offset, inverse_rms, dy, dy_stride, dx, dx_stride, sums, rows, width, lanes,    \
                        block_rows);                                                                                    \
        } else {                                                                                                        \
            backward<1>(x, x_stride, w, offset, inverse_rms, dy, dy_stride, dx, dx_stride, sums, rows, width, lanes,    \
                        block_rows);                                                                                    \
        }                                                                                                               \
    }
FOR_TYPES(BACKWARD, rms_norm_backward)
