#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "base/error.hpp"
#include "golden.hpp"
#include "optim/adagrad.hpp"
#include "optim/adam.hpp"
#include "optim/kernels.hpp"
#include "optim/lamb.hpp"
#include "optim/lion.hpp"
#include "optim/sgd.hpp"

namespace tsr {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class T>
constexpr DType dtype_of = sizeof(T) == 4 ? DType::f32 : DType::f64;

// Parameters of one dtype with their gradients, and the view of them that an optimizer takes.
template <class T>
struct Model {
    std::vector<std::vector<T>> values;
    std::vector<std::vector<T>> grads;

    explicit Model(const std::vector<size_t>& sizes) {
        for (const size_t size : sizes) {
            values.emplace_back(size);
            grads.emplace_back(size);
        }
    }
    std::vector<OptimizerParam> params() {
        std::vector<OptimizerParam> out;
        for (size_t p = 0; p < values.size(); ++p) {
            out.push_back({fmt::format("p{}", p), tensor_of(std::span<T>(values[p]), dtype_of<T>),
                           tensor_of(std::span<T>(grads[p]), dtype_of<T>)});
        }
        return out;
    }
};

// The inputs of make_golden.py.
template <class T>
Model<T> golden_model() {
    Model<T> model({golden::n});
    for (int i = 0; i < golden::n; ++i) model.values[0][static_cast<size_t>(i)] = static_cast<T>((i - 2.5) / 4);
    return model;
}

template <class T>
void set_golden_grad(Model<T>& model, int step) {
    for (int i = 0; i < golden::n; ++i) {
        model.grads[0][static_cast<size_t>(i)] = static_cast<T>(((i * 7 + step * 5) % 13 - 6) / 8.0);
    }
}

template <class T, class Kind, class Options>
void expect_golden(const Options& options, const std::array<double, golden::n>& expected) {
    Model<T> model = golden_model<T>();
    Kind optimizer(model.params(), options);
    for (int step = 0; step < golden::steps; ++step) {
        set_golden_grad(model, step);
        optimizer.step();
    }
    for (size_t i = 0; i < expected.size(); ++i) {
        const double tolerance = 8 * static_cast<double>(std::numeric_limits<T>::epsilon());
        EXPECT_NEAR(static_cast<double>(model.values[0][i]), expected[i], tolerance) << "element " << i;
    }
}

template <class Kind, class Options>
void expect_golden(const Options& options, const golden::Result& expected) {
    expect_golden<float, Kind>(options, expected.f32);
    expect_golden<double, Kind>(options, expected.f64);
}

TEST(Sgd, DoesWhatPyTorchDoes) {
    expect_golden<Sgd>(SgdOptions{.lr = 0.1}, golden::sgd_plain);
    expect_golden<Sgd>(SgdOptions{.lr = 0.1, .weight_decay = 0.05}, golden::sgd_decay);
    expect_golden<Sgd>(SgdOptions{.lr = 0.1, .momentum = 0.9}, golden::sgd_momentum);
    expect_golden<Sgd>(SgdOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.05},
                       golden::sgd_damped);
    expect_golden<Sgd>(SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true},
                       golden::sgd_nesterov);
}

TEST(Adam, DoesWhatPyTorchDoes) {
    expect_golden<Adam>(AdamOptions{.lr = 0.01}, golden::adam_plain);
    expect_golden<Adam>(AdamOptions{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1},
                        golden::adam_decay);
    expect_golden<Adam>(AdamOptions{.lr = 0.01, .beta1 = 0.25, .beta2 = 0.9}, golden::adam_low_beta1);
}

TEST(AdamW, DoesWhatPyTorchDoes) {
    expect_golden<Adam>(AdamOptions{.lr = 0.01, .weight_decay = 0.01, .decay = Decay::decoupled},
                        golden::adamw_default);
    expect_golden<Adam>(
        AdamOptions{
            .lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1, .decay = Decay::decoupled},
        golden::adamw_decay);
}

TEST(Adagrad, DoesWhatPyTorchDoes) {
    expect_golden<Adagrad>(AdagradOptions{.lr = 0.1}, golden::adagrad_plain);
    expect_golden<Adagrad>(
        AdagradOptions{.lr = 0.1, .lr_decay = 0.5, .weight_decay = 0.1, .initial_accumulator_value = 0.25, .eps = 1e-6},
        golden::adagrad_decay);
}

TEST(Lion, ElementsMoveByTheRateAndStayWhereTheMeanIsZero) {
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    Model<double> model({5});
    model.values[0] = {1, 1, 1, 1, 1};
    model.grads[0] = {1e-300, -7, 0, -0.0, nan};
    Lion optimizer(model.params(), {.lr = 0.25});
    optimizer.step();
    EXPECT_EQ(model.values[0][0], 0.75);
    EXPECT_EQ(model.values[0][1], 1.25);
    EXPECT_EQ(model.values[0][2], 1);
    EXPECT_EQ(model.values[0][3], 1);
    EXPECT_TRUE(std::isnan(model.values[0][4]));
}

TEST(Lion, MomentumOfASchedulesIsBeta1) {
    Model<double> model({1});
    Lion optimizer(model.params(), {});
    optimizer.set_momentum(0.5);
    EXPECT_EQ(std::get<std::vector<double>>(optimizer.settings()[1].second), (std::vector{0.5, 0.99}));
}

// With a constant gradient g both bias-corrected moments are exact (g and g^2), so each step moves by
// lr * g / (|g| + eps), whatever the betas.
TEST(Adam, ConstantGradientMovesByTheLearningRate) {
    Model<double> model({3});
    model.values[0] = {1, 2, 3};
    model.grads[0] = {0.5, -4, 1e-3};
    Adam optimizer(model.params(), {.lr = 0.01, .beta1 = 0.7, .beta2 = 0.9, .eps = 1e-4});
    for (int step = 0; step < 10; ++step) optimizer.step();
    EXPECT_NEAR(model.values[0][0], 1 - 0.1 * 0.5 / (0.5 + 1e-4), 1e-12);
    EXPECT_NEAR(model.values[0][1], 2 + 0.1 * 4 / (4 + 1e-4), 1e-12);
    EXPECT_NEAR(model.values[0][2], 3 - 0.1 * 1e-3 / (1e-3 + 1e-4), 1e-12);
}

// The vectorised loop and its scalar remainder must agree: an element's result does not depend on its place.
TEST(Adam, EveryElementOfALongTensorIsUpdatedAlike) {
    Model<float> model({1031});
    for (size_t i = 0; i < 1031; ++i) {
        model.values[0][i] = 0.75F;
        model.grads[0][i] = -0.3F;
    }
    Adam optimizer(model.params(), {.weight_decay = 0.1, .decay = Decay::decoupled});
    for (int step = 0; step < 3; ++step) optimizer.step();
    for (size_t i = 1; i < 1031; ++i) ASSERT_EQ(model.values[0][i], model.values[0][0]) << "element " << i;
}

// Random numbers over many magnitudes through each instruction set that this machine has.
template <class T>
void expect_all_vectors_give_the_same_bits() {
    constexpr size_t n = 1031;
    std::mt19937 random(20261121);
    std::lognormal_distribution<T> magnitude(T(-3), T(4));
    std::vector<T> start(n);
    std::vector<T> grad(n);
    for (T& x : start) x = magnitude(random) * (random() % 2 == 0 ? 1 : -1);
    for (T& x : grad) x = magnitude(random) * (random() % 2 == 0 ? 1 : -1);
    const auto run = [&](Vectors vectors) {
        std::vector<T> param = start;
        std::vector<T> buffer(n);
        std::vector<T> average(n);
        std::vector<T> square(n);
        std::vector<T> sum(n);
        std::vector<T> mean(n);
        std::vector<T> directions(n);
        for (int step = 0; step < 3; ++step) {
            sgd_update(param.data(), grad.data(), buffer.data(), n,
                       SgdStep<T>{T(0.1), T(0.9), T(0.75), T(0.01), step == 1, step == 0}, vectors);
            adam_update(param.data(), grad.data(), average.data(), square.data(), n,
                        AdamStep<T>{T(0.9), T(0.1), T(0.999), T(0.001), T(0.01), T(0.3), T(1e-8), T(0.1), T(0.99)},
                        vectors);
            one_moment_update(param.data(), grad.data(), sum.data(), n, AdagradStep<T>{T(0.1), T(1e-8), T(0.01)},
                              vectors);
            one_moment_update(param.data(), grad.data(), mean.data(), n,
                              LionStep<T>{T(0.9), T(0.1), T(0.99), T(0.01), T(1e-3), T(0.999)}, vectors);
            const LambStep<T> lamb{T(0.9), T(0.1), T(0.999), T(0.001), T(1e-8), T(0.1)};
            lamb_directions(param.data(), grad.data(), average.data(), square.data(), directions.data(), n, lamb,
                            vectors);
            lamb_update(param.data(), grad.data(), average.data(), square.data(), n, lamb, T(0.01), vectors);
        }
        for (const auto& moment : {square, sum, mean, directions})
            param.insert(param.end(), moment.begin(), moment.end());
        return param;
    };
    const auto plain = run(Vectors::plain);
    for (const Vectors vectors : {Vectors::avx2, Vectors::avx512}) {
        if (vectors > widest_vectors()) break;
        EXPECT_EQ(run(vectors), plain) << "set " << static_cast<int>(vectors);
    }
}

TEST(Kernels, EveryInstructionSetGivesTheSameBits) {
    expect_all_vectors_give_the_same_bits<float>();
    expect_all_vectors_give_the_same_bits<double>();
}

TEST(Optimizer, MomentsAreNamedTensorsOfTheParametersShape) {
    std::vector<float> weight(6);
    std::vector<float> weight_grad(6);
    Tensor value = tensor_of(std::span<float>(weight), DType::f32);
    Tensor grad = tensor_of(std::span<float>(weight_grad), DType::f32);
    value.shape = grad.shape = Dims{2, 3};
    weight_grad[4] = 2;
    Adam adam({{"fc.weight", value, grad}}, {});
    adam.step();
    ASSERT_EQ(adam.moments().size(), 3U);
    EXPECT_EQ(adam.moments()[0].param, "fc.weight");
    EXPECT_EQ(adam.moments()[0].name, "exp_avg");
    EXPECT_EQ(adam.moments()[0].tensor.shape, (Dims{2, 3}));
    EXPECT_FLOAT_EQ(adam.moments()[0].tensor.as<float>()[4], 0.2F);
    EXPECT_EQ(adam.moments()[1].name, "exp_avg_sq");
    EXPECT_FLOAT_EQ(adam.moments()[1].tensor.as<float>()[4], 0.004F);
    EXPECT_EQ(adam.moments()[2].name, "step");
    EXPECT_EQ(adam.moments()[2].tensor.shape, Dims{});
    EXPECT_EQ(adam.moments()[2].tensor.as<float>()[0], 1.0F);

    Adagrad adagrad({{"fc.weight", value, grad}}, {.initial_accumulator_value = 0.5});
    EXPECT_EQ(adagrad.moments()[1].tensor.as<float>()[0], 0.5F);
    adagrad.step();
    ASSERT_EQ(adagrad.moments().size(), 2U);
    EXPECT_EQ(adagrad.moments()[0].name, "step");
    EXPECT_EQ(adagrad.moments()[0].tensor.as<float>()[0], 1.0F);
    EXPECT_EQ(adagrad.moments()[1].name, "sum");
    EXPECT_EQ(adagrad.moments()[1].tensor.shape, (Dims{2, 3}));
    EXPECT_EQ(adagrad.moments()[1].tensor.as<float>()[4], 4.5F);

    Sgd plain({{"fc.weight", value, grad}}, {});
    EXPECT_TRUE(plain.moments().empty());
    Sgd heavy({{"fc.weight", value, grad}}, {.momentum = 0.9});
    ASSERT_EQ(heavy.moments().size(), 1U);
    EXPECT_EQ(heavy.moments()[0].name, "momentum_buffer");
}

// What a checkpoint does: parameters, moments and settings copied into a fresh optimizer go on with the same bits.
template <class Kind, class Options>
void expect_resume_is_exact(const Options& options) {
    Model<float> model = golden_model<float>();
    Kind optimizer(model.params(), options);
    for (int step = 0; step < 4; ++step) {
        set_golden_grad(model, step);
        optimizer.step();
    }
    optimizer.set_lr(0.025);

    Model<float> copy = model;
    Options fresh_options = options;
    fresh_options.lr = 0.5;
    Kind fresh(copy.params(), fresh_options);
    ASSERT_EQ(fresh.moments().size(), optimizer.moments().size());
    for (size_t i = 0; i < fresh.moments().size(); ++i) {
        const Tensor& from = optimizer.moments()[i].tensor;
        std::memcpy(fresh.moments()[i].tensor.data, from.data, from.size_bytes());
    }
    fresh.load_settings(optimizer.settings());
    EXPECT_EQ(fresh.settings(), optimizer.settings());
    EXPECT_EQ(fresh.steps(), 4);
    for (int step = 4; step < 8; ++step) {
        set_golden_grad(model, step);
        set_golden_grad(copy, step);
        optimizer.step();
        fresh.step();
    }
    EXPECT_EQ(copy.values, model.values);
}

TEST(Optimizer, ResumedGoesOnWithTheSameBits) {
    expect_resume_is_exact<Sgd>(SgdOptions{.lr = 0.1});
    expect_resume_is_exact<Sgd>(SgdOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.25, .weight_decay = 0.05});
    expect_resume_is_exact<Adam>(AdamOptions{.lr = 0.1, .weight_decay = 0.05});
    expect_resume_is_exact<Adam>(AdamOptions{.lr = 0.1, .weight_decay = 0.05, .decay = Decay::decoupled});
    expect_resume_is_exact<Adagrad>(
        AdagradOptions{.lr = 0.1, .lr_decay = 0.25, .weight_decay = 0.05, .initial_accumulator_value = 0.5});
    expect_resume_is_exact<Lion>(LionOptions{.lr = 0.01, .weight_decay = 0.05});
    expect_resume_is_exact<Lamb>(LambOptions{.lr = 0.01, .weight_decay = 0.05});
}

// A load may have been of the moments alone, or of the settings alone.
TEST(Optimizer, StepsAreCountedByTheMoments) {
    Model<float> model({2});
    Adam optimizer(model.params(), {});
    Settings settings = optimizer.settings();
    optimizer.moments()[2].tensor.template as<float>()[0] = 41;
    optimizer.load_settings(settings);
    EXPECT_EQ(optimizer.steps(), 41);
    settings.back().second = int64_t{7};
    optimizer.load_settings(settings);
    EXPECT_EQ(optimizer.steps(), 41);
    optimizer.moments()[2].tensor.template as<float>()[0] = 0x1p24F;
    settings.back().second = (int64_t{1} << 24) + 1;  // no float, which the moments' nearest one is
    optimizer.load_settings(settings);
    EXPECT_EQ(optimizer.steps(), (int64_t{1} << 24) + 1);
    settings.pop_back();
    optimizer.load_settings(settings);
    EXPECT_EQ(optimizer.steps(), int64_t{1} << 24);
}

TEST(Optimizer, LoadedMomentumIsNotOverwrittenByAFirstStep) {
    Model<float> model({2});
    Sgd sgd(model.params(), {.lr = 1, .momentum = 0.5});
    const Settings settings = sgd.settings();
    sgd.load_settings(settings);
    EXPECT_EQ(sgd.steps(), 0);
    sgd.moments()[0].tensor.template as<float>()[1] = 8;
    sgd.load_settings(settings);
    model.grads[0] = {1, 1};
    sgd.step();
    EXPECT_EQ(sgd.moments()[0].tensor.template as<float>()[1], 5);
}

TEST(Optimizer, BadSettingsAreRefusedAndChangeNothing) {
    Model<float> model({2});
    Adam optimizer(model.params(), {});
    const Settings before = optimizer.settings();
    const auto refused = [&](const std::string& name, std::optional<Setting> value) {
        Settings changed;
        for (const auto& entry : before) {
            if (entry.first != name) changed.push_back(entry);
        }
        if (value) changed.emplace_back(name, *value);
        try {
            optimizer.load_settings(changed);
            ADD_FAILURE() << name << " was taken";
        } catch (const Error& e) {
            EXPECT_EQ(e.code(), Code::invalid_argument);
            EXPECT_THAT(e.what(), HasSubstr(name));
        }
        EXPECT_EQ(optimizer.settings(), before);
    };
    refused("lr", -1.0);
    refused("lr", std::nullopt);
    refused("lr", int64_t{1});
    refused("eps", std::numeric_limits<double>::quiet_NaN());
    refused("betas", std::vector<double>{0.9});
    refused("step", int64_t{-3});
    refused("step", std::numeric_limits<int64_t>::max());
    refused("amsgrad", true);
    try {
        Settings changed = before;
        changed[1].second = std::vector<double>{0.9, 1.0};
        optimizer.load_settings(changed);
        ADD_FAILURE() << "beta2 of 1 was taken";
    } catch (const Error& e) {
        EXPECT_THAT(e.what(), HasSubstr("beta2 is 1"));
    }
}

TEST(Optimizer, ZeroGradZeroesEveryGradient) {
    Model<double> model({3, 2});
    for (auto& grad : model.grads) std::iota(grad.begin(), grad.end(), 1);
    Sgd optimizer(model.params(), {});
    optimizer.zero_grad();
    EXPECT_THAT(model.grads[0], ElementsAre(0, 0, 0));
    EXPECT_THAT(model.grads[1], ElementsAre(0, 0));
}

TEST(Optimizer, ClosedGateLeavesEverythingAsItIs) {
    Model<float> model({2});
    model.grads[0] = {1, 1};
    Sgd optimizer(model.params(), {});
    optimizer.set_gate([] { throw Error(Code::invalid_state, "being reduced"); });
    EXPECT_THROW(optimizer.step(), Error);
    EXPECT_THROW(optimizer.zero_grad(), Error);
    EXPECT_EQ(optimizer.steps(), 0);
    EXPECT_THAT(model.values[0], ElementsAre(0, 0));
    EXPECT_THAT(model.grads[0], ElementsAre(1, 1));
}

TEST(Optimizer, BadParametersAreRefusedByName) {
    const auto message = [](std::vector<OptimizerParam> params) {
        try {
            Sgd optimizer(std::move(params), {});
            return std::string("nothing thrown");
        } catch (const Error& e) {
            EXPECT_EQ(e.code(), Code::invalid_argument);
            return std::string(e.what());
        }
    };
    std::array<double, 4> memory{};
    const Tensor f32{reinterpret_cast<std::byte*>(memory.data()), Dims{2}, DType::f32, {}};
    const Tensor f64{reinterpret_cast<std::byte*>(memory.data()), Dims{2}, DType::f64, {}};
    const Tensor f16{reinterpret_cast<std::byte*>(memory.data()), Dims{2}, DType::f16, {}};
    const Tensor matrix{reinterpret_cast<std::byte*>(memory.data()), Dims{2, 1}, DType::f32, {}};
    EXPECT_THAT(message({}), HasSubstr("the optimizer has no parameters"));
    EXPECT_THAT(message({{"w", f16, f16}}), HasSubstr("\"w\" is f16"));
    EXPECT_THAT(message({{"w", f32, f64}}), HasSubstr("\"w\" is f32, but its gradient is f64"));
    EXPECT_THAT(message({{"w", f32, matrix}}), HasSubstr("shape [2], but its gradient has shape [2, 1]"));
    EXPECT_THAT(message({{"w", f32, f32}, {"w", f64, f64}}), HasSubstr("two parameters are named \"w\""));
    EXPECT_THAT(message({{"w", f32, f32}, {"v", f64, f64}}), HasSubstr("parameters \"w\" and \"v\" share memory"));
}

TEST(Optimizer, BadOptionsAreRefused) {
    Model<float> model({1});
    EXPECT_THROW(Sgd(model.params(), {.lr = -1}), Error);
    EXPECT_THROW(Sgd(model.params(), {.momentum = -0.5}), Error);
    EXPECT_THROW(Sgd(model.params(), {.nesterov = true}), Error);
    EXPECT_THROW(Sgd(model.params(), {.momentum = 0.9, .dampening = 0.1, .nesterov = true}), Error);
    EXPECT_THROW(Adam(model.params(), {.beta1 = 1}), Error);
    EXPECT_THROW(Adam(model.params(), {.beta2 = -0.1}), Error);
    EXPECT_THROW(Adam(model.params(), {.eps = -1}), Error);
    EXPECT_THROW(Adam(model.params(), {.lr = std::numeric_limits<double>::infinity()}), Error);
    EXPECT_THROW(Adagrad(model.params(), {.lr_decay = -1}), Error);
    EXPECT_THROW(Adagrad(model.params(), {.weight_decay = -1}), Error);
    EXPECT_THROW(Adagrad(model.params(), {.initial_accumulator_value = -1}), Error);
    EXPECT_THROW(Adagrad(model.params(), {.eps = std::numeric_limits<double>::quiet_NaN()}), Error);
    EXPECT_THROW(Adagrad(model.params(), {}).set_momentum(0.9), Error);
    EXPECT_THROW(Lion(model.params(), {.beta1 = 1}), Error);
    EXPECT_THROW(Lion(model.params(), {.beta2 = std::numeric_limits<double>::quiet_NaN()}), Error);
    EXPECT_THROW(Lion(model.params(), {.weight_decay = -1}), Error);
    EXPECT_THROW(Lamb(model.params(), {.beta2 = 1}), Error);
    EXPECT_THROW(Lamb(model.params(), {.eps = -1}), Error);
    EXPECT_THROW(Lamb(model.params(), {.weight_decay = -1}), Error);
    EXPECT_THROW(Lamb(model.params(), {.max_coeff = 0.5, .min_coeff = 0.75}), Error);
    EXPECT_THROW(Lamb(model.params(), {.max_coeff = std::numeric_limits<double>::infinity()}), Error);
    Sgd optimizer(model.params(), {});
    EXPECT_THROW(optimizer.set_lr(-0.1), Error);
    EXPECT_THROW(optimizer.set_lr(std::numeric_limits<double>::quiet_NaN()), Error);
}

TEST(Optimizer, EmptyParametersAreTaken) {
    Model<float> model({0, 2});
    model.grads[1] = {1, 1};
    Adam optimizer(model.params(), {.lr = 0.5});
    optimizer.step();
    EXPECT_NEAR(model.values[1][0], -0.5, 1e-6);
}

}  // namespace
}  // namespace tsr
