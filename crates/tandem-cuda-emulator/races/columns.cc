// Tiles that are full and not, with and without vectors.
#include "drive.h"

namespace races {

Grid grid(int rows, int cols, int block_rows) { return {{blocks_of(rows, block_rows), blocks_of(cols, 128), 1}, 256}; }

template <typename A> void sums(int cols) {
    const int rows = 150, block_rows = 128;
    launch("column_sums_" + type_name<A>(), grid(rows, cols, block_rows),
           {{numbers<A>(rows * cols), cols, rows, cols, block_rows, zeros<float>(2 * cols), cols, 0}});
    launch("column_sums_" + type_name<A>(), grid(90, cols, block_rows),
           {{numbers<A>(rows * cols), cols, 90, cols, block_rows, zeros<float>(cols), cols, 1}});
}

void drive() {
    for (const int cols : {200, 131}) {
        sums<float>(cols), sums<bf16>(cols);
        for_types([&](auto x, auto y) {
            const int rows = 150, block_rows = 128;
            auto *a = numbers<decltype(x)>(rows * cols);
            auto *b = numbers<decltype(y)>(rows * cols);
            launch(by_types("column_dots", x, y), grid(rows, cols, block_rows),
                   {{a, cols, b, cols, rows, cols, block_rows, zeros<float>(2 * cols), cols, 0}});
            launch(by_types("scale_columns", x, y), grid(rows, cols, 64),
                   {{a, cols, numbers<float>(cols), numbers<float>(cols), b, cols, rows, cols}});
        });
    }
}

} // namespace races
