// Optimizers of parameters on a (simulated) device beside the same ones on the CPU.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "optim/adagrad.hpp"
#include "optim/adam.hpp"
#include "optim/grad_scaler.hpp"
#include "optim/lamb.hpp"
#include "optim/lion.hpp"
#include "optim/sgd.hpp"
#include "seed.hpp"
#include "simulated_cuda/device_test.hpp"
#include "simulated_cuda/hold.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double infinite = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

template <class T>
constexpr DType dtype_of = sizeof(T) == 4 ? DType::f32 : DType::f64;

// The same parameters and gradients on the CPU and on a device.
template <class T>
struct Part {
    std::vector<std::vector<T>> values;
    std::vector<std::vector<T>> grads;
    std::deque<OnDeviceMemory<T>> device_values;
    std::deque<OnDeviceMemory<T>> device_grads;
};

class OptimizerOnDevice : public DeviceTest {
   protected:
    using Params = std::vector<OptimizerParam>;

    void TearDown() override {
        floats_ = {};
        doubles_ = {};
        DeviceTest::TearDown();
    }

    // Of sizes around a thread's pack and a block's chunk, more of them than one launch takes, and some not aligned.
    void make_both() {
        std::vector<size_t> sizes{1, 3, 4, 0, 8191, 8192, 8193, 30001};
        sizes.resize(sizes.size() + 200, 5);
        for (size_t i = 0; i < sizes.size(); ++i) {
            add(floats_, sizes[i], i % 3);
            if (i < 10) add(doubles_, sizes[i], i % 2);
        }
    }
    template <class T>
    void add(Part<T>& part, size_t size, size_t skipped) {
        const size_t p = part.values.size();
        part.values.push_back(numbers<T>(size));
        part.grads.push_back(numbers<T>(size));
        part.device_values.emplace_back(device(), part.values[p], skipped);
        part.device_grads.emplace_back(device(), part.grads[p], skipped);
    }
    template <class T>
    std::vector<T> numbers(size_t count) {
        std::lognormal_distribution<T> magnitude(T(-3), T(4));
        std::vector<T> result(count);
        for (T& x : result) x = magnitude(random_) * (random_() % 2 == 0 ? 1 : -1);
        return result;
    }

    template <class T>
    static void append(Params& params, Part<T>& part, bool on_device) {
        for (size_t p = 0; p < part.values.size(); ++p) {
            const std::string name = fmt::format("{}{}", name_of(dtype_of<T>), p);
            if (on_device) {
                params.push_back(
                    {name, part.device_values[p].tensor(dtype_of<T>), part.device_grads[p].tensor(dtype_of<T>)});
            } else {
                params.push_back({name, tensor_of(std::span<T>(part.values[p]), dtype_of<T>),
                                  tensor_of(std::span<T>(part.grads[p]), dtype_of<T>)});
            }
        }
    }
    Params params(bool on_device) {
        Params result;
        append(result, floats_, on_device);
        append(result, doubles_, on_device);
        return result;
    }
    Params on_cpu() { return params(false); }
    Params on_device() { return params(true); }

    template <class T>
    void draw_grads(Part<T>& part) {
        for (size_t p = 0; p < part.grads.size(); ++p) {
            const std::vector<T> drawn = numbers<T>(part.grads[p].size());
            std::copy(drawn.begin(), drawn.end(), part.grads[p].begin());
            part.device_grads[p].write(drawn);
        }
    }
    void draw_grads() {
        draw_grads(floats_);
        draw_grads(doubles_);
    }

    template <class T>
    static void expect_same(Part<T>& part) {
        for (size_t p = 0; p < part.values.size(); ++p) {
            ASSERT_EQ(part.device_values[p].read(), part.values[p]) << "values of " << name_of(dtype_of<T>) << p;
            ASSERT_EQ(part.device_grads[p].read(), part.grads[p]) << "gradients of " << name_of(dtype_of<T>) << p;
        }
    }
    void expect_same() {
        expect_same(floats_);
        expect_same(doubles_);
    }
    static void expect_same_moments(const Optimizer& cpu, const Optimizer& cuda) {
        ASSERT_EQ(cpu.moments().size(), cuda.moments().size());
        for (size_t i = 0; i < cpu.moments().size(); ++i) {
            const Tensor& ours = cuda.moments()[i].tensor;
            const Tensor& theirs = cpu.moments()[i].tensor;
            EXPECT_EQ(cuda.moments()[i].name, cpu.moments()[i].name);
            const bool is_step = cuda.moments()[i].name == step_moment;
            ASSERT_EQ(ours.device.type, is_step ? DeviceType::cpu : DeviceType::cuda);
            std::vector<std::byte> bytes(ours.data, is_step ? ours.data + ours.size_bytes() : ours.data);
            if (!is_step) bytes = OnDeviceMemory<float>::content<std::byte>(device(), ours.data, ours.size_bytes());
            ASSERT_EQ(bytes, std::vector<std::byte>(theirs.data, theirs.data + theirs.size_bytes()))
                << cpu.moments()[i].name << " of " << cpu.moments()[i].param;
        }
    }

    template <class Kind, class Options>
    void expect_same_steps(const Options& options) {
        floats_ = {};
        doubles_ = {};
        make_both();
        Kind cpu(on_cpu(), options);
        Kind cuda(on_device(), options);
        for (int step = 0; step < 3; ++step) {
            draw_grads();
            cpu.step();
            cuda.step();
        }
        expect_same();
        expect_same_moments(cpu, cuda);
        EXPECT_EQ(cuda.steps(), 3);
    }

    Part<float> floats_;
    Part<double> doubles_;
    const Seed seed_;
    std::mt19937_64 random_{seed_};
};

TEST_F(OptimizerOnDevice, SgdHasTheBitsOfTheCpu) {
    expect_same_steps<Sgd>(SgdOptions{.lr = 0.1});
    expect_same_steps<Sgd>(SgdOptions{.lr = 0.1, .weight_decay = 0.05});
    expect_same_steps<Sgd>(SgdOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.05});
    expect_same_steps<Sgd>(SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true});
}

TEST_F(OptimizerOnDevice, AdamHasTheBitsOfTheCpu) {
    expect_same_steps<Adam>(AdamOptions{.lr = 0.01});
    expect_same_steps<Adam>(AdamOptions{.lr = 0.01, .beta1 = 0.25, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1});
    expect_same_steps<Adam>(AdamOptions{.lr = 0.01, .weight_decay = 0.1, .decay = Decay::decoupled});
}

TEST_F(OptimizerOnDevice, AdagradHasTheBitsOfTheCpu) {
    expect_same_steps<Adagrad>(AdagradOptions{.lr = 0.1});
    expect_same_steps<Adagrad>(AdagradOptions{
        .lr = 0.1, .lr_decay = 0.1, .weight_decay = 0.05, .initial_accumulator_value = 0.3, .eps = 1e-6});
}

TEST_F(OptimizerOnDevice, LionHasTheBitsOfTheCpu) {
    expect_same_steps<Lion>(LionOptions{.lr = 0.1});
    expect_same_steps<Lion>(LionOptions{.lr = 0.1, .beta1 = 0.5, .beta2 = 0.9, .weight_decay = 0.05});
}

TEST_F(OptimizerOnDevice, LambIsUnsupported) {
    make_both();
    try {
        Lamb lamb(on_device(), {});
        ADD_FAILURE() << "it was made";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::unsupported);
        EXPECT_THAT(error.what(), AllOf(HasSubstr("\"f320\" is on a CUDA device"), HasSubstr("on the CPU only")));
    }
}

TEST_F(OptimizerOnDevice, AStepLeavesOutParametersWithoutAGradient) {
    make_both();
    Adam cpu(on_cpu(), {.lr = 0.01});
    Adam cuda(on_device(), {.lr = 0.01});
    for (Adam* optimizer : {&cpu, &cuda}) {
        optimizer->step();
        optimizer->set_has_grad([](size_t param) { return param % 2 == 0; }, [] {});
        optimizer->step();
        optimizer->set_has_grad([](size_t) { return true; }, [] {});
        optimizer->step();
    }
    expect_same();
    expect_same_moments(cpu, cuda);
}

TEST_F(OptimizerOnDevice, ClipsTheNormAsTheCpuDoes) {
    make_both();
    Sgd cpu(on_cpu(), {});
    Sgd cuda(on_device(), {});
    for (const double p : {1.0, 2.0, 2.5, infinite}) {
        draw_grads();
        const double expected = cpu.clip_grad_norm(1e300, p);
        const double norm = cuda.clip_grad_norm(1e300, p);
        EXPECT_NEAR(norm / expected, 1, 1e-13) << p;
        EXPECT_EQ(cuda.clip_grad_norm(1e300, p), norm) << "the same bits each time";
        expect_same();  // below the bound nothing is changed
        (void)cpu.clip_grad_norm(expected / 8, p);
        EXPECT_EQ(cuda.clip_grad_norm(expected / 8, p), norm);
        if (std::isinf(p)) expect_same();
        EXPECT_NEAR(cuda.clip_grad_norm(1e300, p) / (expected / 8), 1, 1e-5) << p;
    }
}

TEST_F(OptimizerOnDevice, TheNormLeavesOutWhatOthersCount) {
    add(floats_, 3, 0);
    add(floats_, 2, 0);
    floats_.device_grads[0].write({3, 0, 4});
    floats_.device_grads[1].write({100, 100});
    Sgd cuda(on_device(), {});
    cuda.count_elsewhere(std::array<size_t, 1>{1});
    EXPECT_EQ(cuda.clip_grad_norm(1, 2), 5);
    EXPECT_NEAR(floats_.device_grads[1].read()[0], 20, 1e-4) << "but scales it";
}

TEST_F(OptimizerOnDevice, ANormThatIsNotFiniteChangesNothing) {
    add(floats_, 9000, 0);
    add(doubles_, 3, 0);
    Sgd cuda(on_device(), {});
    for (const double bad : {infinite, -infinite, nan}) {
        for (const double p : {1.0, 2.0, 2.5, infinite}) {
            doubles_.device_grads[0].write({1, bad, 2});
            EXPECT_EQ(cuda.clip_grad_norm(0.5, p), infinite) << bad << ' ' << p;
            EXPECT_EQ(doubles_.device_grads[0].read()[2], 2);
            EXPECT_EQ(floats_.device_grads[0].read(), floats_.grads[0]);
        }
    }
}

TEST_F(OptimizerOnDevice, ClipsValuesAsTheCpuDoes) {
    make_both();
    floats_.grads[4][4097] = static_cast<float>(-infinite);
    floats_.device_grads[4].write(floats_.grads[4]);
    Sgd cpu(on_cpu(), {});
    Sgd cuda(on_device(), {});
    cpu.clip_grad_value(0.01);
    cuda.clip_grad_value(0.01);
    expect_same();
    doubles_.device_grads[1].write({nan, 1, -1});
    cuda.clip_grad_value(0.5);
    EXPECT_TRUE(std::isnan(doubles_.device_grads[1].read()[0]));
    EXPECT_EQ(doubles_.device_grads[1].read()[2], -0.5);
}

TEST_F(OptimizerOnDevice, UnscalesAndFindsWhatIsNotFinite) {
    make_both();
    Sgd cpu(on_cpu(), {});
    Sgd cuda(on_device(), {});
    EXPECT_TRUE(cpu.unscale_grads(1024));
    EXPECT_TRUE(cuda.unscale_grads(1024));
    expect_same();
    for (const double bad : {infinite, nan}) {
        for (const size_t place : {size_t{0}, size_t{8192}}) {  // read as one of several, and alone
            std::vector<float> grads(8193, 1);
            grads[place] = static_cast<float>(bad);
            floats_.device_grads[6].write(grads);
            EXPECT_FALSE(cuda.unscale_grads(2)) << bad;
            floats_.device_grads[6].write(std::vector<float>(8193, 1));
            EXPECT_TRUE(cuda.unscale_grads(2));
        }
    }
}

TEST_F(OptimizerOnDevice, AScalerSkipsItsStep) {
    add(floats_, 4, 0);
    const auto cuda = std::make_shared<Sgd>(on_device(), SgdOptions{.lr = 1});
    GradScaler scaler({.init_scale = 4});
    floats_.device_values[0].write({0, 0, 0, 0});
    floats_.device_grads[0].write({1, 2, static_cast<float>(nan), 3});
    EXPECT_FALSE(scaler.step(cuda));
    scaler.update();
    EXPECT_EQ(floats_.device_values[0].read(), std::vector<float>(4, 0));
    floats_.device_grads[0].write({2, 4, 6, 8});
    EXPECT_TRUE(scaler.step(cuda));
    EXPECT_EQ(floats_.device_values[0].read(), (std::vector<float>{-1, -2, -3, -4}));
}

TEST_F(OptimizerOnDevice, ZeroesGradients) {
    make_both();
    Sgd cuda(on_device(), {});
    cuda.zero_grad();
    for (size_t p = 0; p < floats_.grads.size(); ++p) {
        ASSERT_EQ(floats_.device_grads[p].read(), std::vector<float>(floats_.grads[p].size(), 0)) << p;
        ASSERT_EQ(floats_.device_values[p].read(), floats_.values[p]) << p;
    }
    for (size_t p = 0; p < doubles_.grads.size(); ++p) {
        ASSERT_EQ(doubles_.device_grads[p].read(), std::vector<double>(doubles_.grads[p].size(), 0)) << p;
    }
}

TEST_F(OptimizerOnDevice, StepsInTheOrderOfItsStream) {
    add(floats_, 2, 0);
    floats_.device_values[0].write({0, 0});
    floats_.device_grads[0].write({1, 1});
    device().record(nullptr)->wait(soon());
    const auto first = device().new_stream();
    const auto second = device().new_stream();
    Sgd cuda(on_device(), {.lr = 1});
    cuda.set_stream(first.get());
    {
        const Hold gate(device(), first.get());
        cuda.step();
        const auto stepped = device().record(first.get());
        EXPECT_FALSE(stepped->done());
        cuda.set_stream(second.get());  // whose step comes after the first one
        cuda.step();
        const auto both = device().record(second.get());
        EXPECT_EQ(failure([&] { both->wait(Deadline::in(milliseconds{20})); }).code(), Code::timeout);
        gate.release();
        both->wait(soon());
    }
    EXPECT_EQ(floats_.device_values[0].read(), std::vector<float>(2, -2));
    // A number is that of what the stream had before.
    const Hold gate(device(), second.get());
    device().zero(floats_.device_grads[0].data(), 2 * sizeof(float), second.get());
    gate.release();
    EXPECT_EQ(cuda.clip_grad_norm(1, 2), 0);
}

TEST_F(OptimizerOnDevice, AWrongStreamIsRefused) {
    add(floats_, 2, 0);
    Sgd cuda(on_device(), {});
    const auto other = device(1).new_stream();
    EXPECT_THAT(failure([&] { cuda.set_stream(other.get()); }).what(), HasSubstr("a stream of another device"));
    EXPECT_NO_THROW(cuda.set_stream(nullptr));
    Sgd cpu(on_cpu(), {});
    EXPECT_EQ(failure([&] { cpu.set_stream(other.get()); }).code(), Code::invalid_argument);
    EXPECT_NO_THROW(cpu.set_stream(nullptr));
}

TEST_F(OptimizerOnDevice, MemoryOfElsewhereIsRefused) {
    add(floats_, 2, 0);
    add(floats_, 2, 0);
    const auto refused = [&](auto&& change) {
        Params all = on_device();
        change(all);
        const Error error = failure([&] { Sgd(std::move(all), {}); });
        EXPECT_EQ(error.code(), Code::invalid_argument);
        return std::string(error.what());
    };
    EXPECT_THAT(refused([&](Params& all) { all[1] = on_cpu()[1]; }),
                HasSubstr("parameter \"f321\" is on the CPU, but the first one is on CUDA device 0"));
    EXPECT_THAT(refused([&](Params& all) { all[1].grad.device = {}; }),
                HasSubstr("its gradient is f32 or on another device"));
    const OnDeviceMemory<float> there(device(1), {1, 2});
    EXPECT_THAT(refused([&](Params& all) { all[1].value.device = all[1].grad.device = {DeviceType::cuda, 1}; }),
                HasSubstr("is on CUDA device 1, but the first one is on CUDA device 0"));
    EXPECT_THAT(refused([&](Params& all) { all[1].value.data = there.data(); }),
                HasSubstr("parameter \"f321\" is memory of CUDA device 1, not of CUDA device 0"));
    EXPECT_THAT(refused([&](Params& all) { all[0].grad.data = on_cpu()[0].grad.data; }),
                HasSubstr("the gradient of parameter \"f320\" is memory of the host, not of CUDA device 0"));
    EXPECT_THAT(refused([&](Params& all) { all[0].value.dtype = all[0].grad.dtype = DType::f16; }), HasSubstr("f16"));
}

TEST_F(OptimizerOnDevice, ALoadTakesStepsFromMomentsOnTheDevice) {
    add(floats_, 3, 0);
    add(floats_, 5, 0);
    const SgdOptions options{.momentum = 0.5};
    Sgd cuda(on_device(), options);
    Settings saved = cuda.settings();
    cuda.load_settings(saved);
    EXPECT_EQ(cuda.steps(), 0);
    // The second moment alone was loaded: the first parameter's buffer is not set yet.
    const std::vector<float> loaded{0, 0, 0, 0, 2};
    const Tensor& moment = cuda.moments()[1].tensor;
    device().copy(moment.data, reinterpret_cast<const std::byte*>(loaded.data()), moment.size_bytes(), nullptr);
    cuda.load_settings(saved);
    EXPECT_EQ(cuda.steps(), 1);
    floats_.device_grads[0].write({1, 1, 1});
    floats_.device_grads[1].write({1, 1, 1, 1, 1});
    cuda.step();
    const auto buffer = [&](size_t i) {
        const Tensor& tensor = cuda.moments()[i].tensor;
        return OnDeviceMemory<float>::content<float>(device(), tensor.data, static_cast<size_t>(tensor.numel()));
    };
    EXPECT_EQ(buffer(0), std::vector<float>(3, 1));
    EXPECT_EQ(buffer(1), (std::vector<float>{1, 1, 1, 1, 2}));
}

TEST_F(OptimizerOnDevice, WithoutMemoryForMomentsIsNoMemory) {
    add(floats_, 10000, 0);
    simulated_cuda_capacity(150000);
    const Error error = failure([&] { Adam(on_device(), {}); });
    EXPECT_EQ(error.code(), Code::no_memory);
    EXPECT_NO_THROW(Sgd(on_device(), {}));
}

}  // namespace
}  // namespace tsr::testing
