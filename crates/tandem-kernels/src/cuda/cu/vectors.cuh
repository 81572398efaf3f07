// Elements that lie side by side, moved at once: 4 or 8 where they are aligned for it, else 1.
#pragma once
#include "common.cuh"

// How many where everything is aligned: 16 bytes of the wider type. More would leave gaps between
// what neighbouring threads move at a time.
template <typename X, typename Y = X> constexpr int AT_ONCE = sizeof(X) == 2 && sizeof(Y) == 2 ? 8 : 4;

// `N` elements as they were moved. A thread that has several vectors under way fetches all before
// it unpacks one: whatever is done with one waits for it, and holds up what comes after.
template <typename T, int N> struct Vector;
template <typename T> struct Vector<T, 1> {
    T bits;
};
template <> struct Vector<float, 4> {
    float4 bits;
};
template <> struct Vector<bf16, 4> {
    uint2 bits;
};
template <> struct Vector<bf16, 8> {
    uint4 bits;
};

template <int N, typename T> __device__ __forceinline__ Vector<T, N> fetch(const T *at) {
    check_alignment<N>(at, sizeof(Vector<T, N>));
    Vector<T, N> vector;
    vector.bits = *reinterpret_cast<const decltype(vector.bits) *>(at);
    return vector;
}

template <typename T> __device__ __forceinline__ void unpack(const Vector<T, 1> &v, float (&x)[1]) { x[0] = to_float(v.bits); }
__device__ __forceinline__ void unpack(const Vector<float, 4> &v, float (&x)[4]) {
    x[0] = v.bits.x, x[1] = v.bits.y, x[2] = v.bits.z, x[3] = v.bits.w;
}
__device__ __forceinline__ void unpack(const Vector<bf16, 4> &v, float (&x)[4]) {
    x[0] = low_float(v.bits.x), x[1] = high_float(v.bits.x), x[2] = low_float(v.bits.y), x[3] = high_float(v.bits.y);
}
__device__ __forceinline__ void unpack(const Vector<bf16, 8> &v, float (&x)[8]) {
    x[0] = low_float(v.bits.x), x[1] = high_float(v.bits.x), x[2] = low_float(v.bits.y), x[3] = high_float(v.bits.y);
    x[4] = low_float(v.bits.z), x[5] = high_float(v.bits.z), x[6] = low_float(v.bits.w), x[7] = high_float(v.bits.w);
}

// Beside those of `common.cuh`. Eight f32, which stand beside eight bf16, are two moves.
template <typename T> __device__ __forceinline__ void load_many(const T *at, float (&x)[1]) { x[0] = load(at); }
__device__ __forceinline__ void load_many(const bf16 *at, float (&x)[8]) { unpack(fetch<8>(at), x); }
__device__ __forceinline__ void load_many(const float *at, float (&x)[8]) {
    const Vector<float, 4> low = fetch<4>(at), high = fetch<4>(at + 4);
    x[0] = low.bits.x, x[1] = low.bits.y, x[2] = low.bits.z, x[3] = low.bits.w;
    x[4] = high.bits.x, x[5] = high.bits.y, x[6] = high.bits.z, x[7] = high.bits.w;
}
template <typename T> __device__ __forceinline__ void store_many(T *at, const float (&x)[1]) { store(at, x[0]); }

__device__ __forceinline__ float4 pack(const float *, const float (&x)[4]) { return make_float4(x[0], x[1], x[2], x[3]); }
__device__ __forceinline__ uint2 pack(const bf16 *, const float (&x)[4]) {
    return make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
}
__device__ __forceinline__ uint4 pack(const bf16 *, const float (&x)[8]) {
    return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

// Stores to the device's memory as one move: the compiler takes some apart that are written as an
// assignment, into as many as there are words.
template <int N, typename T> __device__ __forceinline__ void put(T *at, const float (&x)[N]) {
    if constexpr (N == 1) {
        store(at, x[0]);
    } else {
        auto bits = pack(at, x);
        check_alignment<N>(at, sizeof(bits));
#ifdef TANDEM_HOST
        std::memcpy(at, &bits, sizeof(bits));
#else
        __stwb(reinterpret_cast<decltype(bits) *>(at), bits);
#endif
    }
}
