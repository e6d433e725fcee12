// A collective that is prepared once and launched many times over the same tensors. It is validated, described and
// fingerprinted in advance, so that a launch through shared memory neither allocates nor compares strings. Threading
// rules are those of its communicator's collectives.
#pragma once

#include "base/clock.hpp"

namespace tsr {

class Plan {
   public:
    virtual ~Plan() = default;
    // As Communicator::run.
    virtual void run() = 0;
    // Queues a launch, as Communicator::submit; INVALID_STATE while the previous launch is not done.
    virtual void start() = 0;
    // Waits for the last start(); throws its error, NOT_READY if `deadline` passes first, INTERRUPTED. Any thread.
    virtual void wait(Deadline deadline) const = 0;
};

}  // namespace tsr
