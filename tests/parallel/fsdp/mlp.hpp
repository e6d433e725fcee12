// A model of three linear layers, each a unit, whose forward and backward are computed from whatever parameters and
// gradients lie in: under FSDP, or on one rank alone.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/splitmix64.hpp"
#include "parallel/model.hpp"

namespace tsr::testing {

struct Mlp {
    static constexpr size_t layers = 3;
    static constexpr std::array<size_t, layers + 1> widths{6, 11, 7, 3};  // rows that no number of ranks divides

    struct Batch {
        std::vector<float> inputs;   // count x widths[0]
        std::vector<float> targets;  // count x widths[3]
        size_t count = 0;
    };
    using Floats = std::function<float*(size_t param)>;  // weight of layer l: 2 l, bias: 2 l + 1

    // Runs before and after a layer's part of a pass.
    struct Hooks {
        std::function<void(size_t layer)> forward = [](size_t) {};
        std::function<void(size_t layer)> forward_done = [](size_t) {};
        std::function<void(size_t layer)> backward = [](size_t) {};
        std::function<void(size_t layer)> grads_ready = [](size_t) {};
    };

    static Model initial(uint64_t seed = 1) {
        Model model;
        SplitMix64 random(seed);
        for (size_t l = 0; l < layers; ++l) {
            const auto in = static_cast<int64_t>(widths.at(l));
            const auto out = static_cast<int64_t>(widths.at(l + 1));
            model.add("fc" + std::to_string(l) + ".weight", {out, in});
            model.add("fc" + std::to_string(l) + ".bias", {out});
        }
        for (auto& entry : model.entries) {
            for (float& value : entry.values) value = uniform(random) - 0.5F;
        }
        return model;
    }

    static float uniform(SplitMix64& random) { return static_cast<float>(random.next() >> 40) / 16777216.0F; }

    // Rows [begin, begin + count) of a data set without end.
    static Batch batch(uint64_t begin, size_t count) {
        Batch out;
        out.count = count;
        for (uint64_t i = begin; i < begin + count; ++i) {
            SplitMix64 random(i * 77 + 5);
            float sum = 0;
            for (size_t k = 0; k < widths[0]; ++k) {
                out.inputs.push_back(uniform(random) * 2 - 1);
                sum += out.inputs.back() * static_cast<float>(k + 1);
            }
            for (size_t k = 0; k < widths[layers]; ++k) out.targets.push_back(std::sin(sum + static_cast<float>(k)));
        }
        return out;
    }

    // Mean squared error of a batch; gradients are written, or added to if `add`.
    static float forward_backward(const Batch& batch, const Floats& params, const Floats& grads, bool add,
                                  const Hooks& hooks) {
        std::array<std::vector<float>, layers + 1> activations;
        activations[0] = batch.inputs;
        for (size_t l = 0; l < layers; ++l) {
            hooks.forward(l);
            const size_t in = widths.at(l);
            const size_t out = widths.at(l + 1);
            const float* const weight = params(2 * l);
            const float* const bias = params(2 * l + 1);
            auto& y = activations.at(l + 1);
            y.resize(batch.count * out);
            for (size_t b = 0; b < batch.count; ++b) {
                for (size_t o = 0; o < out; ++o) {
                    float sum = bias[o];
                    for (size_t i = 0; i < in; ++i) sum += weight[o * in + i] * activations.at(l)[b * in + i];
                    y[b * out + o] = l + 1 < layers ? std::tanh(sum) : sum;
                }
            }
            hooks.forward_done(l);
        }
        float loss = 0;
        std::vector<float> delta(batch.targets.size());
        const auto scale = 1.0F / static_cast<float>(batch.targets.size());
        for (size_t k = 0; k < delta.size(); ++k) {
            const float difference = activations[layers][k] - batch.targets[k];
            loss += difference * difference * scale;
            delta[k] = 2 * difference * scale;
        }
        for (size_t l = layers; l-- > 0;) {
            hooks.backward(l);
            const size_t in = widths.at(l);
            const size_t out = widths.at(l + 1);
            const float* const weight = params(2 * l);
            float* const weight_grad = grads(2 * l);
            float* const bias_grad = grads(2 * l + 1);
            if (!add) std::fill(weight_grad, weight_grad + in * out, 0.0F);
            if (!add) std::fill(bias_grad, bias_grad + out, 0.0F);
            std::vector<float> before(batch.count * in);
            for (size_t b = 0; b < batch.count; ++b) {
                for (size_t o = 0; o < out; ++o) {
                    float d = delta[b * out + o];
                    const float y = activations.at(l + 1)[b * out + o];
                    if (l + 1 < layers) d *= 1 - y * y;
                    bias_grad[o] += d;
                    for (size_t i = 0; i < in; ++i) {
                        weight_grad[o * in + i] += d * activations.at(l)[b * in + i];
                        before[b * in + i] += d * weight[o * in + i];
                    }
                }
            }
            delta = std::move(before);
            hooks.grads_ready(l);
        }
        return loss;
    }
};

}  // namespace tsr::testing
