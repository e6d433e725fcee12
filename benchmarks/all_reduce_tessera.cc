// all_reduce of float sums by Tessera, through the C API, in library buffers and in foreign memory; or, as the bound that
// memory sets, a copy of as many bytes on all ranks at once.
// usage: all_reduce_tessera RANKS SIZE,SIZE,... buffer|foreign|copy
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fork_ranks.hpp"
#include "measure.hpp"
#include "with_comm.hpp"

namespace {

using bench::check;

void measure(tsr_comm* comm, int rank, int ranks, const std::vector<size_t>& sizes, const std::string& mode) {
    const size_t largest = *std::max_element(sizes.begin(), sizes.end());
    tsr_buffer* buffer = nullptr;
    std::vector<float> foreign;
    void* data = nullptr;
    if (mode == "buffer") {
        check(tsr_buffer_create(comm, largest, &buffer));
        check(tsr_buffer_data(buffer, &data, nullptr));
    } else {
        foreign.resize(largest / sizeof(float));
        data = foreign.data();
    }
    for (const size_t bytes : sizes) {
        const size_t count = bytes / sizeof(float);
        const auto shape = static_cast<int64_t>(count);
        const tsr_tensor tensor = bench::floats(data, &shape);
        auto* values = static_cast<float*>(data);
        bench::fill(values, count, rank);
        check(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr));
        const bool correct = bench::is_sum(values, count, ranks);
        std::fill(values, values + count, 0.0F);  // sums of zeros stay finite over any number of calls
        const bench::Timing taken = bench::timing(
            bytes, ranks, [&] { check(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr)); },
            [&] { check(tsr_comm_barrier(comm, nullptr)); });
        if (!correct) _exit(1);
        if (rank == 0) bench::report("tessera", mode.c_str(), ranks, bytes, taken, correct);
    }
    tsr_buffer_destroy(buffer);
}

// Each rank reads its bytes once and writes as many, as an all_reduce has to.
void measure_copy(tsr_comm* comm, int rank, int ranks, const std::vector<size_t>& sizes) {
    const size_t largest = *std::max_element(sizes.begin(), sizes.end());
    std::vector<char> from(largest, 1);
    std::vector<char> to(largest);
    for (const size_t bytes : sizes) {
        const bench::Timing taken = bench::timing(
            bytes, ranks,
            [&] {
                std::memcpy(to.data(), from.data(), bytes);
                asm volatile("" ::: "memory");
            },
            [&] { check(tsr_comm_barrier(comm, nullptr)); });
        if (rank == 0) bench::report("memory", "copy", ranks, bytes, taken, true);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: %s RANKS SIZE,SIZE,... buffer|foreign|copy\n", argv[0]);
        return 2;
    }
    const int ranks = std::atoi(argv[1]);
    const auto sizes = bench::parse_sizes(argv[2]);
    const std::string mode = argv[3];
    return bench::fork_ranks(ranks, [&](int rank, const std::string& directory) {
        return bench::with_comm(rank, ranks, directory, [&](tsr_comm* comm) {
            if (mode == "copy") return measure_copy(comm, rank, ranks, sizes);
            measure(comm, rank, ranks, sizes, mode);
        });
    });
}
