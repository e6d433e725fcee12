// A chain of small perceptrons (parallel/tensor/mlp.hpp), and its training with AdamW by one process: what all the ways to
// cut it over ranks have to agree with. Blocks differ in width, so that no shape fits by chance.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "optim/adam.hpp"
#include "parallel/pipeline/microbatches.hpp"
#include "parallel/tensor/mlp.hpp"

namespace tsr::testing {

inline constexpr size_t batch_rows = 13;
inline constexpr AdamOptions adam_options{.lr = 0.01, .weight_decay = 0.1, .decay = Decay::decoupled};
inline constexpr double clip_at = 0.1;  // below all norms

template <class T>
std::vector<T> random_values(uint64_t seed, size_t count) {
    const std::vector<double> numbers = random_numbers(seed, count);
    std::vector<T> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<T>(2 * numbers[i]);
    return values;
}

template <class T>
struct Chain {
    static size_t inputs(int block) { return 4 + static_cast<size_t>(block % 2); }
    static size_t outputs(int block) { return inputs(block + 1); }
    static size_t hidden(int block) { return 6 + static_cast<size_t>(block % 2); }

    int blocks;
    std::vector<std::vector<T>> values;  // those of a block one after another

    explicit Chain(int count) : blocks(count) {
        for (size_t i = 0; i < static_cast<size_t>(blocks) * Mlp::params; ++i) {
            values.push_back(random_values<T>(i + 1, static_cast<size_t>(shape(i).product())));
            if (i % Mlp::params != Mlp::gain) continue;
            for (T& gain : values.back()) gain = 1 + gain / 2;
        }
    }

    static Dims shape(size_t param) {
        const int block = static_cast<int>(param / Mlp::params);
        const auto in = static_cast<int64_t>(inputs(block));
        const auto out = static_cast<int64_t>(outputs(block));
        const auto width = static_cast<int64_t>(hidden(block));
        const std::array<Dims, Mlp::params> shapes{Dims{width, in}, Dims{width}, Dims{out, width}, Dims{out}, Dims{in}};
        return shapes.at(param % Mlp::params);
    }
    static std::string name(size_t param) {
        const std::array<const char*, Mlp::params> names{"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias",
                                                         "norm.weight"};
        return "block" + std::to_string(param / Mlp::params) + "." + names.at(param % Mlp::params);
    }
    [[nodiscard]] NamedTensor named(size_t param) {
        return {name(param), tensor_of_shape(values[param], shape(param))};
    }
};

// The batch of a step.
template <class T>
struct Examples {
    std::vector<T> inputs;
    std::vector<T> targets;

    Examples(int blocks, int step)
        : inputs(random_values<T>(static_cast<uint64_t>(1000 + step), batch_rows * Chain<T>::inputs(0))),
          targets(random_values<T>(static_cast<uint64_t>(2000 + step), batch_rows * Chain<T>::inputs(blocks))) {}
};

template <class T>
std::vector<T> rows_of(const std::vector<T>& whole, pipeline::Rows rows) {
    const auto width = static_cast<std::ptrdiff_t>(whole.size() / batch_rows);
    return {whole.begin() + rows.begin * width, whole.begin() + (rows.begin + rows.count) * width};
}

// The gradient of the loss, which is half the squared distance, a mean over the rows of the batch; adds to the sum.
template <class T>
std::vector<T> distance(std::vector<T> y, const std::vector<T>& targets, T weight, double& sum) {
    for (size_t i = 0; i < y.size(); ++i) {
        y[i] -= targets[i];
        sum += static_cast<double>(y[i]) * static_cast<double>(y[i]) / 2;
        y[i] *= weight;
    }
    return y;
}
inline constexpr double row_weight = 1.0 / batch_rows;

// How a batch goes through the chain: in so many micro-batches; block by block, the order in which they add their gradients
// of the weights.
struct Passes {
    int microbatches = 1;
    std::function<std::vector<int>(int block)> order = [](int) { return std::vector<int>{0}; };
};

// What training is at the beginning of each step, and what the step makes of it.
template <class T>
struct Trace {
    std::vector<double> losses;
    std::vector<double> norms;                                   // of the gradients, before they are clipped
    std::vector<std::vector<std::vector<T>>> values;             // one set more than there are steps
    std::vector<std::vector<std::vector<T>>> grads;              // clipped, if they are
    std::vector<std::map<std::string, std::vector<T>>> moments;  // "block0.fc1.weight.exp_avg"
};

// Gives a step's gradients, and returns its loss.
template <class T>
double pass_alone(Chain<T>& chain, const MlpParams<T>& params, const Examples<T>& examples, const Passes& passes) {
    const auto m = static_cast<size_t>(passes.microbatches);
    const auto blocks = static_cast<size_t>(chain.blocks);
    const auto of_block = [&](size_t block) {
        const auto at = [=](size_t p) { return block * Mlp::params + p; };
        return MlpParams<T>{[=, &params](size_t p) { return params.value(at(p)); },
                            [=, &params](size_t p) { return params.grad(at(p)); }};
    };
    std::vector<std::vector<MlpPass<T>>> kept(blocks, std::vector<MlpPass<T>>(m));
    double loss = 0;
    for (size_t i = 0; i < m; ++i) {
        const auto part = pipeline::rows_of_part(batch_rows, passes.microbatches, static_cast<int>(i));
        std::vector<T> x = rows_of(examples.inputs, part);
        for (size_t block = 0; block < blocks; ++block) {
            const int k = static_cast<int>(block);
            kept[block][i] = {.inputs = chain.inputs(k), .width = chain.hidden(k), .outputs = chain.outputs(k)};
            x = kept[block][i].forward(of_block(block), {}, std::move(x));
        }
        double own = 0;
        std::vector<T> dy = distance(std::move(x), rows_of(examples.targets, part), static_cast<T>(row_weight), own);
        loss += own;
        for (size_t block = blocks; block-- > 0;)
            dy = kept[block][i].backward_input(of_block(block), {}, std::move(dy));
    }
    for (size_t block = 0; block < blocks; ++block) {
        for (const int i : passes.order(static_cast<int>(block))) {
            kept[block][static_cast<size_t>(i)].backward_weight(of_block(block));
        }
    }
    return loss * row_weight;
}

template <class T>
std::map<std::string, std::vector<T>> moments_of(const Optimizer& adam) {
    std::map<std::string, std::vector<T>> moments;
    for (const Moment& moment : adam.moments()) {
        if (moment.name == step_moment) continue;
        const auto numbers = moment.tensor.template as<T>();
        moments[moment.param + "." + moment.name] = {numbers.begin(), numbers.end()};
    }
    return moments;
}

template <class T>
Trace<T> train_alone(int blocks, int steps, bool clip, const Passes& passes = {}) {
    Chain<T> chain(blocks);
    std::vector<std::vector<T>> grads;
    std::vector<OptimizerParam> own;
    for (const std::vector<T>& value : chain.values) grads.emplace_back(value.size());
    for (size_t p = 0; p < chain.values.size(); ++p) {
        own.push_back({chain.name(p), chain.named(p).tensor, tensor_of_shape(grads[p], chain.shape(p))});
    }
    Adam adam(own, adam_options);
    const MlpParams<T> params{[&](size_t p) { return std::span(chain.values[p]); },
                              [&](size_t p) { return std::span(grads[p]); }};
    Trace<T> trace;
    for (int step = 0; step < steps; ++step) {
        trace.values.push_back(chain.values);
        trace.moments.push_back(moments_of<T>(adam));
        adam.zero_grad();
        trace.losses.push_back(pass_alone(chain, params, Examples<T>(blocks, step), passes));
        if (clip) trace.norms.push_back(adam.clip_grad_norm(clip_at, 2));
        trace.grads.push_back(grads);
        adam.step();
    }
    trace.values.push_back(chain.values);
    return trace;
}

}  // namespace tsr::testing
