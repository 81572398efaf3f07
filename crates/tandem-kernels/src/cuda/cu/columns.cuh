// A matrix whose columns are treated alike, in tiles: a block has 128 columns, four of each lane,
// and its warps take turns with the rows. So what belongs to a column stays in registers, and a
// warp reads what lies side by side.
#pragma once

#include "common.cuh"

constexpr int COLUMN_THREADS = 256;
constexpr int COLUMN_WARPS = COLUMN_THREADS / WARP;
constexpr int TILE_COLUMNS = 4 * WARP;

// The columns of a lane, counted from the tile's first.
__device__ __forceinline__ int column_of(bool wide, int k) {
    const int lane = threadIdx.x % WARP;
    return wide ? 4 * lane + k : lane + k * WARP;
}

// Whether four elements of every row can be moved at once.
template <typename T> __device__ __forceinline__ bool rows_are_aligned(const T *x, int stride) {
    return stride % 4 == 0 && is_aligned<4>(x);
}

// A lane's elements of a row's tile of `cols` columns or less; 0 beyond.
template <typename T> __device__ __forceinline__ void load_columns(const T *row, int cols, bool wide, float (&x)[4]) {
    if (wide) {
        x[0] = x[1] = x[2] = x[3] = 0;
        if (column_of(true, 0) < cols) load_many(row + column_of(true, 0), x);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = column_of(false, k) < cols ? load(row + column_of(false, k)) : 0.0f;
    }
}

template <typename T> __device__ __forceinline__ void store_columns(T *row, int cols, bool wide, const float (&x)[4]) {
    if (wide) {
        if (column_of(true, 0) < cols) store_many(row + column_of(true, 0), x);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (column_of(false, k) < cols) store(row + column_of(false, k), x[k]);
        }
    }
}
