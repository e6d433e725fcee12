// Adds models, optimizers, scalers, schedules, samplers and metrics to a state: their tensors under their names, and their numbers as
// values. A state keeps alive what was added. Each function adds everything or, if it throws, nothing.
#pragma once

#include <memory>
#include <string>

#include "checkpoint/model/state.hpp"
#include "data/sampler.hpp"
#include "metrics/metric.hpp"
#include "optim/grad_scaler.hpp"
#include "optim/lr_schedule.hpp"
#include "optim/optimizer.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/tensor/tensor_parallel.hpp"

namespace tsr {

// "<prefix>.<parameter>"
void add_ddp(State& state, const std::string& prefix, const std::shared_ptr<Ddp>& model);
// The same names, with this rank's shard of each tensor.
void add_fsdp(State& state, const std::string& prefix, const std::shared_ptr<Fsdp>& model);
// The same names, with this rank's slice of each tensor.
void add_tp(State& state, const std::string& prefix, const std::shared_ptr<TensorParallel>& model);
// PyTorch's names: "<prefix>.state.<parameter>.<moment>" and "<prefix>.param_groups.0.<setting>".
void add_optimizer(State& state, const std::string& prefix, const std::shared_ptr<Optimizer>& optimizer);
// "<prefix>.<setting>"
void add_grad_scaler(State& state, const std::string& prefix, const std::shared_ptr<GradScaler>& scaler);
// "<prefix>.schedule", which identifies it, "<prefix>.steps" and "<prefix>.base_lrs".
void add_lr_schedule(State& state, const std::string& prefix, const std::shared_ptr<LrSchedule>& schedule);
// "<prefix>.epoch", "<prefix>.consumed" and the values that identify the order of samples.
void add_sampler(State& state, const std::string& prefix, const std::shared_ptr<Sampler>& sampler);
// "<prefix>.kind", "<prefix>.state". Rank 0 of the metric's ranks has all samples.
void add_metric(State& state, const std::string& prefix, const std::shared_ptr<metrics::Metric>& metric, int rank);

}  // namespace tsr
