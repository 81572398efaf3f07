// Texts of which one continues a slot of the history and one follows another, of few taps and of many.
#include "drive.h"

namespace races {

constexpr uint32_t NO_TAP = 0xffffffffu;

// Rows of two texts: the second begins with the history's only slot.
constexpr int FIRST = 200, ROWS = 300;

std::vector<uint32_t> taps_of(int width) {
    std::vector<uint32_t> taps;
    for (int row = 0; row < ROWS; row++)
        for (int j = 0; j < width; j++) {
            const int start = row < FIRST ? 0 : FIRST, at = row - (width - 1) + j;
            const uint32_t before = start ? uint32_t(ROWS + (width - 1) + (at - start)) : NO_TAP;
            taps.push_back(at >= start ? uint32_t(at) : before);
        }
    return taps;
}

template <typename T> void run(int cols, int width) {
    const int block_rows = 64, of_weights = 256;
    const auto grid = [&](int of_block) { return Grid{{blocks_of(ROWS, of_block), blocks_of(cols, 128), 1}, 256}; };
    const std::string type = "_" + type_name<T>();
    const T *x = numbers<T>(ROWS * cols), *dy = numbers<T>(ROWS * cols);
    T *history = numbers<T>((width - 1) * cols), *y = zeros<T>(ROWS * cols);
    const float *w = numbers<float>(cols * width);
    const std::vector<uint32_t> taps = taps_of(width);
    const uint32_t *taps_at = table(taps);
    launch("causal_conv" + type, grid(block_rows),
           {{x, cols, w, width, taps_at, (const T *)history, cols, y, cols, ROWS, cols, block_rows}});
    launch("causal_conv_keep" + type, {{1, blocks_of(cols, 256), 1}, 256},
           {{x, cols, width, taps_at, table<uint32_t>({0, 1}), table<uint32_t>({ROWS - 1, 0}), history, cols, ROWS, cols}});
    // Without a history, as in training.
    std::vector<uint32_t> trained = taps, starts = {0}, readers;
    for (uint32_t &tap : trained) tap = tap < ROWS ? tap : NO_TAP;
    for (int row = 0; row < ROWS; row++) {
        for (size_t i = 0; i < trained.size(); i++) {
            if (trained[i] == uint32_t(row)) readers.insert(readers.end(), {uint32_t(i / width), uint32_t(i % width)});
        }
        starts.push_back(uint32_t(readers.size() / 2));
    }
    launch("causal_conv_backward" + type, grid(block_rows),
           {{dy, cols, w, width, table(starts), table(readers), zeros<T>(ROWS * cols), cols, ROWS, cols, block_rows}});
    const int blocks = blocks_of(ROWS, of_weights);
    float *partial = zeros<float>(size_t(blocks) * width * cols);
    launch("causal_conv_weights" + type, grid(of_weights),
           {{x, cols, dy, cols, width, table(trained), partial, ROWS, cols, of_weights}});
    launch("causal_conv_sum", {{blocks_of(cols * width, 256), 1, 1}, 256},
           {{(const float *)partial, blocks, zeros<float>(cols * width), width, cols, width}});
}

void drive() {
    run<float>(200, 4), run<float>(131, 9);
    run<bf16>(200, 4), run<bf16>(131, 9);
}

} // namespace races
