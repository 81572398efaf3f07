// The program of a driver. ThreadSanitizer prints what it finds, and sets the exit code.
#include "drive.h"
#include "host.h"

#include <set>

using tandem_host::Kernel;

extern "C" const Kernel *tandem_kernel(const char *name);
extern "C" unsigned tandem_arguments(const Kernel *kernel, const size_t **sizes);
extern "C" void tandem_launch(const Kernel *kernel, const unsigned *blocks, unsigned threads, size_t shared_bytes,
                              const uint64_t *const *arguments);

namespace races {

namespace {

std::set<std::string> launched;
unsigned num_launches = 0;

[[noreturn]] void end(const std::string &kernel, const char *reason) {
    std::fprintf(stderr, "races: %s: %s\n", kernel.c_str(), reason);
    std::exit(2);
}

// The next of numbers that are the same in every run.
uint32_t draw() {
    static uint64_t state = 0x2545f4914f6cdd1dull;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return uint32_t(state >> 32);
}

} // namespace

void launch(const std::string &kernel, const Grid &grid, const std::vector<Args> &parts) {
    const Kernel *found = tandem_kernel(kernel.c_str());
    if (!found) end(kernel, "no such kernel");
    std::vector<const uint64_t *> bits;
    const size_t *sizes;
    const unsigned count = tandem_arguments(found, &sizes);
    for (const Args &part : parts)
        for (const Arg &arg : part) {
            if (bits.size() == count || sizes[bits.size()] != arg.size) end(kernel, ("argument " + std::to_string(bits.size())).c_str());
            bits.push_back(&arg.bits);
        }
    if (bits.size() != count) end(kernel, "too few arguments");
    const unsigned blocks[3] = {unsigned(grid.blocks[0]), unsigned(grid.blocks[1]), unsigned(grid.blocks[2])};
    tandem_launch(found, blocks, unsigned(grid.threads), grid.shared, bits.data());
    launched.insert(kernel);
    num_launches++;
}

void *room(size_t bytes) {
    void *at = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!at) end("no kernel", "no memory");
    return at;
}

void fill(float *at, size_t count, float from, float to) {
    for (size_t i = 0; i < count; i++) at[i] = from + (to - from) * (float(draw() >> 8) / float(1 << 24));
}

void fill(bf16 *at, size_t count, float from, float to) {
    for (size_t i = 0; i < count; i++) {
        float x;
        fill(&x, 1, from, to);
        at[i].bits = uint16_t(__float_as_uint(x) >> 16);
    }
}

} // namespace races

int main() {
    races::drive();
    unsigned count = 0;
    for (const Kernel *kernel = tandem_host::kernels; kernel; kernel = kernel->next, count++) {
        if (!races::launched.count(kernel->name)) races::end(kernel->name, "no launch in the driver of its file");
    }
    std::printf("%u kernels, %u launches\n", count, races::num_launches);
}
