// Divergence of a student's distribution from a teacher's, of a row's strip of both models' logits, and
// its derivative by the student's logits.
//
// Threads: a block of 256 per row of a strip. Neighbouring threads take neighbouring logits, 256 at a
// time.
// Bytes per token: sums 8 read; gradient 8 read, 4 or 2 written; each bias 4 more.
#include "common.cuh"

namespace {

constexpr int THREADS = 256;

// Scale and softcap of a model's logits (none if it is 0).
struct Shape {
    float scale, cap, inverse_cap;
};

__device__ __forceinline__ float shaped(float logit, float bias, const Shape &shape) {
    const float scaled = __fmul_rn(__fadd_rn(logit, bias), shape.scale);
    return shape.cap > 0 ? __fmul_rn(tanhf(__fmul_rn(scaled, shape.inverse_cap)), shape.cap) : scaled;
}

// ln(1 + e^x).
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

} // namespace

// Adds to the four numbers of each row: KL(q‖p), KL(p‖q), KL(q‖m), KL(p‖m). `log_own`, `log_other` and
// `log_both` are the logarithms of 1 − β, of β and of their ratio; the last two numbers are 0 without a
// mixture.
KERNEL_BOUNDS(head_divergence_sums, THREADS, 4, const float *student, long long stride, const float *teacher,
              long long teacher_stride, int count, const float *bias, const float *teacher_bias, float scale, float cap,
              float inverse_cap, float teacher_scale, float teacher_cap, float teacher_inverse_cap, int first_row,
              const float *log_sum_exp, const float *teacher_log_sum_exp, float log_own, float log_other, float log_both,
              int mixes, int is_first, double *sums) {
    const Shape shape = {scale, cap, inverse_cap}, of_teacher = {teacher_scale, teacher_cap, teacher_inverse_cap};
    const int row = first_row + blockIdx.x;
    student += size_t(blockIdx.x) * stride, teacher += size_t(blockIdx.x) * teacher_stride;
    const float lse = log_sum_exp[row], teacher_lse = teacher_log_sum_exp[row];
    float forward = 0, reverse = 0, of_q = 0, of_p = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const float log_p = shaped(student[i], bias ? bias[i] : 0.0f, shape) - lse;
        const float log_q = shaped(teacher[i], teacher_bias ? teacher_bias[i] : 0.0f, of_teacher) - teacher_lse;
        const float p = expf(log_p), q = expf(log_q), log_ratio = log_p - log_q;
        forward = fmaf(q, -log_ratio, forward), reverse = fmaf(p, log_ratio, reverse);
        if (mixes) {
            const float x = log_ratio + log_both;
            of_q = fmaf(q, -log_other - softplus(x), of_q), of_p = fmaf(p, -log_own - softplus(-x), of_p);
        }
    }
    const double found[4] = {block_sum<THREADS>(double(forward)), block_sum<THREADS>(double(reverse)),
                             block_sum<THREADS>(double(of_q)), block_sum<THREADS>(double(of_p))};
    if (threadIdx.x != 0) return;
    double *own = sums + size_t(4) * row;
    for (int i = 0; i < 4; i++) own[i] = (is_first ? 0.0 : own[i]) + found[i];
}

namespace {

// The derivative of `d` times the divergence by the student's raw logits of a row's strip, in their
// place; bf16 in the first half of it.
template <typename G>
__device__ __forceinline__ void differentiate(float *student, long long stride, const float *teacher, long long teacher_stride,
                                              int count, const float *bias, const float *teacher_bias, const Shape &shape,
                                              const Shape &of_teacher, int first_row, const float *log_sum_exp,
                                              const float *teacher_log_sum_exp, float beta, float log_own, float log_both,
                                              const float *centres, const float *d) {
    const int row = first_row + blockIdx.x;
    student += size_t(blockIdx.x) * stride, teacher += size_t(blockIdx.x) * teacher_stride;
    const float lse = log_sum_exp[row], teacher_lse = teacher_log_sum_exp[row], centre = centres[row];
    const bool mixes = beta != 0 && beta != 1;
    const float factor = d[row] * shape.scale * (mixes ? 1 - beta : 1);
    G *to = reinterpret_cast<G *>(student);
    for (int from = 0; from < count; from += THREADS) {
        const int i = from + threadIdx.x;
        float gradient = 0;
        if (i < count) {
            const float logit = shaped(student[i], bias ? bias[i] : 0.0f, shape), log_p = logit - lse;
            const float log_q = shaped(teacher[i], teacher_bias ? teacher_bias[i] : 0.0f, of_teacher) - teacher_lse;
            const float p = expf(log_p), log_ratio = log_p - log_q;
            if (beta == 0) gradient = p - expf(log_q);
            else if (beta == 1) gradient = p * (log_ratio - centre);
            else gradient = p * (-log_own - centre - softplus(-(log_ratio + log_both)));
            const float t = shape.cap > 0 ? logit * shape.inverse_cap : 0.0f;
            gradient *= factor * (1.0f - t * t);
        }
        // Narrow numbers come where logits lie that were read before, these 256 among them.
        if (sizeof(G) < sizeof(float)) __syncthreads();
        if (i < count) store(to + i, gradient);
    }
}

} // namespace

#define DIFFERENTIATE(name, G)                                                                                          \
    KERNEL_BOUNDS(name, THREADS, 4, float *student, long long stride, const float *teacher, long long teacher_stride,   \
                  int count, const float *bias, const float *teacher_bias, float scale, float cap, float inverse_cap,   \
                  float teacher_scale, float teacher_cap, float teacher_inverse_cap, int first_row,                     \
                  const float *log_sum_exp, const float *teacher_log_sum_exp, float beta, float log_own, float log_both, \
                  const float *centres, const float *d) {                                                               \
        const Shape shape = {scale, cap, inverse_cap}, of_teacher = {teacher_scale, teacher_cap, teacher_inverse_cap};  \
        differentiate<G>(student, stride, teacher, teacher_stride, count, bias, teacher_bias, shape, of_teacher,        \
                         first_row, log_sum_exp, teacher_log_sum_exp, beta, log_own, log_both, centres, d);             \
    }
DIFFERENTIATE(head_divergence_gradient_f32, float)
DIFFERENTIATE(head_divergence_gradient_bf16, bf16)
