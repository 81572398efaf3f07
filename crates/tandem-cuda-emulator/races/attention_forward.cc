// Several tiles of keys, of packed heads; windows, softcaps, and heads that no copy of 16 bytes fits.
#include "attention.h"

namespace races {

void drive() {
    for (const int width : {16, 32, 64, 80, 96, 128, 256}) {
        const std::string kernel = "attention_forward_" + std::to_string(width);
        const int tile = width <= 128 ? 128 : 64;
        const size_t shared = 2 * size_t(width) * (tile + 2 * 64) + 4 * 2 * 64;
        const auto run = [&](const std::vector<Segment> &forest, const Shape &shape) {
            Operands<bf16>(forest, shape).forward(kernel, tile, shared);
        };
        run(family(150, 70, 30, 9), {2, 1, width});
        run(family(100, 20, 70, 40), {1, 1, width, 20, 33});
        run(family(70, 3, 5, 2), {3, 1, width - 1});
    }
}

} // namespace races
