// Optimiser states as they are kept, and as the f32 that an update computes with: `src/states.rs` says what they are.
//
// A warp takes 256 elements, which have a scale in common where states are kept in 8 bits. A lane has two runs of four of them, 128
// apart, so that every access of a warp is one piece of memory.
#pragma once
#include "common.cuh"

namespace {

constexpr int STATE_BLOCK = 256;
constexpr int RUN = 4;
constexpr int RUNS = 2;

// The elements of a lane.
typedef float Elements[RUNS][RUN];

// Where they are.
struct Place {
    // Where the warp's begin, of how many there are.
    size_t start, n;
    // Whether all operands are aligned for runs.
    bool wide;

    __device__ __forceinline__ size_t at(int run) const {
        return start + run * (RUN * WARP) + RUN * (threadIdx.x % WARP);
    }
    __device__ __forceinline__ int count(int run) const {
        return at(run) >= n ? 0 : n - at(run) < RUN ? int(n - at(run)) : RUN;
    }
    __device__ __forceinline__ bool is_whole(int run) const { return wide && count(run) == RUN; }
};

// What is missing is zeros.
template <typename T> __device__ __forceinline__ void read(const T *from, const Place &place, Elements &x) {
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
        const T *at = from + place.at(run);
        if (place.is_whole(run)) {
            load_many(at, x[run]);
        } else {
#pragma unroll
            for (int i = 0; i < RUN; i++) x[run][i] = i < place.count(run) ? load(at + i) : 0.0f;
        }
    }
}

template <typename T> __device__ __forceinline__ void write(T *to, const Place &place, const Elements &x) {
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
        T *at = to + place.at(run);
        if (place.is_whole(run)) {
            store_many(at, x[run]);
        } else {
#pragma unroll
            for (int i = 0; i < RUN; i++) {
                if (i < place.count(run)) store(at + i, x[run][i]);
            }
        }
    }
}

// What states are kept in: f32, bf16 with stochastic rounding, codes of the signed or the unsigned map.
enum Form { F32, BF16, SIGNED, UNSIGNED };

constexpr int DECADES = 7;

// A decade of a map: its codes are the middles of `1 / slope` wide steps, and it begins half-way from the last code below.
struct Decade {
    float bound, slope, steps;
};

// A dynamic map of 256 codes, as `Map` in `src/cpu/states.rs`.
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

// Copies what codes stand for to where a warp's lanes can look them up all at once.
template <int FORM> __device__ __forceinline__ void bring_values(float *values) {
    if constexpr (FORM == SIGNED || FORM == UNSIGNED) {
        for (int code = threadIdx.x; code < 256; code += blockDim.x) values[code] = MAPS[FORM == SIGNED].values[code];
    }
}

// The code of a number of [-1, 1], or of [0, 1].
template <bool IS_SIGNED> __device__ __forceinline__ uint32_t code_of(float y) {
    constexpr Map map(IS_SIGNED);
    // The first code of a decade is that many more than its steps, for each has twice as many as the one below.
    constexpr float SHIFT = IS_SIGNED ? 0.0f : -1.0f;
    const float magnitude = IS_SIGNED ? fabsf(y) : y;
    float slope = map.decades[0].slope, steps = map.decades[0].steps;
#pragma unroll
    for (int decade = 1; decade < DECADES; decade++) {
        const bool is_below = magnitude < map.decades[decade].bound;
        slope = is_below ? slope : map.decades[decade].slope;
        steps = is_below ? steps : map.decades[decade].steps;
    }
    // A decade begins at a tenth of its end, which is a ninth of its steps' width; what lies between two whole numbers is the
    // lower one's. The last step reaches a little beyond the decade's end, for the next one's are wider.
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

// A number for a place: Ellis's `lowbias32` finaliser (public domain) of key and place.
__device__ __forceinline__ uint32_t drawn(uint32_t key, uint32_t place) {
    uint32_t x = place ^ key;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// Adds half a word of what was drawn to the half that bf16 lacks. What is not finite stays that.
__device__ __forceinline__ uint32_t rounded(float value, uint32_t drawn) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7f800000u) != 0x7f800000u) return (bits + (drawn >> 16)) >> 16;
    return bits >> 16 | (value != value ? 0x40u : 0u);
}

// States of some form.
template <int FORM> struct States {
    void *kept;
    // Of 8 bits.
    float *scales;
    const float *values;
    // Of bf16.
    uint32_t key, first;

    // As f32.
    __device__ __forceinline__ void open(const Place &place, Elements &x) const {
        if (FORM == F32) {
            read(static_cast<const float *>(kept), place, x);
        } else if (FORM == BF16) {
            read(static_cast<const bf16 *>(kept), place, x);
        } else {
            const float scale = scales[place.start / STATE_BLOCK];
#pragma unroll
            for (int run = 0; run < RUNS; run++) {
                const uint32_t codes = read_codes(place, run);
#pragma unroll
                for (int i = 0; i < RUN; i++) x[run][i] = __fmul_rn(values[codes >> 8 * i & 255u], scale);
            }
        }
    }

    // Keeps what has become of them.
    __device__ __forceinline__ void close(const Place &place, const Elements &x) const {
        if (FORM == F32) {
            write(static_cast<float *>(kept), place, x);
        } else if (FORM == BF16) {
            round(place, x);
        } else {
            encode(place, x);
        }
    }

    __device__ __forceinline__ uint32_t read_codes(const Place &place, int run) const {
        const uint8_t *at = static_cast<const uint8_t *>(kept) + place.at(run);
        // A block of codes begins at a multiple of 256 bytes.
        if (place.count(run) == RUN) return *reinterpret_cast<const uint32_t *>(at);
        uint32_t codes = 0;
#pragma unroll
        for (int i = 0; i < RUN; i++) codes |= i < place.count(run) ? uint32_t(at[i]) << 8 * i : 0u;
        return codes;
    }

    __device__ __forceinline__ void round(const Place &place, const Elements &x) const {
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            uint16_t *at = static_cast<uint16_t *>(kept) + place.at(run);
            uint32_t bits[RUN];
#pragma unroll
            for (int i = 0; i < RUN; i++) {
                bits[i] = rounded(x[run][i], drawn(key, first + uint32_t(place.at(run)) + i));
            }
            if (place.is_whole(run)) {
                *reinterpret_cast<uint2 *>(at) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
            } else {
#pragma unroll
                for (int i = 0; i < RUN; i++) {
                    if (i < place.count(run)) at[i] = uint16_t(bits[i]);
                }
            }
        }
    }

    // The element of the largest magnitude is the block's scale: its own is 1.
    __device__ __forceinline__ void encode(const Place &place, const Elements &x) const {
        float highest = 0, lowest = 0;
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
#pragma unroll
            for (int i = 0; i < RUN; i++) highest = fmaxf(highest, x[run][i]), lowest = fmaxf(lowest, -x[run][i]);
        }
        highest = warp_max(highest), lowest = warp_max(lowest);
        const float largest = highest >= lowest ? highest : -lowest;
        // The smallest code times a scale is always a normal number.
        const bool is_zero = fabsf(largest) < 0x1p-100f;
        if (threadIdx.x % WARP == 0) scales[place.start / STATE_BLOCK] = is_zero ? 0.0f : largest;
        const float inverse = __fdiv_rn(1.0f, largest);
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            uint8_t *at = static_cast<uint8_t *>(kept) + place.at(run);
            uint32_t codes = 0;
#pragma unroll
            for (int i = 0; i < RUN; i++) codes |= code_of<FORM == SIGNED>(__fmul_rn(x[run][i], inverse)) << 8 * i;
            codes = is_zero ? 0u : codes;
            if (place.count(run) == RUN) {
                *reinterpret_cast<uint32_t *>(at) = codes;
            } else {
#pragma unroll
                for (int i = 0; i < RUN; i++) {
                    if (i < place.count(run)) at[i] = uint8_t(codes >> 8 * i);
                }
            }
        }
    }

    __device__ __forceinline__ bool is_wide() const {
        return FORM == F32    ? is_aligned<RUN>(static_cast<const float *>(kept))
               : FORM == BF16 ? is_aligned<RUN>(static_cast<const bf16 *>(kept))
                              : true;
    }
};

} // namespace
