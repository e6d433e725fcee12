// The optimizer that updates parameters in the backward pass, as seen by jobs in a communicator's queue. It may be
// destroyed at any time; then there is none.
#pragma once

#include <functional>
#include <mutex>
#include <span>

#include "optim/optimizer.hpp"

namespace tsr {

class BackwardStep {
   public:
    [[nodiscard]] bool is_on();
    void set(Optimizer& optimizer);
    // Call this before `ending` is destroyed. When it returns, no call on the optimizer is running and none will begin.
    void forget(const Optimizer& ending);

    // Both do nothing without an optimizer.
    void step(std::span<const size_t> params);
    void end_step();
    // Throws INVALID_STATE if the optimizer was destroyed.
    void with(const std::function<void(Optimizer& optimizer)>& call);

   private:
    std::mutex mutex_;  // guards the optimizer's lifetime
    Optimizer* optimizer_ = nullptr;
};

}  // namespace tsr
