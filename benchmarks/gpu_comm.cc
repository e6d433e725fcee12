// An all_reduce of CUDA tensors by this library beside the same call of NCCL alone, on one device a rank, in one process and
// alternately: of a communicator of NCCL that blocks, and of one that does not, as ours (a call is polled until it is
// launched). For each size and round, rank 0 prints a line of JSON: microseconds of a call until the device is done, and of
// the host's part of it.
// usage, with each rank by `tessera run`: gpu_comm ROUNDS SIZE,SIZE,...
#include <tessera/tessera.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/nccl/library.hpp"
#include "device/device.hpp"
#include "measure.hpp"
#include "with_comm.hpp"

namespace {

using bench::check;

void check_nccl(int result) {
    if (result == tsr::nccl::success) return;
    std::fprintf(stderr, "NCCL: %s\n", tsr::nccl::library().error_string(result));
    std::exit(1);
}

// Until a call is done that need not be when it returns.
void settle(const tsr::nccl::Comm& comm, int result) {
    while (result == tsr::nccl::in_progress) check_nccl(tsr::nccl::library().async_error(comm, &result));
    check_nccl(result);
}

tsr::nccl::Comm bare_comm(tsr_comm* comm, int rank, int ranks, int blocking) {
    tsr::nccl::UniqueId id{};
    if (rank == 0) check_nccl(tsr::nccl::library().get_unique_id(&id));
    const int64_t size = sizeof id;
    const tsr_tensor bytes{
        .data = &id, .shape = &size, .ndim = 1, .dtype = TSR_DTYPE_U8, .device_type = TSR_DEVICE_CPU};
    check(tsr_comm_broadcast(comm, &bytes, 1, 0, nullptr, nullptr));
    tsr::nccl::Comm bare = nullptr;
    tsr::nccl::Config config;
    config.blocking = blocking;
    settle(bare, tsr::nccl::library().init_rank(&bare, ranks, id, rank, &config));
    return bare;
}

struct Taken {
    double us = 0;       // of a call, until the device is done
    double host_us = 0;  // until it returned
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: %s ROUNDS SIZE,SIZE,...\n", argv[0]);
        return 2;
    }
    const int rounds = std::atoi(argv[1]);
    // Ranks that share a device are separate hosts to NCCL; gpu.py sets the rest of tests/gpu/ranks/one_gpu.py.
    if (const char* place = std::getenv("RANK"); place != nullptr && tsr::cuda_device_count() == 1) {
        ::setenv("NCCL_HOSTID", place, 1);
    }
    tsr_comm_options options;
    check(tsr_comm_options_init(&options, sizeof options));
    options.backend = "cpu:auto,cuda:nccl";
    tsr_comm* comm = nullptr;
    check(tsr_comm_from_env(&options, &comm));
    int rank = 0;
    int ranks = 0;
    check(tsr_comm_rank(comm, &rank));
    check(tsr_comm_world_size(comm, &ranks));
    const int index = rank % tsr::cuda_device_count();
    tsr::DeviceApi& device = tsr::cuda_device(index);
    const auto stream = device.new_stream();
    device.in_use([&] {
        const tsr::nccl::Comm blocking = bare_comm(comm, rank, ranks, 1);
        const tsr::nccl::Comm polled = bare_comm(comm, rank, ranks, 0);
        for (const size_t bytes : bench::parse_sizes(argv[2])) {
            const auto memory = device.allocate(bytes);
            device.zero(memory.get(), bytes, stream.get());
            const auto count = static_cast<int64_t>(bytes / sizeof(float));
            tsr_tensor tensor = bench::floats(memory.get(), &count);
            tensor.device_type = TSR_DEVICE_CUDA;
            tensor.device_index = index;
            const auto of_nccl = [&](const tsr::nccl::Comm& bare) {
                settle(bare,
                       tsr::nccl::library().all_reduce(memory.get(), memory.get(), static_cast<size_t>(count),
                                                       tsr::nccl::number_of(tsr::DType::f32),
                                                       tsr::nccl::number_of(tsr::ReduceOp::sum), bare, stream.get()));
            };
            const std::array<std::function<void()>, 3> kinds{
                [&] { check(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, stream.get(), nullptr)); },
                [&] { of_nccl(blocking); }, [&] { of_nccl(polled); }};
            const auto timed = [&](const std::function<void()>& call) {
                const int calls = bytes <= (size_t{1} << 20) ? 50 : bytes <= (size_t{64} << 20) ? 10 : 3;
                check(tsr_comm_barrier(comm, nullptr));
                const double begin = bench::now_us();
                for (int i = 0; i < calls; ++i) call();
                const double returned = bench::now_us();
                const auto event = device.record(stream.get());
                while (!event->done()) {
                }
                return Taken{(bench::now_us() - begin) / calls, (returned - begin) / calls};
            };
            for (const auto& call : kinds) timed(call);
            for (int round = 0; round < rounds; ++round) {
                std::array<Taken, 3> taken;
                for (int turn = 0; turn < 3; ++turn) {  // who is first takes turns
                    const auto kind = static_cast<size_t>((round + turn) % 3);
                    taken[kind] = timed(kinds[kind]);
                }
                if (rank != 0) continue;
                const auto& [ours, peer, polling] = taken;
                std::printf("{\"ranks\":%d,\"bytes\":%zu,\"us\":[%.3f,%.3f,%.3f],\"host_us\":[%.3f,%.3f,%.3f]}\n",
                            ranks, bytes, ours.us, peer.us, polling.us, ours.host_us, peer.host_us, polling.host_us);
            }
        }
        for (const tsr::nccl::Comm bare : {blocking, polled}) {
            settle(bare, tsr::nccl::library().finalize(bare));
            check_nccl(tsr::nccl::library().destroy(bare));
        }
    });
    check(tsr_comm_finalize(comm));
    tsr_comm_destroy(comm);
    return 0;
}
