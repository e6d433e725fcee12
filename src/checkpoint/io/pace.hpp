// Limits the load of a save on the trainer: a limit of bytes per second shared by the writer's threads, and a low
// priority for the background thread and those that it starts.
#pragma once

#include <cstdint>
#include <mutex>

#include "base/clock.hpp"

namespace tsr {

class Pace {
   public:
    explicit Pace(int64_t bytes_per_s);  // 0: no limit; INVALID_ARGUMENT below

    // Returns when that many bytes may be written. INTERRUPTED if the wait is interrupted.
    void spend(int64_t bytes);

   private:
    const int64_t bytes_per_s_;
    std::mutex mutex_;
    Clock::time_point next_{};  // guarded by mutex_; when the bytes spent so far are paid off
};

// Lowers the priority of the calling thread; threads that it starts inherit it. False if the system refuses.
[[nodiscard]] bool lower_thread_priority();

}  // namespace tsr
