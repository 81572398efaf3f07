// Rows that are drawn from, one that asks for the likeliest token, and one that is no number.
#include "drive.h"

namespace races {

void drive() {
    for (const int count : {300, 5003}) {
        const long long rows = 4, stride = count + 1;
        float *logits = numbers<float>(rows * stride, -6, 6);
        logits[3 * stride + 7] = 0.0f / 0.0f;
        const float *temperatures = table<float>({1.0f, 0.0f, 0.7f, 1.0f});
        const double *uniforms = table<double>({0.1, 0.5, 0.999, 0.5});
        launch("sample_rows", {{int(rows), 1, 1}, 512, size_t(blocks_of(count, 512)) * 8},
               {{(const float *)logits, stride, count, 1.0f, 0.0f, 0.0f, temperatures, uniforms, zeros<uint32_t>(rows)}});
    }
}

} // namespace races
