// Each divergence, over strips of several turns of a block's threads.
#include "drive.h"

#include <cmath>

namespace races {

void drive() {
    for (const float beta : {0.0f, 0.5f, 1.0f}) {
        const int rows = 3, count = 1000;
        const long long stride = count;
        const float own = std::log(1 - beta), other = std::log(beta);
        const auto operands = [&] {
            const float *bias = numbers<float>(count), *teacher_bias = numbers<float>(count);
            return Args{numbers<float>(rows * stride), stride, (const float *)numbers<float>(rows * stride), stride, count, bias,
                        teacher_bias, 1.0f, 30.0f, 1 / 30.0f, 0.5f, 0.0f, 0.0f, 0,
                        (const float *)numbers<float>(rows, 6, 8), (const float *)numbers<float>(rows, 6, 8)};
        };
        const Grid grid = {{rows, 1, 1}, 256};
        for (const int is_first : {1, 0})
            launch("head_divergence_sums", grid, {operands(), {own, other, own - other, int(beta == 0.5f), is_first, zeros<double>(4 * rows)}});
        const float *centres = numbers<float>(rows), *d = numbers<float>(rows);
        for (const char *kernel : {"head_divergence_gradient_f32", "head_divergence_gradient_bf16"})
            launch(kernel, grid, {operands(), {beta, own, own - other, centres, d}});
    }
}

} // namespace races
