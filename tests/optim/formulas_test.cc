// Optimizers beside their formulas in long double, written down independently, for 100 steps of several parameters.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "optim/adagrad.hpp"
#include "optim/lamb.hpp"
#include "optim/lion.hpp"

namespace tsr {
namespace {

using Real = long double;
using Reals = std::vector<Real>;

constexpr int steps = 100;
constexpr std::array<size_t, 4> sizes{1, 17, 3000, 0};

// The state of one parameter of a formula.
struct Parameter {
    Reals values;
    Reals first;  // moments
    Reals second;
};
using Formula = std::function<void(Parameter& param, const Reals& grad, int step)>;

template <class T>
Tensor tensor_over(std::vector<T>& values) {
    return tensor_of(std::span<T>(values), sizeof(T) == 4 ? DType::f32 : DType::f64);
}

template <class T, class Kind, class Options>
void expect_formula(const Options& options, const Formula& formula, Real first_moment, double tolerance) {
    std::vector<std::vector<T>> values;
    std::vector<std::vector<T>> grads;
    std::vector<Parameter> expected;
    for (size_t p = 0; p < sizes.size(); ++p) {
        auto& own = values.emplace_back(sizes[p]);
        grads.emplace_back(sizes[p]);
        for (size_t i = 0; i < own.size(); ++i) own[i] = static_cast<T>(std::cos(3.0 * static_cast<double>(p + i)));
        expected.push_back({{own.begin(), own.end()}, Reals(sizes[p], first_moment), Reals(sizes[p], 0)});
    }
    std::vector<OptimizerParam> params;
    for (size_t p = 0; p < sizes.size(); ++p) {
        params.push_back({std::string(1, static_cast<char>('a' + p)), tensor_over(values[p]), tensor_over(grads[p])});
    }
    Kind optimizer(params, options);
    for (int step = 1; step <= steps; ++step) {
        for (size_t p = 0; p < sizes.size(); ++p) {
            for (size_t i = 0; i < sizes[p]; ++i) {
                grads[p][i] =
                    static_cast<T>(std::sin(0.7 * step + 2.0 * static_cast<double>(i) + static_cast<double>(p)));
            }
            formula(expected[p], Reals(grads[p].begin(), grads[p].end()), step);
        }
        optimizer.step();
    }
    for (size_t p = 0; p < sizes.size(); ++p) {
        for (size_t i = 0; i < sizes[p]; ++i) {
            ASSERT_NEAR(static_cast<double>(values[p][i]), static_cast<double>(expected[p].values[i]), tolerance)
                << "element " << i << " of " << p;
        }
    }
}

template <class Kind, class Options>
void expect_formula(const Options& options, const Formula& formula, Real first_moment = 0) {
    expect_formula<double, Kind>(options, formula, first_moment, 1e-12);
    expect_formula<float, Kind>(options, formula, first_moment, 2e-5);
}

TEST(Formulas, Adagrad) {
    expect_formula<Adagrad>(
        AdagradOptions{
            .lr = 0.1, .lr_decay = 0.02, .weight_decay = 0.1, .initial_accumulator_value = 0.25, .eps = 1e-6},
        [](Parameter& param, const Reals& grad, int step) {
            for (size_t i = 0; i < grad.size(); ++i) {
                const Real g = grad[i] + 0.1L * param.values[i];
                param.first[i] += g * g;
                param.values[i] -= 0.1L / (1 + (step - 1) * 0.02L) * g / (std::sqrt(param.first[i]) + 1e-6L);
            }
        },
        0.25L);
}

// Signs differ where a mean is nearly 0, which the gradients above do not bring about.
TEST(Formulas, Lion) {
    expect_formula<Lion>(LionOptions{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1},
                         [](Parameter& param, const Reals& grad, int) {
                             for (size_t i = 0; i < grad.size(); ++i) {
                                 const Real mean = 0.8L * param.first[i] + 0.2L * grad[i];
                                 param.first[i] = 0.95L * param.first[i] + 0.05L * grad[i];
                                 param.values[i] *= 1 - 0.01L * 0.1L;
                                 param.values[i] -= 0.01L * static_cast<Real>((mean > 0) - (mean < 0));
                             }
                         });
}

Formula lamb(Real lr, bool corrects, Real most, Real least) {
    return [=](Parameter& param, const Reals& grad, int step) {
        Reals directions;
        Real weights = 0;
        Real all = 0;
        for (size_t i = 0; i < grad.size(); ++i) {
            param.first[i] = 0.9L * param.first[i] + 0.1L * grad[i];
            param.second[i] = 0.99L * param.second[i] + 0.01L * grad[i] * grad[i];
            directions.push_back(param.first[i] / (std::sqrt(param.second[i]) + 1e-6L) + 0.1L * param.values[i]);
            weights += param.values[i] * param.values[i];
            all += directions[i] * directions[i];
        }
        Real ratio = weights > 0 && all > 0 ? std::sqrt(weights / all) : 1;
        if (ratio > most) ratio = most;
        if (ratio < least) ratio = least;
        const Real correction = std::sqrt(1 - std::pow(0.99L, step)) / (1 - std::pow(0.9L, step));
        for (size_t i = 0; i < grad.size(); ++i) {
            param.values[i] -= lr * (corrects ? correction : 1) * ratio * directions[i];
        }
    };
}

TEST(Formulas, Lamb) {
    LambOptions options{.lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6, .weight_decay = 0.1};
    expect_formula<Lamb>(options, lamb(0.01L, true, 10, 0.01L));
    options.bias_correction = false;
    expect_formula<Lamb>(options, lamb(0.01L, false, 10, 0.01L));
    options.max_coeff = 0.3;
    options.min_coeff = 0.25;
    expect_formula<Lamb>(options, lamb(0.01L, false, 0.3L, 0.25L));
}

struct Lambs {
    std::vector<float> values;
    std::vector<float> grads = std::vector<float>(values.size(), 0.5F);

    float moved(size_t element, const LambOptions& options) {
        std::vector<float> now = values;
        Lamb optimizer({{"w", tensor_over(now), tensor_over(grads)}}, options);
        optimizer.step();
        return now[element] - values[element];
    }
};

TEST(Lamb, TheRatioIsOneWhereANormIsZero) {
    Lambs zeros{{0, 0, 0}};
    EXPECT_NEAR(zeros.moved(0, {.lr = 0.25, .beta1 = 0, .beta2 = 0}), -0.25, 1e-6);
    Lambs still{{2, 0, 0}};
    still.grads = {0, 0, 0};
    EXPECT_EQ(still.moved(0, {.lr = 0.25, .beta1 = 0, .beta2 = 0}), 0);
}

TEST(Lamb, TheRatioHasBounds) {
    Lambs large{{4000, 0, 0, 0}};  // norms of 4000 and 2
    EXPECT_NEAR(large.moved(1, {.lr = 0.25, .beta1 = 0, .beta2 = 0}), -2.5, 1e-5);
    Lambs small{{1e-6F, 0, 0, 0}};
    EXPECT_NEAR(small.moved(1, {.lr = 0.25, .beta1 = 0, .beta2 = 0}), -0.0025, 1e-8);
}

TEST(Lamb, TheNormsHoldForAllMagnitudes) {
    for (const auto& [scale, lr] :
         {std::pair{1e-44F, 1e44}, std::pair{1e-30F, 1e30}, std::pair{1.0F, 0.5}, std::pair{1e30F, 0.5}}) {
        Lambs one{std::vector<float>(50000, scale)};
        const float moved = one.moved(3, {.lr = lr, .beta1 = 0, .beta2 = 0, .max_coeff = 1e60, .min_coeff = 0});
        EXPECT_NEAR(static_cast<double>(moved) / (-lr * static_cast<double>(scale)), 1, 1e-5) << scale;
    }
}

TEST(Lamb, AnInfinityOrNaNShowsInTheWholeParameter) {
    for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        Lambs one{{1, 2, 3}};
        one.grads[2] = bad;
        EXPECT_TRUE(std::isnan(one.moved(0, {}))) << bad;
        Lambs two{{1, bad, 3}};
        EXPECT_TRUE(std::isnan(two.moved(0, {}))) << bad;
    }
}

}  // namespace
}  // namespace tsr
