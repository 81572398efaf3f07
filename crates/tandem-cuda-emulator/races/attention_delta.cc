// Rows of many lanes and of few, with and without vectors.
#include "drive.h"

namespace races {

template <typename T> void sums(int head_dim, int lanes) {
    const int tokens = 21, heads = 3, stride = heads * head_dim;
    const T *out = numbers<T>(size_t(tokens) * stride), *d_out = numbers<T>(size_t(tokens) * stride);
    launch("attention_delta_" + type_name<T>(), {{blocks_of(tokens * heads * lanes, 256), 1, 1}, 256},
           {{out, stride, d_out, stride, zeros<float>(tokens * heads), tokens, heads, head_dim, lanes}});
}

void drive() {
    sums<float>(128, 32), sums<float>(5, 2);
    sums<bf16>(128, 32), sums<bf16>(5, 2);
}

} // namespace races
