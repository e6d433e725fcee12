// A perceptron of two layers with a gain on its inputs, the first layer cut by columns and the second by rows, computed from
// whatever its parameters and gradients lie in; and the same on one rank.
#pragma once

#include <cmath>
#include <functional>
#include <span>
#include <utility>
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

// What moves activations between the layers: nothing on one rank, or the calls of a tensor-parallel model.
template <class T>
struct Moves {
    using Move = std::function<std::vector<T>(std::vector<T> activation, size_t features)>;
    static Move nothing() {
        return [](std::vector<T> activation, size_t) { return activation; };
    }
    Move enter = nothing();
    Move enter_backward = nothing();
    Move leave = nothing();
    Move leave_backward = nothing();
};

// Where the values and gradients of the parameters lie.
template <class T>
struct MlpParams {
    using Spans = std::function<std::span<T>(size_t param)>;
    Spans value;
    Spans grad;
};

// One batch of rows on its way through the layers and back. The gradients of the weights may be added later than that of
// the inputs is computed; all that is moved is moved before.
template <class T>
struct MlpPass {
    size_t inputs;
    size_t width;
    size_t outputs;
    std::vector<T> x, entered, h;                       // kept by forward
    std::vector<T> output_grad, left, dh, scaled_grad;  // kept by backward_input

    std::vector<T> forward(const MlpParams<T>& params, const Moves<T>& moves, std::vector<T> input) {
        x = std::move(input);
        std::vector<T> scaled = x;
        for (size_t i = 0; i < x.size(); ++i) scaled[i] *= params.value(Mlp::gain)[i % inputs];
        entered = moves.enter(std::move(scaled), inputs);
        const size_t count = entered.size() / inputs;
        h.assign(count * width, 0);
        multiply_transposed(entered, params.value(Mlp::w1), h, count, width, inputs);
        for (size_t i = 0; i < h.size(); ++i) h[i] = std::tanh(h[i] + params.value(Mlp::b1)[i % width]);
        std::vector<T> part(count * outputs, 0);
        multiply_transposed(h, params.value(Mlp::w2), part, count, outputs, width);
        std::vector<T> y = moves.leave(std::move(part), outputs);
        for (size_t i = 0; i < y.size(); ++i) y[i] += params.value(Mlp::b2)[i % outputs];
        return y;
    }

    // Returns the gradient of the inputs.
    std::vector<T> backward_input(const MlpParams<T>& params, const Moves<T>& moves, std::vector<T> dy) {
        output_grad = dy;
        left = moves.leave_backward(std::move(dy), outputs);
        const size_t count = left.size() / outputs;
        dh.assign(count * width, 0);
        multiply(left, params.value(Mlp::w2), dh, count, width, outputs);
        for (size_t i = 0; i < dh.size(); ++i) dh[i] *= 1 - h[i] * h[i];
        std::vector<T> summand(count * inputs, 0);
        multiply(dh, params.value(Mlp::w1), summand, count, inputs, width);
        scaled_grad = moves.enter_backward(std::move(summand), inputs);
        std::vector<T> dx = scaled_grad;
        for (size_t i = 0; i < dx.size(); ++i) dx[i] *= params.value(Mlp::gain)[i % inputs];
        return dx;
    }

    // Adds the gradients of the parameters.
    void backward_weight(const MlpParams<T>& params) const {
        const size_t count = left.size() / outputs;
        for (size_t i = 0; i < output_grad.size(); ++i) params.grad(Mlp::b2)[i % outputs] += output_grad[i];
        multiply_first_transposed(left, h, params.grad(Mlp::w2), outputs, width, count);
        for (size_t i = 0; i < dh.size(); ++i) params.grad(Mlp::b1)[i % width] += dh[i];
        multiply_first_transposed(dh, entered, params.grad(Mlp::w1), width, inputs, count);
        for (size_t i = 0; i < x.size(); ++i) params.grad(Mlp::gain)[i % inputs] += scaled_grad[i] * x[i];
    }
};

struct StepResult {
    std::vector<double> y;
    std::vector<double> dx;
};

// Forward and backward of the rows `x`, whose outputs have the gradients `dy`; adds to the gradients.
inline StepResult mlp_step(std::vector<double> x, std::vector<double> dy, size_t width,
                           const MlpParams<double>::Spans& value, const MlpParams<double>::Spans& grad,
                           const Moves<double>& moves) {
    const MlpParams<double> params{value, grad};
    MlpPass<double> pass{.inputs = Mlp::inputs, .width = width, .outputs = Mlp::outputs};
    StepResult result;
    result.y = pass.forward(params, moves, std::move(x));
    result.dx = pass.backward_input(params, moves, std::move(dy));
    pass.backward_weight(params);
    return result;
}

// The moves of a model; with `cut`, activations outside of regions are cut along `rows` rows.
template <class T = double>
Moves<T> moves_of(TensorParallel& tp, bool cut, size_t rows) {
    const int n = tp.comm()->world_size();
    const int rank = tp.comm()->rank();
    const int dim = cut ? 0 : -1;
    const auto whole = [rows](size_t features) {
        return Dims{static_cast<int64_t>(rows), static_cast<int64_t>(features)};
    };
    const auto own = [=](size_t features) { return cut ? part_shape(whole(features), 0, n, rank) : whole(features); };
    const auto gather = [=, &tp](std::vector<T> in, size_t features) {
        std::vector<T> out;
        tp.enter(tensor_of_shape(in, own(features)), tensor_of_shape(out, whole(features)), dim, nullptr, nullptr);
        return out;
    };
    const auto sum = [=, &tp](std::vector<T> in, size_t features) {
        std::vector<T> out;
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
