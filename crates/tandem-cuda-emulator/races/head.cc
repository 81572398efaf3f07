// Narrow and wide strips, a first one and one after it; rows with no target, with several, and with
// one that has the largest logit.
#include "drive.h"

namespace races {

// Rows of a strip: each has as many predictions as its number.
constexpr int ROWS = 4;

void strip(int count, const std::string &threads, int first) {
    const int threads_of_block = std::stoi(threads);
    const long long stride = count;
    float *logits = numbers<float>(ROWS * stride), *bias = numbers<float>(count);
    std::vector<uint32_t> starts = {0}, targets;
    for (int row = 0; row < ROWS; row++) {
        for (int i = 0; i < row; i++) targets.push_back(first + (count / 3) * (i + 1) - 1);
        if (row) logits[row * stride + count / 3 - 1] = 9;
        starts.push_back(uint32_t(targets.size()));
    }
    // As many that are in another strip.
    targets.back() = first + count;
    const Grid grid = {{ROWS, 1, 1}, threads_of_block};
    const uint32_t *starts_at = table(starts), *targets_at = table(targets);
    double *of_rows = zeros<double>(5 * ROWS), *of_predictions = zeros<double>(2 * targets.size());
    const auto operands = [&](float *own) {
        return Args{own, stride, count, (const float *)bias, 1.5f, 30.0f, 1 / 30.0f, 0, first, starts_at, targets_at};
    };
    launch("head_statistics_" + threads, grid, {operands(logits), {of_rows, of_predictions}});
    const float *d = numbers<float>(targets.size()), *log_sum_exp = numbers<float>(ROWS, 3, 9);
    launch("head_gradient_f32_" + threads, grid, {operands(logits), {d, log_sum_exp}});
    launch("head_gradient_bf16_" + threads, grid, {operands(numbers<float>(ROWS * stride)), {d, log_sum_exp}});
}

void drive() {
    for (const int first : {0, 512}) {
        strip(2048, "128", first), strip(1501, "128", first);
        strip(8192, "256", first), strip(4099, "256", first);
    }
}

} // namespace races
