// What the tests of metrics share: tensors over vectors, and a metric computed by several ranks.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "metrics/metric.hpp"
#include "ranks.hpp"

namespace tsr::metrics {

template <class T>
constexpr DType dtype_of() {
    if constexpr (std::is_same_v<T, float>) return DType::f32;
    if constexpr (std::is_same_v<T, double>) return DType::f64;
    if constexpr (std::is_same_v<T, int64_t>) return DType::i64;
    if constexpr (std::is_same_v<T, int32_t>) return DType::i32;
    return DType::u8;
}

// Samples, in rows of `columns`.
template <class P = float, class T = int64_t>
struct Data {
    std::vector<P> predictions;
    std::vector<T> targets;
    std::vector<double> weights;
    std::vector<uint8_t> valid;
    size_t columns = 1;
    size_t target_columns = 1;

    [[nodiscard]] size_t rows() const { return predictions.size() / columns; }
    // The rows for which `takes` is true.
    [[nodiscard]] Data part(const std::function<bool(size_t row)>& takes) const {
        Data out;
        out.columns = columns;
        out.target_columns = target_columns;
        const auto take = [](auto& to, const auto& from, size_t row, size_t width) {
            for (size_t c = 0; c < width && !from.empty(); ++c) to.push_back(from[row * width + c]);
        };
        for (size_t row = 0; row < rows(); ++row) {
            if (!takes(row)) continue;
            take(out.predictions, predictions, row, columns);
            take(out.targets, targets, row, target_columns);
            take(out.weights, weights, row, 1);
            take(out.valid, valid, row, 1);
        }
        return out;
    }
};

template <class T>
Tensor matrix_of(const std::vector<T>& values, size_t columns) {
    static T nothing{};
    auto* data = const_cast<T*>(values.empty() ? &nothing : values.data());
    Tensor tensor = tensor_of(std::span(data, values.size()), dtype_of<T>());
    if (columns != 1) tensor.shape = Dims{static_cast<int64_t>(values.size() / columns), static_cast<int64_t>(columns)};
    return tensor;
}

template <class P, class T>
void update(Metric& metric, const Data<P, T>& data, bool has_targets = true) {
    const Tensor predictions = matrix_of(data.predictions, data.columns);
    const Tensor targets = matrix_of(data.targets, data.target_columns);
    const Tensor weights = matrix_of(data.weights, 1);
    const Tensor valid = matrix_of(data.valid, 1);
    metric.update({&predictions, has_targets ? &targets : nullptr, data.weights.empty() ? nullptr : &weights,
                   data.valid.empty() ? nullptr : &valid});
}

// The number and the arrays of a computed metric.
struct Outcome {
    double value = 0;
    std::vector<std::vector<double>> arrays;
    friend bool operator==(const Outcome& one, const Outcome& other) {
        const auto same = [](double a, double b) { return a == b || (a != a && b != b); };
        return same(one.value, other.value) &&
               std::ranges::equal(one.arrays, other.arrays,
                                  [&](const auto& a, const auto& b) { return std::ranges::equal(a, b, same); });
    }
};

inline Outcome outcome_of(Metric& metric, double value, const std::vector<std::string>& arrays) {
    Outcome outcome{value, {}};
    for (const std::string& name : arrays) {
        const Result& result = metric.result(name);
        outcome.arrays.push_back(
            result.counts.empty() ? result.numbers : std::vector<double>(result.counts.begin(), result.counts.end()));
    }
    return outcome;
}

// Of one rank, in two updates.
template <class P, class T>
Outcome alone(Kind kind, const Options& options, const Data<P, T>& data, const std::vector<std::string>& arrays = {},
              bool has_targets = true) {
    const auto metric = Metric::create(kind, options);
    update(*metric, data.part([&](size_t row) { return row < data.rows() / 3; }), has_targets);
    update(*metric, data.part([&](size_t row) { return row >= data.rows() / 3; }), has_targets);
    return outcome_of(*metric, metric->compute(nullptr), arrays);
}

// Of each of `world_size` ranks; `owner` says who has a row.
template <class P, class T>
std::vector<Outcome> together(int world_size, Kind kind, const Options& options, const Data<P, T>& data,
                              const std::function<int(size_t row)>& owner, const std::vector<std::string>& arrays = {},
                              bool has_targets = true) {
    const auto store = make_memory_store(testing::patience(milliseconds{30000}));
    std::vector<Outcome> outcomes(static_cast<size_t>(world_size));
    testing::expect_all_well(testing::run_threads(world_size, [&](int rank) {
        const auto comm = testing::join_job(store, rank, world_size, testing::test_options());
        const auto metric = Metric::create(kind, options);
        update(*metric, data.part([&](size_t row) { return owner(row) == rank; }), has_targets);
        outcomes[static_cast<size_t>(rank)] = outcome_of(*metric, metric->compute(comm), arrays);
        comm->finalize();
    }));
    return outcomes;
}

}  // namespace tsr::metrics
