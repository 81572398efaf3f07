// Tokens with and without a row here, several with one.
#include "drive.h"

namespace races {

constexpr int TOKENS = 7;

template <typename T> void look_up(long long cols, int wide) {
    const uint32_t *ids = table<uint32_t>({3, 1, 0xffffffffu, 3, 0, 1, 3});
    for (const int accumulate : {0, 1})
        launch("embedding_" + type_name<T>(), {{blocks_of(TOKENS * cols, 256), 1, 1}, 256},
               {{numbers<T>(4 * cols), cols, ids, 2.0f, zeros<float>(TOKENS * cols), cols, accumulate, (long long)TOKENS, cols, wide}});
}

void drive() {
    for (const int wide : {1, 0}) {
        const long long cols = wide ? 520 : 131;
        look_up<float>(cols, wide), look_up<bf16>(cols, wide);
        // Three ids with their tokens.
        const uint32_t *runs = table<uint32_t>({0, 1, 3, 6, 0, 1, 3, 4, 1, 5, 0, 3, 6});
        launch("embedding_backward_f32", {{3, blocks_of(cols, wide ? 512 : 128), 1}, 128},
               {{runs, 3, 2.0f, (const float *)numbers<float>(TOKENS * cols), cols, zeros<float>(4 * cols), cols, cols, wide}});
        launch("embedding_backward_exact", {{3, blocks_of(cols, wide ? 512 : 128), 1}, 128},
               {{runs, 3, 2.0f, (const float *)numbers<float>(TOKENS * cols), cols, zeros<float>(4 * cols), cols, cols, wide, 4096.0f,
                 zeros<unsigned>(1)}});
    }
}

} // namespace races
