// `Σ out · d_out` of each row and head, which backward subtracts from the gradients of weights.
//
// Threads: blocks of 256; `lanes` neighbouring threads, a power of two, take one row and head, four
// elements each at a time.
// Bytes: 2 · head_dim elements read and 4 bytes written per row and head.
#include "common.cuh"

namespace {

constexpr int THREADS = 256;

// `lanes` neighbouring threads, a power of two, take a head.
template <typename T>
__device__ __forceinline__ void delta(const T *__restrict__ out, int out_stride, const T *__restrict__ d_out, int d_out_stride,
                                      float *__restrict__ to, int tokens, int heads, int head_dim, int lanes) {
    const long long task = ((long long)blockIdx.x * THREADS + threadIdx.x) / lanes;
    const int lane = threadIdx.x % lanes, head = task % heads;
    const long long token = task / heads;
    float sum = 0;
    if (token < tokens) {
        out += token * out_stride + (long long)head * head_dim, d_out += token * d_out_stride + (long long)head * head_dim;
        if (head_dim % 4 == 0 && is_aligned<4>(out) && is_aligned<4>(d_out)) {
            for (int i = 4 * lane; i < head_dim; i += 4 * lanes) {
                float a[4], b[4];
                load_many(out + i, a);
                load_many(d_out + i, b);
                sum += a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
            }
        } else {
            // The same numbers for each lane, so that the sum has the same bits.
            for (int i = 4 * lane; i < head_dim; i += 4 * lanes) {
                float products = 0;
                for (int n = i; n < i + 4 && n < head_dim; n++) products += load(out + n) * load(d_out + n);
                sum += products;
            }
        }
    }
    for (int by = lanes / 2; by > 0; by /= 2) sum += __shfl_xor_sync(ALL, sum, by);
    if (lane == 0 && token < tokens) to[task] = sum;
}

} // namespace

#define DELTA(name, T)                                                                                                     \
    KERNEL_BOUNDS(name, THREADS, 4, const T *out, int out_stride, const T *d_out, int d_out_stride, float *to, int tokens,  \
                  int heads, int head_dim, int lanes) {                                                                    \
        delta(out, out_stride, d_out, d_out_stride, to, tokens, heads, head_dim, lanes);                                   \
    }
DELTA(attention_delta_f32, float)
DELTA(attention_delta_bf16, bf16)
