// Ctrl-C while a command writes: it stops at the next batch, removes its partial output and exits with
// exit_interrupted. A second Ctrl-C kills it immediately.
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
