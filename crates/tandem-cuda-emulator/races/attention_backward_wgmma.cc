// As for `attention_backward`, with more tiles than there are stages.
#include "attention.h"

namespace races {

void drive() {
    for (const int width : {64, 128}) {
        const std::string name = std::to_string(width);
        const int groups = width <= 64 ? 3 : 2, of_queries = 64 * groups, of_keys = 128;
        const size_t row = 2 * size_t(width);
        const size_t shared_of_queries = row * (2 * of_queries + 6 * 64) + 4 * 4 * 64;
        const size_t shared_of_keys = row * (2 * of_keys + 6 * 64) + 4 * 3 * 4 * 64;
        const auto run = [&](const std::vector<Segment> &forest, const Shape &shape) {
            const Operands<bf16> operands(forest, shape);
            operands.backward_queries("attention_backward_queries_wgmma_" + name, of_queries, shared_of_queries, 128 * groups);
            operands.backward_keys("attention_backward_keys_wgmma_" + name, of_keys, shared_of_keys, 256);
        };
        run(family(250, 70, 30, 9), {2, 1, width});
        run(family(100, 20, 70, 40), {1, 1, width, 20, 33});
        run(family(70, 3, 5, 2), {3, 1, width - 1});
    }
}

} // namespace races
