// Rows and threads of the norms, as in `rows.rs`.
#pragma once
#include "drive.h"

#include <algorithm>

namespace races {

struct Rows {
    int width, lanes, groups, wide;

    // A thread holds so many elements, by vectors or one by one.
    Rows(int width, bool wide, int held, int most) : width(width), wide(wide) {
        lanes = 16;
        while (lanes < most && lanes * held < width) lanes *= 2;
        groups = lanes > 32 ? 1 : 256 / lanes;
    }
    Grid grid(int rows, int of_block, size_t shared = 0) const { return {{blocks_of(rows, of_block), 1, 1}, lanes * groups, shared}; }
};

// Calls `with(rows, width, wide)`: lanes of one warp and of several, as many elements as registers
// hold and more.
template <typename With> void for_widths(With with) {
    with(19, 64, true), with(5, 704, true), with(3, 8600, true);
    with(19, 13, false), with(5, 333, false);
}

// Where a block's sums of weight gradients are: in shared memory, in memory, or nowhere.
enum class Sums { Shared, Memory, None };
template <typename With> void for_sums(With with) { with(Sums::Shared), with(Sums::Memory), with(Sums::None); }

} // namespace races
