// The optimizer that updates parameters in the backward pass, as the jobs in a communicator's queue see it: none once it has
// ended, which may be at any time.
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
    // Before `ending` ends. A call of it that goes on is over when this returns, and no other begins.
    void forget(const Optimizer& ending);

    // Both do nothing without an optimizer.
    void step(std::span<const size_t> params);
    void end_step();
    // Throws INVALID_STATE if there is none any more.
    void with(const std::function<void(Optimizer& optimizer)>& call);

   private:
    std::mutex mutex_;  // guards the optimizer's life
    Optimizer* optimizer_ = nullptr;
};

}  // namespace tsr
