// As for `attention_forward`, with more tiles of keys than there are stages.
#include "attention.h"

namespace races {

void drive() {
    for (const int width : {64, 128}) {
        const std::string kernel = "attention_forward_wgmma_" + std::to_string(width);
        const int groups = width <= 64 ? 3 : 2, tile = 64 * groups, keys = width <= 64 ? 64 : 128;
        const size_t shared = 2 * size_t(width) * (tile + 4 * keys) + 4 * 4 * keys;
        const auto run = [&](const std::vector<Segment> &forest, const Shape &shape) {
            Operands<bf16>(forest, shape).forward(kernel, tile, shared, 128 * groups);
        };
        run(family(400, 170, 30, 9), {2, 1, width});
        run(family(100, 20, 70, 40), {1, 1, width, 20, 33});
        run(family(70, 3, 5, 2), {3, 1, width - 1});
    }
}

} // namespace races
