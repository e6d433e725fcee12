// The arithmetic of batches: train batch = micro-batch * accumulation * data-parallel ranks. Pure functions.
#pragma once

#include <cstdint>
#include <optional>

namespace tsr {

// What a configuration gives; a missing number follows from the others.
struct BatchConfig {
    std::optional<int64_t> train;         // train_batch_size: samples of all ranks per step of the optimizer
    std::optional<int64_t> micro;         // train_micro_batch_size_per_gpu: samples of a rank per backward pass
    std::optional<int64_t> accumulation;  // gradient_accumulation_steps: backward passes per step of the optimizer
};

struct BatchSizes {
    int64_t train = 0;
    int64_t micro = 0;
    int64_t accumulation = 0;
    friend bool operator==(const BatchSizes&, const BatchSizes&) = default;
};

// `ranks`: the data-parallel ranks, at least 1. Each throws INVALID_ARGUMENT with the formula and all its numbers.
[[nodiscard]] BatchSizes solve_batch(const BatchConfig& given, int ranks);
// Another train batch, by another accumulation.
[[nodiscard]] BatchSizes with_train_batch(const BatchSizes& now, int64_t train, int ranks);
// Another micro-batch, and so another train batch.
[[nodiscard]] BatchSizes with_micro_batch(const BatchSizes& now, int64_t micro, int ranks);

}  // namespace tsr
