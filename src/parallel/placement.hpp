// Where a model is: all of it on the CPU, or all of it on the CUDA device of its communicator.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "parallel/params.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

// The device of a model's parameters, of which there is at least one. `own`: the communicator's, if it has one. Throws
// INVALID_ARGUMENT or UNSUPPORTED if they are not all in one place, or on another device.
[[nodiscard]] Device device_of(std::span<const NamedTensor> params, const std::optional<Device>& own);
// Throws INVALID_ARGUMENT or UNSUPPORTED, beginning with `what` ("parameter \"w\""), unless the tensor is on `own`, with its
// memory, if it has any.
void check_on_device(const Tensor& tensor, const std::string& what, const std::optional<Device>& own);
// Throws UNSUPPORTED, beginning with `what`, if the device has no kernels, and how to get them.
void require_kernels_for(const std::string& what, Device device);

}  // namespace tsr
