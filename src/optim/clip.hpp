// Bounds on gradients, as torch.nn.utils.clip_grad_norm_ and clip_grad_value_ set them, and their scale. Sums are of doubles, in an order that
// depends on sizes alone, so that repeats have the same bits.
#pragma once

#include <cstddef>
#include <span>

#include "optim/optimizer.hpp"

namespace tsr {

// Of this rank's part of the gradients: the sum of |g|^p, or the largest |g| where p is infinite. What several ranks hold
// counts on the first of them alone. NaN if one is.
[[nodiscard]] double power_sum(std::span<const OptimizerParam> params, double p);
void scale_grads(std::span<const OptimizerParam> params, double factor);
// Returns whether all are finite then.
[[nodiscard]] bool scale_grads_finitely(std::span<const OptimizerParam> params, double factor);
void bound_grads(std::span<const OptimizerParam> params, double most);

}  // namespace tsr
