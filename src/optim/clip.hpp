// Clipping of gradients, as in torch.nn.utils.clip_grad_norm_ and clip_grad_value_, and scaling. Sums use doubles in an
// order that depends only on sizes, so repeated runs give the same bits.
#pragma once

#include <cstddef>
#include <span>

#include "optim/optimizer.hpp"

namespace tsr {

// Over this rank's part of the gradients: the sum of |g|^p, or the largest |g| if p is infinite. Gradients that several
// ranks hold count only on the first of them, and those that are not `counted` not at all. NaN if any gradient is NaN.
[[nodiscard]] double power_sum(std::span<const OptimizerParam> params, double p);
// The sum of (|g| / unit)^p, for gradients whose powers overflow.
[[nodiscard]] double power_sum_in(double unit, std::span<const OptimizerParam> params, double p);
void scale_grads(std::span<const OptimizerParam> params, double factor);
// Returns whether all scaled gradients are finite.
[[nodiscard]] bool scale_grads_finitely(std::span<const OptimizerParam> params, double factor);
void bound_grads(std::span<const OptimizerParam> params, double most);

}  // namespace tsr
