// What the tests of the engine share: a model of two layers in f64 that is computed from whatever tensors it is given, and
// trainers that run it.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/splitmix64.hpp"
#include "comm/communicator.hpp"
#include "engine/engine.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"

namespace tsr::testing {

// Parameters of their own memory, all of one dtype, in units.
template <class T>
struct Params {
    struct Entry {
        std::string name;
        Dims shape;
        std::vector<T> values;
    };
    std::vector<std::vector<Entry>> units;

    void add(size_t unit, const std::string& name, const Dims& shape, T value = 0) {
        units.resize(std::max(units.size(), unit + 1));
        units[unit].push_back({name, shape, std::vector<T>(static_cast<size_t>(shape.product()), value)});
    }
    std::vector<EngineUnit> in_units() {
        std::vector<EngineUnit> out;
        for (auto& unit : units) {
            EngineUnit& one = out.emplace_back();
            one.name = fmt::format("unit{}", out.size() - 1);
            for (Entry& entry : unit) {
                Tensor tensor = tensor_of(std::span<T>(entry.values), sizeof(T) == 8 ? DType::f64 : DType::f32);
                tensor.shape = entry.shape;
                one.params.push_back({entry.name, tensor});
            }
        }
        return out;
    }
};

// y = w2 tanh(w1 x + b1) + b2, and half the squared error of it, per sample.
struct Toy {
    static constexpr size_t in = 4;
    static constexpr size_t hidden = 5;
    static constexpr size_t out = 3;
    enum : size_t { w1, b1, w2, b2, count };
    using Doubles = std::function<double*(size_t param)>;
    struct Hooks {
        std::function<void(size_t unit)> forward = [](size_t) {};
        std::function<void(size_t unit)> forward_done = [](size_t) {};
        std::function<void(size_t unit)> backward = [](size_t) {};
        std::function<void(size_t unit)> ready = [](size_t) {};
    };

    static Params<double> initial(uint64_t seed) {
        Params<double> params;
        params.add(0, "fc1.weight", {hidden, in});
        params.add(0, "fc1.bias", {hidden});
        params.add(1, "fc2.weight", {out, hidden});
        params.add(1, "fc2.bias", {out});
        SplitMix64 random(seed);
        for (auto& unit : params.units) {
            for (auto& entry : unit) {
                for (double& value : entry.values) value = uniform(random);
            }
        }
        return params;
    }
    static double uniform(SplitMix64& random) { return static_cast<double>(random.next() >> 11) * 0x1p-53 - 0.5; }

    // Gradients of the mean loss over samples [begin, begin + samples) of a data set without end, times `factor`.
    static void run(uint64_t begin, uint64_t samples, double factor, bool adds, const Doubles& params,
                    const Doubles& grads, const Hooks& hooks) {
        std::vector<double> x;
        std::vector<double> h(samples * hidden);
        std::vector<double> d(samples * out);
        hooks.forward(0);
        for (uint64_t s = 0; s < samples; ++s) {
            SplitMix64 random(77 * (begin + s) + 5);
            for (size_t i = 0; i < in; ++i) x.push_back(4 * uniform(random));
            for (size_t j = 0; j < hidden; ++j) {
                double sum = params(b1)[j];
                for (size_t i = 0; i < in; ++i) sum += params(w1)[j * in + i] * x[s * in + i];
                h[s * hidden + j] = std::tanh(sum);
            }
        }
        hooks.forward_done(0);
        hooks.forward(1);
        for (uint64_t s = 0; s < samples; ++s) {
            for (size_t o = 0; o < out; ++o) {
                double y = params(b2)[o];
                for (size_t j = 0; j < hidden; ++j) y += params(w2)[o * hidden + j] * h[s * hidden + j];
                const double target = std::sin(x[s * in] + static_cast<double>(o));
                d[s * out + o] = (y - target) * factor / static_cast<double>(samples);
            }
        }
        hooks.forward_done(1);

        const auto clear = [&](size_t param, size_t size) {
            if (!adds) std::fill(grads(param), grads(param) + size, 0.0);
        };
        std::vector<double> dh(samples * hidden);
        hooks.backward(1);
        clear(w2, out * hidden);
        clear(b2, out);
        for (uint64_t s = 0; s < samples; ++s) {
            for (size_t o = 0; o < out; ++o) {
                grads(b2)[o] += d[s * out + o];
                for (size_t j = 0; j < hidden; ++j) {
                    grads(w2)[o * hidden + j] += d[s * out + o] * h[s * hidden + j];
                    dh[s * hidden + j] += d[s * out + o] * params(w2)[o * hidden + j];
                }
            }
        }
        hooks.ready(1);
        hooks.backward(0);
        clear(w1, hidden * in);
        clear(b1, hidden);
        for (uint64_t s = 0; s < samples; ++s) {
            for (size_t j = 0; j < hidden; ++j) {
                const double t = h[s * hidden + j];
                const double dj = dh[s * hidden + j] * (1 - t * t);
                grads(b1)[j] += dj;
                for (size_t i = 0; i < in; ++i) grads(w1)[j * in + i] += dj * x[s * in + i];
            }
        }
        hooks.ready(0);
    }

    // A pass of an engine over these samples.
    static void pass(Engine& engine, uint64_t begin, uint64_t samples) {
        run(
            begin, samples, engine.loss_factor(), engine.adds_gradients(),
            [&](size_t param) { return engine.model().param(param).as<double>().data(); },
            [&](size_t param) { return engine.model().grad(param).as<double>().data(); },
            {[&](size_t unit) { engine.forward(unit); }, [&](size_t unit) { engine.forward_done(unit); },
             [&](size_t unit) { engine.backward(unit); }, [&](size_t unit) { engine.unit_ready(unit); }});
        engine.backward_done();
    }
};

// The values of a parameter, whole, at any stage. Collective.
template <class T>
std::vector<T> values_of(Engine& engine, size_t param) {
    const size_t unit = engine.model().unit_of(param);
    const auto fsdp = engine.model().fsdp();
    if (fsdp) {
        fsdp->unshard(unit);
        fsdp->await_unit(unit);
    }
    const auto values = engine.model().param(param).as<T>();
    std::vector<T> copy(values.begin(), values.end());
    if (fsdp) fsdp->reshard(unit);
    return copy;
}

// A pass whose gradients are written from outside: `write` gets each parameter's number and gradient.
template <class T>
void pass_with(Engine& engine, const std::function<void(size_t param, std::span<T> grad)>& write) {
    const EngineModel& model = engine.model();
    for (size_t unit = 0; unit < model.units(); ++unit) {
        engine.forward(unit);
        engine.forward_done(unit);
    }
    for (size_t unit = model.units(); unit-- > 0;) {
        engine.backward(unit);
        for (size_t param = 0; param < model.params(); ++param) {
            if (model.unit_of(param) != unit) continue;
            const std::span<T> grad = model.grad(param).as<T>();
            std::vector<T> own(grad.size());
            write(param, own);
            for (size_t i = 0; i < grad.size(); ++i) grad[i] = engine.adds_gradients() ? grad[i] + own[i] : own[i];
            engine.ready(param);
        }
    }
    engine.backward_done();
}

}  // namespace tsr::testing
