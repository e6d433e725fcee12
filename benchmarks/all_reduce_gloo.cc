// all_reduce of float sums by Gloo's ring over TCP, for comparison.
// usage: all_reduce_gloo RANKS SIZE,SIZE,...
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <memory>
#include <vector>

#include "fork_ranks.hpp"
#include "measure.hpp"

namespace {

int run(int rank, int ranks, const std::string& directory, const std::vector<size_t>& sizes) {
    gloo::transport::tcp::attr attr;
    attr.iface = bench::interface();
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    auto store = gloo::rendezvous::FileStore(directory);
    auto device = gloo::transport::tcp::CreateDevice(attr);
    context->connectFullMesh(store, device);
    std::vector<float> values(*std::max_element(sizes.begin(), sizes.end()) / sizeof(float));
    const auto all_reduce = [&](size_t count) {
        gloo::AllreduceOptions options(context);
        options.setOutput(values.data(), count);
        options.setReduceFunction(static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::sum<float>));
        gloo::allreduce(options);
    };
    const auto barrier = [&] {
        gloo::BarrierOptions options(context);
        gloo::barrier(options);
    };
    for (const size_t bytes : sizes) {
        const size_t count = bytes / sizeof(float);
        bench::fill(values.data(), count, rank);
        all_reduce(count);
        const bool correct = bench::is_sum(values.data(), count, ranks);
        std::fill(values.begin(), values.end(), 0.0F);
        const bench::Timing taken = bench::timing(bytes, ranks, [&] { all_reduce(count); }, barrier);
        if (!correct) return 1;
        if (rank == 0) bench::report("gloo", "foreign", ranks, bytes, taken, correct);
    }
    barrier();
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: %s RANKS SIZE,SIZE,...\n", argv[0]);
        return 2;
    }
    const int ranks = std::atoi(argv[1]);
    const auto sizes = bench::parse_sizes(argv[2]);
    return bench::fork_ranks(
        ranks, [&](int rank, const std::string& directory) { return run(rank, ranks, directory, sizes); });
}
