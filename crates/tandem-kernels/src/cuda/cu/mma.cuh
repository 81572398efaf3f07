// Tensor core instructions, and the loads of their operands: `mma`, `ldmatrix` and `cp.async` of
// PTX, with what the host does instead.
//
// A warp holds a matrix in *fragments*: with g = lane / 4 and t = lane % 4, a lane holds of A, 16 ×
// 16: words 0 to 3 are rows g, g + 8, g, g + 8, columns 2t and 2t + 1 (words 0, 1) or 2t + 8 and 2t
// + 9 (words 2, 3); of B, 16 × 8: words 0 and 1 are column g, rows 2t and 2t + 1, or 2t + 8 and 2t
// + 9; of C and D, 16 × 8: numbers 0 to 3 are row g (0, 1) or g + 8 (2, 3), columns 2t and 2t + 1.
// A word is two bf16, the one with the lower row or column in the lower half. So two of C side by
// side, rounded, are an A.
#pragma once
#include "common.cuh"

#ifdef TANDEM_HOST
namespace tandem_host {
// One lane's part of a product, and where the lane that comes first puts what the others get.
struct Product {
    uint32_t a[4], b[2];
    float d[4];
    uint32_t is_done;
};
static inline float half_of(uint32_t word, int upper) {
    return __uint_as_float(upper ? word & 0xffff0000u : word << 16);
}
// The product of all lanes' parts, left in their slots.
static inline void multiply(char *slots) {
    const auto of = [&](int lane) { return reinterpret_cast<Product *>(slots + 64 * lane); };
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4;
        for (int word = 0; word < 4; word++)
            for (int i = 0; i < 2; i++) a[g + word % 2 * 8][2 * t + word / 2 * 8 + i] = half_of(of(lane)->a[word], i);
        for (int word = 0; word < 2; word++)
            for (int i = 0; i < 2; i++) b[2 * t + word * 8 + i][g] = half_of(of(lane)->b[word], i);
        for (int i = 0; i < 4; i++) d[g + i / 2 * 8][2 * t + i % 2] = of(lane)->d[i];
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) of(lane)->d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}
} // namespace tandem_host
#endif

// D += A · B.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef TANDEM_HOST
    const tandem_host::Product mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}, 0};
    char *slots = const_cast<char *>(tandem_host::gather(mine));
    auto *first = reinterpret_cast<tandem_host::Product *>(slots);
    {
        const tandem_host::Unwatched unwatched;
        if (!first->is_done) tandem_host::multiply(slots), first->is_done = 1;
    }
    const auto result = tandem_host::given<tandem_host::Product>(slots, threadIdx.x % WARP);
    for (int i = 0; i < 4; i++) d[i] = result.d[i];
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

#ifdef TANDEM_HOST
namespace tandem_host {
// Lanes read one after another here: who writes what others load this way must have waited for
// them.
static inline void load_matrices(uint32_t (&to)[4], const bf16 *row, bool across) {
    if (reinterpret_cast<uintptr_t>(row) % 16) fail("a row of a matrix is not aligned");
    const char *slots = gather(row);
    const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (unsigned i = 0; i < 4; i++) {
        const bf16 *first = given<const bf16 *>(slots, 8 * i + (across ? 2 * t : g));
        const bf16 *second = across ? given<const bf16 *>(slots, 8 * i + 2 * t + 1) : first;
        to[i] = across ? first[g].bits | uint32_t(second[g].bits) << 16
                       : first[2 * t].bits | uint32_t(second[2 * t + 1].bits) << 16;
    }
}
} // namespace tandem_host
#endif

// Four matrices of 8 × 8 from shared memory: lane 8i + r gives the address of row r of matrix i,
// which is 16 bytes. Word i is row lane / 4, columns 2 (lane % 4) and the next one.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const bf16 *row) {
#ifdef TANDEM_HOST
    tandem_host::load_matrices(to, row, false);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(uint32_t(__cvta_generic_to_shared(row))));
#endif
}

// The same, and each matrix is transposed: word i is column lane / 4, rows 2 (lane % 4) and the
// next one.
__device__ __forceinline__ void load_matrices_across(uint32_t (&to)[4], const bf16 *row) {
#ifdef TANDEM_HOST
    tandem_host::load_matrices(to, row, true);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(uint32_t(__cvta_generic_to_shared(row))));
#endif
}

// Begins to copy 16 bytes to shared memory; zeros, and nothing is read, where there is nothing.
// Both are aligned.
__device__ __forceinline__ void copy_later(void *to, const void *from, bool is_there) {
#ifdef TANDEM_HOST
    tandem_host::copy_later(to, from, is_there ? 16 : 0);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(uint32_t(__cvta_generic_to_shared(to))), "l"(__cvta_generic_to_global(from)), "r"(is_there ? 16 : 0)
                 : "memory");
#endif
}

// What this thread has begun to copy since the last call is a group.
__device__ __forceinline__ void commit_copies() {
#ifdef TANDEM_HOST
    tandem_host::commit_copies();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most so many of this thread's groups are under way. Others see what it copied
// after a barrier.
template <int LEFT> __device__ __forceinline__ void wait_copies() {
#ifdef TANDEM_HOST
    tandem_host::wait_copies(LEFT);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

// The same number, of which the compiler does not know that: what depends on it is computed where it is
// used, and not kept in registers through a loop.
__device__ __forceinline__ int anew(int x) {
#ifndef TANDEM_HOST
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// 2^x to about 2 units in the last place; results below the smallest normal number are zeros.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef TANDEM_HOST
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// tanh to an absolute error of about 2e-7.
__device__ __forceinline__ float tanh_fast(float x) {
#ifdef TANDEM_HOST
    return 1.0f - 2.0f / (1.0f + exp2f(x * 2.88539008f));
#else
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x * 2.88539008f));
#endif
}
