// How far a long command is, on one line of standard error that is drawn over itself: only if that is a terminal, a few
// times a second, and gone when the command ends.
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
    Clock::time_point next_{};  // guarded by mutex_; when the line is drawn again
};

}  // namespace tsr::cli
