// Detects whether a gradient was written: until then its first and last element hold a signalling NaN that no
// arithmetic produces. A gradient of the wrong, shorter shape leaves the last one.
#pragma once

#include "tensor/tensor.hpp"

namespace tsr {

void mark_unwritten(const Tensor& grad);

// For a marked gradient. One without elements counts as written.
[[nodiscard]] bool is_unwritten(const Tensor& grad);

}  // namespace tsr
