// FSDP over parameters on CUDA devices, which are simulated (simulated_cuda/control.h), with a mock of NCCL
// (mock_nccl/control.h). Ranks are threads, each with a device of its own. All that the trainer computes runs as kernels on its
// stream, delayed at random, so that whatever is not ordered there computes something else than a model on the CPU.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "device/device.hpp"
#include "mock_nccl/fixture.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "simulated_cuda/control.h"
#include "simulated_cuda/hold.hpp"
#include "soon.hpp"
#include "tensor/convert.hpp"
#include "units.hpp"

namespace tsr {
namespace {

using testing::a_unit_each;
using ::testing::AllOf;
using ::testing::AnyOf;
using testing::CallInInterrupt;
using testing::equal_layers;
using testing::expect_all_well;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::Hold;
using testing::Model;
using testing::odd_shapes;
using testing::Outcomes;
using testing::run_ranks;
using testing::shared;
using testing::soon;
using testing::test_backend;
using testing::test_options;
using testing::two_units;

using Floats = std::vector<float>;

constexpr int illegal_address = 700;

CommOptions on_devices() { return test_options(("cpu:" + std::string(test_backend()) + ",cuda:nccl").c_str()); }

// Runs on the stream when its turn comes; false: it met an address without memory.
void launch(DeviceApi& api, StreamHandle stream, std::function<bool()> kernel) {
    const auto run = [](void* argument) -> int {
        return (*static_cast<std::function<bool()>*>(argument))() ? 0 : illegal_address;
    };
    const auto end = [](void* argument) { delete static_cast<std::function<bool()>*>(argument); };
    api.in_use([&] {
        auto* body = new std::function<bool()>(std::move(kernel));
        if (simulated_cuda_launch_until(stream, run, end, body) != 0) end(body);  // the device has failed
    });
}

// In a kernel.
std::byte* bytes_of(const Tensor& tensor) {
    return static_cast<std::byte*>(simulated_cuda_bytes(tensor.data, tensor.size_bytes()));
}

// A place to train at: a rank's device, or the CPU.
class Place {
   public:
    explicit Place(std::optional<Device> device, StreamHandle stream = nullptr)
        : device_(device.value_or(Device{})), api_(device_api(device_)), stream_(stream) {}

    [[nodiscard]] DeviceApi& api() const { return api_; }
    [[nodiscard]] StreamHandle stream() const { return stream_; }
    void set_stream(StreamHandle stream) { stream_ = stream; }

    // Copies parameters here.
    [[nodiscard]] std::vector<FsdpUnit> here(std::vector<FsdpUnit> units) {
        for (FsdpUnit& unit : units) {
            for (NamedTensor& param : unit.params) {
                Tensor& tensor = param.tensor;
                tensor.device = device_;
                if (tensor.data == nullptr) continue;
                memory_.push_back(api_.allocate(tensor.size_bytes()));
                api_.copy(memory_.back().get(), tensor.data, tensor.size_bytes(), nullptr);
                tensor.data = memory_.back().get();
            }
        }
        return units;
    }

    void run(std::function<bool()> kernel) const {
        if (device_.type != DeviceType::cpu) return launch(api_, stream_, std::move(kernel));
        EXPECT_TRUE(kernel());
    }
    [[nodiscard]] Floats read(const Tensor& tensor) const {
        std::vector<std::byte> bytes(tensor.size_bytes());
        api_.copy(bytes.data(), tensor.data, bytes.size(), stream_);
        api_.record(stream_)->wait(soon());
        Floats values(static_cast<size_t>(tensor.numel()));
        convert(bytes.data(), tensor.dtype, reinterpret_cast<std::byte*>(values.data()), DType::f32, tensor.numel());
        return values;
    }

   private:
    const Device device_;
    DeviceApi& api_;
    StreamHandle stream_;
    std::vector<std::shared_ptr<std::byte>> memory_;
};

// The elements of a tensor of any floating-point type, read and written as floats.
class Elements {
   public:
    Elements(std::byte* data, DType dtype) : data_(data), dtype_(dtype) {}

    class Element {
       public:
        Element(std::byte* data, DType dtype) : data_(data), dtype_(dtype) {}
        operator float() const {  // NOLINT(google-explicit-constructor)
            float value = 0;
            convert(data_, dtype_, reinterpret_cast<std::byte*>(&value), DType::f32, 1);
            return value;
        }
        Element& operator=(float value) {
            convert(reinterpret_cast<const std::byte*>(&value), DType::f32, data_, dtype_, 1);
            return *this;
        }
        Element& operator-=(float value) { return *this = *this - value; }

       private:
        std::byte* const data_;
        const DType dtype_;
    };
    Element operator[](int64_t i) const { return {data_ + static_cast<size_t>(i) * size_of(dtype_), dtype_}; }

   private:
    std::byte* data_;
    DType dtype_;
};

// Calls use(i) for each element of tensors of one size.
template <class Use>
bool each_element(const std::vector<Tensor>& tensors, Use&& use) {
    std::vector<Elements> at;
    for (const Tensor& tensor : tensors) {
        if (tensor.numel() == 0) return true;
        std::byte* const data = bytes_of(tensor);
        if (data == nullptr) return false;
        at.emplace_back(data, tensor.dtype);
    }
    for (int64_t i = 0; i < tensors[0].numel(); ++i) use(at, i);
    return true;
}

// A trainer whose losses, gradients and updates depend on every parameter.
class Trainer {
   public:
    Trainer(Fsdp& fsdp, const Place& place, int rank) : fsdp_(fsdp), place_(place), rank_(rank) {}

    void forward(size_t unit) {
        fsdp_.forward(unit);
        for (const size_t p : fsdp_.unit(unit).params) {
            place_.run([whole = fsdp_.whole(p), state = state_] {
                return each_element({whole}, [&](const auto& at, int64_t i) {
                    *state = *state * 0.5F + at[0][i] * static_cast<float>(i % 7 + 1);
                });
            });
        }
        fsdp_.forward_done(unit);
    }
    enum class Grads { write, add };
    void backward(size_t unit, Grads grads = Grads::write) {
        fsdp_.backward(unit);
        for (const size_t p : fsdp_.unit(unit).params) {
            if (!fsdp_.param(p).trained) continue;
            const float scale = static_cast<float>(rank_ + 1) * static_cast<float>(++count_ % 5 + 1);
            place_.run([whole = fsdp_.whole(p), grad = fsdp_.grad(p), state = state_, scale, grads] {
                return each_element({whole, grad}, [&](const auto& at, int64_t i) {
                    const float value = at[0][i] * scale * 0.25F + *state * 0.125F + static_cast<float>(i % 3);
                    at[1][i] = grads == Grads::add ? at[1][i] + value : value;
                });
            });
        }
        fsdp_.grads_ready(unit);
    }
    void pass(Grads grads = Grads::write) {
        for (size_t u = 0; u < fsdp_.units(); ++u) forward(u);
        for (size_t u = fsdp_.units(); u-- > 0;) backward(u, grads);
        fsdp_.wait();
    }
    void update() {
        for (size_t p = 0; p < fsdp_.params(); ++p) {
            if (!fsdp_.param(p).trained) continue;
            place_.run([shard = fsdp_.shard(p), grad = fsdp_.shard_grad(p)] {
                return each_element({shard, grad}, [](const auto& at, int64_t i) { at[0][i] -= 0.01F * at[1][i]; });
            });
        }
    }
    void steps(int count) {
        for (int step = 0; step < count; ++step) {
            pass();
            update();
        }
    }

   private:
    Fsdp& fsdp_;
    const Place& place_;
    const int rank_;
    int count_ = 0;
    std::shared_ptr<float> state_ = std::make_shared<float>(1.0F);  // of the kernels, in the order of their stream
};

// All shards and their gradients, with what no rank updates.
std::vector<Floats> content(const Fsdp& fsdp, const Place& place) {
    std::vector<Floats> all;
    for (size_t p = 0; p < fsdp.params(); ++p) {
        all.push_back(place.read(fsdp.shard(p)));
        if (fsdp.param(p).trained) all.push_back(place.read(fsdp.shard_grad(p)));
    }
    return all;
}

class FsdpOnDevice : public testing::MockNcclTest {};

// --- the numbers of the CPU

struct Case {
    const char* name;
    int ranks;
    std::function<void(std::vector<FsdpUnit>&, FsdpOptions&)> change;
};

const std::vector<Case>& cases() {
    static const std::vector<Case> all{
        {"AloneOnADevice", 1, {}},
        {"TwoRanks", 2, {}},
        {"ThreeRanks", 3, {}},
        {"FourRanks", 4, {}},
        {"StaysUnsharded", 3, [](auto& units, auto&) { units[1].reshard_after_forward = 0; }},
        {"KeptByTwo", 4,
         [](auto& units, auto&) { units[0].reshard_after_forward = units[2].reshard_after_forward = 2; }},
        {"KeptByAll", 2, [](auto& units, auto&) { units[0].reshard_after_forward = 2; }},
        {"KeptWithinReplicas", 4,
         [](auto& units, auto& options) {
             options.shard_ranks = 4;
             units[1].reshard_after_forward = 2;
         }},
        {"Replicas", 4, [](auto&, auto& options) { options.shard_ranks = 2; }},
        {"ReplicasOfAll", 3, [](auto&, auto& options) { options.shard_ranks = 1; }},
        {"Sums", 2, [](auto&, auto& options) { options.op = ReduceOp::sum; }},
        {"SumsOfReplicas", 4,
         [](auto&, auto& options) {
             options.shard_ranks = 2;
             options.op = ReduceOp::sum;
         }},
        {"NoPrefetch", 2, [](auto&, auto& options) { options.forward_prefetch = options.backward_prefetch = 0; }},
        {"FarPrefetch", 2,
         [](auto&, auto& options) {
             options.forward_prefetch = 1;
             options.backward_prefetch = 3;
         }},
        {"GradientsTakeTurns", 3, [](auto&, auto& options) { options.grads_in_flight = 1; }},
        {"OwnValues", 2, [](auto&, auto& options) { options.sync_values = false; }},
        {"Flat", 3,
         [](auto& units, auto&) {
             for (FsdpUnit& unit : units) unit.flat = true;
         }},
        {"BlocksOfRows", 3,
         [](auto& units, auto&) {
             for (FsdpUnit& unit : units) unit.row_block = 2;
         }},
        {"Frozen", 2, [](auto& units, auto&) { units[0].trained = {true, false}; }},
        {"WithoutValues", 2, [](auto& units, auto&) { units[1].params[0].tensor.data = nullptr; }},
        {"AllFrozenInAUnit", 2, [](auto& units, auto&) { units[2].trained = {false, false}; }},
        {"InBf16", 3, [](auto&, auto& options) { options.param_dtype = DType::bf16; }},
        {"InBf16ReducedInF32", 2,
         [](auto&, auto& options) {
             options.param_dtype = DType::bf16;
             options.reduce_dtype = DType::f32;
         }},
        {"ReducedInBf16", 3, [](auto&, auto& options) { options.reduce_dtype = DType::bf16; }},
        {"ReducedInF64", 2, [](auto&, auto& options) { options.reduce_dtype = DType::f64; }},
        {"UnitsInSeveralTypes", 2,
         [](auto& units, auto& options) {
             options.param_dtype = DType::bf16;
             units[0].param_dtype = DType::f16;
             units[2].reduce_dtype = DType::f64;
         }},
        {"FlatInBf16", 3,
         [](auto& units, auto& options) {
             for (FsdpUnit& unit : units) unit.flat = true;
             options.param_dtype = DType::bf16;
         }},
        {"KeptByTwoInBf16", 4,
         [](auto& units, auto& options) {
             units[0].reshard_after_forward = units[2].reshard_after_forward = 2;
             options.param_dtype = DType::bf16;
         }},
        {"ReplicasInBf16", 4,
         [](auto&, auto& options) {
             options.shard_ranks = 2;
             options.param_dtype = DType::bf16;
         }},
        {"Divided", 3, [](auto&, auto& options) { options.pre_divide = 3; }},
        {"DividedSums", 2,
         [](auto&, auto& options) {
             options.pre_divide = 7;
             options.op = ReduceOp::sum;
         }},
        {"DividedReplicasInF16", 4,
         [](auto&, auto& options) {
             options.shard_ranks = 2;
             options.pre_divide = 4;
             options.reduce_dtype = DType::f16;
         }},
    };
    return all;
}

// Three units of two parameters, of every kind of rows.
std::vector<FsdpUnit> three_units(Model& model) {
    const auto params = model.params();
    std::vector<FsdpUnit> units;
    for (size_t u = 0; u < 3; ++u) {
        units.push_back({.name = fmt::format("u{}", u), .params = {params[2 * u], params[2 * u + 1]}});
    }
    return units;
}

class FsdpOnDeviceCases : public FsdpOnDevice, public ::testing::WithParamInterface<Case> {};

TEST_P(FsdpOnDeviceCases, TrainAsOnTheCpu) {
    simulated_cuda_delay(300, 11);
    expect_all_well(run_ranks(GetParam().ranks, on_devices(), [](Communicator& comm) {
        std::vector<std::vector<Floats>> results;
        for (const auto device : {std::optional<Device>{}, comm.device()}) {
            Model model = odd_shapes(comm.rank());
            auto units = three_units(model);
            FsdpOptions options;
            if (GetParam().change) GetParam().change(units, options);
            Place place(device);
            Fsdp fsdp(shared(comm), place.here(units), options);
            Trainer trainer(fsdp, place, comm.rank());
            trainer.steps(4);
            results.push_back(content(fsdp, place));
        }
        EXPECT_EQ(results[1], results[0]);
    }));
}

INSTANTIATE_TEST_SUITE_P(All, FsdpOnDeviceCases, ::testing::ValuesIn(cases()),
                         [](const auto& one) { return std::string(one.param.name); });

// What a step does besides a plain pass.
struct Manner {
    const char* name;
    std::function<void(Fsdp&, Trainer&)> step;
};

const std::vector<Manner>& manners() {
    static const std::vector<Manner> all{
        {"UnshardedGradientsAccumulate",
         [](Fsdp& fsdp, Trainer& trainer) {
             fsdp.set_sync(false);
             trainer.pass(Trainer::Grads::add);
             trainer.pass(Trainer::Grads::add);
             fsdp.set_sync(true);
             trainer.pass(Trainer::Grads::add);
         }},
        {"ShardsAccumulate",
         [](Fsdp& fsdp, Trainer& trainer) {
             fsdp.zero_grad();
             fsdp.set_accumulate(true);
             for (int pass = 0; pass < 3; ++pass) trainer.pass();
             fsdp.set_accumulate(false);
         }},
        {"AUnitIsUsedTwice",
         [](Fsdp& fsdp, Trainer& trainer) {
             for (const size_t unit : {0, 1, 2, 1, 0}) trainer.forward(unit);
             for (const size_t unit : {0, 1, 2, 1, 0}) trainer.backward(unit);
             fsdp.wait();
         }},
        {"ReplicasAreLeftOut",
         [](Fsdp& fsdp, Trainer& trainer) {
             fsdp.set_all_reduce(false);
             trainer.pass();
             trainer.pass();
             fsdp.set_all_reduce(true);
             trainer.pass();
         }},
        {"WhatReplicasLackIsForgotten",
         [](Fsdp& fsdp, Trainer& trainer) {
             fsdp.set_all_reduce(false);
             trainer.pass();
             fsdp.set_all_reduce(true);
             fsdp.zero_grad();
             trainer.pass();
         }},
        {"ReplicasAreLeftOutAndShardsAccumulate",
         [](Fsdp& fsdp, Trainer& trainer) {
             fsdp.zero_grad();
             fsdp.set_accumulate(true);
             trainer.pass();
             fsdp.set_all_reduce(false);
             trainer.pass();
             fsdp.set_all_reduce(true);
             trainer.pass();
             fsdp.set_accumulate(false);
         }},
    };
    return all;
}

struct Dtypes {
    const char* name;
    FsdpOptions options;
};

const std::vector<Dtypes>& dtypes() {
    static const std::vector<Dtypes> all{
        {"", {}},
        {"InBf16", {.param_dtype = DType::bf16}},
        {"DividedAndReducedInF64", {.reduce_dtype = DType::f64, .pre_divide = 3}},
    };
    return all;
}

class FsdpOnDeviceManners : public FsdpOnDevice, public ::testing::WithParamInterface<std::tuple<Manner, Dtypes>> {};

TEST_P(FsdpOnDeviceManners, TrainAsOnTheCpu) {
    simulated_cuda_delay(300, 12);
    const Manner& manner = std::get<0>(GetParam());
    const Dtypes& dtypes = std::get<1>(GetParam());
    for (const int shard_ranks : {0, 2}) {
        expect_all_well(run_ranks(shard_ranks == 0 ? 3 : 4, on_devices(), [&](Communicator& comm) {
            std::vector<std::vector<Floats>> results;
            for (const auto device : {std::optional<Device>{}, comm.device()}) {
                Model model = odd_shapes(0);
                Place place(device);
                FsdpOptions options = dtypes.options;
                options.shard_ranks = shard_ranks;
                Fsdp fsdp(shared(comm), place.here(three_units(model)), options);
                Trainer trainer(fsdp, place, comm.rank());
                for (int step = 0; step < 2; ++step) {
                    manner.step(fsdp, trainer);
                    trainer.update();
                }
                trainer.steps(1);
                results.push_back(content(fsdp, place));
            }
            EXPECT_EQ(results[1], results[0]);
        }));
    }
}

INSTANTIATE_TEST_SUITE_P(All, FsdpOnDeviceManners,
                         ::testing::Combine(::testing::ValuesIn(manners()), ::testing::ValuesIn(dtypes())),
                         [](const auto& one) {
                             return std::string(std::get<0>(one.param).name) + std::get<1>(one.param).name;
                         });

TEST_F(FsdpOnDevice, EveryFloatingTypeIsReducedAndOthersAreGathered) {
    expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
        Model ones;
        for (const char* name : {"f16", "bf16", "f32", "f64", "i32"}) ones.add(name, {6, 2});
        const auto params = ones.params();
        std::vector<std::vector<Floats>> results;
        for (const auto device : {std::optional<Device>{}, comm.device()}) {
            std::vector<std::vector<std::byte>> memory;
            FsdpUnit unit{.name = "all", .trained = {true, true, true, true, false}};
            for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32}) {
                memory.emplace_back(12 * size_of(dtype));
                for (size_t i = 0; i < 12; ++i) {
                    const auto value = static_cast<float>(i);
                    const auto whole = static_cast<int32_t>(i);
                    std::byte* const to = memory.back().data() + i * size_of(dtype);
                    if (dtype == DType::i32)
                        std::memcpy(to, &whole, sizeof whole);
                    else
                        convert(reinterpret_cast<const std::byte*>(&value), DType::f32, to, dtype, 1);
                }
                const std::string name(name_of(dtype));
                unit.params.push_back({name, {memory.back().data(), Dims{6, 2}, dtype, {}}});
            }
            Place place(device);
            Fsdp fsdp(shared(comm), place.here({unit}), {});
            fsdp.forward(0);
            std::vector<Floats> result;
            for (size_t p = 0; p < 4; ++p) result.push_back(place.read(fsdp.whole(p)));
            const Tensor numbers = fsdp.whole(4);
            std::vector<int32_t> read(12);
            place.api().copy(reinterpret_cast<std::byte*>(read.data()), numbers.data, numbers.size_bytes(), nullptr);
            for (int32_t i = 0; i < 12; ++i) EXPECT_EQ(read[static_cast<size_t>(i)], i);
            fsdp.forward_done(0);
            fsdp.backward(0);
            for (size_t p = 0; p < 4; ++p) {
                place.run([whole = fsdp.whole(p), grad = fsdp.grad(p), rank = comm.rank()] {
                    std::byte* const to = bytes_of(grad);
                    const std::byte* const from = bytes_of(whole);
                    if (to == nullptr || from == nullptr) return false;
                    if (rank == 0)
                        std::memcpy(to, from, grad.size_bytes());
                    else
                        std::memset(to, 0, grad.size_bytes());
                    return true;
                });
            }
            fsdp.grads_ready(0);
            fsdp.wait();
            for (size_t p = 0; p < 4; ++p) result.push_back(place.read(fsdp.shard_grad(p)));
            results.push_back(result);
        }
        EXPECT_EQ(results[1], results[0]);
    }));
}

TEST_F(FsdpOnDevice, GradientsThatARankLacksCountAsZeros) {
    expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
        Model model = equal_layers(2);
        Place place(comm.device());
        Fsdp fsdp(shared(comm), place.here(a_unit_each(model)), {});
        for (const size_t unit : {size_t{0}, size_t{1}}) {
            fsdp.forward(unit);
            fsdp.forward_done(unit);
        }
        fsdp.backward(1);
        fsdp.unused(1);
        fsdp.grads_ready(1);
        fsdp.backward(0);
        if (comm.rank() == 0)
            fsdp.unused(0);
        else
            place.run([grad = fsdp.grad(0)] {
                return each_element({grad}, [](const auto& at, int64_t i) { at[0][i] = 4; });
            });
        fsdp.grads_ready(0);
        fsdp.wait();
        EXPECT_TRUE(fsdp.used(0));
        EXPECT_FALSE(fsdp.used(1));
        EXPECT_THAT(place.read(fsdp.shard_grad(0)), ::testing::Each(2.0F));
        EXPECT_THAT(place.read(fsdp.shard_grad(1)), ::testing::Each(0.0F));
        fsdp.zero_grad();
        EXPECT_THAT(place.read(fsdp.shard_grad(0)), ::testing::Each(0.0F));
    }));
}

// --- streams

TEST_F(FsdpOnDevice, NoCallOfAStepWaitsForTheDevice) {
    const FsdpOptions plain;
    const FsdpOptions all{.shard_ranks = 2, .param_dtype = DType::bf16, .reduce_dtype = DType::f32, .pre_divide = 2};
    for (const FsdpOptions& options : {plain, all}) {
        expect_all_well(run_ranks(options.shard_ranks == 0 ? 2 : 4, on_devices(), [&](Communicator& comm) {
            std::vector<std::vector<Floats>> results;
            for (const auto device : {std::optional<Device>{}, comm.device()}) {
                Model model = odd_shapes(0);
                Place place(device);
                const auto stream = place.api().new_stream();
                place.set_stream(stream.get());
                Fsdp fsdp(shared(comm), place.here(three_units(model)), options);
                fsdp.set_stream(stream.get());
                Trainer trainer(fsdp, place, comm.rank());
                const auto train = [&] {
                    trainer.steps(3);
                    for (const Manner& manner : manners()) {
                        manner.step(fsdp, trainer);
                        trainer.update();
                    }
                };
                if (device) {
                    const Hold hold(place.api(), stream.get());
                    train();
                    const auto end = place.api().record(stream.get());
                    EXPECT_FALSE(end->done());
                    hold.release();
                    end->wait(soon());
                } else {
                    train();
                }
                results.push_back(content(fsdp, place));
            }
            EXPECT_EQ(results[1], results[0]);
        }));
    }
}

TEST_F(FsdpOnDevice, TheNextUnitIsGatheredWhileOneComputes) {
    expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
        Model model = equal_layers(3);
        Place place(comm.device());
        Fsdp fsdp(shared(comm), place.here(a_unit_each(model)), {});
        fsdp.unshard(1);
        fsdp.await_unit(1);
        const Tensor next = fsdp.whole(1);  // where the unit always is
        fsdp.reshard(1);
        fsdp.forward(0);
        const Hold computes(place.api(), place.stream());
        const auto beside = place.api().new_stream();
        Place look(comm.device(), beside.get());
        wait_until([&] { return mock_nccl_running(comm.rank()) == 0; }, soon(), "the gather beside the computation");
        EXPECT_EQ(look.read(next), Floats(48, 1.0F));
        fsdp.forward_done(0);
        fsdp.forward(1);
        EXPECT_EQ(fsdp.whole(1).data, next.data);
        computes.release();
        EXPECT_EQ(place.read(fsdp.whole(1)), Floats(48, 1.0F));
        fsdp.abandon();
    }));
}

// Nanoseconds of a step whose gathers, and whose reductions, follow each other (docs/SCALING.md).
uint64_t step_of_the_model(const std::vector<uint64_t>& forward, const std::vector<uint64_t>& moved,
                           const FsdpOptions& options) {
    const size_t count = forward.size();
    uint64_t now = 0;
    uint64_t gathers = 0;
    uint64_t reductions = 0;
    std::vector<uint64_t> reduced;
    for (const bool is_backward : {false, true}) {
        const auto unit_at = [&](size_t place) { return is_backward ? count - 1 - place : place; };
        const auto ahead = static_cast<size_t>(is_backward ? options.backward_prefetch : options.forward_prefetch);
        std::vector<uint64_t> whole;
        for (size_t place = 0; place < count; ++place) {
            while (whole.size() < std::min(count, place + 1 + ahead)) {
                gathers = std::max(gathers, now) + moved[unit_at(whole.size())];
                whole.push_back(gathers);
            }
            if (is_backward && reduced.size() >= static_cast<size_t>(options.grads_in_flight)) {
                now = std::max(now, reduced[reduced.size() - static_cast<size_t>(options.grads_in_flight)]);
            }
            now = std::max(now, whole[place]) + forward[unit_at(place)] * (is_backward ? 2 : 1);
            if (!is_backward) continue;
            reductions = std::max(reductions, now) + moved[unit_at(place)];
            reduced.push_back(reductions);
        }
    }
    return std::max(now, reductions);
}

// By the simulated clock, in which computation and NCCL's operations alone take time.
TEST_F(FsdpOnDevice, AStepTakesTheTimeOfTheModel) {
    constexpr uint64_t latency_ns = 20'000;
    constexpr uint64_t bytes_per_us = 1'000;
    simulated_cuda_use_simulated_clock(1);
    mock_nccl_speed(latency_ns, bytes_per_us);
    const std::vector<int64_t> rows{8, 64, 2, 64, 24, 64};
    std::vector<uint64_t> moved;
    for (const int64_t each : rows)
        moved.push_back(latency_ns + static_cast<uint64_t>(each) * 2 * 1024 * 1000 / bytes_per_us);
    for (const uint64_t unit_ns : {10'000, 100'000, 300'000}) {
        for (const FsdpOptions& options : {FsdpOptions{}, FsdpOptions{.forward_prefetch = 0, .backward_prefetch = 0},
                                           FsdpOptions{.backward_prefetch = 2, .grads_in_flight = 1}}) {
            expect_all_well(run_ranks(2, on_devices(), [&](Communicator& comm) {
                Model model;
                std::vector<FsdpUnit> units;
                for (const int64_t each : rows) {  // two parameters each, so that they are moved together
                    for (int i = 0; i < 2; ++i) model.add(fmt::format("{}.{}", units.size(), i), {each, 256});
                    units.push_back({.name = fmt::format("{}", units.size())});
                }
                const auto params = model.params();
                for (size_t i = 0; i < params.size(); ++i) units[i / 2].params.push_back(params[i]);
                Place place(comm.device());
                const auto stream = place.api().new_stream();
                place.set_stream(stream.get());
                Fsdp fsdp(shared(comm), place.here(units), options);
                fsdp.set_stream(stream.get());
                std::vector<uint64_t> forward(rows.size(), unit_ns);
                forward[1] *= 3;
                const auto compute = [&](uint64_t ns) {
                    place.run([ns] {
                        simulated_cuda_take_until(simulated_cuda_now() + ns);
                        return true;
                    });
                };
                for (const bool is_measured : {false, true}) {  // the first does not know the next unit yet
                    const auto begin = place.api().record_time(stream.get());
                    for (size_t u = 0; u < rows.size(); ++u) {
                        fsdp.forward(u);
                        compute(forward[u]);
                        fsdp.forward_done(u);
                    }
                    for (size_t u = rows.size(); u-- > 0;) {
                        fsdp.backward(u);
                        compute(2 * forward[u]);
                        fsdp.grads_ready(u);
                    }
                    fsdp.wait();
                    const auto end = place.api().record_time(stream.get());
                    end->wait(soon());
                    if (!is_measured) continue;
                    const auto expected = static_cast<double>(step_of_the_model(forward, moved, options));
                    const auto computed = static_cast<double>(3 * unit_ns * (rows.size() + 2));
                    const auto measured = static_cast<double>(place.api().elapsed(*begin, *end).count());
                    EXPECT_NEAR(measured - computed, expected - computed, 0.05 * (expected - computed))
                        << unit_ns << " ns a unit, prefetch " << options.backward_prefetch;
                }
            }));
        }
    }
}

TEST_F(FsdpOnDevice, GradientsAreReducedWhileTheNextAreComputed) {
    expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
        Model model = equal_layers(2);
        Place place(comm.device());
        Fsdp fsdp(shared(comm), place.here(a_unit_each(model)), {});
        Trainer trainer(fsdp, place, 0);
        trainer.forward(0);
        trainer.forward(1);
        const Floats before = place.read(fsdp.shard_grad(1));
        trainer.backward(1);
        fsdp.backward(0);
        const Hold computes(place.api(), place.stream());
        const auto beside = place.api().new_stream();
        Place look(comm.device(), beside.get());
        wait_until([&] { return mock_nccl_running(comm.rank()) == 0; }, soon(), "the reduction");
        EXPECT_NE(look.read(fsdp.shard_grad(1)), before);
        place.run(
            [grad = fsdp.grad(0)] { return each_element({grad}, [](const auto& at, int64_t i) { at[0][i] = 1; }); });
        fsdp.grads_ready(0);
        fsdp.wait();
        computes.release();
        EXPECT_EQ(place.read(fsdp.shard_grad(0)), Floats(24, 1.0F));
    }));
}

TEST_F(FsdpOnDevice, AnotherStreamGoesOnAfterTheFormerOne) {
    simulated_cuda_delay(2000, 13);
    expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
        std::vector<std::vector<Floats>> results;
        for (const auto device : {std::optional<Device>{}, comm.device()}) {
            Model model = odd_shapes(0);
            Place place(device);
            Fsdp fsdp(shared(comm), place.here(three_units(model)), {});
            Trainer trainer(fsdp, place, comm.rank());
            std::vector<std::shared_ptr<void>> streams;
            for (int step = 0; step < 4; ++step) {
                streams.push_back(place.api().new_stream());
                fsdp.set_stream(streams.back().get());
                place.set_stream(streams.back().get());
                trainer.steps(1);
            }
            results.push_back(content(fsdp, place));
            place.set_stream(nullptr);
            fsdp.set_stream(nullptr);
        }
        EXPECT_EQ(results[1], results[0]);
    }));
}

TEST_F(FsdpOnDevice, AStreamIsOfTheDeviceAndSetBetweenSteps) {
    expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
        Model model = equal_layers(1);
        Place place(comm.device());
        const auto other = cuda_device(3).new_stream();
        const auto own = place.api().new_stream();
        Fsdp on_cpu(shared(comm), a_unit_each(model), {});
        expect_error([&] { on_cpu.set_stream(own.get()); }, Code::invalid_argument);
        on_cpu.set_stream(nullptr);
        Fsdp fsdp(shared(comm), place.here(a_unit_each(model)), {});
        expect_error([&] { fsdp.set_stream(other.get()); }, Code::invalid_argument);
        fsdp.forward(0);
        EXPECT_THAT(expect_error([&] { fsdp.set_stream(own.get()); }, Code::invalid_state).what(),
                    HasSubstr("the stream cannot be changed while unit \"uw0\" is unsharded"));
        fsdp.abandon();
        fsdp.set_stream(own.get());
        fsdp.set_stream(nullptr);
    }));
}

// --- memory

constexpr size_t page = size_t{2} << 20;  // of the simulated devices

void pass_without_kernels(Fsdp& fsdp) {
    for (size_t u = 0; u < fsdp.units(); ++u) {
        fsdp.forward(u);
        fsdp.forward_done(u);
    }
    for (size_t u = fsdp.units(); u-- > 0;) {
        fsdp.backward(u);
        fsdp.grads_ready(u);
    }
    fsdp.wait();
}

TEST_F(FsdpOnDevice, OnlyTheExpectedUnitsHaveMemoryAtATime) {
    for (const int prefetch : {0, 1, 2}) {
        std::atomic<size_t> most{0};
        std::atomic<size_t> shards{0};
        expect_all_well(run_ranks(2, on_devices(), [&](Communicator& comm) {
            const size_t before = used().bytes;
            comm.run({.collective = Collective::barrier});
            std::vector<FsdpUnit> units;
            for (size_t u = 0; u < 6; ++u) {  // of a page each
                units.push_back(
                    {.name = fmt::format("u{}", u),
                     .params = {{fmt::format("w{}", u),
                                 {nullptr, Dims{static_cast<int64_t>(page / 4)}, DType::f32, *comm.device()}}}});
            }
            FsdpOptions options;
            options.forward_prefetch = options.backward_prefetch = prefetch;
            options.grads_in_flight = 2;
            Place place(comm.device());
            Fsdp fsdp(shared(comm), units, options);
            comm.run({.collective = Collective::barrier});
            if (comm.rank() == 0) shards = used().bytes - before;
            comm.run({.collective = Collective::barrier});
            for (int step = 0; step < 2; ++step) pass_without_kernels(fsdp);
            place.api().record(nullptr)->wait(soon());
            comm.run({.collective = Collective::barrier});
            if (comm.rank() == 0) most = used().bytes - before;
            comm.run({.collective = Collective::barrier});
        }));
        EXPECT_EQ(shards, 2 * 2 * 6 * page / 2) << "shards and their gradients, of two ranks";
        EXPECT_EQ(most - shards, 2 * static_cast<size_t>(prefetch + 1 + 2) * page) << "slots, of two ranks";
    }
}

// The device still computes with a unit when the order of the calls gives it another slot.
TEST_F(FsdpOnDevice, AUnitMovesOnceTheDeviceHasLeftItsFormerPlace) {
    expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
        Model model = equal_layers(3);
        Place place(comm.device());
        Fsdp fsdp(shared(comm), place.here(a_unit_each(model)), {});
        fsdp.unshard(1);
        fsdp.await_unit(1);
        const Tensor whole = fsdp.whole(1);
        const Hold computes(place.api(), place.stream());
        auto sum = std::make_shared<float>(0.0F);
        place.run([whole, sum] { return each_element({whole}, [&](const auto& at, int64_t i) { *sum += at[0][i]; }); });
        fsdp.reshard(1);
        fsdp.unshard(2);  // where the other was
        std::atomic<bool> waited{false};
        {
            const CallInInterrupt release([&] { computes.release(); }, waited);
            fsdp.unshard(1);  // so that this moves
        }
        EXPECT_TRUE(waited);
        computes.release();
        fsdp.await_unit(2);
        fsdp.await_unit(1);
        EXPECT_EQ(fsdp.whole(1).data, whole.data);
        EXPECT_EQ(place.read(fsdp.whole(1)), Floats(48, 1.0F));
        EXPECT_EQ(place.read(fsdp.whole(2)), Floats(48, 2.0F));
        EXPECT_EQ(*sum, 48);
        fsdp.abandon();
    }));
}

// Pages of the device are of 2 MiB.
TEST_F(FsdpOnDevice, ASmallUnitIsInTheSlotOfALargeOne) {
    expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
        Model model;
        model.add("large", {600, 1000}, 5);
        model.add("small", {12, 4}, 6);
        Place place(comm.device());
        Fsdp fsdp(shared(comm), place.here(a_unit_each(model)), {});
        for (int round = 0; round < 2; ++round) {
            for (const size_t unit : {0, 1}) {
                fsdp.unshard(unit);
                fsdp.await_unit(unit);
                const Tensor whole = fsdp.whole(unit);
                EXPECT_EQ(place.read(whole),
                          Floats(static_cast<size_t>(whole.numel()), 5.0F + static_cast<float>(unit)));
                fsdp.reshard(unit);
            }
        }
    }));
}

TEST_F(FsdpOnDevice, AModelEndsWhileItsDeviceWorks) {
    simulated_cuda_delay(3000, 15);
    for (int round = 0; round < 5; ++round) {
        expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
            Model model = odd_shapes(0);
            Place place(comm.device());
            auto fsdp = std::make_unique<Fsdp>(shared(comm), place.here(three_units(model)), FsdpOptions{});
            Trainer(*fsdp, place, comm.rank()).pass();
            fsdp.reset();
            comm.run({.collective = Collective::barrier});
        }));
    }
}

TEST_F(FsdpOnDevice, AnAbandonedStepLeavesNothing) {
    simulated_cuda_delay(300, 16);
    expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
        std::vector<std::vector<Floats>> results;
        for (const bool abandons : {false, true}) {
            Model model = odd_shapes(0);
            Place place(comm.device());
            Fsdp fsdp(shared(comm), place.here(three_units(model)), {});
            if (abandons) {
                Trainer other(fsdp, place, comm.rank());
                for (const size_t unit : {size_t{0}, size_t{1}, size_t{2}}) other.forward(unit);
                other.backward(2);
                fsdp.backward(1);
                fsdp.abandon();
                for (size_t p = 0; p < fsdp.params(); ++p)
                    EXPECT_THAT(place.read(fsdp.shard_grad(p)), ::testing::Each(0));
            }
            Trainer trainer(fsdp, place, comm.rank());
            trainer.steps(2);
            results.push_back(content(fsdp, place));
        }
        EXPECT_EQ(results[1], results[0]);
    }));
}

// --- what is refused, on all ranks

TEST_F(FsdpOnDevice, ParametersInSeveralPlacesAreRefusedOnAllRanks) {
    expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
        Model model = equal_layers(2);
        Place place(comm.device());
        const auto on_cpu = a_unit_each(model);
        const auto on_device = place.here(on_cpu);
        const bool is_bad = comm.rank() == 1;
        const auto refused = [&](const std::vector<FsdpUnit>& units, Code code, const std::string& why) {
            const Error error = expect_error([&] { Fsdp(shared(comm), units, {}); }, code);
            EXPECT_THAT(error.what(), HasSubstr(why));
        };
        refused(is_bad ? std::vector{on_device[0], on_cpu[1]} : on_device, Code::invalid_argument,
                "parameter \"w1\" is on the CPU, but \"w0\" is on a CUDA device");
        refused(is_bad ? on_cpu : on_device, Code::mismatch, "on CUDA");
        auto elsewhere = on_device;
        elsewhere[1].params[0].tensor.device.index = 3;
        refused(is_bad ? elsewhere : on_device, Code::invalid_argument, "parameter \"w1\" is on CUDA device 3, but");
        auto of_host = on_device;
        of_host[1].params[0].tensor.data = on_cpu[1].params[0].tensor.data;
        refused(is_bad ? of_host : on_device, Code::invalid_argument, "parameter \"w1\" is memory of the host");
    }));
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = equal_layers(1);
        Place place(Device{DeviceType::cuda, comm.rank()});
        const auto units = place.here(a_unit_each(model));
        EXPECT_THAT(expect_error([&] { Fsdp(shared(comm), units, {}); }, Code::unsupported).what(),
                    HasSubstr("'cpu:auto,cuda:nccl'"));
    }));
}

// The units are of f32.
void expect_kernels_to_be_missing(Communicator& comm, const std::vector<FsdpUnit>& units, const Place& place) {
    const auto refused = [](const std::function<void()>& call, const std::string& what) {
        EXPECT_THAT(expect_error(call, Code::unsupported).what(),
                    AllOf(HasSubstr(what + " is not available here: kernels for CUDA devices are missing"),
                          HasSubstr("./dev build --cuda")));
    };
    const auto refuses = [&](const FsdpOptions& options, const std::string& what) {
        refused([&] { Fsdp(shared(comm), units, options); }, what);
    };
    refuses({.param_dtype = DType::bf16}, "the param_dtype bf16 for \"w0\", which is f32,");
    refuses({.reduce_dtype = DType::f64}, "the reduce_dtype f64 for \"w0\", which is f32,");
    refuses({.pre_divide = 2}, "pre_divide");
    Fsdp fsdp(shared(comm), units, {.param_dtype = DType::f32, .reduce_dtype = DType::f32});
    refused([&] { fsdp.set_accumulate(true); }, "accumulation in the shards' gradients");
    refused([&] { fsdp.set_all_reduce(false); }, "a reduction that leaves out replicas");
    Trainer trainer(fsdp, place, comm.rank());
    trainer.forward(0);
    trainer.forward(1);
    trainer.backward(1);
    refused([&] { fsdp.backward(1); }, "a second backward of a unit in a step");
    trainer.backward(0);
    fsdp.wait();
    trainer.steps(1);
}

// In a process of its own: this one has the kernels.
TEST_F(FsdpOnDevice, WhatNeedsKernelsIsUnsupportedWithoutThem) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const auto train = [] {
        ::setenv("TESSERA_CUDA_KERNELS", "/nowhere/libtessera_cuda.so", 1);
        expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
            Model model = equal_layers(2);
            Place place(comm.device());
            expect_kernels_to_be_missing(comm, place.here(a_unit_each(model)), place);
        }));
        std::_Exit(HasFailure() ? 1 : 0);
    };
    EXPECT_EXIT(train(), ::testing::ExitedWithCode(0), "");
}

TEST_F(FsdpOnDevice, AUnitReshardsAfterItsBackward) {
    expect_all_well(run_ranks(2, on_devices(), [](Communicator& comm) {
        Model model = equal_layers(1);
        Place place(comm.device());
        Fsdp fsdp(shared(comm), place.here(a_unit_each(model)), {});
        EXPECT_THAT(expect_error([&] { fsdp.set_reshard_after_backward(0, false); }, Code::unsupported).what(),
                    HasSubstr("cannot keep its memory after its backward"));
        fsdp.set_reshard_after_backward(0, true);
    }));
}

// --- what goes wrong

Error error_of(const Outcomes& outcomes, size_t rank) {
    if (outcomes[rank]) return *outcomes[rank];
    ADD_FAILURE() << "rank " << rank << " has no error";
    return {Code::internal, ""};
}

// A model of equal units, which trains until something goes wrong.
void train_for_ever(Communicator& comm, const std::function<void(int step)>& before = {}) {
    Model model = equal_layers(3);
    Place place(comm.device());
    Fsdp fsdp(shared(comm), place.here(a_unit_each(model)), {});
    Trainer trainer(fsdp, place, comm.rank());
    for (int step = 0; step < 100000; ++step) {
        if (before) before(step);
        trainer.steps(1);
    }
}

TEST_F(FsdpOnDevice, RanksThatUnshardDifferentUnitsAreNamed) {
    const auto outcomes = run_ranks(3, on_devices(), [](Communicator& comm) {
        Model model = equal_layers(3);
        Place place(comm.device());
        Fsdp fsdp(shared(comm), place.here(a_unit_each(model)), {.forward_prefetch = 0});
        fsdp.forward(0);
        fsdp.forward_done(0);
        fsdp.forward(comm.rank() == 2 ? 2 : 1);
    });
    for (size_t rank = 0; rank < 3; ++rank) {
        const Error error = error_of(outcomes, rank);
        EXPECT_EQ(error.code(), Code::mismatch) << error.what();
        EXPECT_THAT(error.what(), AllOf(HasSubstr("\"uw1\""), HasSubstr("\"uw2\"")));
    }
}

TEST_F(FsdpOnDevice, ARankWithoutMemoryForItsShardsIsNamed) {
    const auto outcomes = run_ranks(2, on_devices(), [](Communicator& comm) {
        const bool lacks = comm.rank() == 1;
        FsdpUnit unit{.name = "u", .params = {{"w", {nullptr, Dims{1 << 20}, DType::f32, *comm.device()}}}};
        comm.run({.collective = Collective::barrier});
        if (lacks) simulated_cuda_capacity(page);
        comm.run({.collective = Collective::barrier});
        try {
            Fsdp(shared(comm), {unit}, {});
        } catch (...) {
            comm.run({.collective = Collective::barrier});  // the communicator works
            throw;
        }
    });
    for (size_t rank = 0; rank < 2; ++rank) {
        EXPECT_EQ(error_of(outcomes, rank).code(), Code::no_memory);
        EXPECT_THAT(error_of(outcomes, rank).what(), HasSubstr("does not have enough memory for its shards"));
    }
}

TEST_F(FsdpOnDevice, ARankThatHasNoMemoryInAStepFailsAll) {
    for (const char* symbol : {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAlloc_v2"}) {
        const auto outcomes = run_ranks(3, on_devices(), [&](Communicator& comm) {
            train_for_ever(comm, [&](int step) {
                if (step > 0) return;
                comm.run({.collective = Collective::barrier});
                if (comm.rank() == 0) simulated_cuda_fail(symbol, 0, 2);
                comm.run({.collective = Collective::barrier});
            });
        });
        int without = 0;
        for (size_t rank = 0; rank < 3; ++rank) {
            const Error error = error_of(outcomes, rank);
            without += error.code() == Code::no_memory ? 1 : 0;
            EXPECT_THAT(error.code(), AnyOf(Code::no_memory, Code::aborted, Code::peer_lost)) << error.what();
        }
        EXPECT_EQ(without, 1) << symbol;
    }
}

TEST_F(FsdpOnDevice, AnOperationThatHangsTimesOut) {
    const auto outcomes = run_ranks(2, on_devices(), [](Communicator& comm) {
        comm.set_timeout(milliseconds{500});
        train_for_ever(comm, [&](int step) {
            if (step == 1 && comm.rank() == 0) mock_nccl_hang(1);
        });
    });
    int timed_out = 0;
    for (size_t rank = 0; rank < 2; ++rank) {
        const Error error = error_of(outcomes, rank);
        timed_out += error.code() == Code::timeout ? 1 : 0;
        EXPECT_THAT(error.code(), AnyOf(Code::timeout, Code::aborted, Code::peer_lost)) << error.what();
    }
    EXPECT_GE(timed_out, 1);
}

TEST_F(FsdpOnDevice, AnErrorOfNcclFailsTheModelOnAllRanks) {
    for (const char* symbol : {"ncclAllGather", "ncclReduceScatter"}) {
        const auto outcomes = run_ranks(2, on_devices(), [&](Communicator& comm) {
            train_for_ever(comm, [&](int step) {
                if (step == 1 && comm.rank() == 0) mock_nccl_fail(symbol, 0, 3);
            });
        });
        int by_nccl = 0;
        for (size_t rank = 0; rank < 2; ++rank) {
            const Error error = error_of(outcomes, rank);
            by_nccl += error.code() == Code::nccl ? 1 : 0;
            EXPECT_THAT(error.code(), AnyOf(Code::nccl, Code::aborted, Code::peer_lost)) << error.what();
        }
        EXPECT_GE(by_nccl, 1) << symbol;
    }
}

TEST_F(FsdpOnDevice, ADeviceThatBreaksFailsTheModelOnAllRanks) {
    breaks_ = true;
    const auto outcomes = run_ranks(2, on_devices(), [](Communicator& comm) {
        train_for_ever(comm, [&](int step) {
            if (step == 1 && comm.rank() == 0) simulated_cuda_break(comm.device()->index, 719);
        });
    });
    for (int device = 0; device < 4; ++device) simulated_cuda_break(device, 0);
    EXPECT_EQ(error_of(outcomes, 0).code(), Code::cuda) << error_of(outcomes, 0).what();
    EXPECT_THAT(error_of(outcomes, 1).code(), AnyOf(Code::aborted, Code::peer_lost)) << error_of(outcomes, 1).what();
}

TEST_F(FsdpOnDevice, ARankThatLeavesInAStepEndsThatOfTheOthers) {
    simulated_cuda_delay(500, 17);
    const auto outcomes = run_ranks(3, on_devices(), [](Communicator& comm) {
        Model model = equal_layers(3);
        Place place(comm.device());
        Fsdp fsdp(shared(comm), place.here(a_unit_each(model)), {});
        Trainer trainer(fsdp, place, comm.rank());
        trainer.steps(1);
        trainer.forward(0);
        if (comm.rank() == 1) throw Error(Code::user, "the trainer failed");
        trainer.steps(1);
    });
    EXPECT_EQ(error_of(outcomes, 1).code(), Code::user);
    for (const size_t rank : {size_t{0}, size_t{2}}) {
        EXPECT_THAT(error_of(outcomes, rank).code(), AnyOf(Code::aborted, Code::peer_lost));
    }
}

}  // namespace
}  // namespace tsr
