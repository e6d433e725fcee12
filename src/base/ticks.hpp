// Time stamps that cost a few nanoseconds, for records of every call: the processor's counter where it has a
// constant-rate one, else the monotonic clock. Counts are converted to times only when they are read.
#pragma once

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace tsr {

[[nodiscard]] inline uint64_t ticks() {
#if defined(__x86_64__)
    return __rdtsc();
#else
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

// Converts counts to times, from two marks: the longer the time between them, the more accurate the rate.
class TickScale {
   public:
    struct Mark {
        uint64_t ticks = 0;
        int64_t monotonic_ns = 0;
        int64_t utc_ns = 0;  // since 1970
        [[nodiscard]] static Mark now();
    };
    TickScale(const Mark& early, const Mark& late);

    // Nanoseconds since 1970, comparable between hosts as far as their clocks agree.
    [[nodiscard]] int64_t utc_ns(uint64_t ticks) const;
    [[nodiscard]] double seconds(uint64_t span) const { return static_cast<double>(span) * ns_a_tick_ * 1e-9; }
    // Between `ticks` and the later mark; negative: after it.
    [[nodiscard]] double seconds_since(uint64_t ticks) const {
        return static_cast<double>(static_cast<int64_t>(late_.ticks - ticks)) * ns_a_tick_ * 1e-9;
    }

   private:
    Mark late_;
    double ns_a_tick_;
};

}  // namespace tsr
