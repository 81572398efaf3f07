// LayerNorm over rows.
//
// Threads: 16 to 512 lanes per row by its width (256 backward), several rows per block where they
// are short (`rows.cuh`). Forward has one row per group of lanes; backward has `block_rows` rows per
// block, whose weight gradients it sums in shared memory and writes as one row of `partial`.
// Bytes per element: forward x and y once; backward x and dy once, dx read and written (8).
#include "rows.cuh"

namespace {

// y = (x − mean) / σ · w + b, and (mean, 1/σ); without b if it is null. The variance is taken from the mean: it may be small
// beside the mean's square.
template <int N, typename X, typename Y>
__device__ __forceinline__ void forward(const X *__restrict__ x, size_t x_stride, const float *__restrict__ w,
                                        const float *__restrict__ b, float eps, Y *__restrict__ y, size_t y_stride,
                                        float *__restrict__ mean_inverse, size_t kept_stride, size_t rows, int width,
                                        int lanes) {
    constexpr int VECTORS = FORWARD_VECTORS<N>;
    RowLane<N, VECTORS> part(lanes);
    const size_t row = size_t(blockIdx.x) * part.groups + part.group;
    part.limit = row < rows ? width : 0;
    x += row * x_stride, y += row * y_stride;
    float v[VECTORS][N], sum = 0, squares = 0;
    part.load_registers(x, v);
    part.over(x, v, [&](int, const float (&u)[N]) {
#pragma unroll
        for (int j = 0; j < N; j++) sum += u[j];
    });
    const float mean = part.sum(sum) / width;
    // Of x, which becomes its deviation.
    part.over(x, v, [&](int, float (&u)[N]) {
#pragma unroll
        for (int j = 0; j < N; j++) u[j] -= mean, squares += u[j] * u[j];
    });
    const float inverse = 1.0f / sqrtf(part.sum(squares) / width + eps);
    if (part.lane == 0 && part.limit > 0) {
        mean_inverse[row * kept_stride] = mean;
        mean_inverse[row * kept_stride + 1] = inverse;
    }
    const auto write = [&](int i, const float (&u)[N]) {
        float g[N], shift[N] = {};
        load_many(w + i, g);
        if (b) load_many(b + i, shift);
#pragma unroll
        for (int j = 0; j < N; j++) g[j] = u[j] * inverse * g[j] + shift[j];
        put(y + i, g);
    };
    part.in_registers([&](int k, int i) { write(i, v[k]); });
    part.beyond_registers([&](int i) {
        float u[N];
        load_many(x + i, u);
#pragma unroll
        for (int j = 0; j < N; j++) u[j] -= mean;
        write(i, u);
    });
}

// With n = (x − mean)/σ and g = dy · w: dx += (g − mean(g) − n · mean(n · g))/σ for the block's
// rows, and the sums of dy · n and of dy over them.
template <int N, typename X, typename Y>
__device__ __forceinline__ void backward(const X *__restrict__ x, size_t x_stride, const float *__restrict__ w,
                                         const float *__restrict__ mean_inverse, size_t kept_stride, const Y *__restrict__ dy,
                                         size_t dy_stride, float *__restrict__ dx, size_t dx_stride, const WeightSums sums,
                                         size_t rows, int width, int lanes, int block_rows) {
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
        const float mean = part.limit > 0 ? mean_inverse[row * kept_stride] : 0.0f;
        const float inverse = part.limit > 0 ? mean_inverse[row * kept_stride + 1] : 0.0f;
        float v[VECTORS][N], g[VECTORS][N], total = 0, dot = 0;
        part.in_registers([&](int k, int i) {
            load_many(from + i, v[k]);
            load_many(d + i, g[k]);
        });
        // Of x and dy, which become n and g.
        part.over(from, v, d, g, [&](int i, float (&v)[N], float (&g)[N]) {
            float weight[N], dw[N];
            load_many(w + i, weight);
            if (sums.is_wanted) add_to(sums.own + width + i, g);
#pragma unroll
            for (int j = 0; j < N; j++) {
                v[j] = (v[j] - mean) * inverse;
                dw[j] = g[j] * v[j];
                g[j] *= weight[j];
                total += g[j];
                dot += v[j] * g[j];
            }
            if (sums.is_wanted) add_to(sums.own + i, dw);
        });
        const float mean_g = part.sum(total) / width, mean_dot = part.sum(dot) / width;
        float sum[VECTORS][N];
        part.in_registers([&](int k, int i) { load_many(to + i, sum[k]); });
        part.in_registers([&](int k, int i) {
#pragma unroll
            for (int j = 0; j < N; j++) sum[k][j] += (g[k][j] - mean_g - v[k][j] * mean_dot) * inverse;
            put(to + i, sum[k]);
        });
        part.beyond_registers([&](int i) {
            float u[N], t[N], weight[N];
            load_many(from + i, u);
            load_many(d + i, t);
            load_many(w + i, weight);
#pragma unroll
            for (int j = 0; j < N; j++) {
                u[j] = (t[j] * weight[j] - mean_g - (u[j] - mean) * inverse * mean_dot) * inverse;
            }
            add_to(to + i, u);
        });
    }
    sums.write(part);
}

} // namespace

#define FORWARD(name, X, Y)                                                                                             \
    KERNEL_BOUNDS(name, THREADS, 2, const X *x, long long x_stride, const float *w, const float *b, float eps, Y *y,    \
                  long long y_stride, float *mean_inverse, long long kept_stride, long long rows, int width,            \
                  int lanes, int wide) {                                                                                \
        if (wide) {                                                                                                     \
            forward<AT_ONCE<X, Y>>(x, x_stride, w, b, eps, y, y_stride, mean_inverse, kept_stride, rows, width, lanes); \
        } else {                                                                                                        \
            forward<1>(x, x_stride, w, b, eps, y, y_stride, mean_inverse, kept_stride, rows, width, lanes);             \
        }                                                                                                               \
    }
FOR_TYPES(FORWARD, layer_norm)

#define BACKWARD(name, X, Y)                                                                                            \
    KERNEL_BOUNDS(name, THREADS / 2, 3, const X *x, long long x_stride, const float *w, const float *mean_inverse,          \
                  long long kept_stride, const Y *dy, long long dy_stride, float *dx, long long dx_stride,              \
                  float *partial, int in_shared, long long rows, int width, int lanes, int block_rows, int wide) {      \
        DYNAMIC_SHARED(memory);                                                                                         \
        const WeightSums sums(memory, partial, 2 * width, lanes, in_shared);                                                  \
        if (wide) {                                                                                                     \
            backward<4>(x, x_stride, w, mean_inverse, kept_stride, dy, dy_stride, dx, dx_stride, sums, rows, width,     \
                        lanes, block_rows);                                                                             \
        } else {                                                                                                        \
            backward<1>(x, x_stride, w, mean_inverse, kept_stride, dy, dy_stride, dx, dx_stride, sums, rows, width,     \
                        lanes, block_rows);                                                                             \
        }                                                                                                               \
    }
FOR_TYPES(BACKWARD, layer_norm_backward)
