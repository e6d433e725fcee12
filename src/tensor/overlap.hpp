// Finds tensors that share memory.
#pragma once

#include <optional>
#include <span>
#include <utility>

#include "tensor/tensor.hpp"

namespace tsr {

// The indices of two tensors that have bytes in common, the smaller one first; none: there are no two. What has no memory or no
// elements has nothing in common with others.
[[nodiscard]] std::optional<std::pair<size_t, size_t>> find_overlap(std::span<const Tensor> tensors);

}  // namespace tsr
