// Named parameters and buffers of a model, as the trainer registers them, and the checks that DDP and FSDP share.
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

// Throws INVALID_ARGUMENT unless the list is not empty, names are unique and not empty, and no two tensors share memory.
void check_distinct(std::span<const NamedTensor> params);

// Throws INVALID_ARGUMENT unless the parameter can have a gradient, that is, is a floating-point tensor.
void check_trained(const NamedTensor& param);

// One line per tensor for check_same_on_all_ranks (comm/fingerprint.hpp): `parameter 3 "fc1.bias" f32 [128]`, with " on CUDA"
// behind it for one that is on a device, whose number is the rank's own affair.
[[nodiscard]] std::vector<std::string> description(std::span<const NamedTensor> tensors, std::string_view kind);

// An INVALID_ARGUMENT error: the model has only `count` of `what` ("unit").
[[nodiscard]] Error no_such(std::string_view what, size_t index, size_t count);

}  // namespace tsr
