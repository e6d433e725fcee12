// A perceptron of two layers with a gain on its inputs, the first layer cut by columns and the second by rows, computed from
// whatever its parameters and gradients lie in; and the same on one rank.
#pragma once

#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "parallel/params.hpp"
#include "parallel/tensor/helpers.hpp"
#include "parallel/tensor/plan.hpp"
#include "parallel/tensor/tensor_parallel.hpp"

namespace tsr::testing {

struct Mlp {
    static constexpr size_t rows = 6;  // of the batch
    static constexpr size_t inputs = 5;
    static constexpr size_t outputs = 4;
    enum Param { w1, b1, w2, b2, gain, params };

    size_t hidden;
    std::vector<std::vector<double>> values{params};
    std::vector<double> x = random_numbers(6, rows* inputs);
    std::vector<double> dy = random_numbers(7, rows* outputs);

    explicit Mlp(size_t width) : hidden(width) {
        for (size_t p = 0; p < params; ++p) {
            values[p] = random_numbers(p + 1, static_cast<size_t>(shape(p).product()));
        }
    }

    [[nodiscard]] Dims shape(size_t param) const {
        const auto h = static_cast<int64_t>(hidden);
        const std::vector<Dims> shapes{{h, inputs}, {h}, {outputs, h}, {outputs}, {inputs}};
        return shapes[param];
    }
    [[nodiscard]] std::vector<NamedTensor> named() {
        const std::vector<std::string> names{"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "norm.weight"};
        std::vector<NamedTensor> result;
        for (size_t p = 0; p < params; ++p) result.push_back({names[p], tensor_of_shape(values[p], shape(p))});
        return result;
    }
    static std::vector<TpRule> rules() {
        return {{"fc1", TpStyle::column, 0, {}}, {"fc2", TpStyle::row, 0, {}}, {"norm", TpStyle::sequence, 0, {}}};
    }
};

using Spans = std::function<std::span<double>(size_t param)>;

struct StepResult {
    std::vector<double> y;
    std::vector<double> dx;
};

// What moves activations between the layers: nothing on one rank, or the calls of a tensor-parallel model.
struct Moves {
    using Move = std::function<std::vector<double>(std::vector<double> activation, size_t features)>;
    static Move nothing() {
        return [](std::vector<double> activation, size_t) { return activation; };
    }
    Move enter = nothing();
    Move enter_backward = nothing();
    Move leave = nothing();
    Move leave_backward = nothing();
};

// Forward and backward of the rows `x`, whose outputs have the gradients `dy`; adds to the gradients.
inline StepResult mlp_step(std::vector<double> x, std::vector<double> dy, size_t width, const Spans& value,
                           const Spans& grad, const Moves& moves) {
    constexpr size_t inputs = Mlp::inputs;
    constexpr size_t outputs = Mlp::outputs;
    std::vector<double> scaled = x;
    for (size_t i = 0; i < x.size(); ++i) scaled[i] *= value(Mlp::gain)[i % inputs];
    const std::vector<double> entered = moves.enter(scaled, inputs);
    const size_t count = entered.size() / inputs;
    std::vector<double> h(count * width, 0);
    multiply_transposed(entered, value(Mlp::w1), h, count, width, inputs);
    for (size_t i = 0; i < h.size(); ++i) h[i] = std::tanh(h[i] + value(Mlp::b1)[i % width]);
    std::vector<double> part(count * outputs, 0);
    multiply_transposed(h, value(Mlp::w2), part, count, outputs, width);
    StepResult result;
    result.y = moves.leave(std::move(part), outputs);
    for (size_t i = 0; i < result.y.size(); ++i) result.y[i] += value(Mlp::b2)[i % outputs];

    for (size_t i = 0; i < dy.size(); ++i) grad(Mlp::b2)[i % outputs] += dy[i];
    const std::vector<double> left = moves.leave_backward(std::move(dy), outputs);
    multiply_first_transposed(left, h, grad(Mlp::w2), outputs, width, count);
    std::vector<double> dh(count * width, 0);
    multiply(left, value(Mlp::w2), dh, count, width, outputs);
    for (size_t i = 0; i < dh.size(); ++i) dh[i] *= 1 - h[i] * h[i];
    for (size_t i = 0; i < dh.size(); ++i) grad(Mlp::b1)[i % width] += dh[i];
    multiply_first_transposed(dh, entered, grad(Mlp::w1), width, inputs, count);
    std::vector<double> summand(count * inputs, 0);
    multiply(dh, value(Mlp::w1), summand, count, inputs, width);
    result.dx = moves.enter_backward(std::move(summand), inputs);
    for (size_t i = 0; i < result.dx.size(); ++i) {
        grad(Mlp::gain)[i % inputs] += result.dx[i] * x[i];
        result.dx[i] *= value(Mlp::gain)[i % inputs];
    }
    return result;
}

// The moves of a model; with `cut`, activations outside of regions are cut along `rows` rows.
inline Moves moves_of(TensorParallel& tp, bool cut, size_t rows) {
    const int n = tp.comm()->world_size();
    const int rank = tp.comm()->rank();
    const int dim = cut ? 0 : -1;
    const auto whole = [rows](size_t features) {
        return Dims{static_cast<int64_t>(rows), static_cast<int64_t>(features)};
    };
    const auto own = [=](size_t features) { return cut ? part_shape(whole(features), 0, n, rank) : whole(features); };
    const auto gather = [=, &tp](std::vector<double> in, size_t features) {
        std::vector<double> out;
        tp.enter(tensor_of_shape(in, own(features)), tensor_of_shape(out, whole(features)), dim, nullptr, nullptr);
        return out;
    };
    const auto sum = [=, &tp](std::vector<double> in, size_t features) {
        std::vector<double> out;
        tp.leave(tensor_of_shape(in, whole(features)), tensor_of_shape(out, own(features)), dim, nullptr, nullptr,
                 nullptr);
        return out;
    };
    return {gather, sum, sum, gather};
}

// The same step on one rank; gradients by parameter.
inline std::vector<std::vector<double>> dense_step(Mlp& mlp, StepResult& result) {
    std::vector<std::vector<double>> grads;
    for (const std::vector<double>& value : mlp.values) grads.emplace_back(value.size(), 0);
    result = mlp_step(
        mlp.x, mlp.dy, mlp.hidden, [&](size_t p) { return std::span(mlp.values[p]); },
        [&](size_t p) { return std::span(grads[p]); }, {});
    return grads;
}

inline std::vector<double> numbers_of(const Tensor& tensor) {
    const std::span<double> values = tensor.as<double>();
    return {values.begin(), values.end()};
}

}  // namespace tsr::testing
