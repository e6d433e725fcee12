// all_reduce of float sums by Tessera, through the C API, in library buffers and in foreign memory.
// usage: all_reduce_tessera RANKS SIZE,SIZE,... buffer|foreign
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
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
        const double us = bench::median_us(
            bytes, ranks, [&] { check(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr)); },
            [&] { check(tsr_comm_barrier(comm, nullptr)); });
        if (!correct) _exit(1);
        if (rank == 0) bench::report("tessera", mode.c_str(), ranks, bytes, us, correct);
    }
    tsr_buffer_destroy(buffer);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: %s RANKS SIZE,SIZE,... buffer|foreign\n", argv[0]);
        return 2;
    }
    const int ranks = std::atoi(argv[1]);
    const auto sizes = bench::parse_sizes(argv[2]);
    return bench::fork_ranks(ranks, [&](int rank, const std::string& directory) {
        return bench::with_comm(rank, ranks, directory,
                                [&](tsr_comm* comm) { measure(comm, rank, ranks, sizes, argv[3]); });
    });
}
