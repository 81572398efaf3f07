// As for `attention_forward`, without tensor cores.
#include "attention.h"

namespace races {

void drive() {
    for (const int width : {32, 64, 128, 256}) {
        const std::string name = "attention_f32_", of_width = "_" + std::to_string(width);
        const int tile = width <= 128 ? 32 : 16;
        // Tiles of rows, and of scores.
        const auto shared = [&](int tiles, int scores) {
            return 4 * (size_t(tiles) * tile * (width + 4) + size_t(scores) * tile * (tile + 4) + 4 * tile);
        };
        const auto run = [&](const std::vector<Segment> &forest, const Shape &shape) {
            const Operands<float> operands(forest, shape);
            operands.forward(name + "forward" + of_width, tile, shared(2, 1));
            operands.backward_queries(name + "backward_queries" + of_width, tile, shared(3, 1));
            operands.backward_keys(name + "backward_keys" + of_width, tile, shared(4, 2));
        };
        run(family(50, 33, 20, 3), {2, 1, width});
        run(family(40, 9, 40, 5), {1, 1, width, 20, 17});
        run(family(33, 3, 5, 2), {3, 1, width - 1});
    }
}

} // namespace races
