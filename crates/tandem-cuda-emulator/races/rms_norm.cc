#include "norms.h"

namespace races {

template <typename X, typename Y> void run(int rows, int width, bool wide, X x_type, Y y_type) {
    const size_t count = size_t(rows) * width;
    const long long stride = width;
    const X *x = numbers<X>(count);
    Y *y = numbers<Y>(count);
    float *w = numbers<float>(width), *inverse = numbers<float>(rows, 0.5f, 2), *dx = numbers<float>(count);
    const Rows forward(width, wide, wide ? 16 : 4, 512), backward(width, wide, wide ? 8 : 2, 512);
    launch(by_types("rms_norm", x_type, y_type), forward.grid(rows, forward.groups),
           {{x, stride, w, 1.0f, 1e-5f, y, stride, inverse, (long long)rows, width, forward.lanes, forward.wide}});
    for_sums([&](Sums sums) {
        const bool in_shared = sums == Sums::Shared, is_wanted = sums != Sums::None;
        // Groups of one block cannot share a row in memory.
        if (sums == Sums::Memory && backward.groups > 1) return;
        const int block_rows = blocks_of(is_wanted ? 4 : 1, backward.groups) * backward.groups;
        float *partial = is_wanted ? zeros<float>(size_t(blocks_of(rows, block_rows)) * width) : nullptr;
        launch(by_types("rms_norm_backward", x_type, y_type),
               backward.grid(rows, block_rows, in_shared ? sizeof(float) * backward.groups * width : 0),
               {{x, stride, w, 1.0f, inverse, y, stride, dx, stride, partial, int(in_shared), (long long)rows, width,
                 backward.lanes, block_rows, backward.wide}});
    });
}

void drive() {
    for_types([](auto x, auto y) {
        for_widths([&](int rows, int width, bool wide) { run(rows, width, wide, x, y); });
    });
}

} // namespace races
