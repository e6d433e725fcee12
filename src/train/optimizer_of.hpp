// Optimizers over the parameters of a DDP model, the shards of an FSDP model or the slices of a tensor-parallel one.
#pragma once

#include <memory>
#include <vector>

#include "base/function_ref.hpp"
#include "optim/optimizer.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/tensor/tensor_parallel.hpp"

namespace tsr {

// Creates an optimizer of some kind; its moments are stored in `copy`, if there is one.
using MakeOptimizer =
    FunctionRef<std::shared_ptr<Optimizer>(std::vector<OptimizerParam> params, std::shared_ptr<SharedCopy> copy)>;

// The optimizer keeps the model alive. It refuses to touch gradients that are being reduced, or to step again before
// new gradients were reduced. If the ranks of a host share the parameters, they also share the moments, and the
// optimizer steps in the backward pass.
[[nodiscard]] std::shared_ptr<Optimizer> optimizer_of(const std::shared_ptr<Ddp>& model, MakeOptimizer make);
// Over the trained shards. It works only between steps, while no unit is unsharded.
[[nodiscard]] std::shared_ptr<Optimizer> optimizer_of(const std::shared_ptr<Fsdp>& model, MakeOptimizer make);
// Over the slices that have gradients, and their gradients.
[[nodiscard]] std::shared_ptr<Optimizer> optimizer_of(const std::shared_ptr<TensorParallel>& model, MakeOptimizer make);

// Joins the optimizers of ranks that have different parameters: norms and overflows of gradients are those of all of them
// together. A parameter that several have under one name counts once. Collective, once per optimizer, before its model's
// ranks use it. Throws INVALID_ARGUMENT, on every rank, if two hold different parts of a parameter.
void join_optimizers(Optimizer& optimizer, const std::shared_ptr<Communicator>& comm);

// Lets `optimizer` step in the model's backward pass; INVALID_ARGUMENT unless optimizer_of(model) created it, UNSUPPORTED if it
// needs norms of parameters of which ranks hold slices.
void step_in_backward(Ddp& model, Optimizer& optimizer);

}  // namespace tsr
