// Several terms out of range, which set one flag.
#include "drive.h"

namespace races {

void drive() {
    for (const long long n : {4096ll, 2501ll})
        for (const int add : {0, 1}) {
            float *terms = numbers<float>(n);
            for (int i = 0; i < n; i += 7) terms[i] = 1e9f;
            int64_t *sums = zeros<int64_t>(n);
            launch("exact_sum", {{blocks_of(n, 2048), 1, 1}, 256}, {{terms, sums, n, add, 32768.0f, zeros<uint32_t>(1)}});
            launch("check_terms", {{blocks_of(n, 2048), 1, 1}, 256}, {{(const float *)terms, n, 32768.0f, zeros<uint32_t>(1)}});
            launch("exact_merge", {{blocks_of(n, 2048), 1, 1}, 256}, {{(const int64_t *)zeros<int64_t>(n), sums, n, add}});
        }
}

} // namespace races
