// How a batch is cut into micro-batches, and what each counts in the loss.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tensor/tensor.hpp"

namespace tsr::pipeline {

// The rows of `tensors` along dimension 0, which all have; 0 without tensors. Throws INVALID_ARGUMENT if they differ or
// are fewer than `microbatches`; `what` names the tensors: "batch".
[[nodiscard]] int64_t rows_of(std::span<const Tensor> tensors, int microbatches, std::string_view what);

struct Rows {
    int64_t begin = 0;
    int64_t count = 0;
};
// As torch.tensor_split: the first rows % microbatches parts have one row more than the others.
[[nodiscard]] Rows rows_of_part(int64_t rows, int microbatches, int part);

// Views of part `part` of each tensor.
[[nodiscard]] std::vector<Tensor> part_of(std::span<const Tensor> tensors, int microbatches, int part);

// The factor of each micro-batch's loss: `given`; without it each micro-batch's share of the `rows` of the targets, or
// equal shares if there are none. Throws INVALID_ARGUMENT for a number that is not finite.
[[nodiscard]] std::vector<double> weights_of(std::span<const double> given, int64_t rows, int microbatches);

}  // namespace tsr::pipeline
