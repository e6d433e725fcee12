// Looks a few times for what is about to come before its caller sleeps: to sleep and to be woken takes as long as the answer
// of a store on the same host. Where looking was in vain (another host, more threads than cores), it is left out for a while.
// It never yields: on a busy machine that costs a time slice.
#pragma once

#include <chrono>

#include "base/clock.hpp"

namespace tsr {

class BriefWait {
   public:
    // Whether `attempt` has succeeded. It is tried at least once.
    template <class Attempt>
    bool look(Attempt&& attempt) {
        if (attempt()) return true;
        if (left_out_ > 0) {
            --left_out_;
            return false;
        }
        for (const auto until = Clock::now() + span; Clock::now() < until;) {
            if (attempt()) return true;
        }
        left_out_ = pause;
        return false;
    }

   private:
    static constexpr std::chrono::microseconds span{30};
    static constexpr int pause = 100;  // so that looking in vain costs little

    int left_out_ = 0;
};

}  // namespace tsr
