// Operands of attention over a forest, and its tables of tiles as in `attention.cuh`.
#pragma once
#include "drive.h"

#include <algorithm>
#include <cmath>

namespace races {

constexpr int NO_WINDOW = 0x7fffffff;

struct Segment {
    int row, len, position, parent;
};

// A root with two children, the second of which has a child.
inline std::vector<Segment> family(int root, int first, int second, int grandchild) {
    const int a = root, b = root + first, c = b + second;
    return {{0, root, 0, -1}, {a, first, root, 0}, {b, second, root, 0}, {c, grandchild, root + second, 2}};
}

struct Shape {
    int heads, kv_heads, head_dim;
    float softcap = 0;
    int window = NO_WINDOW;

    int group() const { return heads / kv_heads; }
    // The most heads up to `most` that share keys and divide a group.
    int pack(int most) const {
        int pack = std::min(most, group());
        while (group() % pack) pack--;
        return pack;
    }
};

// Tiles, which come first, and pieces; a tile of keys has two entries.
struct Tiles {
    int count;
    const uint32_t *at;
};
typedef std::vector<uint32_t> Entry;

inline Tiles tiles_of(const std::vector<Entry> &tiles, const std::vector<Entry> &pieces) {
    std::vector<uint32_t> words;
    for (const Entry &tile : tiles) words.insert(words.end(), tile.begin(), tile.end());
    const uint32_t first_piece = uint32_t(words.size() / 4);
    for (size_t at = 3; at < words.size(); at += tiles[0].size()) words[at] += first_piece;
    for (const Entry &piece : pieces) words.insert(words.end(), piece.begin(), piece.end());
    return {int(tiles.size()), table(words)};
}

inline Entry piece(uint32_t start, int len, int row, int position) { return {start + len, row - start, position - start, 0}; }

inline Tiles query_tiles(const std::vector<Segment> &forest, int size) {
    std::vector<Entry> tiles, pieces;
    for (const Segment &segment : forest) {
        const uint32_t first_piece = uint32_t(pieces.size());
        for (int start = 0; start < segment.len; start += size) {
            tiles.push_back({uint32_t(segment.row + start), uint32_t(std::min(size, segment.len - start)),
                             uint32_t(segment.position + start), first_piece});
        }
        std::vector<Segment> path = {segment};
        while (path.back().parent >= 0) path.push_back(forest[path.back().parent]);
        for (auto part = path.rbegin(); part != path.rend(); part++)
            pieces.push_back(piece(part->position, part->len, part->row, part->position));
    }
    return tiles_of(tiles, pieces);
}

inline bool descends(const std::vector<Segment> &forest, int index, int from) {
    while (index >= 0 && index != from) index = forest[index].parent;
    return index == from;
}

inline Tiles key_tiles(const std::vector<Segment> &forest, int size, int window) {
    std::vector<Entry> tiles, pieces;
    for (int index = 0; index < int(forest.size()); index++) {
        const Segment &segment = forest[index];
        for (int start = 0; start < segment.len; start += size) {
            const int count = std::min(size, segment.len - start), position = segment.position + start;
            // No query from here on sees one of the keys.
            const long long limit = (long long)position + count - 1 + window;
            const uint32_t first_piece = uint32_t(pieces.size());
            uint32_t queries = 0;
            for (int other = index; other < int(forest.size()); other++) {
                if (!descends(forest, other, index)) continue;
                const int skipped = other == index ? start : 0, first = forest[other].position + skipped;
                const int len = int(std::min<long long>(forest[other].len - skipped, limit - first));
                if (len <= 0) continue;
                pieces.push_back(piece(queries, len, forest[other].row + skipped, first));
                queries += len;
            }
            tiles.push_back({uint32_t(segment.row + start), uint32_t(count), uint32_t(position), first_piece, queries, 0, 0, 0});
        }
    }
    return tiles_of(tiles, pieces);
}

template <typename T> struct Operands {
    std::vector<Segment> forest;
    Shape shape;
    int pack, rows, q_stride, kv_stride;
    T *q, *k, *v, *out, *d_out, *dq, *dk, *dv;
    float *log_sum_exp, *delta;

    Operands(const std::vector<Segment> &forest, const Shape &shape)
        : forest(forest), shape(shape), pack(shape.pack(16)), rows(forest.back().row + forest.back().len),
          q_stride(shape.heads * shape.head_dim), kv_stride(shape.kv_heads * shape.head_dim) {
        const size_t of_q = size_t(rows) * q_stride, of_kv = size_t(rows) * kv_stride;
        q = numbers<T>(of_q), out = numbers<T>(of_q), d_out = numbers<T>(of_q), dq = zeros<T>(of_q);
        k = numbers<T>(of_kv), v = numbers<T>(of_kv), dk = zeros<T>(of_kv), dv = zeros<T>(of_kv);
        log_sum_exp = numbers<float>(size_t(rows) * shape.heads, 3, 5), delta = numbers<float>(size_t(rows) * shape.heads);
    }
    Args rest() const {
        return {shape.head_dim, pack, shape.group(), 1 / std::sqrt(float(shape.head_dim)), shape.softcap, shape.window};
    }

    void forward(const std::string &kernel, int tile, size_t shared, int threads = 128) const {
        const Tiles tiles = query_tiles(forest, tile / pack);
        launch(kernel, {{tiles.count, shape.heads / pack, 1}, threads, shared},
               {{tiles.at, q, q_stride, k, kv_stride, v, kv_stride, out, q_stride, log_sum_exp, shape.heads}, rest()});
    }
    Args backward_operands(const Tiles &tiles) const {
        return {tiles.at, q,        q_stride,    k,           kv_stride, v, kv_stride, d_out,
                q_stride, log_sum_exp, shape.heads, delta, shape.heads};
    }
    void backward_queries(const std::string &kernel, int tile, size_t shared, int threads = 128) const {
        const Tiles tiles = query_tiles(forest, tile / pack);
        launch(kernel, {{tiles.count, shape.heads / pack, 1}, threads, shared},
               {backward_operands(tiles), {dq, q_stride}, rest()});
    }
    void backward_keys(const std::string &kernel, int tile, size_t shared, int threads = 128) const {
        const Tiles tiles = key_tiles(forest, tile, shape.window);
        launch(kernel, {{tiles.count, shape.kv_heads, 1}, threads, shared},
               {backward_operands(tiles), {dk, kv_stride, dv, kv_stride}, rest()});
    }
};

} // namespace races
