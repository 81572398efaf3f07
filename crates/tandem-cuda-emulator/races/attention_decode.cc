// Queries of one part and of several, over caches of two ranges; every number of packed heads.
#include "attention.h"

namespace races {

template <typename T> void decode(int pack, const Shape &shape) {
    const int num_queries = 2, cached = 300, part_len = 128, lens[num_queries] = {57, 290};
    const int q_stride = shape.heads * shape.head_dim, kv_stride = shape.kv_heads * shape.head_dim;
    const T *q = numbers<T>(num_queries * q_stride), *k = numbers<T>(cached * kv_stride), *v = numbers<T>(cached * kv_stride);
    T *out = zeros<T>(num_queries * q_stride);
    int lanes = 1;
    while (lanes < 32 && lanes * 16 < shape.head_dim * int(sizeof(T))) lanes *= 2;
    // Without `partial` each query has one part.
    for (const bool has_several : {false, true}) {
        std::vector<Entry> parts, pieces;
        std::vector<uint32_t> queries;
        for (uint32_t query = 0; query < uint32_t(num_queries); query++) {
            const int seen = has_several ? lens[query] : std::min(lens[query], part_len), half = seen / 2;
            queries.insert(queries.end(), {uint32_t(parts.size()), uint32_t(blocks_of(seen, part_len))});
            for (int start = 0; start < seen; start += part_len)
                parts.push_back({query, uint32_t(std::min(part_len, seen - start)), uint32_t(start), uint32_t(pieces.size())});
            pieces.push_back(piece(0, half, 3, 0)), pieces.push_back(piece(half, seen - half, half + 5, half));
        }
        const Tiles tiles = tiles_of(parts, pieces);
        float *partial = has_several ? zeros<float>(size_t(tiles.count) * shape.heads * (shape.head_dim + 2)) : nullptr;
        launch("attention_decode_" + std::to_string(pack) + "_" + type_name<T>(),
               {{tiles.count, shape.heads / shape.pack(8), 1}, 128},
               {{tiles.at, q, q_stride, k, kv_stride, v, kv_stride, out, q_stride, partial, shape.heads, shape.head_dim,
                 shape.pack(8), shape.group(), 0.125f, shape.softcap, lanes}});
        if (!has_several) continue;
        launch("attention_combine_" + type_name<T>(), {{num_queries, shape.heads, 1}, 128},
               {{table(queries), partial, out, q_stride, shape.heads, shape.head_dim}});
    }
}

template <typename T> void of_type() {
    decode<T>(1, {2, 2, 64});
    decode<T>(2, {4, 2, 256, 20});
    decode<T>(4, {3, 1, 19});
    decode<T>(8, {8, 1, 80});
}

void drive() { of_type<float>(), of_type<bf16>(); }

} // namespace races
