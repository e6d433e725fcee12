// A collective that was prepared once and is launched many times, over the same tensors: checked, described and
// fingerprinted before, so that a launch through shared memory neither allocates nor compares strings. Threads: as the
// collectives of its communicator.
#pragma once

#include "base/clock.hpp"

namespace tsr {

class Plan {
   public:
    virtual ~Plan() = default;
    // As Communicator::run.
    virtual void run() = 0;
    // Queues it, as Communicator::submit; INVALID_STATE while the launch before is not done.
    virtual void start() = 0;
    // For what was started last; throws its error, NOT_READY if `deadline` passes first, INTERRUPTED. Any thread.
    virtual void wait(Deadline deadline) const = 0;
};

}  // namespace tsr
