// As for `attention_forward`.
#include "attention.h"

namespace races {

void drive() {
    for (const int width : {16, 32, 64, 80, 96, 128, 256}) {
        const std::string name = std::to_string(width);
        const bool is_narrow = width <= 128;
        const size_t shared = 2 * size_t(width) * (is_narrow ? 5 * 64 : 2 * 64 + 2 * 32);
        const int of_step = is_narrow ? 64 : 32;
        const auto run = [&](const std::vector<Segment> &forest, const Shape &shape) {
            const Operands<bf16> operands(forest, shape);
            operands.backward_queries("attention_backward_queries_" + name, 64, shared + 4 * 2 * of_step);
            const size_t of_keys = shared + 4 * (shape.window == NO_WINDOW ? 4 : 8) * of_step;
            operands.backward_keys("attention_backward_keys_" + name, 64, of_keys);
            if (!is_narrow) operands.backward_keys("attention_backward_values_" + name, 64, of_keys);
        };
        run(family(150, 70, 30, 9), {2, 1, width});
        run(family(100, 20, 70, 40), {1, 1, width, 20, 33});
        run(family(70, 3, 5, 2), {3, 1, width - 1});
    }
}

} // namespace races
