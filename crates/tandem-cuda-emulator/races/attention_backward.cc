// As for `attention_forward`.
#include "attention.h"

namespace races {

void drive() {
    for (const int width : {16, 32, 64, 80, 96, 128, 256}) {
        const std::string name = std::to_string(width);
        const bool is_narrow = width <= 128;
        const size_t row = 2 * size_t(width);
        // Tiles of queries, of keys, and of the queries of a step for them.
        const int of_queries = is_narrow ? 128 : 64, of_keys = is_narrow ? 64 : 32, of_step = is_narrow ? 64 : 32;
        const size_t shared_of_queries = row * (2 * of_queries + (is_narrow ? 4 : 2) * 32) + 4 * 2 * 32;
        const size_t shared_of_keys = row * (2 * of_keys + 3 * of_step) + 2 * of_keys * of_step + 4 * 8 * of_step;
        const auto run = [&](const std::vector<Segment> &forest, const Shape &shape) {
            const Operands<bf16> operands(forest, shape);
            operands.backward_queries("attention_backward_queries_" + name, of_queries, shared_of_queries);
            operands.backward_keys("attention_backward_keys_" + name, of_keys, shared_of_keys);
        };
        run(family(150, 70, 30, 9), {2, 1, width});
        run(family(100, 20, 70, 40), {1, 1, width, 20, 33});
        run(family(70, 3, 5, 2), {3, 1, width - 1});
    }
}

} // namespace races
