// Named parameters and buffers of a model, as the trainer registers them: what every way of training in parallel asks of
// them.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

struct NamedTensor {
    std::string name;
    Tensor tensor;
};

// The name without leading "module." and "_orig_mod.", however many.
[[nodiscard]] std::string without_wrappers(std::string name);

// Throws INVALID_ARGUMENT or UNSUPPORTED unless there are some, their names differ and are not empty, and all are on the
// CPU.
void check_params(std::span<const NamedTensor> params);

// INVALID_ARGUMENT unless it can have a gradient: a floating-point tensor.
void check_trained(const NamedTensor& param);

// A line each for check_same_on_all_ranks (comm/fingerprint.hpp): `parameter 3 "fc1.bias" f32 [128]`.
[[nodiscard]] std::vector<std::string> description(std::span<const NamedTensor> tensors, std::string_view kind);

// INVALID_ARGUMENT: of the `what`s ("unit") of a model there are `count`.
[[nodiscard]] Error no_such(std::string_view what, size_t index, size_t count);

}  // namespace tsr
