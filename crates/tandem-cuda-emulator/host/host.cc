// Runs kernels: fibers, barriers, shared memory.
#include "host.h"

#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#include <deque>
#include <map>
#include <memory>
#include <vector>

#if __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_read_range(void *at, unsigned long bytes);
extern "C" void __tsan_write_range(void *at, unsigned long bytes);
// Of functions that run on both sides of a switch, or leave one fiber's stack for another's.
#define UNWATCHED __attribute__((noinline, no_sanitize("thread")))
#else
#define UNWATCHED
#endif

namespace tandem_host {

thread_local Thread *current = nullptr;
const Kernel *kernels = nullptr;

namespace {

#if __SANITIZE_THREAD__
// Instrumented frames are larger.
constexpr size_t STACK = size_t(512) << 10;
#else
constexpr size_t STACK = size_t(128) << 10;
#endif
constexpr unsigned WARP = 32;
constexpr unsigned LIMIT = 1024;

enum class State { Ready, AtBlock, AtWarp, Done };

struct Copy {
    void *to;
    const void *from;
    unsigned valid;
};

// Order of accesses as ThreadSanitizer sees it: what a fiber did before `give` comes before what
// another does after `take` of the same place.
#if __SANITIZE_THREAD__
typedef void *Known;
Known known_fiber() { return __tsan_create_fiber(0); }
void forget(Known fiber) {
    if (fiber) __tsan_destroy_fiber(fiber);
}
UNWATCHED void switch_known(Known to) { __tsan_switch_to_fiber(to, __tsan_switch_to_fiber_no_sync); }
Known known_now() { return __tsan_get_current_fiber(); }
void give(char *place) { __tsan_release(place); }
void take(char *place) { __tsan_acquire(place); }
void touch(const Copy &copy) {
    __tsan_write_range(copy.to, 16);
    if (copy.valid) __tsan_read_range(const_cast<void *>(copy.from), copy.valid);
}
void touch_read(const void *at, unsigned bytes) { __tsan_read_range(const_cast<void *>(at), bytes); }
#else
typedef char Known;
Known known_fiber() { return 1; }
void forget(Known) {}
void switch_known(Known) {}
Known known_now() { return 1; }
void give(char *) {}
void take(char *) {}
void touch(const Copy &) {}
void touch_read(const void *, unsigned) {}
#endif

// Places of a barrier. They take turns: some threads give at the next barrier before others have
// taken at this one, and these must not see what came between.
struct Barrier {
    char places[2];
};

struct Fiber {
    Thread thread;
    State state;
    Known known{};
    // Turns of the barriers of the block and of the warp.
    unsigned block_turn, warp_turn;
#if defined(__x86_64__)
    void *stack_pointer;
#else
    ucontext_t context;
#endif
    unsigned parity;
    // Groups of copies that were committed and not waited for, and those of the next group.
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> next;
    // The same of products of a warpgroup.
    std::deque<std::deque<Wide>> products;
    std::deque<Wide> next_products;
};

struct Machine {
    char *stacks = nullptr;
    std::vector<Fiber> fibers{LIMIT};
    Fiber *running = nullptr;
#if defined(__x86_64__)
    void *scheduler = nullptr;
#else
    ucontext_t scheduler;
#endif
    const Kernel *kernel = nullptr;
    const uint64_t *const *arguments = nullptr;
    std::map<const void *, std::vector<char>> shared;
    std::vector<char> dynamic;
    char slots[2][LIMIT / WARP][64 * WARP];
    Known known{};
    char begun, ended;
    Barrier of_block, of_warps[LIMIT / WARP];

    ~Machine() {
        for (Fiber &fiber : fibers) forget(fiber.known);
    }
};

Machine &machine() {
    static thread_local std::unique_ptr<Machine> machine = std::make_unique<Machine>();
    return *machine;
}

// The machine of the thread that runs a block. Fibers never move to another thread.
thread_local Machine *on = nullptr;

} // namespace

void fail(const char *reason) {
    const char *name = on && on->kernel ? on->kernel->name : "no kernel";
    std::fprintf(stderr, "emulated CUDA: %s: %s\n", name, reason);
    std::abort();
}

#if defined(__x86_64__)
// Saves what a function must preserve, and the stack; goes on with another.
extern "C" void tandem_switch(void **from, void *to);
asm(R"(
.text
.globl tandem_switch
.type tandem_switch, @function
tandem_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size tandem_switch, .-tandem_switch
)");
#endif

namespace {

UNWATCHED void to_scheduler(State state) {
    Fiber *fiber = on->running;
    fiber->state = state;
    switch_known(on->known);
#if defined(__x86_64__)
    tandem_switch(&fiber->stack_pointer, on->scheduler);
#else
    swapcontext(&fiber->context, &on->scheduler);
#endif
}

UNWATCHED void body() {
    take(&on->begun);
    on->kernel->call(on->kernel->function, on->arguments);
    give(&on->ended);
    // Copies that nobody waited for have not arrived.
    to_scheduler(State::Done);
}

void begin(Fiber &fiber, unsigned index) {
    char *stack = on->stacks + index * STACK;
    fiber.state = State::Ready;
    if (!fiber.known) fiber.known = known_fiber();
    fiber.block_turn = fiber.warp_turn = 0;
    fiber.parity = 0;
    fiber.groups.clear();
    fiber.next.clear();
    fiber.products.clear();
    fiber.next_products.clear();
#if defined(__x86_64__)
    // As if `body` had been called: six registers, its address, and a stack that is aligned as
    // after a call.
    uint64_t *top = reinterpret_cast<uint64_t *>(stack + STACK) - 1;
    *top = 0;
    *--top = reinterpret_cast<uint64_t>(&body);
    for (int i = 0; i < 6; i++) *--top = 0;
    fiber.stack_pointer = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &body, 0);
#endif
}

UNWATCHED void resume(Fiber &fiber) {
    on->running = &fiber;
    current = &fiber.thread;
    switch_known(fiber.known);
#if defined(__x86_64__)
    tandem_switch(&on->scheduler, fiber.stack_pointer);
#else
    swapcontext(&on->scheduler, &fiber.context);
#endif
}

// Runs a warp until all its threads wait for the block or have ended.
void run_warp(Fiber *fibers, unsigned count) {
    while (true) {
        unsigned at_warp = 0, at_block = 0, done = 0;
        for (unsigned lane = 0; lane < count; lane++) {
            if (fibers[lane].state == State::Ready) resume(fibers[lane]);
            at_warp += fibers[lane].state == State::AtWarp;
            at_block += fibers[lane].state == State::AtBlock;
            done += fibers[lane].state == State::Done;
        }
        if (at_warp == 0) return;
        if (at_block > 0) fail("threads of one warp wait for the warp and for the block");
        // Full warps only: every lane takes part in what a warp does together.
        if (done > 0 && at_warp + done == count) fail("a warp does something together, and some of its threads have ended");
        for (unsigned lane = 0; lane < count; lane++) fibers[lane].state = State::Ready;
    }
}

void run_block(unsigned threads) {
    for (auto &entry : on->shared) std::memset(entry.second.data(), 0xff, entry.second.size());
    std::memset(on->dynamic.data(), 0xff, on->dynamic.size());
    for (unsigned t = 0; t < threads; t++) begin(on->fibers[t], t);
    give(&on->begun);
    while (true) {
        unsigned done = 0;
        for (unsigned first = 0; first < threads; first += WARP) {
            run_warp(&on->fibers[first], threads - first < WARP ? threads - first : WARP);
        }
        for (unsigned t = 0; t < threads; t++) {
            Fiber &fiber = on->fibers[t];
            if (fiber.state == State::Done) done++;
            else fiber.state = State::Ready;
        }
        if (done == threads) {
            take(&on->ended);
            return;
        }
    }
}

// Waits, and orders the accesses of all that wait at the barrier.
void wait_at(Barrier &barrier, unsigned &turn, State state) {
    char *const place = &barrier.places[turn];
    turn ^= 1;
    give(place);
    to_scheduler(state);
    take(place);
}

} // namespace

void block_barrier() { wait_at(on->of_block, on->running->block_turn, State::AtBlock); }
void warp_barrier() {
    Fiber *fiber = on->running;
    wait_at(on->of_warps[fiber->thread.index.x / WARP], fiber->warp_turn, State::AtWarp);
}
void meet_warp() { to_scheduler(State::AtWarp); }

UNWATCHED char *warp_slots() {
    Fiber *fiber = on->running;
    fiber->parity ^= 1;
    return on->slots[fiber->parity][fiber->thread.index.x / WARP];
}

void *shared(const void *place, size_t bytes) {
    const Unwatched unwatched;
    std::vector<char> &memory = on->shared[place];
    if (memory.size() < bytes) {
        if (!memory.empty()) fail("shared memory of one name has two sizes");
        memory.resize(bytes, char(0xff));
    }
    return memory.data();
}

void *dynamic_shared() { return on->dynamic.data(); }

void copy_later(void *to, const void *from, unsigned valid) {
    if (reinterpret_cast<uintptr_t>(to) % 16 || (valid && reinterpret_cast<uintptr_t>(from) % 16)) fail("a copy of 16 bytes is not aligned");
    // A GPU may copy at any time from here until the wait: the accesses are both here and there.
    touch({to, from, valid});
    on->running->next.push_back({to, from, valid});
}

void commit_copies() {
    Fiber *fiber = on->running;
    fiber->groups.push_back(std::move(fiber->next));
    fiber->next.clear();
}

void wait_copies(unsigned left) {
    Fiber *fiber = on->running;
    while (fiber->groups.size() > left) {
        for (const Copy &copy : fiber->groups.front()) {
            std::memcpy(copy.to, copy.from, copy.valid);
            std::memset(static_cast<char *>(copy.to) + copy.valid, 0, 16 - copy.valid);
        }
        fiber->groups.erase(fiber->groups.begin());
    }
}

void touch_shared(const void *at, unsigned bytes) { touch_read(at, bytes); }

UNWATCHED void push_wide(const Wide &wide) { on->running->next_products.push_back(wide); }

UNWATCHED void commit_wide() {
    Fiber *fiber = on->running;
    fiber->products.push_back(std::move(fiber->next_products));
    fiber->next_products.clear();
}

UNWATCHED bool pop_wide(unsigned left, Wide &wide) {
    Fiber *fiber = on->running;
    while (fiber->products.size() > left && fiber->products.front().empty()) fiber->products.pop_front();
    if (fiber->products.size() <= left) return false;
    wide = fiber->products.front().front();
    fiber->products.front().pop_front();
    return true;
}

} // namespace tandem_host

using namespace tandem_host;

extern "C" const Kernel *tandem_kernel(const char *name) {
    for (const Kernel *kernel = kernels; kernel; kernel = kernel->next) {
        if (std::strcmp(kernel->name, name) == 0) return kernel;
    }
    return nullptr;
}

// The number of a kernel's arguments, and the size of each.
extern "C" unsigned tandem_arguments(const Kernel *kernel, const size_t **sizes) {
    *sizes = kernel->sizes;
    return kernel->count;
}

extern "C" void tandem_launch(const Kernel *kernel, const unsigned *blocks, unsigned threads, size_t shared_bytes,
                              const uint64_t *const *arguments) {
    Machine &here = machine();
    on = &here;
    if (!here.stacks) {
        void *stacks = mmap(nullptr, STACK * LIMIT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) fail("no memory for stacks");
        here.stacks = static_cast<char *>(stacks);
    }
    if (threads == 0 || threads > LIMIT) fail("a block has 1 to 1024 threads");
    here.kernel = kernel;
    here.arguments = arguments;
    here.shared.clear();
    here.dynamic.assign(shared_bytes, char(0xff));
    here.known = known_now();
    for (unsigned z = 0; z < blocks[2]; z++)
        for (unsigned y = 0; y < blocks[1]; y++)
            for (unsigned x = 0; x < blocks[0]; x++) {
                for (unsigned t = 0; t < threads; t++) {
                    here.fibers[t].thread = {{t, 0, 0}, {x, y, z}, {blocks[0], blocks[1], blocks[2]}, {threads, 1, 1}};
                }
                run_block(threads);
            }
    on = nullptr;
    current = nullptr;
}
