// What a call takes through the C API, on a communicator of one rank: nothing waits, and what a binding adds shows.
// Call.java, call.py and src/main.rs do the same. Prints a line: {"plan": NS, "all_reduce": NS}.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>

#include "../with_comm.hpp"

namespace {

using bench::check;

constexpr int calls = 200000;
constexpr int batches = 15;

template <class Call>
double nanoseconds(Call&& call) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) check(call());
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / calls;
}

}  // namespace

int main() {
    std::array<float, 2> values{};
    const int64_t count = values.size();
    const tsr_tensor tensor = bench::floats(values.data(), &count);
    tsr_comm* comm = nullptr;
    tsr_plan* plan = nullptr;
    check(tsr_comm_from_env(nullptr, &comm));
    check(tsr_plan_create(comm, TSR_COLLECTIVE_ALL_REDUCE, nullptr, 0, &tensor, 1, TSR_REDUCE_SUM, -1, nullptr, &plan));
    double planned = 1e9;
    double plain = 1e9;
    for (int batch = 0; batch < batches; ++batch) {
        planned = std::min(planned, nanoseconds([&] { return tsr_plan_run(plan); }));
        plain = std::min(plain, nanoseconds([&] {
                             return tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr);
                         }));
    }
    std::printf("{\"plan\": %.2f, \"all_reduce\": %.2f}\n", planned, plain);
    tsr_plan_destroy(plan);
    check(tsr_comm_finalize(comm));
    tsr_comm_destroy(comm);
    return 0;
}
