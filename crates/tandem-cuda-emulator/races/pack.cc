// Units that are full and not.
#include "drive.h"

namespace races {

template <typename T> void unpack() {
    const int unit = 16384, unit_len = 8512;
    const long long n = unit + 1001;
    uint8_t *packed = zeros<uint8_t>(2 * unit_len);
    for (int i = 0; i < 2 * unit_len; i++) packed[i] = uint8_t(37 * i);
    launch("unpack_nf4_" + type_name<T>(), {{2, 1, 1}, 256}, {{packed, numbers<float>(16 + 256), zeros<T>(n), n}});
    const long long cols = 8500, row_len = (cols + 4 + 63) / 64 * 64;
    for (const char *format : {"int8_", "fp8_"})
        launch("unpack_" + (format + type_name<T>()), {{1, blocks_of(cols, 8192), 1}, 256}, {{zeros<uint8_t>(row_len), row_len, zeros<T>(cols), cols}});
}

void drive() { unpack<float>(), unpack<bf16>(); }

} // namespace races
