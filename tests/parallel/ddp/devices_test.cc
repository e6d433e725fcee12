// A model that spans devices (a multi-device module). This build reduces in host memory alone, so the devices are two that
// the library tells apart by their numbers, though both are memory of the host: what is decided by device (buckets, their
// order, the rebuild, where gradients lie) is decided as for any two.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "optim/sgd.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "with_grads.hpp"

namespace tsr {
namespace {

using testing::expect_all_well;
using testing::Model;
using testing::run_ranks;
using testing::shared;
using testing::test_options;
using testing::with_grads;

constexpr int params = 13;
constexpr int steps = 4;

// A stack of layers whose middle third is on device 1, and every fifth parameter of the rest, too.
int device_of(int param) { return (param >= 5 && param < 9) || param % 5 == 3 ? 1 : 0; }

std::vector<NamedTensor> on_devices(Model& model, bool spread) {
    std::vector<NamedTensor> named = model.params();
    for (int i = 0; spread && i < params; ++i) named[static_cast<size_t>(i)].tensor.device.index = device_of(i);
    return named;
}

Model layers(int rank) {
    Model model;
    for (int i = 0; i < params; ++i) {
        model.add(fmt::format("layer {}", i), {7 + 11 * i % 40, 3}, static_cast<float>(i + 10 * rank) / 16);
    }
    return model;
}

void expect_one_device_a_bucket(const Ddp& ddp, size_t devices) {
    std::set<int> seen;
    size_t held = 0;
    for (const Bucket& bucket : ddp.buckets()) {
        const Device first = ddp.param(bucket.slots.front().param).tensor.device;
        seen.insert(first.index);
        held += bucket.slots.size();
        for (const Bucket::Slot& slot : bucket.slots) {
            EXPECT_EQ(ddp.param(slot.param).tensor.device, first) << "a bucket mixes devices";
            EXPECT_EQ(ddp.grad(slot.param).device, first) << "a gradient is elsewhere than its parameter";
        }
    }
    EXPECT_EQ(held, size_t{params});
    EXPECT_EQ(seen.size(), devices);
}

// A rank's parameters and gradients after training.
struct Trained {
    std::vector<float> params;
    std::vector<float> grads;
    friend bool operator==(const Trained&, const Trained&) = default;
};

// Gradients that depend on the parameters, the rank and the step, and come in another order on each rank.
Trained train(Communicator& comm, const DdpOptions& options, bool spread, bool in_backward) {
    Model model = layers(comm.rank());
    Ddp ddp(shared(comm), on_devices(model, spread), options);
    Sgd optimizer(with_grads(ddp), {.lr = 0.05, .momentum = 0.9});
    if (in_backward) ddp.step_in_backward(optimizer);
    expect_one_device_a_bucket(ddp, spread ? 2 : 1);
    for (int step = 0; step < steps; ++step) {
        for (int k = 0; k < params; ++k) {
            const auto i = static_cast<size_t>((5 * k + comm.rank() + step) % params);
            if (options.find_unused && i == 4 && (comm.rank() + step) % 2 == 0) continue;
            const auto values = ddp.param(i).tensor.as<float>();
            const auto grad = ddp.grad(i).as<float>();
            for (size_t at = 0; at < grad.size(); ++at) {
                grad[at] = values[at] / 3 + static_cast<float>((comm.rank() + step + static_cast<int>(at)) % 7);
            }
            ddp.ready(i);
        }
        ddp.wait();
        if (!in_backward) optimizer.step();
        expect_one_device_a_bucket(ddp, spread ? 2 : 1);
    }
    if (in_backward) ddp.forget_optimizer(optimizer);
    Trained trained;
    for (size_t i = 0; i < size_t{params}; ++i) {
        std::ranges::copy(ddp.param(i).tensor.as<float>(), std::back_inserter(trained.params));
        std::ranges::copy(ddp.grad(i).as<float>(), std::back_inserter(trained.grads));
    }
    return trained;
}

void expect_devices_do_not_matter(const DdpOptions& options, bool in_backward = false) {
    for (const int world : {1, 2, 3}) {
        std::vector<Trained> on_two(static_cast<size_t>(world));
        expect_all_well(run_ranks(world, test_options(), [&](Communicator& comm) {
            Trained& own = on_two[static_cast<size_t>(comm.rank())];
            own = train(comm, options, true, in_backward);
            EXPECT_EQ(own, train(comm, options, false, in_backward)) << "another result than on one device";
        }));
        for (const Trained& one : on_two) EXPECT_EQ(one, on_two[0]) << "the ranks differ";
    }
}

constexpr DdpOptions small{.bucket_bytes = 1000, .first_bucket_bytes = 300};

TEST(ModelOnTwoDevices, TrainsAsOnOne) { expect_devices_do_not_matter(small); }

TEST(ModelOnTwoDevices, TrainsAsOnOneWithBucketsByArrival) {
    DdpOptions options = small;
    options.rebuild_buckets = true;
    expect_devices_do_not_matter(options);
}

TEST(ModelOnTwoDevices, TrainsAsOnOneWithUnusedParameters) {
    DdpOptions options = small;
    options.find_unused = true;
    expect_devices_do_not_matter(options);
}

TEST(ModelOnTwoDevices, TrainsAsOnOneWithGradientsReducedInBf16) {
    DdpOptions options = small;
    options.reduce_dtype = DType::bf16;
    expect_devices_do_not_matter(options);
}

TEST(ModelOnTwoDevices, TrainsAsOnOneWithTheOptimizerInBackward) { expect_devices_do_not_matter(small, true); }

// The number of the device is the rank's own affair, as CUDA's numbers are; that some parameters are together is not.
TEST(ModelOnTwoDevices, MayHaveOtherNumbersOnEachRank) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = layers(0);
        std::vector<NamedTensor> named = on_devices(model, true);
        for (NamedTensor& param : named) {
            param.tensor.device.index = comm.rank() == 0 ? param.tensor.device.index : 7 - param.tensor.device.index;
        }
        Ddp ddp(shared(comm), named, small);
        for (int step = 0; step < 2; ++step) {
            for (size_t i = 0; i < size_t{params}; ++i) {
                std::ranges::fill(ddp.grad(i).as<float>(),
                                  static_cast<float>(comm.rank() + 1) * (static_cast<float>(i) + 1));
            }
            ddp.ready_all();
            ddp.wait();
            for (size_t i = 0; i < size_t{params}; ++i) {
                EXPECT_THAT(ddp.grad(i).as<float>(), ::testing::Each(1.5F * (static_cast<float>(i) + 1)));
            }
        }
    }));
}

}  // namespace
}  // namespace tsr
