// A text of two chunks that two others continue, and one that begins with a slot; every room of a
// thread for a state, full and not, in two value heads of one key head.
#include "drive.h"

namespace races {

enum : uint32_t { NOTHING, SLOT, END, CONTINUES, NONE = 0xffffffffu };

constexpr int ROWS = 140, KEY_HEADS = 1, GROUP = 2, HEADS = KEY_HEADS * GROUP, SIDE = 32;

struct Walk {
    uint32_t first, count;
};

template <typename T> void run(int room, int dk, int dv) {
    const std::string of_size = "_" + std::to_string(room) + "_" + type_name<T>(), type = "_" + type_name<T>();
    // Rows, origin, slots and ends, first chunk, and gradients that runs begin with.
    const auto pieces = [](uint32_t origin, uint32_t keep) {
        return table<uint32_t>({0,   130, NOTHING,   0, NONE, NONE, 0, NONE, 0, 0,  //
                                130, 131, CONTINUES, 0, 0,    NONE, 2, NONE, 0, 2,  //
                                134, 140, origin,    0, NONE, keep, 3, NONE, 2, 0,  //
                                131, 133, END,       0, NONE, NONE, 4, 0,    2, 0,  //
                                133, 134, END,       0, NONE, NONE, 5, 1,    2, 0});
    };
    const uint32_t *walks = table<uint32_t>({0, 2, 2, 1, 3, 1, 4, 1});
    const int num_chunks = 6;
    const uint32_t *chunks = table<uint32_t>({0, 128, 128, 2, 130, 1, 134, 6, 131, 2, 133, 1});

    const long long key_stride = KEY_HEADS * dk, value_stride = HEADS * dv, gate_stride = HEADS, len = (long long)dk * dv;
    const float *q = numbers<float>(ROWS * key_stride), *k = numbers<float>(ROWS * key_stride, -0.1f, 0.1f);
    const T *v = numbers<T>(ROWS * value_stride), *d_out = numbers<T>(ROWS * value_stride);
    const T *a = numbers<T>(ROWS * HEADS), *b = numbers<T>(ROWS * HEADS);
    const float *decay_log = numbers<float>(HEADS), *decay_bias = numbers<float>(HEADS);
    float *ends = zeros<float>(HEADS * len), *begins = zeros<float>(2 * HEADS * len), *states = numbers<float>(HEADS * len);
    float *starts = zeros<float>(num_chunks * HEADS * len), *stops = zeros<float>(num_chunks * HEADS * len);
    float *us = zeros<float>(ROWS * value_stride), *ds = zeros<float>(ROWS * value_stride);
    const int columns = blocks_of(dv, SIDE), rows = blocks_of(dk, SIDE);
    float *terms = zeros<float>(ROWS * HEADS * rows), *bounds = zeros<float>(num_chunks * HEADS * rows);

    const Args keys = {q, key_stride, k, key_stride};
    const Args gates = {a, gate_stride, b, gate_stride, decay_log, decay_bias};
    const Args heads = {0, HEADS, GROUP, dk, dv, 0.1f};
    const Args of_values = {v, value_stride}, of_out = {d_out, value_stride};
    // Two walks, and two that continue one of them.
    for (const int level : {0, 1}) {
        const Args own = {walks + 4 * level, pieces(SLOT, 0)};
        launch("delta_rule" + of_size, {{2, HEADS * columns, 1}, 128},
               {own, keys, of_values, gates, heads, {states, len, ends, (float *)nullptr, zeros<T>(ROWS * value_stride), value_stride}});
    }
    for (const int level : {0, 1}) {
        const Args own = {walks + 4 * level, pieces(NOTHING, NONE)};
        launch("delta_states" + of_size, {{2, HEADS * columns, 1}, 128},
               {own, keys, of_values, gates, heads, {(float *)nullptr, 0ll, ends, starts, us, value_stride}});
    }
    for (const int level : {1, 0}) {
        const Args own = {walks + 4 * level, pieces(NOTHING, NONE)};
        launch("delta_adjoints" + of_size, {{2, HEADS * columns, 1}, 128},
               {own, keys, of_out, gates, heads, {begins, stops, ds, zeros<T>(ROWS * value_stride), value_stride}});
    }
    const Args kept = {(const float *)us, (const float *)ds};
    launch("delta_rows" + of_size, {{num_chunks, KEY_HEADS * rows, 1}, 128},
           {{chunks}, keys, of_out, gates, heads, {(const float *)starts, (const float *)stops}, kept,
            {terms, bounds, zeros<float>(ROWS * key_stride), key_stride, zeros<float>(ROWS * key_stride), key_stride}});
    launch("delta_gates" + type, {{num_chunks, HEADS, 1}, 128},
           {{chunks}, gates, {0, HEADS, rows, dv}, kept, {(const float *)terms, (const float *)bounds},
            {zeros<T>(ROWS * HEADS), gate_stride, zeros<T>(ROWS * HEADS), gate_stride, zeros<float>(ROWS * HEADS), gate_stride}});
}

template <typename T> void of_type() {
    run<T>(16, 64, 64), run<T>(16, 37, 41);
    run<T>(32, 128, 66);
    run<T>(64, 131, 33);
}

void drive() { of_type<float>(), of_type<bf16>(); }

} // namespace races
