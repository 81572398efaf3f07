// CUDA's language on the host: what kernels are written in, so that a C++ compiler takes their
// files as they are.
//
// A block's threads are fibers of one thread of the host; a fiber runs until it waits at a barrier.
// Blocks run one after another. So results are those of a GPU up to its own functions' roundings,
// every barrier that is missing on one path is found as a deadlock, and shared memory holds
// not-a-number until it is written.
//
// Under ThreadSanitizer each CUDA thread is a fiber that it knows. Switches between fibers order
// nothing for it: only `__syncthreads` and `__syncwarp` do, and atomics are atomic. So it reports
// two accesses of a block that no barrier keeps apart (`tools/gpu/races`).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#define TANDEM_HOST 1

#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict

struct uint3 { unsigned x, y, z; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#if __SANITIZE_THREAD__
extern "C" {
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
}
#endif

namespace tandem_host {

// Scope whose accesses are the emulator's own: ThreadSanitizer ignores them.
struct Unwatched {
#if __SANITIZE_THREAD__
    Unwatched() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__), AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
    ~Unwatched() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__), AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
#else
    Unwatched() {}
#endif
    Unwatched(const Unwatched &) = delete;
};

// The thread that runs, and its block.
struct Thread {
    uint3 index, block, blocks, threads;
};
extern thread_local Thread *current;

// Waits for all threads of the block that have not ended.
void block_barrier();
// Waits for the other threads of the warp. Accesses before it come before those after it.
void warp_barrier();
// Waits for the other threads of the warp, as a shuffle does: it orders no accesses.
void meet_warp();
// Shared memory of the block: the same for every thread that names the same place of the source.
void *shared(const void *place, size_t bytes);
void *dynamic_shared();
// A slot of 64 bytes for each lane of the warp; those of two calls in a row are different ones.
char *warp_slots();
// Copies 16 bytes when the thread waits for them, or never.
void copy_later(void *to, const void *from, unsigned valid);
void commit_copies();
void wait_copies(unsigned groups_left);
// A product of a warpgroup as `wgmma.cuh` has it: this thread's part of D and, unless A is in shared memory, of A;
// matrices in shared memory; columns of B, whether its rows are those of its tile, and whether D is added to.
struct Wide {
    float *d;
    const uint32_t *a;
    uint64_t a_matrix, b_matrix;
    unsigned n;
    bool across, adds;
};
// Keeps a product until the thread waits for it.
void push_wide(const Wide &wide);
void commit_wide();
// Takes the next product of all groups but the last `groups_left`; false if there is none.
bool pop_wide(unsigned groups_left, Wide &wide);
// Tells ThreadSanitizer of a read.
void touch_shared(const void *at, unsigned bytes);
[[noreturn]] void fail(const char *reason);

// What each lane gives, for all of them.
template <typename T> static inline const char *gather(const T &value) {
    static_assert(sizeof(T) <= 64, "a slot has 64 bytes");
    char *slots = warp_slots();
    {
        const Unwatched unwatched;
        std::memcpy(slots + 64 * (current->index.x % 32), &value, sizeof(T));
    }
    meet_warp();
    return slots;
}
template <typename T> static inline T given(const char *slots, unsigned lane) {
    const Unwatched unwatched;
    T value;
    std::memcpy(&value, slots + 64 * lane, sizeof(T));
    return value;
}

// Addresses of the device have this bit, so that nobody else can use them.
constexpr uint64_t DEVICE = uint64_t(1) << 62;
static inline uint64_t translate(uint64_t address) { return (address >> 62) == 1 ? address & ~DEVICE : address; }

template <typename T> static inline T argument(const uint64_t *bits) {
    T value;
    std::memcpy(&value, bits, sizeof(T));
    if constexpr (std::is_pointer_v<T>) value = reinterpret_cast<T>(translate(reinterpret_cast<uint64_t>(value)));
    return value;
}

// A kernel by its name.
struct Kernel {
    const char *name;
    void (*function)();
    void (*call)(void (*function)(), const uint64_t *const *arguments);
    unsigned count;
    const size_t *sizes;
    const Kernel *next;
};
extern const Kernel *kernels;

template <typename... Args> struct Call {
    static constexpr size_t sizes[sizeof...(Args) + 1] = {sizeof(Args)..., 0};
    template <size_t... I>
    static void with(void (*function)(Args...), const uint64_t *const *arguments, std::index_sequence<I...>) {
        function(argument<Args>(arguments[I])...);
    }
    static void call(void (*function)(), const uint64_t *const *arguments) {
        with(reinterpret_cast<void (*)(Args...)>(function), arguments, std::index_sequence_for<Args...>());
    }
};

struct Registered {
    Kernel kernel;
    template <typename... Args>
    Registered(const char *name, void (*function)(Args...))
        : kernel{name, reinterpret_cast<void (*)()>(function), &Call<Args...>::call, sizeof...(Args), Call<Args...>::sizes, kernels} {
        kernels = &kernel;
    }
};

} // namespace tandem_host

#define threadIdx (tandem_host::current->index)
#define blockIdx (tandem_host::current->block)
#define gridDim (tandem_host::current->blocks)
#define blockDim (tandem_host::current->threads)

#define KERNEL(name, ...)                                                       \
    static void name(__VA_ARGS__);                                              \
    static const tandem_host::Registered registered_##name(#name, &name);       \
    static void name(__VA_ARGS__)
#define KERNEL_BOUNDS(name, threads, blocks, ...) KERNEL(name, __VA_ARGS__)

#define SHARED(type, name, count)                                               \
    static const char place_of_##name = 0;                                      \
    type *const name = static_cast<type *>(tandem_host::shared(&place_of_##name, sizeof(type) * (count)))
#define DYNAMIC_SHARED(name) char *const name = static_cast<char *>(tandem_host::dynamic_shared())

static inline void __syncthreads() { tandem_host::block_barrier(); }
static inline void __syncwarp(unsigned = 0xffffffffu) { tandem_host::warp_barrier(); }
template <typename T> static inline T __shfl_sync(unsigned, T value, int lane) {
    return tandem_host::given<T>(tandem_host::gather(value), unsigned(lane) % 32);
}
template <typename T> static inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return tandem_host::given<T>(tandem_host::gather(value), (threadIdx.x % 32) ^ unsigned(mask));
}
template <typename T> static inline T __shfl_down_sync(unsigned, T value, unsigned by) {
    unsigned lane = threadIdx.x % 32;
    return tandem_host::given<T>(tandem_host::gather(value), lane + by < 32 ? lane + by : lane);
}
static inline unsigned __ballot_sync(unsigned, int yes) {
    const char *slots = tandem_host::gather(yes);
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; lane++) ballot |= unsigned(tandem_host::given<int>(slots, lane) != 0) << lane;
    return ballot;
}
static inline unsigned atomicOr(unsigned *at, unsigned bits) { return __atomic_fetch_or(at, bits, __ATOMIC_RELAXED); }
static inline unsigned atomicAdd(unsigned *at, unsigned more) { return __atomic_fetch_add(at, more, __ATOMIC_RELAXED); }

static inline unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(unsigned u) { float x; std::memcpy(&x, &u, 4); return x; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline long long min(long long a, long long b) { return a < b ? a : b; }
static inline long long max(long long a, long long b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
