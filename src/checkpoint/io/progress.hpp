// The progress of a save, a load or a check. Bytes are counted on many threads and reported on the one that polls: at
// the beginning and end of a phase, and in between at most once per poll_slice. done == total is reported once, at the
// end.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/clock.hpp"

namespace tsr {

enum class Phase : int32_t { stage = 1, write = 2, commit = 3, read = 4, verify = 5 };

using ProgressFn = std::function<void(Phase phase, int64_t done, int64_t total)>;
using ByteProgress = std::function<void(int64_t bytes)>;  // called for each piece of work done

class Progress {
   public:
    Progress(ProgressFn tell, Phase phase, int64_t total) : tell_(std::move(tell)), phase_(phase), total_(total) {
        if (tell_) tell_(phase_, 0, total_);
    }

    void add(int64_t bytes) { done_.fetch_add(bytes, std::memory_order_relaxed); }  // any thread; only counts
    void poll() {
        if (!tell_ || Clock::now() < next_) return;
        next_ = Clock::now() + poll_slice;
        if (const int64_t done = done_.load(std::memory_order_relaxed); done < total_) tell_(phase_, done, total_);
    }
    void finish() {
        if (tell_) tell_(phase_, total_, total_);
    }

   private:
    ProgressFn tell_;
    Phase phase_;
    int64_t total_;
    std::atomic<int64_t> done_{0};
    Clock::time_point next_ = Clock::now() + poll_slice;
};

}  // namespace tsr
