// The progress of a long command, on one line of standard error that is redrawn a few times a second and cleared at the
// end. Only if standard error is a terminal.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "base/clock.hpp"

namespace tsr::cli {

class Progress {
   public:
    Progress(std::string what, int64_t total_bytes);
    ~Progress();
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    void add(int64_t bytes);  // from any thread

   private:
    const std::string what_;
    const int64_t total_;
    const bool shown_;
    std::mutex mutex_;
    int64_t done_ = 0;          // guarded by mutex_
    Clock::time_point next_{};  // guarded by mutex_; time of the next redraw
};

}  // namespace tsr::cli
