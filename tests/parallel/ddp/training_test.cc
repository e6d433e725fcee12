// Whole trainings under DDP. Ranks with a share of each batch learn what one rank learns with all of it, and a second
// run has the same bits.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/splitmix64.hpp"
#include "optim/adam.hpp"
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

constexpr DdpOptions small_buckets{.bucket_bytes = 64, .first_bucket_bytes = 64};  // one parameter a bucket

// A two-layer network with tanh on a fixed regression problem of 24 samples; the rank's share of each batch is every
// world-th sample. The gradients are those of the mean over the rank's samples.
class Regression {
   public:
    static constexpr size_t in = 5;
    static constexpr size_t hidden = 8;
    static constexpr size_t samples = 24;

    Regression() {
        SplitMix64 random(99);
        const auto uniform = [&] { return static_cast<float>(random.next() >> 40) / 0x1p24F * 2 - 1; };
        for (auto& x : inputs_) {
            for (float& value : x) value = uniform();
        }
        for (float& y : targets_) y = uniform();
        model.add("w1", {hidden, in});
        model.add("b1", {hidden});
        model.add("w2", {1, hidden});
        for (auto& entry : model.entries) {
            for (float& value : entry.values) value = uniform() / 2;
        }
    }

    // Adds the gradients of the mean over every `parts * world_size`-th sample, a part of the rank's share.
    void backward(const Ddp& ddp, int first, int world_size, int parts) const {
        const auto w1 = ddp.param(0).tensor.as<float>();
        const auto b1 = ddp.param(1).tensor.as<float>();
        const auto w2 = ddp.param(2).tensor.as<float>();
        const auto g1 = ddp.grad(0).as<float>();
        const auto gb = ddp.grad(1).as<float>();
        const auto g2 = ddp.grad(2).as<float>();
        const float share = static_cast<float>(world_size) / samples;
        for (size_t s = static_cast<size_t>(first); s < samples; s += static_cast<size_t>(world_size * parts)) {
            const auto [h, y] = forward(w1, b1, w2, s);
            const float d = 2 * (y - targets_[s]) * share;
            for (size_t j = 0; j < hidden; ++j) {
                const float dh = d * w2[j] * (1 - h[j] * h[j]);
                g2[j] += d * h[j];
                gb[j] += dh;
                for (size_t k = 0; k < in; ++k) g1[j * in + k] += dh * inputs_[s][k];
            }
        }
    }

    // The mean over all samples.
    double loss() {
        double sum = 0;
        for (size_t s = 0; s < samples; ++s) {
            const float y =
                forward(model.entries[0].values, model.entries[1].values, model.entries[2].values, s).second;
            sum += std::pow(double{y} - double{targets_[s]}, 2);
        }
        return sum / samples;
    }

    Model model;

   private:
    [[nodiscard]] std::pair<std::array<float, hidden>, float> forward(std::span<const float> w1,
                                                                      std::span<const float> b1,
                                                                      std::span<const float> w2, size_t s) const {
        std::array<float, hidden> h{};
        float y = 0;
        for (size_t j = 0; j < hidden; ++j) {
            float sum = b1[j];
            for (size_t k = 0; k < in; ++k) sum += w1[j * in + k] * inputs_[s][k];
            h[j] = std::tanh(sum);
            y += w2[j] * h[j];
        }
        return {h, y};
    }

    std::array<std::array<float, in>, samples> inputs_{};
    std::array<float, samples> targets_{};
};

// How a training goes about its steps.
struct Way {
    DdpOptions ddp = small_buckets;
    int micro_steps = 1;   // parts of a rank's share of the batch, of which the last one synchronises
    double near = 1e-4;    // how close to one rank with the whole batch
    bool by_hand = false;  // backward reduces nothing; the trainer averages what it left
};

struct Trained {
    std::vector<float> weights;
    std::vector<double> losses;  // after each step, of all samples
    friend bool operator==(const Trained&, const Trained&) = default;
};

// 50 steps on `world_size` ranks; all ranks must have the same bits.
template <class Kind, class Options>
Trained trained(int world_size, const Options& options, const Way& way) {
    std::mutex mutex;
    std::vector<Trained> results;
    expect_all_well(run_ranks(world_size, test_options(), [&](Communicator& comm) {
        Regression problem;
        Ddp ddp(shared(comm), problem.model.params(), way.ddp);
        Kind optimizer(with_grads(ddp), options);
        Trained result;
        for (int step = 0; step < 50; ++step) {
            ddp.zero_grad();
            for (int micro = 0; micro < way.micro_steps; ++micro) {
                ddp.set_sync(micro + 1 == way.micro_steps);
                problem.backward(ddp, comm.rank() + comm.world_size() * micro, comm.world_size(), way.micro_steps);
                for (size_t i = 3; i-- > 0;) ddp.ready(i);
                ddp.wait();
            }
            for (size_t i = 0; way.by_hand && i < 3; ++i) {
                const std::array grad{ddp.grad(i)};
                comm.run({.collective = Collective::all_reduce, .outputs = grad, .op = ReduceOp::avg});
            }
            optimizer.step();
            result.losses.push_back(problem.loss());
        }
        for (const auto& entry : problem.model.entries) {
            result.weights.insert(result.weights.end(), entry.values.begin(), entry.values.end());
        }
        const std::lock_guard lock(mutex);
        results.push_back(std::move(result));
    }));
    for (const auto& result : results) EXPECT_TRUE(result == results[0]) << "ranks ended with different bits";
    return results[0];
}

template <class Kind, class Options>
void expect_world_size_does_not_matter(const Options& options, const Way& way = {}) {
    const Trained alone = trained<Kind>(1, options, {});
    EXPECT_LT(alone.losses.back(), alone.losses.front() * 0.8) << "it learns something";
    for (const int world_size : {2, 3, 4}) {
        const Trained together = trained<Kind>(world_size, options, way);
        for (size_t i = 0; i < alone.losses.size(); ++i) {
            EXPECT_NEAR(together.losses[i], alone.losses[i], way.near * alone.losses[i])
                << world_size << " ranks, step " << i;
        }
        for (size_t i = 0; way.near <= 1e-4 && i < alone.weights.size(); ++i) {
            EXPECT_NEAR(together.weights[i], alone.weights[i], way.near * std::abs(alone.weights[i]) + 1e-6)
                << world_size << " ranks, weight " << i;
        }
        EXPECT_TRUE(trained<Kind>(world_size, options, way) == together) << "a second run gave other bits";
    }
}

TEST(DdpTraining, GradientsAveragedByHandEqualOneRankWithAllOfIt) {
    DdpOptions nothing_in_backward = small_buckets;
    nothing_in_backward.hook = DdpHook::noop;
    expect_world_size_does_not_matter<Sgd>(SgdOptions{.lr = 0.05, .momentum = 0.9},
                                           {.ddp = nothing_in_backward, .by_hand = true});
}

TEST(DdpTraining, GradientsAddedUpInMicroStepsEqualOneRankWithAllOfIt) {
    expect_world_size_does_not_matter<Sgd>(SgdOptions{.lr = 0.05, .momentum = 0.9}, {.micro_steps = 2});
}

TEST(DdpTraining, GradientsReducedInBf16ComeCloseToOneRankWithAllOfIt) {
    DdpOptions in_bf16 = small_buckets;
    in_bf16.reduce_dtype = DType::bf16;
    const SgdOptions sgd{.lr = 0.05, .momentum = 0.9};
    expect_world_size_does_not_matter<Sgd>(sgd, {.ddp = in_bf16, .near = 2e-2});
    EXPECT_FALSE(trained<Sgd>(2, sgd, {.ddp = in_bf16}) == trained<Sgd>(2, sgd, {})) << "nothing was reduced in bf16";
}

TEST(DdpTraining, RanksWithAShareOfTheBatchEqualOneRankWithAllOfItSgd) {
    expect_world_size_does_not_matter<Sgd>(SgdOptions{.lr = 0.05, .momentum = 0.9});
}

TEST(DdpTraining, RanksWithAShareOfTheBatchEqualOneRankWithAllOfItAdamW) {
    expect_world_size_does_not_matter<Adam>(AdamOptions{.lr = 0.003, .weight_decay = 0.01, .decay = Decay::decoupled});
}

}  // namespace
}  // namespace tsr
