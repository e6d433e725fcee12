// DDP over parameters on CUDA devices, which are simulated (simulated_cuda/control.h), with a mock of NCCL
// (mock_nccl/control.h). Ranks are threads, each with a device of its own. What a model on the CPU gets is what one on devices
// must get, bit for bit.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "comm/inner_options.hpp"
#include "device/device.hpp"
#include "mock_nccl/fixture.hpp"
#include "optim/sgd.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "simulated_cuda/control.h"
#include "simulated_cuda/hold.hpp"
#include "soon.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using testing::expect_all_well;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::Hold;
using testing::Model;
using testing::only_error;
using testing::Outcomes;
using testing::run_ranks;
using testing::shared;
using testing::soon;
using testing::test_backend;
using testing::test_options;
using testing::three_layers;

using Floats = std::vector<float>;

// Ranks with a device each, whatever hosts they pretend to be on.
Outcomes run_on_devices(int world_size, const std::function<void(Communicator& comm)>& body) {
    const auto store = make_memory_store(testing::patience(milliseconds{30000}));
    return testing::run_threads(world_size, [&](int rank) {
        CommOptions options = test_options(("cpu:" + std::string(test_backend()) + ",cuda:nccl").c_str());
        options.device = rank;
        const auto comm = testing::join_job(store, rank, world_size, options);
        body(*comm);
    });
}

// A model's parameters copied to a device, and what a trainer does there.
class OnDevice {
   public:
    OnDevice(const Communicator& comm, Model& model, StreamHandle stream = nullptr)
        : device_(comm.device().value()), api_(device_api(device_)), stream_(stream) {
        for (NamedTensor& param : model.params()) add(std::move(param));
        api_.record(nullptr)->wait(soon());
    }

    [[nodiscard]] DeviceApi& api() const { return api_; }
    [[nodiscard]] const std::vector<NamedTensor>& params() const { return params_; }
    // A copy of a tensor of the host.
    NamedTensor add(NamedTensor tensor) {
        memory_.push_back(api_.allocate(std::max<size_t>(tensor.tensor.size_bytes(), 1)));
        api_.copy(memory_.back().get(), tensor.tensor.data, tensor.tensor.size_bytes(), nullptr);
        tensor.tensor.data = memory_.back().get();
        tensor.tensor.device = device_;
        return params_.emplace_back(std::move(tensor));
    }

    // In the order of the stream.
    void write(const Tensor& tensor, const Floats& values) const {
        api_.copy(tensor.data, reinterpret_cast<const std::byte*>(values.data()), tensor.size_bytes(), stream_);
    }
    [[nodiscard]] Floats read(const Tensor& tensor) const {
        Floats values(static_cast<size_t>(tensor.numel()));
        api_.copy(reinterpret_cast<std::byte*>(values.data()), tensor.data, tensor.size_bytes(), stream_);
        return values;
    }
    void set_stream(StreamHandle stream) { stream_ = stream; }

   private:
    const Device device_;
    DeviceApi& api_;
    StreamHandle stream_;
    std::vector<std::shared_ptr<std::byte>> memory_;
    std::vector<NamedTensor> params_;
};

class DdpOnDevice : public testing::MockNcclTest {};

DdpOptions small(DdpOptions options = {}) {
    options.bucket_bytes = 1000;
    options.first_bucket_bytes = 300;
    return options;
}

// --- the gradients of the CPU

constexpr int params = 9;

Model layers(float value) {
    Model model;
    for (int i = 0; i < params; ++i) {
        model.add(fmt::format("layer {}", i), {7 + 11 * i % 40, 3}, value + static_cast<float>(i));
    }
    model.add("empty", {0});
    return model;
}

// Small whole numbers, whose sums are exact.
Floats gradient(const Tensor& tensor, int rank, int step, size_t param) {
    Floats values(static_cast<size_t>(tensor.numel()));
    for (size_t at = 0; at < values.size(); ++at) {
        values[at] = static_cast<float>((5 * rank + 3 * step + static_cast<int>(param + at)) % 13);
    }
    return values;
}

struct Case {
    const char* name;
    DdpOptions options;
    bool skips;  // a gradient that a rank, and one that no rank has
};

class DdpOnDeviceLike : public DdpOnDevice, public ::testing::WithParamInterface<Case> {};

TEST_P(DdpOnDeviceLike, TheCpu) {
    simulated_cuda_delay(100, 5);
    for (const int world : {1, 2, 3}) {
        expect_all_well(run_on_devices(world, [&](Communicator& comm) {
            const int rank = comm.rank();
            Model host_model = layers(static_cast<float>(rank));
            OnDevice there(comm, host_model);
            const auto beside =
                comm.split(0, 0, inner_options(comm, ".host"));  // buckets of two models have no common order
            Ddp host(beside, host_model.params(), GetParam().options);
            Ddp ddp(shared(comm), there.params(), GetParam().options);
            ASSERT_EQ(ddp.buckets().size(), host.buckets().size());
            for (size_t i = 0; i < ddp.params().size(); ++i) {
                ASSERT_EQ(there.read(ddp.param(i).tensor), host_model.entries[i].values) << "rank 0's values";
                ASSERT_THAT(there.read(ddp.grad(i)), Each(0.0F));
            }
            const auto stream = there.api().new_stream();
            ddp.set_stream(stream.get());
            there.set_stream(stream.get());
            for (int step = 0; step < 6; ++step) {
                const bool sync = step != 2;  // whose gradients the next step adds up
                ddp.set_sync(sync);
                host.set_sync(sync);
                for (size_t k = 0; k < ddp.params().size(); ++k) {
                    const size_t i = (7 * k + static_cast<size_t>(rank + step)) % ddp.params().size();
                    if (GetParam().skips && (i == 4 || (i == 5 && rank == 0))) continue;
                    Floats values = gradient(host.grad(i), rank, step, i);
                    if (step == 3) {
                        const auto before = host.grad(i).as<float>();
                        for (size_t at = 0; at < values.size(); ++at) values[at] += before[at];
                    }
                    std::ranges::copy(values, host.grad(i).as<float>().begin());
                    there.write(ddp.grad(i), values);
                    host.ready(i);
                    ddp.ready(i);
                }
                host.wait();
                ddp.wait();
                for (size_t i = 0; i < ddp.params().size(); ++i) {
                    const auto wanted = host.grad(i).as<float>();
                    ASSERT_EQ(there.read(ddp.grad(i)), Floats(wanted.begin(), wanted.end()))
                        << "rank " << rank << ", step " << step << ", parameter " << i;
                    if (sync) {
                        ASSERT_EQ(ddp.used(i), host.used(i));
                    }
                }
                if (step != 4) continue;
                ddp.zero_grad();
                host.zero_grad();
                ASSERT_THAT(there.read(ddp.grad(0)), Each(0.0F));
                // What no rank has stays as it was.
                const Floats old(static_cast<size_t>(host.grad(4).numel()), static_cast<float>(rank + 1));
                std::ranges::copy(old, host.grad(4).as<float>().begin());
                there.write(ddp.grad(4), old);
            }
            comm.finalize();
        }));
    }
}

INSTANTIATE_TEST_SUITE_P(
    Options, DdpOnDeviceLike,
    ::testing::Values(Case{"Plain", small(), false}, Case{"OneBucket", {}, false},
                      Case{"Sum", small({.op = ReduceOp::sum}), false},
                      Case{"Rebuilt", small({.rebuild_buckets = true}), false},
                      Case{"FindUnused", small({.find_unused = true}), true},
                      Case{"StaticGraph", small({.static_graph = true}), true},
                      Case{"FindUnusedRebuilt", small({.find_unused = true, .rebuild_buckets = true}), true},
                      Case{"Joinable", small({.join = DdpJoin::divide_by_world}), false},
                      Case{"NoReduction", small({.hook = DdpHook::noop}), false},
                      Case{"InBf16", small({.reduce_dtype = DType::bf16}), false},
                      Case{"InBf16OneBucket", {.reduce_dtype = DType::bf16}, false},
                      Case{"InF64Rebuilt", small({.rebuild_buckets = true, .reduce_dtype = DType::f64}), false},
                      Case{"InBf16FindUnused", small({.find_unused = true, .reduce_dtype = DType::bf16}), true},
                      Case{"InItsOwnType", small({.reduce_dtype = DType::f32}), false},
                      Case{"Divided", small({.pre_divide = 4}), false},
                      Case{"DividedSum", small({.op = ReduceOp::sum, .pre_divide = 8}), false},
                      Case{"DividedInF16", small({.pre_divide = 4, .reduce_dtype = DType::f16}), false},
                      Case{"JoinableByActive", small({.join = DdpJoin::divide_by_active}), false}),
    [](const ::testing::TestParamInfo<Case>& one) { return std::string(one.param.name); });

// --- order

TEST_F(DdpOnDevice, NoCallOfAStepWaitsForTheDeviceAndLateGradientsAreIncluded) {
    const std::array options{small({.find_unused = true}),
                             small({.pre_divide = 2, .find_unused = true, .reduce_dtype = DType::bf16})};
    for (const DdpOptions& one : options) {
        expect_all_well(run_on_devices(2, [&one](Communicator& comm) {
            const auto rank = static_cast<float>(comm.rank());
            Model model = three_layers();
            OnDevice there(comm, model);
            Floats mean{rank};
            const NamedTensor buffer = there.add({"mean", tensor_of(std::span(mean), DType::f32)});
            const std::vector<NamedTensor> registered(there.params().begin(), there.params().end() - 1);
            Ddp ddp(shared(comm), registered, one);
            ddp.register_buffers({buffer});
            const auto stream = there.api().new_stream();
            ddp.set_stream(stream.get());
            there.set_stream(stream.get());
            const Hold hold(there.api(), stream.get());
            there.write(buffer.tensor, {rank + 5});
            ddp.broadcast_buffers();
            for (const float step : {1.0F, 2.0F}) {
                ddp.zero_grad();
                there.write(ddp.grad(0), Floats(300, step * (rank + 1)));
                there.write(ddp.grad(1), Floats(300, step * (rank + 3)));
                ddp.ready(1);
                ddp.ready(0);
                ddp.wait();
            }
            const auto after = there.api().record(stream.get());
            EXPECT_FALSE(after->done()) << "the stream was not held";
            hold.release();
            EXPECT_THAT(there.read(ddp.grad(0)), Each(3.0F));
            EXPECT_THAT(there.read(ddp.grad(1)), Each(7.0F));
            EXPECT_THAT(there.read(ddp.grad(2)), Each(0.0F));
            EXPECT_THAT(there.read(buffer.tensor), Each(5.0F));
            comm.finalize();
        }));
    }
}

TEST_F(DdpOnDevice, BucketsAreReducedWhileTheTrainerGoesOn) {
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        Model model = three_layers();
        OnDevice there(comm, model);
        Ddp ddp(shared(comm), there.params(), small());
        std::atomic<DeviceEvent*> reduced{nullptr};
        ddp.set_hook([&](const BucketView& bucket) {
            comm.run({.collective = Collective::all_reduce,
                      .outputs = bucket.ranges,
                      .op = ReduceOp::avg,
                      .stream = bucket.stream});
            if (bucket.bucket == 0) reduced = there.api().record(bucket.stream).release();
        });
        const auto stream = there.api().new_stream();
        ddp.set_stream(stream.get());
        there.set_stream(stream.get());
        for (const size_t i : {2U, 1U}) {
            const Floats values(static_cast<size_t>(ddp.grad(i).numel()), static_cast<float>(comm.rank() + 1));
            there.write(ddp.grad(i), values);
            ddp.ready(i);
        }
        const Hold backward(there.api(), stream.get());
        wait_until([&] { return reduced != nullptr; }, soon(), "the first bucket");
        const std::unique_ptr<DeviceEvent> first(reduced.load());
        first->wait(soon());
        ddp.ready(0);
        ddp.wait();
        backward.release();
        EXPECT_THAT(there.read(ddp.grad(1)), Each(1.5F));
        EXPECT_EQ(ddp.stats(0).exposed.count(), 0) << "backward was longer";
        comm.finalize();
    }));
}

TEST_F(DdpOnDevice, ANewStreamGoesOnAfterWhatTheModelDidOnTheFormer) {
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        Model model = three_layers();
        OnDevice there(comm, model);
        Ddp ddp(shared(comm), there.params(), small());
        auto stream = there.api().new_stream();
        ddp.set_stream(stream.get());
        there.set_stream(stream.get());
        const Hold hold(there.api(), stream.get());
        there.write(ddp.grad(0), Floats(300, static_cast<float>(comm.rank() + 1)));
        ddp.ready_all();
        ddp.wait();
        const auto next = there.api().new_stream();
        ddp.set_stream(next.get());
        const auto seen = there.api().allocate_host(sizeof(float));  // copies to it do not wait
        there.api().copy(seen.get(), ddp.grad(0).data, sizeof(float), next.get());
        const auto copied = there.api().record(next.get());
        for (int look = 0; look < 1000; ++look) ASSERT_FALSE(copied->done());
        hold.release();
        stream.reset();  // and ends when it has done its part
        copied->wait(soon());
        float value = 0;
        std::memcpy(&value, seen.get(), sizeof value);
        EXPECT_EQ(value, 1.5F);
        comm.finalize();
    }));
}

TEST_F(DdpOnDevice, AHookReducesOnTheStreamOfTheBucket) {
    simulated_cuda_delay(300, 2);
    expect_all_well(run_on_devices(3, [](Communicator& comm) {
        Model model = three_layers();
        OnDevice there(comm, model);
        Ddp ddp(shared(comm), there.params(), small());
        std::atomic<int> called{0};
        ddp.set_hook([&](const BucketView& bucket) {
            ++called;
            comm.run({.collective = Collective::all_reduce,
                      .outputs = bucket.ranges,
                      .op = ReduceOp::max,
                      .stream = bucket.stream});
        });
        for (size_t i = 0; i < 3; ++i) {
            const Floats values(static_cast<size_t>(ddp.grad(i).numel()), static_cast<float>(comm.rank()));
            there.write(ddp.grad(i), values);
        }
        ddp.ready_all();
        ddp.wait();
        for (size_t i = 0; i < 3; ++i) EXPECT_THAT(there.read(ddp.grad(i)), Each(2.0F));
        EXPECT_EQ(called, static_cast<int>(ddp.buckets().size()));
        comm.finalize();
    }));
}

TEST_F(DdpOnDevice, ADestroyedModelLeavesWhatTheDeviceStillDoes) {
    simulated_cuda_delay(2000, 3);
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        Model model = three_layers();
        OnDevice there(comm, model);
        for (int round = 0; round < 5; ++round) {
            Ddp ddp(shared(comm), there.params(), small());
            there.write(ddp.grad(0), Floats(300, 1));
            ddp.ready_all();
            if (round % 2 == 0) ddp.wait();
        }
        comm.finalize();
    }));
}

// --- buffers, uneven ranks, statistics

TEST_F(DdpOnDevice, BuffersMayBeInBothPlaces) {
    simulated_cuda_delay(300, 8);
    expect_all_well(run_on_devices(3, [](Communicator& comm) {
        const auto rank = static_cast<float>(comm.rank());
        Model model = three_layers();
        OnDevice there(comm, model);
        const std::vector<NamedTensor> registered = there.params();
        Ddp ddp(shared(comm), registered, {});
        Floats mean(10, rank + 1);
        std::array<int64_t, 1> batches{comm.rank() + 7};
        std::array<uint8_t, 3> mask{static_cast<uint8_t>(comm.rank() + 3), 2, 1};
        const NamedTensor mean_there = there.add({"mean", tensor_of(std::span(mean), DType::f32)});
        const NamedTensor mask_there = there.add({"mask", tensor_of(std::span<uint8_t>(mask), DType::u8)});
        ddp.register_buffers({mean_there, {"batches", tensor_of(std::span<int64_t>(batches), DType::i64)}, mask_there});
        EXPECT_THAT(there.read(mean_there.tensor), Each(1.0F));
        EXPECT_EQ(batches[0], 7);
        there.write(mean_there.tensor, Floats(10, rank + 20));
        batches[0] = comm.rank() + 30;
        ddp.broadcast_buffers();
        EXPECT_THAT(there.read(mean_there.tensor), Each(20.0F));
        EXPECT_EQ(batches[0], 30);
        comm.finalize();
    }));
}

// Ranks 0, 1 and 2 make 0, 2 and 4 steps. `means`: of the first two steps, and of the others.
void train_and_join(DdpJoin join, std::array<float, 2> means) {
    expect_all_well(run_on_devices(3, [&](Communicator& comm) {
        const auto rank = static_cast<float>(comm.rank());
        Model model = three_layers(1);
        OnDevice there(comm, model);
        const std::vector<NamedTensor> registered = there.params();
        Ddp ddp(shared(comm), registered, small({.rebuild_buckets = true, .join = join}));
        Floats mean{rank};
        const NamedTensor buffer = there.add({"mean", tensor_of(std::span(mean), DType::f32)});
        ddp.register_buffers({buffer});
        for (int round = 0; round < 2; ++round) {
            for (int step = 0; step < 2 * comm.rank(); ++step) {
                ddp.broadcast_buffers();
                for (size_t i = 0; i < 3; ++i) {
                    const Floats values(static_cast<size_t>(ddp.grad(i).numel()), 3 * (rank + 1));
                    there.write(ddp.grad(i), values);
                }
                ddp.ready_all();
                ddp.wait();
                EXPECT_THAT(there.read(ddp.grad(1)), Each(means[step < 2 ? 0 : 1])) << "step " << step;
            }
            there.write(ddp.param(0).tensor, Floats(300, rank + 10));
            there.write(buffer.tensor, {rank + 40});
            ddp.join(true);
            EXPECT_THAT(there.read(ddp.param(0).tensor), Each(12.0F)) << "of the rank that made most steps";
            EXPECT_THAT(there.read(buffer.tensor), Each(42.0F));
            EXPECT_THAT(there.read(ddp.grad(1)), Each(0.0F));
        }
        comm.finalize();
    }));
}

TEST_F(DdpOnDevice, RanksWithoutDataJoin) {
    simulated_cuda_delay(200, 4);
    train_and_join(DdpJoin::divide_by_world, {5, 3});
    train_and_join(DdpJoin::divide_by_active, {7.5, 9});
}

// A kernel that runs until it is told to end, and for how long it did.
struct Measured {
    std::atomic<bool> go{false};
    std::atomic<int64_t> ran_ns{0};

    static int run(void* argument) {
        auto& self = *static_cast<Measured*>(argument);
        const auto begin = std::chrono::steady_clock::now();
        while (!self.go) std::this_thread::yield();
        self.ran_ns = (std::chrono::steady_clock::now() - begin).count();
        return 0;
    }
};

TEST_F(DdpOnDevice, StatisticsAreByTheClockOfTheDevice) {
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        Measured kernel;
        Model model = three_layers();
        OnDevice there(comm, model);
        Ddp ddp(shared(comm), there.params(), small());
        EXPECT_EQ(ddp.stats(0).end.count(), 0);
        ddp.set_hook([&](const BucketView& bucket) {
            if (bucket.bucket != 0) return;
            EXPECT_EQ(simulated_cuda_launch(bucket.stream, Measured::run, &kernel), 0);
        });
        ddp.ready_all();
        ddp.wait();
        kernel.go = true;
        const BucketStats first = ddp.stats(0);  // waits for the device
        const BucketStats last = ddp.stats(1);
        EXPECT_GT(kernel.ran_ns, 0);
        EXPECT_GE((first.end - first.start).count() + 1000, kernel.ran_ns);
        EXPECT_LE(first.ready, first.start);
        EXPECT_LE(first.end, last.start);
        EXPECT_LE(first.exposed, first.end);
        comm.finalize();
    }));
}

// A kernel that takes time by the simulated clock.
void compute(StreamHandle stream, uint64_t ns) {
    const auto run = [](void* argument) -> int {
        simulated_cuda_take_until(simulated_cuda_now() + reinterpret_cast<uint64_t>(argument));
        return 0;
    };
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a number that the kernel gets back
    EXPECT_EQ(simulated_cuda_launch(stream, run, reinterpret_cast<void*>(ns)), 0);
}

// docs/SCALING.md: a bucket begins when it is ready and the one before is done. Layers are one of 128 KiB each.
TEST_F(DdpOnDevice, ExposedCommunicationIsThatOfTheModel) {
    constexpr int layer_count = 7;
    constexpr uint64_t latency_ns = 20'000;
    constexpr uint64_t bytes_per_us = 10'000;
    simulated_cuda_use_simulated_clock(1);
    mock_nccl_speed(latency_ns, bytes_per_us);
    for (const uint64_t layer_ns : {5'000, 20'000, 30'000, 100'000}) {
        expect_all_well(run_on_devices(2, [&](Communicator& comm) {
            Model model;
            for (int i = 0; i < layer_count; ++i) model.add(fmt::format("layer {}", i), {32, 1024});
            OnDevice there(comm, model);
            const auto stream = there.api().new_stream();
            Ddp ddp(shared(comm), there.params(), {.bucket_bytes = 256 << 10, .first_bucket_bytes = 128 << 10});
            ddp.set_stream(stream.get());
            for (int i = layer_count; i-- > 0;) {
                compute(stream.get(), layer_ns);
                ddp.ready(static_cast<size_t>(i));
            }
            ddp.wait();
            uint64_t ready = 0;
            uint64_t end = 0;
            std::chrono::nanoseconds exposed{0};
            for (size_t b = 0; b < ddp.buckets().size(); ++b) {
                ready += layer_ns * ddp.stats(b).params;
                end = std::max(ready, end) + latency_ns + ddp.stats(b).size_bytes * 1000 / bytes_per_us;
                exposed += ddp.stats(b).exposed;
            }
            EXPECT_EQ(ddp.buckets().size(), 4U);
            const auto expected = static_cast<double>(end - layer_ns * layer_count);
            EXPECT_NEAR(static_cast<double>(exposed.count()), expected, 0.05 * expected) << layer_ns << " ns a layer";
            comm.finalize();
        }));
    }
}

// --- what is refused

// With these parameters, on all ranks with one code.
void expect_refused(Communicator& comm, const std::vector<NamedTensor>& registered, const DdpOptions& options,
                    Code code, const std::string& why) {
    EXPECT_THAT(expect_error([&] { const Ddp ddp(shared(comm), registered, options); }, code).what(), HasSubstr(why));
}

TEST_F(DdpOnDevice, ParametersElsewhereAreRefusedOnAllRanks) {
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        Model model = three_layers();
        const bool bad = comm.rank() == 1;
        {
            OnDevice there(comm, model);
            auto some = there.params();
            if (bad) some[1].tensor = model.params()[1].tensor;
            expect_refused(comm, some, {}, Code::invalid_argument,
                           R"(parameter "b" is on the CPU, but "a" is on a CUDA device)");
            some = there.params();
            if (bad) some[1].tensor.data = model.params()[1].tensor.data;
            expect_refused(comm, some, {}, Code::invalid_argument, R"(parameter "b" is memory of the host)");
            some = there.params();
            if (bad) some[2].tensor.device.index = 3;
            expect_refused(comm, some, {}, Code::invalid_argument,
                           R"(parameter "c" is on CUDA device 3, but this rank communicates from CUDA device)");
            some = bad ? model.params() : there.params();
            expect_refused(comm, some, {}, Code::mismatch, R"(rank 0 has parameter 0 "a" f32 [300] on CUDA)");
            Ddp ddp(shared(comm), there.params(), {});  // and goes on
            ddp.ready_all();
            ddp.wait();
            const auto other = cuda_device(3).new_stream();
            EXPECT_THAT(expect_error([&] { ddp.set_stream(other.get()); }, Code::invalid_argument).what(),
                        HasSubstr("stream of another device"));
            Ddp host(shared(comm), model.params(), {});
            expect_error([&] { host.set_stream(other.get()); }, Code::invalid_argument);
            host.set_stream(nullptr);
            const NamedTensor buffer{"buffer", there.params()[0].tensor};
            expect_error([&] { host.register_buffers({buffer}); }, Code::unsupported);
            ddp.ready(0);
            expect_error([&] { ddp.set_stream(nullptr); }, Code::invalid_state);
            ddp.ready_all();
            ddp.wait();
        }
        comm.finalize();
    }));
}

TEST_F(DdpOnDevice, ACommunicatorOfTheCpuRefusesThem) {
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        Model model = three_layers();
        OnDevice there(comm, model);
        CommOptions options = comm.options();
        options.backend = "auto";
        const auto cpu = comm.split(0, 0, options);
        expect_refused(*cpu, there.params(), {}, Code::unsupported, "'cpu:auto,cuda:nccl'");
        comm.finalize();
    }));
}

TEST_F(DdpOnDevice, WhatNeedsTheCpuIsRefused) {
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        Model model = three_layers();
        OnDevice there(comm, model);
        const auto refuse = [&](const DdpOptions& options, const char* name) {
            expect_refused(comm, there.params(), options, Code::unsupported, name);
        };
        refuse({.hook = DdpHook::power_sgd}, "POWER_SGD");
        refuse({.share_params = true}, "share_params");
        Ddp ddp(shared(comm), there.params(), {});
        Model local = three_layers();
        Sgd optimizer({{"x", model.params()[0].tensor, local.params()[0].tensor}}, {});
        expect_error([&] { ddp.step_in_backward(optimizer); }, Code::unsupported);
        comm.finalize();
    }));
}

// In a process of its own: this one has the kernels.
TEST_F(DdpOnDevice, WhatNeedsKernelsIsUnsupportedWithoutThem) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const auto run = [] {
        ::setenv("TESSERA_CUDA_KERNELS", "/nowhere/libtessera_cuda.so", 1);
        expect_all_well(run_on_devices(2, [](Communicator& comm) {
            Model model = three_layers();
            OnDevice there(comm, model);
            const auto refuse = [&](const DdpOptions& options, const std::string& what) {
                expect_refused(comm, there.params(), options, Code::unsupported,
                               what + " is not available here: kernels for CUDA devices are missing");
            };
            refuse({.pre_divide = 2}, "pre_divide");
            refuse({.reduce_dtype = DType::bf16}, "the reduce_dtype bf16 for \"a\", which is f32,");
            refuse({.join = DdpJoin::divide_by_active}, "join DIVIDE_BY_ACTIVE");
            Ddp ddp(shared(comm), there.params(), {.reduce_dtype = DType::f32});
            ddp.ready_all();
            ddp.wait();
            comm.finalize();
        }));
        std::_Exit(HasFailure() ? 1 : 0);
    };
    EXPECT_EXIT(run(), ::testing::ExitedWithCode(0), "");
}

TEST_F(DdpOnDevice, WithoutMemoryForConversionsNoRankHasAModel) {
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        Model model = three_layers();
        OnDevice there(comm, model);
        const DdpOptions options{.reduce_dtype = DType::bf16};
        comm.run({.collective = Collective::barrier});
        if (comm.rank() == 1) simulated_cuda_fail("cuMemAlloc_v2", 2, 2);  // the third of two for each rank
        comm.run({.collective = Collective::barrier});
        expect_refused(comm, there.params(), options, Code::no_memory, "allocating");
        Ddp ddp(shared(comm), there.params(), options);
        ddp.ready_all();
        ddp.wait();
        comm.finalize();
    }));
}

// --- what goes wrong

// Steps until one fails.
void step_on(Communicator& comm, const std::function<void(int step)>& before = {}) {
    Model model = three_layers();
    OnDevice there(comm, model);
    Ddp ddp(shared(comm), there.params(), small());
    there.write(ddp.grad(0), Floats(300, 1));
    const Deadline deadline = soon();
    try {
        for (int step = 0; !deadline.expired(); ++step) {
            if (before) before(step);
            ddp.ready_all();
            ddp.wait();
        }
        ADD_FAILURE() << "no step has failed";
    } catch (const Error&) {
        expect_error([&] { ddp.ready_all(); }, Code::aborted);
        expect_error([&] { ddp.zero_grad(); }, Code::invalid_state);
        throw;
    }
}

void expect_the_cpu_goes_on() {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {});
        ddp.ready_all();
        ddp.wait();
    }));
}

TEST_F(DdpOnDevice, AReductionThatHangsTimesOut) {
    const auto outcomes = run_on_devices(3, [](Communicator& comm) {
        step_on(comm, [&](int step) {
            if (step != 2) return;
            comm.set_timeout(milliseconds{300});
            if (comm.rank() == 1) mock_nccl_hang(1);
        });
    });
    bool timed_out = false;
    for (size_t rank = 0; rank < 3; ++rank) {
        const Error& error = only_error(outcomes, rank);
        EXPECT_THAT(error.code(), AnyOf(Code::timeout, Code::peer_lost, Code::aborted)) << error.what();
        if (error.code() != Code::timeout) continue;
        timed_out = true;
        EXPECT_THAT(error.what(), AllOf(HasSubstr("all_reduce"), HasSubstr("bucket"), HasSubstr("300 ms")));
    }
    EXPECT_TRUE(timed_out);
    expect_the_cpu_goes_on();
}

TEST_F(DdpOnDevice, ARankThatGivesUpFailsTheStepsOfTheOthers) {
    const auto outcomes = run_on_devices(3, [](Communicator& comm) {
        if (comm.rank() != 2) return step_on(comm);
        Model model = three_layers();
        OnDevice there(comm, model);
        Ddp ddp(shared(comm), there.params(), small());
        ddp.ready_all();
        ddp.wait();
        ddp.ready(2);
        comm.abort("enough");
    });
    for (size_t rank = 0; rank < 2; ++rank) {
        const Error& error = only_error(outcomes, rank);
        EXPECT_EQ(error.code(), Code::aborted) << error.what();
        EXPECT_THAT(error.what(), HasSubstr("enough"));
    }
    expect_the_cpu_goes_on();
}

TEST_F(DdpOnDevice, ADeviceThatBreaksFailsTheStepOnAllRanks) {
    breaks_ = true;
    int broken = -1;
    const auto outcomes = run_on_devices(2, [&](Communicator& comm) {
        step_on(comm, [&](int step) {
            if (step != 3 || comm.rank() != 0) return;
            broken = comm.device()->index;
            simulated_cuda_break(broken, 719);
        });
    });
    simulated_cuda_break(broken, 0);
    const Error& error = only_error(outcomes, 0);
    EXPECT_EQ(error.code(), Code::cuda) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("CUDA_ERROR_LAUNCH_FAILED (719)"));
    EXPECT_THAT(only_error(outcomes, 1).code(), AnyOf(Code::cuda, Code::aborted, Code::peer_lost));
    expect_the_cpu_goes_on();
}

TEST_F(DdpOnDevice, ACallThatFailsFailsTheStepOnAllRanks) {
    for (const char* symbol : {"cuEventRecord", "cuStreamWaitEvent", "cuEventCreate", "cuMemsetD8Async"}) {
        const auto outcomes = run_on_devices(2, [&](Communicator& comm) {
            Model model = three_layers();
            OnDevice there(comm, model);
            Ddp ddp(shared(comm), there.params(), small());
            comm.run({.collective = Collective::barrier});
            if (comm.rank() == 0) simulated_cuda_fail(symbol, 0, 999);  // of whichever rank calls it next
            comm.run({.collective = Collective::barrier});
            const Deadline deadline = soon();
            while (!deadline.expired()) {
                ddp.zero_grad();
                ddp.ready_all();
                ddp.wait();
            }
        });
        size_t failed = 0;
        for (size_t rank = 0; rank < 2; ++rank) {
            const Error& error = only_error(outcomes, rank);
            failed += error.code() == Code::cuda ? 1 : 0;
            EXPECT_THAT(error.code(), AnyOf(Code::cuda, Code::aborted, Code::peer_lost)) << error.what();
        }
        EXPECT_GE(failed, 1U) << symbol;
    }
}

TEST_F(DdpOnDevice, AnErrorThatNcclReportsLaterFailsTheStep) {
    const auto outcomes = run_on_devices(2, [](Communicator& comm) {
        step_on(comm, [&](int step) {
            if (step != 2 || comm.rank() != 0) return;
            mock_nccl_hang(0);  // so that the reduction is there when the error is looked for
            mock_nccl_async_error(0, 3);
        });
    });
    EXPECT_EQ(only_error(outcomes, 0).code(), Code::nccl);
    EXPECT_THAT(only_error(outcomes, 1).code(), AnyOf(Code::nccl, Code::aborted, Code::peer_lost));
}

TEST_F(DdpOnDevice, WithoutMemoryNoRankHasAModel) {
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        Model model = three_layers();
        OnDevice there(comm, model);
        comm.run({.collective = Collective::barrier});
        if (comm.rank() == 1) simulated_cuda_fail("cuMemAlloc_v2", 0, 2);  // of whichever rank calls it next
        comm.run({.collective = Collective::barrier});
        expect_refused(comm, there.params(), {}, Code::no_memory, "allocating");
        Ddp ddp(shared(comm), there.params(), {});
        ddp.ready_all();
        ddp.wait();
        comm.finalize();
    }));
}

}  // namespace
}  // namespace tsr
