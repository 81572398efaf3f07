// RMSNorm and LayerNorm over rows. A block takes a row: widths of language models keep its threads busy.
#include "common.cuh"

constexpr int THREADS = 256;

// y = x / rms(x) · (w + offset), and 1 / rms(x).
template <typename X, typename Y>
__device__ __forceinline__ void rms_norm(const X *__restrict__ x, int x_stride, const float *__restrict__ w, float offset,
                                         float eps, Y *__restrict__ y, int y_stride, float *__restrict__ inverse_rms,
                                         int width) {
    const size_t row = blockIdx.x;
    x += row * x_stride, y += row * y_stride;
    const bool wide = width % 4 == 0 && is_aligned<4>(x) && is_aligned<4>(y) && is_aligned<4>(w);
    float sum = 0;
    if (wide) {
        for (int i = 4 * threadIdx.x; i < width; i += 4 * THREADS) {
            float v[4];
            load_many(x + i, v);
            sum += v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3];
        }
    } else {
        for (int i = threadIdx.x; i < width; i += THREADS) sum += load(x + i) * load(x + i);
    }
    const float inverse = 1.0f / sqrtf(block_sum<THREADS>(sum) / width + eps);
    if (threadIdx.x == 0) inverse_rms[row] = inverse;
    if (wide) {
        for (int i = 4 * threadIdx.x; i < width; i += 4 * THREADS) {
            float v[4], g[4];
            load_many(x + i, v);
            load_many(w + i, g);
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = v[j] * inverse * (g[j] + offset);
            store_many(y + i, v);
        }
    } else {
        for (int i = threadIdx.x; i < width; i += THREADS) store(y + i, load(x + i) * inverse * (w[i] + offset));
    }
}

#define RMS_NORM(name, X, Y)                                                                                            \
    KERNEL_BOUNDS(name, THREADS, 4, const X *x, int x_stride, const float *w, float offset, float eps, Y *y,            \
                  int y_stride, float *inverse_rms, int width) {                                                        \
        rms_norm(x, x_stride, w, offset, eps, y, y_stride, inverse_rms, width);                                         \
    }
RMS_NORM(rms_norm_f32_f32, float, float)
RMS_NORM(rms_norm_f32_bf16, float, bf16)
RMS_NORM(rms_norm_bf16_f32, bf16, float)
RMS_NORM(rms_norm_bf16_bf16, bf16, bf16)
