// Launching a file's kernels as the GPU device does, under ThreadSanitizer. A driver is named after
// the file whose kernels it launches; `tools/gpu/races` builds one program of each.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace races {

struct bf16 {
    uint16_t bits;
};

// An argument of a kernel, with the size that its type has here and must have there.
struct Arg {
    uint64_t bits = 0;
    size_t size;

    template <typename T> Arg(T value) : size(sizeof(T)) {
        static_assert(sizeof(T) == 4 || sizeof(T) == 8, "kernels have arguments of 4 and 8 bytes");
        std::memcpy(&bits, &value, sizeof(T));
    }
};
typedef std::vector<Arg> Args;

struct Grid {
    int blocks[3];
    int threads;
    size_t shared = 0;
};

// Runs a kernel; its arguments are the parts after one another. Ends the program where they are not
// those of the kernel.
void launch(const std::string &kernel, const Grid &grid, const std::vector<Args> &parts);

// Launches the file's kernels. `main` then demands that each was launched.
void drive();

// Memory that stays until the program ends, aligned for vectors.
void *room(size_t bytes);
// Numbers of [-1, 1], or within other bounds.
void fill(float *at, size_t count, float from, float to);
void fill(bf16 *at, size_t count, float from, float to);

template <typename T> T *numbers(size_t count, float from = -1, float to = 1) {
    T *at = static_cast<T *>(room(count * sizeof(T)));
    fill(at, count, from, to);
    return at;
}
template <typename T> T *zeros(size_t count) { return static_cast<T *>(std::memset(room(count * sizeof(T)), 0, count * sizeof(T))); }
template <typename T> const T *table(const std::vector<T> &values) {
    return static_cast<T *>(std::memcpy(room(values.size() * sizeof(T)), values.data(), values.size() * sizeof(T)));
}

template <typename T> std::string type_name();
template <> inline std::string type_name<float>() { return "f32"; }
template <> inline std::string type_name<bf16>() { return "bf16"; }

// Calls `with(X{}, Y{})` for every pair of element types.
template <typename With> void for_types(With with) {
    with(float{}, float{}), with(float{}, bf16{}), with(bf16{}, float{}), with(bf16{}, bf16{});
}
template <typename X, typename Y> std::string by_types(const std::string &name, X, Y) {
    return name + "_" + type_name<X>() + "_" + type_name<Y>();
}

inline int blocks_of(long long count, long long size) { return int((count + size - 1) / size); }

} // namespace races
