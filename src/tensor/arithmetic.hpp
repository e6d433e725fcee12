// Sums and quotients of floating-point tensors in place, element by element. f16 and bf16 are computed in f32 and
// rounded once.
#pragma once

#include "tensor/tensor.hpp"

namespace tsr {

void divide(const Tensor& tensor, double divisor);
// Both must have the same dtype and number of elements.
void add(const Tensor& sum, const Tensor& more);

}  // namespace tsr
