// Every rule and format of states, of f32 gradients and of exact sums.
#include "drive.h"

namespace races {

constexpr long long N = 2 * 2048 + 301;

Args states(const std::string &form) {
    const uint32_t none = 0;
    if (form == "f32") return {(void *)zeros<float>(N), (float *)nullptr, none, none, none, none, none};
    if (form == "bf16") return {(void *)zeros<bf16>(N), (float *)nullptr, 7u, 3u, 50u, 60u, 1u};
    return {(void *)zeros<uint8_t>(N), zeros<float>(N / 256 + 1), none, none, none, none, none};
}

void step(const std::string &rule, const std::vector<std::string> &forms) {
    for (const bool is_exact : {false, true}) {
        std::string kernel = rule;
        const float *grad = is_exact ? nullptr : numbers<float>(N);
        const int64_t *sums = is_exact ? zeros<int64_t>(N) : nullptr;
        std::vector<Args> parts = {{grad, sums, int(!is_exact), 1.0f, numbers<float>(N), is_exact ? zeros<float>(N) : (float *)nullptr,
                                    is_exact ? (bf16 *)nullptr : zeros<bf16>(N)}};
        for (const std::string &form : forms) kernel += "_" + form, parts.push_back(states(form));
        parts.push_back({0.9f, 0.1f, 0.9f, 0.1f, 1.0f, 1e-3f, 0.1f, 0.1f, 0.1f, N});
        launch(kernel, {{blocks_of(N, 2048), 1, 1}, 256}, parts);
    }
}

void drive() {
    const std::vector<std::string> forms = {"f32", "bf16", "8bit"};
    for (const std::string &a : forms) {
        for (const char *rule : {"rmsprop", "lion", "muon_momentum", "momentum"}) step(rule, {a});
        for (const std::string &b : forms) step("adamw", {a, b});
        step("schedule_free_adamw", {"f32", a});
    }
    for (const char *rule : {"decayed_update", "scaled_gradient", "sgd"}) step(rule, {});
    const long long n = 16384 + 77;
    launch("block_squares", {{2, 1, 1}, 256}, {{(const float *)numbers<float>(n), (const int64_t *)nullptr, 1, zeros<long long>(8), n}});
    launch("block_squares", {{2, 1, 1}, 256}, {{(const float *)nullptr, (const int64_t *)zeros<int64_t>(n), 0, zeros<long long>(8), n}});
}

} // namespace races
