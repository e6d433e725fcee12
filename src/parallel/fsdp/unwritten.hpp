// Whether a gradient was written: its first and last element hold a signalling NaN that no arithmetic gives until then. One
// of another shape, which is shorter, leaves the last one.
#pragma once

#include "tensor/tensor.hpp"

namespace tsr {

void mark_unwritten(const Tensor& grad);

// Of a marked one. One without elements is written.
[[nodiscard]] bool is_unwritten(const Tensor& grad);

}  // namespace tsr
