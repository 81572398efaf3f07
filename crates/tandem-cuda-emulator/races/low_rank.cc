// Ranks below and above what shared memory holds at once, over more columns than a block has threads.
#include "drive.h"

namespace races {

void drive() {
    for_types([](auto w, auto a) {
        const int n = 11;
        for (const int rank : {20, 300})
            for (const int k : {1100, 333}) {
                const bool b_is_f32 = rank == 20;
                const void *b = b_is_f32 ? (void *)numbers<float>(n * rank) : numbers<bf16>(n * rank);
                launch(by_types("row_norms", w, a), {{blocks_of(n, 8), 1, 1}, 256},
                       {{numbers<decltype(w)>(n * k), k, numbers<decltype(a)>(rank * k), k, b, rank, int(b_is_f32), 0.5f,
                         zeros<float>(n), n, k, rank, int(rank == 20)}});
            }
    });
}

} // namespace races
