// Ranges of a CUDA device's addresses and the pages that they show (the driver's virtual memory management). Nothing of it
// belongs to a context.
#pragma once

#include <memory>
#include <string>

#include "base/function_ref.hpp"
#include "device/cuda/driver.hpp"
#include "device/device.hpp"

namespace tsr::cuda {

// `what` begins the message of an error, as for check().
[[nodiscard]] std::shared_ptr<void> make_pages(const Driver& functions, Number device, size_t size,
                                               FunctionRef<std::string()> what);
[[nodiscard]] std::unique_ptr<DeviceRange> make_range(const Driver& functions, Number device, const std::string& name,
                                                      size_t size);

}  // namespace tsr::cuda
