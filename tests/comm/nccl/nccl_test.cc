// Communicators with NCCL beside the CPU's transport, over simulated devices (simulated_cuda/control.h) and a mock of NCCL
// (mock_nccl/control.h). Ranks are threads, each with a device of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/device_transport.hpp"
#include "comm/inner_options.hpp"
#include "comm/mesh.hpp"
#include "comm/nccl/nccl_ranks.hpp"
#include "comm/plan.hpp"
#include "simulated_cuda/hold.hpp"
#include "tensor/half.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// --- every collective gives what it gives on the CPU

// Small whole numbers, so that sums are exact in every type and order.
std::vector<std::byte> values_of(DType dtype, size_t count, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::byte> bytes(count * size_of(dtype));
    for (size_t i = 0; i < count; ++i) {
        const auto value = static_cast<int>(random() % 5);
        const auto put = [&](auto typed) { std::memcpy(bytes.data() + i * sizeof typed, &typed, sizeof typed); };
        switch (dtype) {
            case DType::f32: put(static_cast<float>(value)); break;
            case DType::f64: put(static_cast<double>(value)); break;
            case DType::f16: put(narrow_half(static_cast<float>(value))); break;
            case DType::bf16:
                put(static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16));
                break;
            case DType::i32: put(static_cast<int32_t>(value)); break;
            case DType::i64: put(static_cast<int64_t>(value)); break;
            default: put(static_cast<uint8_t>(value)); break;
        }
    }
    return bytes;
}

struct Case {
    Collective collective;
    DType dtype;
    ReduceOp op;
    int ranks;
    int64_t count;  // of a part
};

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
    const Case& c = info.param;
    std::string name = std::string(name_of(c.collective)) + "_" + std::string(name_of(c.dtype));
    if (c.op != ReduceOp::none) name += "_" + std::string(name_of(c.op));
    return name + "_" + std::to_string(c.ranks) + "x" + std::to_string(c.count);
}

class NcclOldest : public Nccl {};

class NcclCollectives : public Nccl, public ::testing::WithParamInterface<Case> {};

// The elements of this rank's input and output, of one list entry.
std::pair<int64_t, int64_t> counts_of(const Case& c, int rank) {
    const int64_t all = c.count * c.ranks;
    const bool is_root = rank == c.ranks - 1;
    switch (c.collective) {
        case Collective::all_reduce:
        case Collective::broadcast: return {0, c.count};
        case Collective::reduce_scatter: return {all, c.count};
        case Collective::all_gather: return {c.count, all};
        case Collective::reduce: return {c.count, is_root ? c.count : 0};
        case Collective::gather: return {c.count, is_root ? all : 0};
        case Collective::scatter: return {is_root ? all : 0, c.count};
        default: return {all, all};  // all_to_all
    }
}

TEST_P(NcclCollectives, EqualTheCpus) {
    const Case& c = GetParam();
    simulated_cuda_delay(200, 7);
    expect_all_well(run_ranks(c.ranks, nccl_options(), [&](Communicator& comm) {
        const int rank = comm.rank();
        DeviceApi& api = cuda_device(rank);
        const auto stream = api.new_stream();
        const auto counts = counts_of(c, rank);
        const int64_t ins = counts.first;
        const int64_t outs = counts.second;
        const size_t width = size_of(c.dtype);
        auto in = values_of(c.dtype, static_cast<size_t>(ins), static_cast<uint64_t>(rank));
        auto out = values_of(c.dtype, static_cast<size_t>(outs), 100 + static_cast<uint64_t>(rank));
        DeviceMemory device_in(rank, static_cast<size_t>(ins) * width);
        DeviceMemory device_out(rank, static_cast<size_t>(outs) * width);
        device_in.write(in, stream.get());
        device_out.write(out, stream.get());
        const auto run = [&](const Tensor& input, const Tensor& output, StreamHandle on) {
            Request request{.collective = c.collective, .op = c.op, .peer = c.ranks - 1, .stream = on};
            if (ins > 0) request.inputs = {&input, 1};
            if (outs > 0) request.outputs = {&output, 1};
            comm.run(request);
        };
        run({in.data(), Dims{ins}, c.dtype, {}}, {out.data(), Dims{outs}, c.dtype, {}}, nullptr);
        run(on_device(device_in, ins, c.dtype, rank), on_device(device_out, outs, c.dtype, rank), stream.get());
        EXPECT_EQ(device_out.read(stream.get()), out);
        comm.finalize();
    }));
}

std::vector<Case> cases() {
    std::vector<Case> all;
    const auto add = [&](Collective collective, DType dtype, ReduceOp op) {
        for (const int ranks : {1, 2, 3, 4}) {
            for (const int64_t count : {int64_t{1}, int64_t{1000}, int64_t{30000}}) {
                if (ranks == 3 || count != 30000) all.push_back({collective, dtype, op, ranks, count});
            }
        }
    };
    for (const Collective collective : {Collective::all_gather, Collective::broadcast, Collective::gather,
                                        Collective::scatter, Collective::all_to_all}) {
        add(collective, DType::f32, ReduceOp::none);
        add(collective, DType::boolean, ReduceOp::none);
    }
    for (const Collective collective : {Collective::all_reduce, Collective::reduce, Collective::reduce_scatter}) {
        for (const DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i64, DType::u8}) {
            for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min, ReduceOp::prod, ReduceOp::avg}) {
                if (op == ReduceOp::avg && dtype == DType::bf16) continue;  // a third is rounded in another place
                if (op == ReduceOp::prod && dtype == DType::u8) continue;
                if (op != ReduceOp::sum && dtype != DType::f32 && dtype != DType::i64) continue;
                add(collective, dtype, op);
            }
        }
    }
    return all;
}

INSTANTIATE_TEST_SUITE_P(All, NcclCollectives, ::testing::ValuesIn(cases()), name_of_case);

TEST_F(Nccl, ListsAndUnevenParts) {
    expect_all_well(run_ranks(3, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        std::vector<float> ones(50, static_cast<float>(rank + 1));
        DeviceMemory memory(rank, 50 * sizeof(float));
        const auto bytes = std::as_bytes(std::span(ones));
        memory.write({bytes.begin(), bytes.end()});
        // In place, a list of two.
        const Tensor list[] = {on_device(memory, 20, DType::f32, rank), on_device(memory, 10, DType::f32, rank, 80)};
        comm.run({.collective = Collective::all_reduce, .outputs = list, .op = ReduceOp::sum});
        auto result = memory.read();
        const auto value = [&result](size_t i) {
            float one = 0;
            std::memcpy(&one, result.data() + i * sizeof one, sizeof one);
            return one;
        };
        EXPECT_EQ(value(0), 6);
        EXPECT_EQ(value(29), 6);
        EXPECT_EQ(value(30), static_cast<float>(rank + 1));
        // Rank r has r elements.
        DeviceMemory parts(rank, 3 * sizeof(float));
        const Tensor outputs[] = {on_device(parts, 0, DType::f32, rank), on_device(parts, 1, DType::f32, rank),
                                  on_device(parts, 2, DType::f32, rank, 4)};
        const Tensor input = on_device(memory, rank, DType::f32, rank, 30 * sizeof(float));
        comm.run({.collective = Collective::all_gather_v, .inputs = {&input, 1}, .outputs = outputs});
        result = parts.read();
        EXPECT_EQ(value(0), 2);
        EXPECT_EQ(value(1), 3);
        EXPECT_EQ(value(2), 3);
    }));
}

TEST_F(Nccl, EightBitFloatsAreReducedOnDevicesAlone) {
    expect_all_well(run_ranks(3, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        DeviceMemory memory(rank, 2);
        memory.write({std::byte{0x38}, std::byte{0x3c}});  // 1 as e4m3 and as e5m2
        const Tensor e4m3 = on_device(memory, 1, DType::f8_e4m3, rank);
        const Tensor e5m2 = on_device(memory, 1, DType::f8_e5m2, rank, 1);
        for (const Tensor* tensor : {&e4m3, &e5m2}) {
            comm.run({.collective = Collective::all_reduce, .outputs = {tensor, 1}, .op = ReduceOp::sum});
        }
        EXPECT_EQ(memory.read(), (std::vector{std::byte{0x44}, std::byte{0x42}}));  // 3
        std::vector<uint8_t> host(1);
        const Tensor there = tensor_of(std::span(host), DType::f8_e4m3);
        EXPECT_THROW(comm.run({.collective = Collective::all_reduce, .outputs = {&there, 1}, .op = ReduceOp::sum}),
                     Error);
        comm.finalize();
    }));
}

// Run with TESSERA_MOCK_NCCL_VERSION=21800.
TEST_F(NcclOldest, LacksOnlyWhatCameLater) {
    EXPECT_EQ(nccl_facts().version, "2.18.0");
    expect_all_well(run_ranks(2, nccl_options(), [](Communicator& comm) {
        DeviceMemory memory(comm.rank(), 1);
        const Tensor tensor = on_device(memory, 1, DType::f8_e5m2, comm.rank());
        try {
            comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
            ADD_FAILURE() << "no error";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::unsupported);
            EXPECT_THAT(error.what(), HasSubstr("NCCL 2.18.0 cannot reduce f8_e5m2; 2.24.0 is the oldest that can"));
        }
        const auto both = comm.split(0, 0, comm.options());
        EXPECT_EQ(sum_of_numbers(*both, comm.rank()), 3);
        comm.finalize();
    }));
}

// --- order

TEST_F(Nccl, ACallReturnsBeforeTheStreamIsThere) {
    expect_all_well(run_ranks(2, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        DeviceApi& api = cuda_device(rank);
        const auto stream = api.new_stream();
        DeviceMemory memory(rank, 4);
        const Tensor tensor = on_device(memory, 1, DType::i32, rank);
        const Hold hold(api, stream.get());
        comm.run({.collective = Collective::all_reduce,
                  .outputs = {&tensor, 1},
                  .op = ReduceOp::sum,
                  .stream = stream.get()});
        const auto event = api.record(stream.get());
        EXPECT_FALSE(event->done());
        std::vector<std::byte> three(4);
        three[0] = std::byte{3};
        hold.release();
        event->wait(soon());
    }));
}

TEST_F(Nccl, AsynchronousWorkFollowsItsStreamAndEndsWithTheDevice) {
    simulated_cuda_delay(1000, 3);
    expect_all_well(run_ranks(2, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        const auto stream = cuda_device(rank).new_stream();
        DeviceMemory memory(rank, 4);
        const Tensor tensor = on_device(memory, 1, DType::i32, rank);
        for (int round = 1; round <= 10; ++round) {
            std::vector<std::byte> value(4);
            value[0] = static_cast<std::byte>(round);
            memory.write(value, stream.get());
            const WorkPtr work = comm.submit({.collective = Collective::all_reduce,
                                              .outputs = {&tensor, 1},
                                              .op = ReduceOp::sum,
                                              .stream = stream.get()});
            work->wait(soon());
            EXPECT_EQ(std::to_integer<int>(memory.read()[0]), 2 * round);
        }
    }));
}

TEST_F(Nccl, TensorsOfBothKindsShareTheOrderOfTheCommunicator) {
    simulated_cuda_delay(300, 4);
    expect_all_well(run_ranks(3, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        DeviceMemory memory(rank, 8);
        const Tensor there = on_device(memory, 1, DType::i64, rank);
        std::vector<int64_t> here{rank};
        const Tensor on_cpu = tensor_of(std::span(here), DType::i64);
        std::vector<WorkPtr> works;
        for (int round = 0; round < 20; ++round) {
            works.push_back(
                comm.submit({.collective = Collective::all_reduce, .outputs = {&on_cpu, 1}, .op = ReduceOp::max}));
            works.push_back(
                comm.submit({.collective = Collective::all_reduce, .outputs = {&there, 1}, .op = ReduceOp::sum}));
        }
        comm.run({.collective = Collective::all_reduce, .outputs = {&there, 1}, .op = ReduceOp::sum});
        for (const WorkPtr& work : works) work->wait(soon());
        EXPECT_EQ(here[0], 2);
        comm.finalize();  // waits for the devices
    }));
}

TEST_F(Nccl, MessagesGoBetweenTwoRanks) {
    expect_all_well(run_ranks(3, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        DeviceMemory memory(rank, 100000);
        if (rank == 1) return comm.finalize();
        memory.write(std::vector<std::byte>(100000, std::byte{static_cast<uint8_t>(5 + rank)}));
        const Tensor tensor = on_device(memory, 100000, DType::u8, rank);
        if (rank == 0) {
            comm.run({.collective = Collective::send, .inputs = {&tensor, 1}, .peer = 2});
        } else {
            comm.run({.collective = Collective::recv, .outputs = {&tensor, 1}, .peer = 0});
            EXPECT_EQ(memory.read(), std::vector<std::byte>(100000, std::byte{5}));
        }
        comm.finalize();
    }));
}

TEST_F(Nccl, APlanCanBeLaunchedAgainAndAgain) {
    expect_all_well(run_ranks(2, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        DeviceMemory memory(rank, 8);
        const Tensor tensor = on_device(memory, 1, DType::f64, rank);
        const double one = 1;
        std::vector<std::byte> bytes(8);
        std::memcpy(bytes.data(), &one, 8);
        memory.write(bytes);
        const auto plan =
            comm.prepare({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
        for (int round = 0; round < 3; ++round) plan->run();
        for (int round = 0; round < 2; ++round) {
            plan->start();
            plan->wait(soon());
        }
        double sum = 0;
        std::memcpy(&sum, memory.read().data(), 8);
        EXPECT_EQ(sum, 32);
    }));
}

TEST_F(Nccl, CallsThatTakeTimeToReturnAreWaitedFor) {
    mock_nccl_slow(50);
    expect_all_well(run_ranks(2, nccl_options(), [](Communicator& comm) {
        DeviceMemory memory(comm.rank(), 8);
        const Tensor tensor = on_device(memory, 1, DType::f64, comm.rank());
        for (int round = 0; round < 10; ++round) {
            comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
        }
        comm.finalize();
    }));
}

TEST_F(Nccl, GroupsSplitOffHaveTheDevicesOfTheirRanks) {
    expect_all_well(run_ranks(4, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        const auto half = comm.split(rank % 2, 0, comm.options());
        EXPECT_EQ(sum_of_numbers(*half, rank), rank % 2 == 0 ? 4 : 6);
    }));
}

TEST_F(Nccl, MeshesAreForDevicesTooAndWhatTheLibrarySplitsOffIsNot) {
    expect_all_well(run_ranks(4, nccl_options(), [](Communicator& comm) {
        EXPECT_EQ(mock_nccl_communicators(), 4);
        comm.run({.collective = Collective::barrier});
        const auto inner = comm.split(0, 0, inner_options(comm, ".inner"));
        EXPECT_EQ(mock_nccl_communicators(), 4);
        comm.run({.collective = Collective::barrier});
        const DeviceMesh mesh(comm, MeshShape({"dp", "tp"}, {2, 2}));
        EXPECT_EQ(sum_of_numbers(*mesh.comm(1), comm.rank()), comm.rank() < 2 ? 3 : 7);
    }));
}

TEST_F(Nccl, TheRemainingRanksKeepTheirDevices) {
    const auto outcomes = run_ranks(3, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        comm.run({.collective = Collective::barrier});  // all have connected
        if (rank == 1) return;                          // leaves
        const auto rest = comm.shrink(comm.options());
        EXPECT_EQ(sum_of_numbers(*rest, rank), 4);
    });
    expect_all_well(outcomes);
}

TEST_F(Nccl, ACommunicatorMayEndInACallbackOfItsWork) {
    for (int round = 0; round < 20; ++round) {
        const auto store = make_memory_store(patience(milliseconds{30000}));
        expect_all_well(run_threads(2, [&](int rank) {
            auto comm = join_job(store, rank, 2, nccl_options());
            DeviceMemory memory(rank, 8);
            const Tensor tensor = on_device(memory, 1, DType::f64, rank);
            std::atomic<int> called{0};
            std::vector<WorkPtr> works;
            for (int i = 0; i < 3; ++i) {
                works.push_back(
                    comm->submit({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum}));
            }
            for (const WorkPtr& work : works) work->wait(soon());
            works.push_back(
                comm->submit({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum}));
            auto held = std::make_shared<std::shared_ptr<Communicator>>(std::move(comm));
            works.back()->on_done([held, &called](const std::optional<Error>&) {
                held->reset();
                called = 1;
            });
            held.reset();
            wait_until([&] { return called == 1; }, soon(), "the callback");
        }));
    }
    wait_until([] { return mock_nccl_communicators() == 0; }, soon(), "the watching threads' end");
}

// --- what goes wrong

TEST_F(Nccl, AnOperationThatHangsTimesOutAndFailsTheCommunicatorEverywhere) {
    auto options = nccl_options();
    mock_nccl_hang(1);
    const auto outcomes = run_ranks(3, options, [](Communicator& comm) {
        DeviceMemory memory(comm.rank(), 8);
        const Tensor tensor = on_device(memory, 1, DType::f64, comm.rank());
        comm.set_timeout(milliseconds{300});
        const WorkPtr work =
            comm.submit({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
        const Error error = [&]() -> Error {
            try {
                work->wait(soon());
            } catch (const Error& e) {
                return e;
            }
            return {Code::internal, "no error"};
        }();
        try {
            comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
            ADD_FAILURE() << "the communicator still works";
        } catch (const Error& later) {
            EXPECT_EQ(later.code(), Code::aborted);
        }
        throw Error(error);
    });
    bool timed_out = false;
    for (size_t rank = 0; rank < 3; ++rank) {
        const Error error = only_error(outcomes, rank);
        EXPECT_THAT(error.code(), AnyOf(Code::timeout, Code::aborted, Code::peer_lost)) << error.what();
        if (error.code() != Code::timeout) continue;
        timed_out = true;
        EXPECT_THAT(error.what(), AllOf(HasSubstr("all_reduce #"), HasSubstr("CUDA device"), HasSubstr("300 ms")));
        EXPECT_EQ(error.record()->operation, "all_reduce");
    }
    EXPECT_TRUE(timed_out);
}

TEST_F(Nccl, AnErrorThatNcclReportsLaterFailsTheWork) {
    const auto outcomes = run_ranks(2, nccl_options(), [](Communicator& comm) {
        DeviceMemory memory(comm.rank(), 8);
        const Tensor tensor = on_device(memory, 1, DType::f64, comm.rank());
        if (comm.rank() == 1) {
            wait_until([&] { return comm.error().has_value(); }, soon(), "the peer's failure");
            throw Error(*comm.error());
        }
        const WorkPtr work =
            comm.submit({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
        mock_nccl_async_error(0, 2);
        work->wait(soon());
    });
    const Error error = only_error(outcomes, 0);
    EXPECT_EQ(error.code(), Code::nccl);
    EXPECT_EQ(error.record()->native_domain, NativeDomain::nccl);
    EXPECT_EQ(error.record()->native_code, 2);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("NCCL 2.29.7"), HasSubstr("unhandled system error")));
    EXPECT_THAT(only_error(outcomes, 1).code(), AnyOf(Code::aborted, Code::peer_lost, Code::nccl));
}

// NCCL sees a connection end before anybody knows why: it does as soon as a process begins to end.
TEST_F(Nccl, WhyAConnectionEndedIsWhatThePeerSaysLater) {
    const auto outcomes = run_ranks(2, nccl_options(), [](Communicator& comm) {
        DeviceMemory memory(comm.rank(), 8);
        const Tensor tensor = on_device(memory, 1, DType::f64, comm.rank());
        if (comm.rank() == 1) {
            wait_until([] { return mock_nccl_reported() > 0; }, soon(), "NCCL to report it");
            comm.abort("out of paper");
            return;
        }
        mock_nccl_async_error(0, 6);
        const WorkPtr work =
            comm.submit({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
        work->wait(soon());
    });
    const Error error = only_error(outcomes, 0);
    EXPECT_EQ(error.code(), Code::aborted) << error.what();
    EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1"), HasSubstr("out of paper")));
}

TEST_F(Nccl, ACallThatFailsFailsTheCommunicator) {
    const auto outcomes = run_ranks(2, nccl_options(), [](Communicator& comm) {
        DeviceMemory memory(comm.rank(), 8);
        const Tensor tensor = on_device(memory, 1, DType::f64, comm.rank());
        if (comm.rank() == 1) {
            wait_until([&] { return comm.error().has_value(); }, soon(), "the peer's failure");
            return;
        }
        mock_nccl_fail("ncclAllReduce", 0, 3);
        comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
    });
    const Error error = only_error(outcomes, 0);
    EXPECT_EQ(error.code(), Code::nccl);
    EXPECT_THAT(error.what(), HasSubstr("internal error (3)"));
}

TEST_F(Nccl, ARankThatCannotConnectFailsAll) {
    for (const char* symbol : {"ncclGetUniqueId", "ncclCommInitRankConfig"}) {
        mock_nccl_fail(symbol, 0, 2);
        const auto outcomes = run_ranks(3, nccl_options(), [](Communicator&) {});
        size_t by_nccl = 0;
        for (size_t rank = 0; rank < 3; ++rank) {
            const Error error = only_error(outcomes, rank);
            by_nccl += error.code() == Code::nccl ? 1 : 0;
            EXPECT_THAT(error.code(), AnyOf(Code::nccl, Code::aborted, Code::peer_lost)) << error.what();
        }
        EXPECT_GE(by_nccl, 1U) << symbol;
    }
}

TEST_F(Nccl, ADeviceThatBreaksFailsTheCommunicatorAndTheCpuGoesOn) {
    breaks_ = true;
    const auto outcomes = run_ranks(2, nccl_options(), [](Communicator& comm) {
        DeviceMemory memory(comm.rank(), 8);
        const Tensor tensor = on_device(memory, 1, DType::f64, comm.rank());
        if (comm.rank() == 0) simulated_cuda_break(0, 719);
        const WorkPtr work =
            comm.submit({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
        work->wait(soon());
    });
    simulated_cuda_break(0, 0);
    EXPECT_EQ(only_error(outcomes, 0).code(), Code::cuda);
    EXPECT_THAT(only_error(outcomes, 0).what(), HasSubstr("CUDA_ERROR_LAUNCH_FAILED (719)"));
    EXPECT_THAT(only_error(outcomes, 1).code(), AnyOf(Code::cuda, Code::aborted, Code::peer_lost));
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        std::vector<float> values(10);
        const Tensor tensor = tensor_of(std::span(values), DType::f32);
        comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
    }));
}

// A sum of all ranks' memory, until it is done.
void reduce(Communicator& comm) {
    DeviceMemory memory(comm.rank(), 8);
    const Tensor tensor = on_device(memory, 1, DType::f64, comm.rank());
    comm.submit({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum})->wait(soon());
}

TEST_F(Nccl, WhatWaitsForAPeerThatLeavesEndsAtOnce) {
    for (const char* backend : {"cpu:shm,cuda:nccl", "cpu:gloo,cuda:nccl"}) {
        const auto outcomes = run_ranks(2, test_options(backend), [](Communicator& comm) {
            reduce(comm);
            if (comm.rank() == 0) reduce(comm);
        });
        const Error error = only_error(outcomes, 0);
        EXPECT_EQ(error.code(), Code::peer_lost) << backend << ": " << error.what();
        EXPECT_EQ(error.record()->peer, 1);
        EXPECT_THAT(error.what(), AllOf(HasSubstr("all_reduce #"), HasSubstr("left the communicator")));
        EXPECT_FALSE(outcomes[1]);
    }
}

// A rank that has waited for its stream has no work, even if the communicator's watch has not looked yet.
TEST_F(Nccl, ARankMayLeaveAsSoonAsItsStreamIsDone) {
    for (int round = 0; round < 20; ++round) {
        std::atomic<int> failures{0};
        CommOptions options = nccl_options();
        options.on_failure = [&](const ErrorRecord* failure) { failures += failure != nullptr ? 1 : 0; };
        expect_all_well(run_ranks(2, options, [](Communicator& comm) {
            const int rank = comm.rank();
            DeviceMemory memory(rank, 4);
            const Tensor tensor = on_device(memory, 1, DType::i32, rank);
            comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
            static_cast<void>(memory.read());
        }));
        ASSERT_EQ(failures, 0) << "round " << round;
    }
}

TEST_F(Nccl, WhatWaitsForAPeerThatFinalizesEndsAtOnce) {
    const auto outcomes = run_ranks(2, nccl_options(), [](Communicator& comm) {
        if (comm.rank() == 0) reduce(comm);
        comm.finalize();
    });
    const Error error = only_error(outcomes, 0);
    EXPECT_EQ(error.code(), Code::mismatch) << error.what();
    EXPECT_THAT(error.what(), AllOf(HasSubstr("all_reduce #"), HasSubstr("is in finalize #")));
    EXPECT_EQ(only_error(outcomes, 1).code(), Code::mismatch);
}

TEST_F(Nccl, WrongTensorsAreRefusedBeforeAnythingMoves) {
    expect_all_well(run_ranks(2, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        const int other = 1 - rank;
        DeviceMemory memory(rank, 64);
        DeviceMemory elsewhere(other, 64);
        std::vector<double> host(8);
        const auto refused = [&](const Tensor& tensor, const std::string& why, StreamHandle stream = nullptr) {
            try {
                comm.run({.collective = Collective::all_reduce,
                          .outputs = {&tensor, 1},
                          .op = ReduceOp::sum,
                          .stream = stream});
                ADD_FAILURE() << why;
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), Code::invalid_argument) << error.what();
                EXPECT_THAT(error.what(), HasSubstr(why));
            }
        };
        const Tensor good = on_device(memory, 8, DType::f64, rank);
        refused(on_device(elsewhere, 8, DType::f64, other), "but this rank communicates from CUDA device");
        refused(on_device(elsewhere, 8, DType::f64, rank), "all_reduce: output[0] is memory of CUDA device");
        refused({reinterpret_cast<std::byte*>(host.data()), Dims{8}, DType::f64, {DeviceType::cuda, rank}},
                "all_reduce: output[0] is memory of the host");
        const auto stream = cuda_device(other).new_stream();
        refused(good, "a stream of another device", stream.get());
        refused(tensor_of(std::span(host), DType::f64), "the tensors are on the CPU", stream.get());
        const Tensor cpu = tensor_of(std::span(host), DType::f64);
        const Tensor mixed[] = {good, cpu};
        EXPECT_THROW(comm.run({.collective = Collective::all_reduce, .outputs = mixed, .op = ReduceOp::sum}), Error);
        // And goes on. What this rank did on the other's device is done before that waits for this rank.
        comm.run({.collective = Collective::barrier});
        comm.run({.collective = Collective::all_reduce, .outputs = {&good, 1}, .op = ReduceOp::sum});
        comm.finalize();
    }));
}

TEST_F(Nccl, WithoutItTensorsOnADeviceAreUnsupported) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        DeviceMemory memory(0, 8);
        const Tensor tensor = on_device(memory, 1, DType::f64, 0);
        try {
            comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
            ADD_FAILURE();
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::unsupported);
            EXPECT_THAT(error.what(), HasSubstr("'cpu:auto,cuda:nccl'"));
        }
    }));
}

TEST_F(Nccl, ADeviceThatDoesNotExistIsAnErrorOnAllRanks) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    const auto outcomes = run_threads(3, [&](int rank) {
        auto options = nccl_options();
        options.device = rank == 1 ? 9 : -1;
        (void)join_job(store, rank, 3, options);
    });
    for (size_t rank = 0; rank < 3; ++rank) {
        const Error error = only_error(outcomes, rank);
        EXPECT_EQ(error.code(), Code::invalid_argument) << error.what();
        EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1"), HasSubstr("CUDA device 9 does not exist")));
    }
}

}  // namespace
}  // namespace tsr::testing
