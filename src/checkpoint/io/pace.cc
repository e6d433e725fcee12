#include "checkpoint/io/pace.hpp"

#include <fmt/core.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "base/error.hpp"

namespace tsr {

Pace::Pace(int64_t bytes_per_s) : bytes_per_s_(bytes_per_s) {
    if (bytes_per_s < 0) {
        throw Error(Code::invalid_argument,
                    fmt::format("write_bytes_per_s is {}; it must be 0 (no limit) or more", bytes_per_s));
    }
}

void Pace::spend(int64_t bytes) {
    if (bytes_per_s_ == 0) return;
    Clock::time_point begin;
    {
        const std::lock_guard lock(mutex_);
        begin = std::max(next_, Clock::now());
        const std::chrono::duration<double> cost(static_cast<double>(bytes) / static_cast<double>(bytes_per_s_));
        next_ = begin + std::chrono::duration_cast<Clock::duration>(cost);
    }
    try {
        for (const Deadline turn(begin); !turn.expired(); poll_interrupt()) std::this_thread::sleep_for(turn.slice());
    } catch (...) {
        const std::lock_guard lock(mutex_);
        next_ = std::min(next_, Clock::now());  // a later save does not pay for bytes that this one left unwritten
        throw;
    }
}

bool lower_thread_priority() {
    constexpr int nice_value = 10;
    // ioprio.h is not installed everywhere: class best effort (2), its lowest level (7), of this thread (who 1, id 0).
    constexpr int lowest_best_effort = (2 << 13) | 7;
    const auto thread = static_cast<id_t>(::syscall(SYS_gettid));
    // Never raise the priority, which root could do.
    const bool cpu =
        ::getpriority(PRIO_PROCESS, thread) >= nice_value || ::setpriority(PRIO_PROCESS, thread, nice_value) == 0;
    const bool io = ::syscall(SYS_ioprio_set, 1, 0, lowest_best_effort) == 0;
    return cpu && io;
}

}  // namespace tsr
