#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "optim/sgd.hpp"

namespace tsr {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double infinite = std::numeric_limits<double>::infinity();

// Two parameters, of f32 and f64.
struct Two {
    std::vector<float> a = std::vector<float>(19, 0);
    std::vector<double> b = std::vector<double>(3, 0);
    std::vector<float> a_grad = std::vector<float>(19, 0);
    std::vector<double> b_grad = std::vector<double>(3, 0);
    Sgd optimizer{{{"a", tensor_of(std::span(a), DType::f32), tensor_of(std::span(a_grad), DType::f32)},
                   {"b", tensor_of(std::span(b), DType::f64), tensor_of(std::span(b_grad), DType::f64)}},
                  {}};
};

TEST(ClipGradNorm, ScalesToTheNormAndTellsWhatItWas) {
    struct Case {
        double p;
        double norm;  // of nineteen -2, and 6, 0, -3
    };
    for (const auto& [p, norm] :
         {Case{1, 47}, Case{2, std::sqrt(19 * 4 + 45)}, Case{infinite, 6}, Case{3, std::cbrt(19 * 8 + 216 + 27)}}) {
        Two two;
        std::fill(two.a_grad.begin(), two.a_grad.end(), -2.0F);
        two.b_grad = {6, 0, -3};
        EXPECT_DOUBLE_EQ(two.optimizer.clip_grad_norm(norm + 1, p), norm) << p;
        EXPECT_THAT(two.b_grad, ElementsAre(6, 0, -3)) << "below it nothing is changed";
        EXPECT_DOUBLE_EQ(two.optimizer.clip_grad_norm(1, p), norm) << p;
        EXPECT_NEAR(two.b_grad[0], 6 / (norm + 1e-6), 1e-12);
        EXPECT_NEAR(two.a_grad[18], -2 / norm, 1e-5);
        EXPECT_NEAR(two.optimizer.clip_grad_norm(1, p), 1, 1e-5);
    }
}

TEST(ClipGradNorm, WhatIsNotFiniteIsToldAndLeftAlone) {
    for (const double bad : {infinite, -infinite, std::numeric_limits<double>::quiet_NaN()}) {
        for (const double p : {1.0, 2.0, 2.5, infinite}) {
            Two two;
            two.b_grad = {1, bad, 2};
            EXPECT_EQ(two.optimizer.clip_grad_norm(0.5, p), infinite);
            EXPECT_EQ(two.b_grad[2], 2);
        }
    }
}

// Their squares overflow, and so may their norm.
TEST(ClipGradNorm, LargeGradientsAreScaledAsWell) {
    for (const double largest : {1e200, 1e308}) {
        for (const double p : {1.0, 2.0, 3.0}) {
            Two two;
            two.b_grad = {largest, -largest, largest};
            two.a_grad[0] = 1;
            const double norm = two.optimizer.clip_grad_norm(6, p);
            EXPECT_DOUBLE_EQ(norm, std::min(largest * std::pow(3, 1 / p), std::numeric_limits<double>::max()));
            const double each = 6 / std::pow(3, 1 / p);
            EXPECT_NEAR(two.b_grad[0], each, 1e-12);
            EXPECT_NEAR(two.b_grad[1], -each, 1e-12);
            EXPECT_EQ(two.a_grad[0], 0);
        }
    }
}

TEST(ClipGradNorm, OfPartsWhosePowersOverflowIsThatOfAll) {
    std::vector<double> a(2, 0);
    for (const bool is_finite : {true, false}) {  // on the other rank
        std::vector<double> grad{3e200, 0};
        Sgd optimizer({{"a", tensor_of(std::span(a), DType::f64), tensor_of(std::span(grad), DType::f64)}}, {});
        std::vector<double> told;
        optimizer.add_together({[&](double own, Optimizer::Over how) {
            told.push_back(own);
            if (how == Optimizer::Over::max) return is_finite ? 4e200 : infinite;
            return told.size() == 1 ? infinite : own + 1;  // the other rank has a gradient of 4e200
        }});
        EXPECT_DOUBLE_EQ(optimizer.clip_grad_norm(10, 2), is_finite ? 5e200 : infinite);
        EXPECT_DOUBLE_EQ(grad[0], is_finite ? 6 : 3e200);
        ASSERT_EQ(told.size(), is_finite ? 3U : 2U);
        EXPECT_EQ(told[1], 3e200);
    }
}

TEST(ClipGradNorm, OfNothingIsNothing) {
    Two two;
    EXPECT_EQ(two.optimizer.clip_grad_norm(0, 2), 0);
    two.b_grad[0] = 5;
    EXPECT_EQ(two.optimizer.clip_grad_norm(0, 2), 5);
    EXPECT_EQ(two.b_grad[0], 0);
}

TEST(ClipGradNorm, OfPartsIsThatOfAllAndReplicasCountOnce) {
    std::vector<float> a(4, 0);
    std::vector<float> grad{1, 2, 3, 4};
    const std::array mesh{2, 2};
    const std::array placements{Placement::replicate(), Placement::shard(0)};
    for (const int rank : {0, 1, 2, 3}) {
        Sgd optimizer({{"a", tensor_of(std::span(a), DType::f32), tensor_of(std::span(grad), DType::f32),
                        Held{Layout::placed(Dims{8}, mesh, placements), rank, rank / 2}}},
                      {});
        double told = -1;
        optimizer.add_together({[&](double own, Optimizer::Over how) {
            EXPECT_EQ(how, Optimizer::Over::sum);
            told = own;
            return 100.0;
        }});
        EXPECT_EQ(optimizer.clip_grad_norm(1000, 2), 10);
        EXPECT_EQ(told, rank < 2 ? 30 : 0) << rank;
    }
}

// Beside each other: one that every rank has whole, one cut among all, one cut among pairs, of each of which are two. On four
// ranks in memory of the test's own, whose sums are added up as an all-reduce does.
TEST(ClipGradNorm, OfParametersOnDifferentMeshesEachCountsOnce) {
    constexpr int ranks = 4;
    const std::array four{ranks};
    const std::array pairs{2, 2};
    const std::array whole{Placement::replicate()};
    const std::array cut{Placement::shard(0)};
    const std::array both{Placement::replicate(), Placement::shard(0)};
    const auto element = [](int parameter, int64_t k) { return static_cast<float>(parameter + 1 + k % 5); };
    for (const double p : {1.0, 2.0, 3.0, infinite}) {
        double expected = 0;  // of three whole gradients of eight elements
        for (const int parameter : {0, 1, 2}) {
            for (int64_t k = 0; k < 8; ++k) {
                const auto g = static_cast<double>(element(parameter, k));
                expected = std::isinf(p) ? std::max(expected, g) : expected + std::pow(g, p);
            }
        }
        std::vector<double> told;
        std::deque<std::vector<float>> memory;
        std::vector<std::unique_ptr<Sgd>> optimizers;
        double together = 0;
        for (int rank = 0; rank < ranks; ++rank) {
            const std::array<Held, 3> held{Held{Layout::placed(Dims{8}, four, whole), rank, rank},
                                           Held{Layout::placed(Dims{8}, four, cut), rank, 0},
                                           Held{Layout::placed(Dims{8}, pairs, both), rank, rank / 2}};
            std::vector<OptimizerParam> params;
            for (const int parameter : {0, 1, 2}) {
                const Held& one = held.at(static_cast<size_t>(parameter));
                EXPECT_EQ(one.layout.replica_of(rank), one.replica);
                const std::vector<Box> boxes = one.layout.boxes_of(rank);
                ASSERT_EQ(boxes.size(), 1U);
                std::vector<float>& grad = memory.emplace_back();
                for (int64_t k = 0; k < boxes[0].numel(); ++k)
                    grad.push_back(element(parameter, boxes[0].offsets[0] + k));
                std::vector<float>& value = memory.emplace_back(grad.size(), 0.0F);
                params.push_back({std::string(1, static_cast<char>('a' + parameter)),
                                  tensor_of(std::span(value), DType::f32), tensor_of(std::span(grad), DType::f32),
                                  one});
            }
            optimizers.push_back(std::make_unique<Sgd>(std::move(params), SgdOptions{}));
            optimizers.back()->add_together({[&](double own, Optimizer::Over how) {
                EXPECT_EQ(how, std::isinf(p) ? Optimizer::Over::max : Optimizer::Over::sum);
                told.push_back(own);
                return together;
            }});
        }
        for (const auto& optimizer : optimizers) (void)optimizer->clip_grad_norm(1000, p);
        ASSERT_EQ(told.size(), 4U);
        for (const double own : told) together = std::isinf(p) ? std::max(together, own) : together + own;
        EXPECT_DOUBLE_EQ(together, expected) << p;
        const double norm = std::isinf(p) ? expected : std::pow(expected, 1 / p);
        for (const auto& optimizer : optimizers) {
            EXPECT_DOUBLE_EQ(optimizer->clip_grad_norm(norm / 4, p), norm) << p;
            for (const OptimizerParam& param : optimizer->params()) {  // replicas are scaled as well
                EXPECT_LT(std::ranges::max(param.grad.as<float>()), 2) << param.name;
            }
        }
    }
}

TEST(ClipGradValue, BoundsEachGradient) {
    Two two;
    two.b_grad = {6, -0.5, -infinite};
    two.a_grad[4] = std::nanf("");
    two.optimizer.clip_grad_value(0.75);
    EXPECT_THAT(two.b_grad, ElementsAre(0.75, -0.5, -0.75));
    EXPECT_TRUE(std::isnan(two.a_grad[4]));
}

TEST(ClipGrad, BadBoundsAreRefused) {
    Two two;
    const auto refused = [](auto&& call) {
        try {
            call();
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::invalid_argument);
            return std::string(error.what());
        }
        return std::string("nothing was thrown");
    };
    const double nan = std::nan("");
    for (const double bad : {-1.0, nan, infinite}) {
        EXPECT_THAT(refused([&] { two.optimizer.clip_grad_norm(bad, 2); }), HasSubstr("max_norm"));
        EXPECT_THAT(refused([&] { two.optimizer.clip_grad_value(bad); }), HasSubstr("the clip value"));
    }
    for (const double bad : {0.5, 0.0, -2.0, nan}) {
        EXPECT_THAT(refused([&] { two.optimizer.clip_grad_norm(1, bad); }), HasSubstr("at least 1 or infinite"));
    }
    two.optimizer.let_others_step();
    EXPECT_THROW(two.optimizer.clip_grad_norm(1, 2), Error);
    EXPECT_THROW(two.optimizer.clip_grad_value(1), Error);
}

}  // namespace
}  // namespace tsr
