// Optimiser states in storage and as the f32 of an update; `numerics/states.rs` describes them.
//
// Threads: a warp takes 256 consecutive elements, one block of 8-bit states. A lane has two vectors
// of four elements, 128 apart, so that every access of a warp is contiguous.
#pragma once
#include "common.cuh"

namespace {

constexpr int STATE_BLOCK = 256;
constexpr int VECTOR = 4;
constexpr int VECTORS = 2;

// The values of a lane.
typedef float LaneValues[VECTORS][VECTOR];

// The elements of a lane.
struct LaneRange {
    // The warp's first element, and the number of elements in all.
    size_t start, n;
    // Whether all operands are aligned for vectors.
    bool wide;

    __device__ __forceinline__ size_t at(int vec) const {
        return start + vec * (VECTOR * WARP) + VECTOR * (threadIdx.x % WARP);
    }
    __device__ __forceinline__ int count(int vec) const {
        return at(vec) >= n ? 0 : n - at(vec) < VECTOR ? int(n - at(vec)) : VECTOR;
    }
    __device__ __forceinline__ bool is_whole(int vec) const { return wide && count(vec) == VECTOR; }
};

// Elements beyond the end read as zeros.
template <typename T> __device__ __forceinline__ void read(const T *from, const LaneRange &range, LaneValues &x) {
#pragma unroll
    for (int vec = 0; vec < VECTORS; vec++) {
        const T *at = from + range.at(vec);
        if (range.is_whole(vec)) {
            load_many(at, x[vec]);
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) x[vec][i] = i < range.count(vec) ? load(at + i) : 0.0f;
        }
    }
}

template <typename T> __device__ __forceinline__ void write(T *to, const LaneRange &range, const LaneValues &x) {
#pragma unroll
    for (int vec = 0; vec < VECTORS; vec++) {
        T *at = to + range.at(vec);
        if (range.is_whole(vec)) {
            store_many(at, x[vec]);
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                if (i < range.count(vec)) store(at + i, x[vec][i]);
            }
        }
    }
}

// Storage formats: f32, bf16 with stochastic rounding, codes of the signed or the unsigned map;
// no states.
enum Form { F32, BF16, SIGNED, UNSIGNED, NONE };

constexpr int DECADES = 7;

// A decade of a map: its codes are the middles of `1 / slope` wide steps, and it begins half-way
// from the last code below.
struct Decade {
    float bound, slope, steps;
};

// A dynamic map of 256 codes, as `Map` in `cpu/states.rs`.
struct Map {
    float values[256];
    Decade decades[DECADES];
    // What is not below becomes 1.
    float top;

    __device__ constexpr Map(bool is_signed) : values{}, decades{}, top(0) {
        // The decade is from a tenth of `unit` to `unit`, cut into `steps`.
        double unit = 1e-6, before = 0;
        int steps = is_signed ? 1 : 2, code = 1;
        for (int decade = 0; decade < DECADES; decade++) {
            const double width = 0.9 * unit / steps;
            for (int step = 0; step < steps; step++) {
                const double value = 0.1 * unit + (step + 0.5) * width;
                if (step == 0) decades[decade] = {float(0.5 * (before + value)), float(1.0 / width), float(steps)};
                values[code] = float(value);
                if (is_signed) values[128 + code] = -float(value);
                before = value;
                code++;
            }
            unit = 10.0 * unit;
            steps = 2 * steps;
        }
        values[is_signed ? 128 : 255] = 1.0f;
        top = float(0.5 * (before + 1.0));
    }
};

__device__ constexpr Map MAPS[2] = {Map(false), Map(true)};

// Copies the values of codes to shared memory, where all lanes of a warp can look them up.
template <int FORM> __device__ __forceinline__ void load_map(float *values) {
    if constexpr (FORM == SIGNED || FORM == UNSIGNED) {
        for (int code = threadIdx.x; code < 256; code += blockDim.x) values[code] = MAPS[FORM == SIGNED].values[code];
    }
}

// The code of a number of [-1, 1], or of [0, 1].
template <bool IS_SIGNED> __device__ __forceinline__ uint32_t code_of(float y) {
    constexpr Map map(IS_SIGNED);
    // The first code of a decade is that many more than its steps, for each has twice as many as
    // the one below.
    constexpr float SHIFT = IS_SIGNED ? 0.0f : -1.0f;
    const float magnitude = IS_SIGNED ? fabsf(y) : y;
    float slope = map.decades[0].slope, steps = map.decades[0].steps;
#pragma unroll
    for (int decade = 1; decade < DECADES; decade++) {
        const bool is_below = magnitude < map.decades[decade].bound;
        slope = is_below ? slope : map.decades[decade].slope;
        steps = is_below ? steps : map.decades[decade].steps;
    }
    // A decade begins at a tenth of its end, which is a ninth of its steps' width; what lies
    // between two whole numbers is the lower one's. The last step reaches a little beyond the
    // decade's end, for the next one's are wider.
    const float offset = __fmaf_rn(steps, 8.0f / 9.0f, SHIFT - 0.5f);
    float code = fminf(__fmaf_rn(steps, 2.0f, SHIFT - 1.0f), rintf(__fmaf_rn(magnitude, slope, offset)));
    if (IS_SIGNED) {
        code = y < 0.0f ? __fadd_rn(code, 128.0f) : code;
        code = magnitude < map.decades[0].bound ? 0.0f : code;
    } else {
        // What is not zero does not become it.
        code = magnitude < map.decades[0].bound ? (y > 0.0f ? 1.0f : 0.0f) : code;
    }
    // Not a number is not below the top.
    return uint32_t(y < map.top ? code : IS_SIGNED ? 128.0f : 255.0f);
}

// Hashes key and index: Ellis's `lowbias32` finaliser (public domain).
__device__ __forceinline__ uint32_t random_bits(uint32_t key, uint32_t index) {
    uint32_t x = index ^ key;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// Adds 16 random bits to the half that bf16 lacks. Infinity and NaN stay.
__device__ __forceinline__ uint32_t rounded(float value, uint32_t random) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7f800000u) != 0x7f800000u) return (bits + (random >> 16)) >> 16;
    return bits >> 16 | (value != value ? 0x40u : 0u);
}

// States in one format.
template <int FORM> struct States {
    void *storage;
    // Of 8-bit states.
    float *scales;
    const float *values;
    // Of bf16. Without columns elements have the indices of a row; else they are `width` columns of rows
    // `stride` apart, `skipped` elements after the first.
    uint32_t key, first, width, stride, skipped;

    __device__ __forceinline__ uint32_t index(uint32_t at) const {
        const uint32_t place = skipped + at;
        return first + (width ? place / width * stride + place % width : place);
    }

    // Reads the lane's states as f32.
    __device__ __forceinline__ void load_states(const LaneRange &range, LaneValues &x) const {
        if (FORM == NONE) {
#pragma unroll
            for (int vec = 0; vec < VECTORS; vec++) {
#pragma unroll
                for (int i = 0; i < VECTOR; i++) x[vec][i] = 0.0f;
            }
        } else if (FORM == F32) {
            read(static_cast<const float *>(storage), range, x);
        } else if (FORM == BF16) {
            read(static_cast<const bf16 *>(storage), range, x);
        } else {
            const float scale = scales[range.start / STATE_BLOCK];
#pragma unroll
            for (int vec = 0; vec < VECTORS; vec++) {
                const uint32_t codes = read_codes(range, vec);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) x[vec][i] = __fmul_rn(values[codes >> 8 * i & 255u], scale);
            }
        }
    }

    // Rounds and stores the lane's states.
    __device__ __forceinline__ void store_states(const LaneRange &range, const LaneValues &x) const {
        if (FORM == NONE) return;
        if (FORM == F32) {
            write(static_cast<float *>(storage), range, x);
        } else if (FORM == BF16) {
            round(range, x);
        } else {
            encode(range, x);
        }
    }

    __device__ __forceinline__ uint32_t read_codes(const LaneRange &range, int vec) const {
        const uint8_t *at = static_cast<const uint8_t *>(storage) + range.at(vec);
        // A block of codes begins at a multiple of 256 bytes.
        if (range.count(vec) == VECTOR) return *reinterpret_cast<const uint32_t *>(at);
        uint32_t codes = 0;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) codes |= i < range.count(vec) ? uint32_t(at[i]) << 8 * i : 0u;
        return codes;
    }

    __device__ __forceinline__ void round(const LaneRange &range, const LaneValues &x) const {
#pragma unroll
        for (int vec = 0; vec < VECTORS; vec++) {
            uint16_t *at = static_cast<uint16_t *>(storage) + range.at(vec);
            uint32_t bits[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                bits[i] = rounded(x[vec][i], random_bits(key, index(uint32_t(range.at(vec)) + i)));
            }
            if (range.is_whole(vec)) {
                *reinterpret_cast<uint2 *>(at) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
            } else {
#pragma unroll
                for (int i = 0; i < VECTOR; i++) {
                    if (i < range.count(vec)) at[i] = uint16_t(bits[i]);
                }
            }
        }
    }

    // The element of the largest magnitude is the block's scale: its own is 1.
    __device__ __forceinline__ void encode(const LaneRange &range, const LaneValues &x) const {
        float highest = 0, lowest = 0;
#pragma unroll
        for (int vec = 0; vec < VECTORS; vec++) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) highest = fmaxf(highest, x[vec][i]), lowest = fmaxf(lowest, -x[vec][i]);
        }
        highest = warp_max(highest), lowest = warp_max(lowest);
        const float largest = highest >= lowest ? highest : -lowest;
        // The smallest code times a scale is always a normal number.
        const bool is_zero = fabsf(largest) < 0x1p-100f;
        // All lanes have read the old scale. The shuffles above order no accesses.
        __syncwarp();
        if (threadIdx.x % WARP == 0) scales[range.start / STATE_BLOCK] = is_zero ? 0.0f : largest;
        const float inverse = __fdiv_rn(1.0f, largest);
#pragma unroll
        for (int vec = 0; vec < VECTORS; vec++) {
            uint8_t *at = static_cast<uint8_t *>(storage) + range.at(vec);
            uint32_t codes = 0;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) codes |= code_of<FORM == SIGNED>(__fmul_rn(x[vec][i], inverse)) << 8 * i;
            codes = is_zero ? 0u : codes;
            if (range.count(vec) == VECTOR) {
                *reinterpret_cast<uint32_t *>(at) = codes;
            } else {
#pragma unroll
                for (int i = 0; i < VECTOR; i++) {
                    if (i < range.count(vec)) at[i] = uint8_t(codes >> 8 * i);
                }
            }
        }
    }

    __device__ __forceinline__ bool is_wide() const {
        return FORM == F32    ? is_aligned<VECTOR>(static_cast<const float *>(storage))
               : FORM == BF16 ? is_aligned<VECTOR>(static_cast<const bf16 *>(storage))
                              : true;
    }
};

} // namespace
