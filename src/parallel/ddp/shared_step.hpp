// A step on the copy of parameters and moments that the ranks of a host share (host_copy.hpp): each rank reduces its
// slice of a bucket and updates the parameters while it is in the cache. Its methods run as jobs of the communicator's
// queue in bucket order, which is the same on all ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "parallel/ddp/backward_step.hpp"
#include "parallel/ddp/host_copy.hpp"
#include "parallel/ddp/reducer.hpp"

namespace tsr {

class SharedStep {
   public:
    SharedStep(std::shared_ptr<Reducer> reducer, std::shared_ptr<HostCopy> copy, std::shared_ptr<BackwardStep> stepping)
        : reducer_(std::move(reducer)), copy_(std::move(copy)), stepping_(std::move(stepping)) {}

    [[nodiscard]] const std::shared_ptr<HostCopy>& copy() const { return copy_; }

    // In the step after `step` steps.
    void reduce_and_update(size_t bucket, int64_t step);
    // After the last bucket: when all ranks of the host have called it, the entire copy is at the next step.
    void end(int64_t step);

   private:
    std::shared_ptr<Reducer> reducer_;
    std::shared_ptr<HostCopy> copy_;
    std::shared_ptr<BackwardStep> stepping_;
};

}  // namespace tsr
