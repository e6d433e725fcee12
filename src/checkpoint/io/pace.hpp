// What a save may take from the trainer: a limit of bytes a second that the writer's threads share, and a low priority
// for the thread of the background and those it starts.
#pragma once

#include <cstdint>
#include <mutex>

#include "base/clock.hpp"

namespace tsr {

class Pace {
   public:
    explicit Pace(int64_t bytes_per_s);  // 0: no limit; INVALID_ARGUMENT below

    // Returns when that many bytes may be written; INTERRUPTED if the wait is.
    void spend(int64_t bytes);

   private:
    const int64_t bytes_per_s_;
    std::mutex mutex_;
    Clock::time_point next_{};  // guarded by mutex_; when what was spent so far is paid for
};

// For the calling thread; threads started by it inherit it. False if the system refuses.
[[nodiscard]] bool lower_thread_priority();

}  // namespace tsr
