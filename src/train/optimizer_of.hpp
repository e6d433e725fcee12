// Optimizers of a model: over the parameters of a DDP model, or the shards of an FSDP model.
#pragma once

#include <memory>
#include <vector>

#include "base/function_ref.hpp"
#include "optim/optimizer.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"

namespace tsr {

// Makes an optimizer of some kind; its moments lie in `copy`, if there is one.
using MakeOptimizer =
    FunctionRef<std::shared_ptr<Optimizer>(std::vector<OptimizerParam> params, std::shared_ptr<SharedCopy> copy)>;

// The optimizer keeps the model alive, and refuses to touch gradients that are being reduced, or to step again before others
// were. If the ranks of a host share the parameters they share the moments, and the optimizer steps in the backward pass.
[[nodiscard]] std::shared_ptr<Optimizer> optimizer_of(const std::shared_ptr<Ddp>& model, MakeOptimizer make);
// Of the shards that are trained. Between steps alone, while no unit is whole.
[[nodiscard]] std::shared_ptr<Optimizer> optimizer_of(const std::shared_ptr<Fsdp>& model, MakeOptimizer make);

// Lets `optimizer`, which optimizer_of(model) has made (else INVALID_ARGUMENT), step in the model's backward pass.
void step_in_backward(Ddp& model, Optimizer& optimizer);

}  // namespace tsr
