#include "parallel/ddp/backward_step.hpp"

#include "base/error.hpp"

namespace tsr {

bool BackwardStep::is_on() {
    const std::lock_guard lock(mutex_);
    return optimizer_ != nullptr;
}

void BackwardStep::set(Optimizer& optimizer) {
    const std::lock_guard lock(mutex_);
    optimizer_ = &optimizer;
}

void BackwardStep::forget(const Optimizer& ending) {
    const std::lock_guard lock(mutex_);
    if (optimizer_ == &ending) optimizer_ = nullptr;
}

void BackwardStep::step(std::span<const size_t> params) {
    const std::lock_guard lock(mutex_);
    if (optimizer_ != nullptr) optimizer_->step_some(params);
}

void BackwardStep::end_step() {
    const std::lock_guard lock(mutex_);
    if (optimizer_ != nullptr) optimizer_->end_step();
}

void BackwardStep::with(const std::function<void(Optimizer& optimizer)>& call) {
    const std::lock_guard lock(mutex_);
    if (optimizer_ == nullptr) {
        throw Error(Code::invalid_state, "the optimizer of a model with share_params was destroyed during a step");
    }
    call(*optimizer_);
}

}  // namespace tsr
