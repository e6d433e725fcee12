// PowerSGD: which gradients it compresses, the error that it feeds back, and the same bits on all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <span>
#include <vector>

#include "grads.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/ddp/power_sgd.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"

namespace tsr {
namespace {

using ::testing::Each;
using testing::expect_all_well;
using testing::fill;
using testing::Model;
using testing::run_ranks;
using testing::shared;
using testing::test_options;

TEST(PowerSgd, CompressesMatricesThatShrinkToAHalf) {
    const PowerSgd two(2);
    const auto of = [](Dims shape, DType dtype = DType::f32) { return Tensor{nullptr, shape, dtype, {}}; };
    EXPECT_TRUE(two.compresses(of({20, 30})));
    EXPECT_TRUE(two.compresses(of({20, 5, 6}, DType::bf16)));
    EXPECT_FALSE(two.compresses(of({20, 30}, DType::f64)));
    EXPECT_FALSE(two.compresses(of({600})));
    EXPECT_TRUE(two.compresses(of({8, 8})));   // 2 * (8 + 8) numbers of 64
    EXPECT_FALSE(two.compresses(of({7, 8})));  // 2 * (7 + 8) numbers of 56
    EXPECT_FALSE(two.compresses(of({0, 30})));
}

TEST(PowerSgd, KeepsWhatItLeftOutAndAddsItLater) {
    constexpr size_t rows = 24;
    constexpr size_t columns = 40;
    std::mt19937 random(5);  // NOLINT: the same numbers at every run
    std::vector<float> truth(rows * columns);
    for (float& value : truth) value = static_cast<float>(random() % 2000) / 1000 - 1;
    PowerSgd one(2);
    const std::vector<size_t> params{0};
    std::vector<double> given(truth.size());
    std::vector<float> gradient;
    double left = 0;
    double all = 0;
    constexpr int steps = 200;
    for (int step = 0; step < steps; ++step) {
        gradient = truth;
        Tensor tensor = tensor_of(std::span<float>(gradient), DType::f32);
        tensor.shape = {rows, columns};
        one.reduce(params, {&tensor, 1}, [](std::span<float>) {}, {});
        for (size_t i = 0; i < given.size(); ++i) given[i] += gradient[i];
    }
    for (size_t i = 0; i < given.size(); ++i) {
        left += std::pow(given[i] - steps * double{truth[i]}, 2);
        all += std::pow(steps * double{truth[i]}, 2);
    }
    // What is not given yet is the error, which stays bounded while the sum grows.
    EXPECT_LT(std::sqrt(left / all), 0.08);
    // Without the error's feedback a matrix of full rank is never given whole.
    double single = 0;
    double norm = 0;
    for (size_t i = 0; i < truth.size(); ++i) {
        single += std::pow(gradient[i] - truth[i], 2);
        norm += std::pow(truth[i], 2);
    }
    EXPECT_GT(std::sqrt(single / norm), 0.2);
}

TEST(PowerSgd, AMatrixOfThatRankIsExact) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Model model;
        model.add("m", {20, 30});
        model.add("v", {9});
        Ddp ddp(shared(comm), model.params(),
                {.hook = DdpHook::power_sgd, .power_sgd_rank = 2, .power_sgd_start_step = 2});
        std::mt19937 random(9);  // NOLINT: the same numbers at every run
        std::array<std::array<float, 50>, 2> factors{};
        for (auto& factor : factors) {
            for (float& value : factor) value = static_cast<float>(random() % 200) / 100 - 1;
        }
        for (int step = 0; step < 8; ++step) {
            const auto at = [&](float rank, size_t i, size_t j) {
                return (rank + 1) * factors[0].at(i) * factors[0].at(20 + j) +
                       (rank - 3 + static_cast<float>(step)) * factors[1].at(i) * factors[1].at(20 + j);
            };
            const auto g = ddp.grad(0).as<float>();
            for (size_t k = 0; k < 600; ++k) g[k] = at(static_cast<float>(comm.rank()), k / 30, k % 30);
            fill(ddp, 1, static_cast<float>(comm.rank()));
            ddp.ready_all();
            ddp.wait();
            for (size_t k = 0; k < 600; ++k) {
                ASSERT_NEAR(ddp.grad(0).as<float>()[k], at(1, k / 30, k % 30), 2e-4) << "step " << step;
            }
            EXPECT_THAT(ddp.grad(1).as<float>(), Each(1.0F));
        }
    }));
}

TEST(PowerSgd, AllRanksGetTheSameBits) {
    std::vector<std::vector<float>> results(4);
    expect_all_well(run_ranks(4, test_options(), [&](Communicator& comm) {
        Model model;
        model.add("m", {20, 30});
        Ddp ddp(shared(comm), model.params(),
                {.hook = DdpHook::power_sgd, .power_sgd_rank = 3, .power_sgd_start_step = 0});
        std::mt19937 random(static_cast<unsigned>(comm.rank()));
        for (int step = 0; step < 5; ++step) {
            for (float& g : ddp.grad(0).as<float>()) g = static_cast<float>(random() % 1000);
            ddp.ready_all();
            ddp.wait();
        }
        const auto g = ddp.grad(0).as<float>();
        results[static_cast<size_t>(comm.rank())].assign(g.begin(), g.end());
    }));
    for (const auto& result : results) EXPECT_EQ(result, results[0]);
}

TEST(PowerSgd, AStepThatOverflowedDoesNotSpoilLaterOnes) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model;
        model.add("m", {20, 30});
        Ddp ddp(shared(comm), model.params(), {.hook = DdpHook::power_sgd, .power_sgd_start_step = 0});
        fill(ddp, 0, 1);
        if (comm.rank() == 1) ddp.grad(0).as<float>()[7] = INFINITY;
        ddp.ready_all();
        ddp.wait();
        EXPECT_FALSE(std::isfinite(ddp.grad(0).as<float>()[7])) << "the trainer must see it";
        fill(ddp, 0, 1);
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(ddp.grad(0).as<float>(), Each(::testing::FloatNear(1, 1e-5)));
    }));
}

}  // namespace
}  // namespace tsr
