// Ctrl-C while a command writes: it stops at the next batch, removes what it has begun and ends with exit_interrupted.
// A second Ctrl-C ends it at once.
#pragma once

namespace tsr::cli {

class Interruptible {
   public:
    Interruptible();
    ~Interruptible();
    Interruptible(const Interruptible&) = delete;
    Interruptible& operator=(const Interruptible&) = delete;
};

}  // namespace tsr::cli
