// A model small enough to compute by hand: stages of x -> tanh(x W + b) in f64, and at the end half the squared
// distance from the targets, a mean over rows. Trained by a pipeline of ranks, and by one process for comparison. Both
// use the same arithmetic in the same order, so that results can be compared bit by bit.
#pragma once

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "parallel/model.hpp"
#include "parallel/pipeline/microbatches.hpp"
#include "parallel/pipeline/pipeline.hpp"
#include "ranks.hpp"

namespace tsr::testing {

using Values = std::vector<double>;
using pipeline::Batch;
using pipeline::Callbacks;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Schedule;
using pipeline::StageCall;

inline Tensor matrix(Values& values, size_t rows) {
    Tensor tensor = tensor_of(std::span(values), DType::f64);
    tensor.shape = Dims{static_cast<int64_t>(rows), static_cast<int64_t>(values.size() / rows)};
    return tensor;
}

// Numbers between -1 and 1 that differ from place to place.
inline Values numbers(size_t count, int seed) {
    Values values(count);
    for (size_t i = 0; i < count; ++i) values[i] = std::sin(static_cast<double>(i * 7 + 1) + seed * 1.7);
    return values;
}

struct Layer {
    size_t in = 0;
    size_t out = 0;
    Values w, b, dw, db;

    Layer(size_t from, size_t to, int seed)
        : in(from), out(to), w(numbers(from * to, seed)), b(numbers(to, seed + 100)), dw(from * to), db(to) {}

    void forward(std::span<const double> x, std::span<double> y) const {
        for (size_t row = 0; row < y.size() / out; ++row) {
            for (size_t j = 0; j < out; ++j) {
                double z = b[j];
                for (size_t i = 0; i < in; ++i) z += x[row * in + i] * w[i * out + j];
                y[row * out + j] = std::tanh(z);
            }
        }
    }
    [[nodiscard]] Values dz(std::span<const double> y, std::span<const double> dy) const {
        Values result(y.size());
        for (size_t i = 0; i < y.size(); ++i) result[i] = dy[i] * (1 - y[i] * y[i]);
        return result;
    }
    void backward_input(std::span<const double> y, std::span<const double> dy, std::span<double> dx) const {
        const Values z = dz(y, dy);
        for (size_t row = 0; row < dx.size() / in; ++row) {
            for (size_t i = 0; i < in; ++i) {
                for (size_t j = 0; j < out; ++j) dx[row * in + i] += z[row * out + j] * w[i * out + j];
            }
        }
    }
    void backward_weight(std::span<const double> x, std::span<const double> y, std::span<const double> dy) {
        const Values z = dz(y, dy);
        for (size_t row = 0; row < y.size() / out; ++row) {
            for (size_t j = 0; j < out; ++j) {
                db[j] += z[row * out + j];
                for (size_t i = 0; i < in; ++i) dw[i * out + j] += x[row * in + i] * z[row * out + j];
            }
        }
    }
};

// Stages have different widths, so that no shape fits by chance.
inline size_t width_of(int stage) { return 2 + static_cast<size_t>(stage % 3); }
inline Layer layer_of(int stage) { return {width_of(stage), width_of(stage + 1), stage}; }

inline double loss_of(std::span<const double> y, std::span<const double> targets, size_t rows) {
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += (y[i] - targets[i]) * (y[i] - targets[i]) / 2;
    return sum / static_cast<double>(rows);
}
inline Values loss_grad(std::span<const double> y, std::span<const double> targets, size_t rows, double weight) {
    Values dy(y.size());
    for (size_t i = 0; i < y.size(); ++i) dy[i] = weight * ((y[i] - targets[i]) / static_cast<double>(rows));
    return dy;
}

// What training leaves behind.
struct Results {
    Values losses;
    std::map<int, Layer> layers;                        // with their gradients
    std::map<std::pair<int, int>, Values> input_grads;  // by stage, from 1 on, and micro-batch
};

// One rank's trainer. The pipeline must not outlive it.
class Trainer {
   public:
    explicit Trainer(const std::vector<int>& stages) {
        for (const int stage : stages) results.layers.emplace(stage, layer_of(stage));
    }
    // The callbacks use the pipeline of this trainer, which is made with them.
    [[nodiscard]] Callbacks callbacks() {
        return {[this](const StageCall& call) { forward(call); },
                [this](const StageCall& call) { backward(call, true, true); },
                [this](const StageCall& call) { backward(call, true, false); },
                [this](const StageCall& call) { backward(call, false, true); }};
    }
    Pipeline& join(Communicator& comm, const std::vector<int>& stages, const PipelineOptions& options) {
        pipe = std::make_unique<Pipeline>(shared(comm), stages, options, callbacks());
        return *pipe;
    }

    Results results;
    std::vector<std::string> last_backwards;  // "2B8"
    std::function<void(const StageCall&)> before_each;
    std::function<void(const StageCall&)> after_each_backward;
    std::unique_ptr<Pipeline> pipe;

   private:
    void forward(const StageCall& call) {
        if (before_each) before_each(call);
        const Layer& layer = results.layers.at(call.stage);
        const auto rows = call.inputs[0].shape[0];
        const Tensor& y = pipe->output(DType::f64, Dims{rows, static_cast<int64_t>(layer.out)});
        layer.forward(call.inputs[0].as<double>(), y.as<double>());
        if (call.targets.empty()) return;
        pipe->loss(loss_of(y.as<double>(), call.targets[0].as<double>(), static_cast<size_t>(rows)));
    }
    void backward(const StageCall& call, bool input, bool weight) {
        if (before_each) before_each(call);
        if (call.is_last_backward)
            last_backwards.push_back(pipeline::text_of(
                {call.work, false, static_cast<uint16_t>(call.stage), static_cast<uint32_t>(call.microbatch)}));
        Layer& layer = results.layers.at(call.stage);
        const auto x = call.inputs[0].as<double>();
        const auto y = call.outputs[0].as<double>();
        const Values dy =
            call.targets.empty()
                ? Values(call.output_grads[0].as<double>().begin(), call.output_grads[0].as<double>().end())
                : loss_grad(y, call.targets[0].as<double>(), static_cast<size_t>(call.inputs[0].shape[0]), call.weight);
        if (input && call.stage > 0) {
            const auto dx = call.input_grads[0].as<double>();
            layer.backward_input(y, dy, dx);
            results.input_grads[{call.stage, call.microbatch}] = Values(dx.begin(), dx.end());
        }
        if (weight) layer.backward_weight(x, y, dy);
        if (after_each_backward) after_each_backward(call);
    }
};

// The same by one process. Each stage adds its gradients in the order in which the schedule lets it.
inline void train_alone(const Schedule& schedule, Results& results, Values& batch, Values& targets, size_t rows) {
    const int m = schedule.microbatches;
    const int stages = schedule.stages();
    if (results.layers.empty()) {
        for (int stage = 0; stage < stages; ++stage) results.layers.emplace(stage, layer_of(stage));
    }
    const Tensor inputs = matrix(batch, rows);
    const Tensor goals = matrix(targets, rows);
    std::map<std::pair<int, int>, Values> x;
    std::map<std::pair<int, int>, Values> dy;
    results.losses.assign(static_cast<size_t>(m), 0);
    for (int i = 0; i < m; ++i) {
        const auto part = pipeline::part_of({&inputs, 1}, m, i)[0];
        const auto goal = pipeline::part_of({&goals, 1}, m, i)[0];
        const auto part_rows = static_cast<size_t>(part.shape[0]);
        x[{0, i}] = Values(part.as<double>().begin(), part.as<double>().end());
        for (int stage = 0; stage < stages; ++stage) {
            Values& y = x[{stage + 1, i}];
            y.resize(part_rows * results.layers.at(stage).out);
            results.layers.at(stage).forward(x[{stage, i}], y);
        }
        results.losses[static_cast<size_t>(i)] = loss_of(x[{stages, i}], goal.as<double>(), part_rows);
        dy[{stages - 1, i}] = loss_grad(x[{stages, i}], goal.as<double>(), part_rows,
                                        static_cast<double>(part_rows) / static_cast<double>(rows));
        for (int stage = stages - 1; stage > 0; --stage) {
            Values& dx = dy[{stage - 1, i}];
            dx.assign(x[{stage, i}].size(), 0);
            results.layers.at(stage).backward_input(x[{stage + 1, i}], dy[{stage, i}], dx);
            results.input_grads[{stage, i}] = dx;
        }
    }
    for (const auto& order : schedule.orders) {
        for (const auto& action : order) {
            if (action.work != pipeline::Work::backward && action.work != pipeline::Work::backward_weight) continue;
            const int i = static_cast<int>(action.microbatch);
            results.layers.at(action.stage)
                .backward_weight(x[{action.stage, i}], x[{action.stage + 1, i}], dy[{action.stage, i}]);
        }
    }
}

inline std::vector<int> stages_of(const Schedule& schedule, int rank) {
    std::vector<int> stages;
    for (int stage = 0; stage < schedule.stages(); ++stage) {
        if (schedule.rank_of_stage[static_cast<size_t>(stage)] == rank) stages.push_back(stage);
    }
    return stages;
}

inline PipelineOptions options_of(const std::string& schedule, int microbatches) {
    PipelineOptions options;
    options.schedule = schedule;
    options.microbatches = microbatches;
    return options;
}

// A batch for the first stage, and targets for a last stage of `stages`.
struct Data {
    size_t rows;
    Values inputs;
    Values targets;

    Data(size_t count, int stages, int seed)
        : rows(count),
          inputs(numbers(count * width_of(0), seed)),
          targets(numbers(count * width_of(stages), seed + 1)) {}

    // One pass with it. Ranks that do not have the first or last stage are given what they ignore.
    Values step(Pipeline& pipe) { return run(&Pipeline::step, pipe); }
    Values eval(Pipeline& pipe) { return run(&Pipeline::eval, pipe); }

   private:
    Values run(std::span<const double> (Pipeline::*pass)(const Batch&), Pipeline& pipe) {
        const Tensor x = matrix(inputs, rows);
        const Tensor t = matrix(targets, rows);
        const auto losses = (pipe.*pass)({{&x, 1}, {&t, 1}, {}});
        return {losses.begin(), losses.end()};
    }
};

inline void expect_same(const Results& got, const Results& wanted) {
    for (const auto& [stage, layer] : got.layers) {
        EXPECT_THAT(layer.dw, ::testing::ElementsAreArray(wanted.layers.at(stage).dw)) << "stage " << stage;
        EXPECT_THAT(layer.db, ::testing::ElementsAreArray(wanted.layers.at(stage).db)) << "stage " << stage;
    }
    for (const auto& [place, grad] : got.input_grads) {
        EXPECT_THAT(grad, ::testing::ElementsAreArray(wanted.input_grads.at(place)))
            << "stage " << place.first << ", micro-batch " << place.second;
    }
}

}  // namespace tsr::testing
