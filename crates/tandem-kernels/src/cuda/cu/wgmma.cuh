// Hopper's products of a warpgroup, `wgmma` of PTX for `sm_90a`, and tiles in the layout that they
// read, with what the host does instead.
//
// A warpgroup is four warps, the first of which has a number that is a multiple of four. D is 64 ×
// N: its warp w holds rows 16w to 16w + 15, in fragments as in `mma.cuh`. A is 64 × 16, in
// fragments or in shared memory; B is 16 × N, in shared memory. A product runs beside what follows
// it, until it is waited for: until then its registers are not touched, and its tiles not written.
//
// A tile is *panels* of 64 columns: 128 bytes of each row, in eight parts of 16. Part p of row r is
// where part `p ^ r % 8` would be, so that parts of eight rows at one column lie in different banks.
// Panels begin at multiples of 1,024 bytes of shared memory: the hardware permutes by bits of the
// address.
#pragma once
#include "mma.cuh"

// Shared memory of tiles.
#ifdef TANDEM_HOST
#define PANELS_SHARED(name) DYNAMIC_SHARED(name)
#else
#define PANELS_SHARED(name) extern __shared__ __align__(1024) char name[]
#endif

// Columns of a panel.
constexpr int PANEL = 64;

// A tile of `ROWS` rows.
template <int WIDTH, int ROWS> struct Panels {
    static_assert(WIDTH % PANEL == 0 && ROWS % 8 == 0, "panels are whole, and so are the groups of rows that are permuted");
    static constexpr int SIZE = ROWS * WIDTH;

    static __device__ __forceinline__ int place(int row, int part) {
        return part / 8 * (ROWS * PANEL) + row * PANEL + ((part % 8 ^ row % 8) << 3);
    }
};

// Where a matrix is in shared memory, for the hardware: address, *leading* and *stride* offset in
// units of 16 bytes at bits 0, 16 and 32, and the permutation of panels at bit 62.
//
// With rows of the matrix along those of the tile, as of A and of Bᵀ: groups of eight rows are a
// stride apart, and the 16 columns are of one panel. With rows across, as of B where its columns
// are those of the tile: panels are the leading offset apart, and groups of eight rows a stride.
__device__ __forceinline__ uint64_t matrix_at(const bf16 *at, int panel_bytes) {
#ifdef TANDEM_HOST
    const uint64_t address = reinterpret_cast<const char *>(at) - static_cast<const char *>(tandem_host::dynamic_shared());
#else
    const uint64_t address = __cvta_generic_to_shared(at);
#endif
    return address >> 4 | uint64_t(panel_bytes >> 4) << 16 | uint64_t(8 * 128 >> 4) << 32 | uint64_t(1) << 62;
}
// The same, so many bytes further on.
__device__ __forceinline__ uint64_t further(uint64_t matrix, int bytes) { return matrix + (bytes >> 4); }

#ifdef TANDEM_HOST
namespace tandem_host {
// Place of an element of a matrix in shared memory: `row` of those that are eight in a group, `column` of
// those that lie side by side.
static inline const char *element(uint64_t matrix, unsigned row, unsigned column) {
    const auto field = [&](int bit) { return unsigned(matrix >> bit & 0x3fff) << 4; };
    unsigned address = field(0) + row / 8 * field(32) + row % 8 * 128 + column / 64 * field(16) + column % 64 * 2;
    address ^= (address >> 7 & 7) << 4;
    return static_cast<const char *>(dynamic_shared()) + address;
}
// Tells what a warp's part of a product reads of shared memory.
static inline void touch_operands(const Wide &wide, unsigned warp) {
    const auto parts = [&](uint64_t matrix, unsigned first, unsigned rows, unsigned columns) {
        for (unsigned row = first; row < first + rows; row++)
            for (unsigned column = 0; column < columns; column += 8) touch_shared(element(matrix, row, column), 16);
    };
    if (!wide.a) parts(wide.a_matrix, 16 * warp, 16, 16);
    if (wide.across) parts(wide.b_matrix, 0, 16, wide.n);
    else parts(wide.b_matrix, 0, wide.n, 16);
}
// A warp's part of a product; lanes give theirs.
static inline void multiply_wide(const char *slots, unsigned warp) {
    Wide of[32];
    for (unsigned lane = 0; lane < 32; lane++) of[lane] = given<Wide>(slots, lane);
    const Wide common = of[0];
    const auto number = [](const char *at) {
        uint16_t bits;
        std::memcpy(&bits, at, 2);
        return half_of(bits, 0);
    };
    float a[16][16], b[16];
    for (int lane = 0; lane < 32; lane++) {
        const Wide &wide = of[lane];
        if (wide.b_matrix != common.b_matrix || wide.a_matrix != common.a_matrix) fail("lanes multiply different matrices");
        for (int word = 0; wide.a && word < 4; word++)
            for (int i = 0; i < 2; i++) a[lane / 4 + word % 2 * 8][lane % 4 * 2 + word / 2 * 8 + i] = half_of(wide.a[word], i);
    }
    for (unsigned row = 0; !common.a && row < 16; row++)
        for (unsigned k = 0; k < 16; k++) a[row][k] = number(element(common.a_matrix, 16 * warp + row, k));
    for (unsigned column = 0; column < common.n; column++) {
        for (unsigned k = 0; k < 16; k++)
            b[k] = number(common.across ? element(common.b_matrix, k, column) : element(common.b_matrix, column, k));
        for (int row = 0; row < 16; row++) {
            float &d = of[row % 8 * 4 + column % 8 / 2].d[column / 8 * 4 + row / 8 * 2 + column % 2];
            float sum = common.adds ? d : 0;
            for (int k = 0; k < 16; k++) sum += a[row][k] * b[k];
            d = sum;
        }
    }
}
static inline void multiply_later(const Wide &wide) {
    if (threadIdx.x % 32 == 0) touch_operands(wide, threadIdx.x / 32 % 4);
    push_wide(wide);
}
static inline void wait_products(unsigned left) {
    Wide wide;
    while (pop_wide(left, wide)) {
        const char *slots = gather(wide);
        if (threadIdx.x % 32 == 0) {
            touch_operands(wide, threadIdx.x / 32 % 4);
            const Unwatched unwatched;
            multiply_wide(slots, threadIdx.x / 32 % 4);
        }
        meet_warp();
    }
}
} // namespace tandem_host
#endif

// Numbers in registers that products read or write: the compiler neither moves their uses past this
// nor keeps them elsewhere.
template <int N> __device__ __forceinline__ void hold(float (&x)[N][4]) {
#ifndef TANDEM_HOST
#pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])::"memory");
#endif
}
template <int N> __device__ __forceinline__ void hold(uint32_t (&x)[N][4]) {
#ifndef TANDEM_HOST
#pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : "+r"(x[n][0]), "+r"(x[n][1]), "+r"(x[n][2]), "+r"(x[n][3])::"memory");
#endif
}

// Products that follow see what this thread has written to registers.
__device__ __forceinline__ void begin_products() {
#ifndef TANDEM_HOST
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Products that follow a barrier see what this thread wrote to shared memory before.
__device__ __forceinline__ void show_to_products() {
#ifndef TANDEM_HOST
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Products since the last call are a group.
__device__ __forceinline__ void commit_products() {
#ifdef TANDEM_HOST
    tandem_host::commit_wide();
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most so many groups of products are under way.
template <int LEFT> __device__ __forceinline__ void wait_products() {
#ifdef TANDEM_HOST
    tandem_host::wait_products(LEFT);
#else
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#endif
}

#ifndef TANDEM_HOST
#define FOUR(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define SIXTEEN(n) FOUR(n), FOUR(n + 1), FOUR(n + 2), FOUR(n + 3)
#define NAMES_32                                                                                                           \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "    \
    "%25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                                           \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "   \
             "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#endif

// Begins D = A · B, or D += A · B, of two matrices in shared memory. `ACROSS`: rows of B are those of its tile.
template <bool ACROSS, int N> __device__ __forceinline__ void multiply_later(float (&d)[N][4], uint64_t a, uint64_t b, bool adds) {
    static_assert(N == 8 || N == 16, "64 or 128 columns");
#ifdef TANDEM_HOST
    tandem_host::multiply_later({d[0], nullptr, a, b, 8 * N, ACROSS, adds});
#else
    if constexpr (N == 8) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, %32, %33, p, 1, 1, 0, %35;\n}\n"
                     : SIXTEEN(0), SIXTEEN(4)
                     : "l"(a), "l"(b), "r"(int(adds)), "n"(ACROSS));
    } else {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, %64, %65, p, 1, 1, 0, %67;\n}\n"
                     : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12)
                     : "l"(a), "l"(b), "r"(int(adds)), "n"(ACROSS));
    }
#endif
}

// The same, with A in fragments.
template <bool ACROSS, int N>
__device__ __forceinline__ void multiply_later(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
    static_assert(N == 8 || N == 16, "64 or 128 columns");
#ifdef TANDEM_HOST
    tandem_host::multiply_later({d[0], a, 0, b, 8 * N, ACROSS, adds});
#else
    if constexpr (N == 8) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32
                     "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
                     : SIXTEEN(0), SIXTEEN(4)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)), "n"(ACROSS));
    } else {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64
                     "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
                     : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)), "n"(ACROSS));
    }
#endif
}

// Begins d = a · bᵀ of 64 rows of one tile, from `a` on, and all rows of another.
template <int WIDTH, int A_ROWS, int N> __device__ __forceinline__ void multiply_rows_later(float (&d)[N][4], const bf16 *a, const bf16 *b) {
    const uint64_t of_a = matrix_at(a, 0), of_b = matrix_at(b, 0);
#pragma unroll
    for (int k = 0; k < WIDTH; k += 16) {
        const int in_panel = k % PANEL * 2, panel = k / PANEL * PANEL * 2;
        multiply_later<false>(d, further(of_a, panel * A_ROWS + in_panel), further(of_b, panel * (8 * N) + in_panel), k > 0);
    }
}

// Begins d += a · b, where `a` is fragments of 64 rows and `16 · K` columns, and `b` as many rows of a tile.
template <int K, int N> __device__ __forceinline__ void multiply_columns_later(float (&d)[N][4], const uint32_t (&a)[K][4], const bf16 *b) {
    const uint64_t of_b = matrix_at(b, 16 * K * PANEL * 2);
#pragma unroll
    for (int k = 0; k < K; k++) multiply_later<true>(d, a[k], further(of_b, 16 * k * PANEL * 2), true);
}
