// all_reduce of float sums by Tessera, through the C API, in library buffers and in foreign memory.
// usage: all_reduce_tessera RANKS SIZE,SIZE,... buffer|foreign
#include <tessera/tessera.h>

#include <cstdlib>
#include <vector>

#include "fork_ranks.hpp"
#include "measure.hpp"

namespace {

void check(tsr_status status) {
    if (status == TSR_OK) return;
    std::fprintf(stderr, "%s: %s\n", tsr_status_name(status), tsr_error_message(tsr_error_last()));
    _exit(1);
}

int run(int rank, int ranks, const std::string& directory, const std::vector<size_t>& sizes, const std::string& mode) {
    tsr_store_options options;
    check(tsr_store_options_init(&options, sizeof options));
    options.insecure = 1;
    tsr_store* store = nullptr;
    check(tsr_store_open(("file://" + directory).c_str(), &options, &store));
    tsr_comm* comm = nullptr;
    check(tsr_comm_create(store, rank, ranks, nullptr, &comm));
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
        tsr_tensor tensor{};
        tensor.data = data;
        tensor.shape = &shape;
        tensor.ndim = 1;
        tensor.dtype = TSR_DTYPE_F32;
        tensor.device_type = TSR_DEVICE_CPU;
        auto* values = static_cast<float*>(data);
        bench::fill(values, count, rank);
        check(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr));
        const bool correct = bench::is_sum(values, count, ranks);
        std::fill(values, values + count, 0.0F);  // sums of zeros stay finite over any number of calls
        const double us = bench::median_us(
            bytes, ranks, [&] { check(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr)); },
            [&] { check(tsr_comm_barrier(comm, nullptr)); });
        if (!correct) return 1;
        if (rank == 0) bench::report("tessera", mode.c_str(), ranks, bytes, us, correct);
    }
    check(tsr_comm_finalize(comm));
    tsr_buffer_destroy(buffer);
    tsr_comm_destroy(comm);
    tsr_store_destroy(store);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: %s RANKS SIZE,SIZE,... buffer|foreign\n", argv[0]);
        return 2;
    }
    const int ranks = std::atoi(argv[1]);
    const auto sizes = bench::parse_sizes(argv[2]);
    return bench::fork_ranks(
        ranks, [&](int rank, const std::string& directory) { return run(rank, ranks, directory, sizes, argv[3]); });
}
