// How far a save, a load or a check is. Bytes are counted on many threads and told on one, the one that polls: at the
// begin and the end of a phase, and between them at most each poll_slice. That all is done is told at the end alone, once.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/clock.hpp"

namespace tsr {

enum class Phase : int32_t { stage = 1, write = 2, commit = 3, read = 4, verify = 5 };

using ProgressFn = std::function<void(Phase phase, int64_t done, int64_t total)>;
using ByteProgress = std::function<void(int64_t bytes)>;  // one more piece of work is done

class Progress {
   public:
    Progress(ProgressFn tell, Phase phase, int64_t total) : tell_(std::move(tell)), phase_(phase), total_(total) {
        if (tell_) tell_(phase_, 0, total_);
    }

    void add(int64_t bytes) { done_.fetch_add(bytes, std::memory_order_relaxed); }  // any thread; only a number
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
