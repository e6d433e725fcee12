// Deadlines on the monotonic clock, and the interrupt callback that every blocking wait polls.
// No wait in Tessera is unbounded: it takes a Deadline and wakes at least once per poll_slice.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

#include "base/error.hpp"

namespace tsr {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A blocking wait sleeps at most this long before it checks for interrupts and peers.
inline constexpr milliseconds poll_slice{100};
// For a wait that needs no deadline, because what it waits for has one.
inline constexpr milliseconds no_timeout = std::chrono::hours{24 * 365};

class Deadline {
   public:
    explicit Deadline(Clock::time_point at) : at_(at) {}
    [[nodiscard]] static Deadline in(milliseconds span) { return Deadline(Clock::now() + span); }

    [[nodiscard]] bool expired() const { return Clock::now() >= at_; }
    [[nodiscard]] Clock::time_point at() const { return at_; }
    [[nodiscard]] milliseconds remaining() const;  // never negative, rounded up
    [[nodiscard]] milliseconds slice() const;      // min(remaining, poll_slice)
    [[nodiscard]] Deadline earlier(Deadline other) const { return Deadline(at_ < other.at_ ? at_ : other.at_); }

   private:
    Clock::time_point at_;
};

// The calling thread's interrupt callback: returns non-zero to make the blocking call fail with INTERRUPTED.
using InterruptFn = int32_t (*)(void* user_data);
void set_interrupt(InterruptFn fn, void* user_data);

// Throws Error(INTERRUPTED) if the calling thread's callback asks for it, or what an InterruptedBy says.
void poll_interrupt();

// While it exists, the calling thread's waits also end once `flag` is true, with an error of that code.
class InterruptedBy {
   public:
    explicit InterruptedBy(const std::atomic<bool>& flag, Code code = Code::interrupted);
    ~InterruptedBy();
    InterruptedBy(const InterruptedBy&) = delete;
    InterruptedBy& operator=(const InterruptedBy&) = delete;

   private:
    friend void poll_interrupt();
    const std::atomic<bool>& flag_;
    Code code_;
    const InterruptedBy* outer_;
};

// Polls `ready` (with growing sleeps up to 5 ms) until it is true; throws TIMEOUT with `what`, or INTERRUPTED. For
// waits on things that cannot signal, such as files; other waits use condition variables or futexes with slice().
void wait_until(const std::function<bool()>& ready, Deadline deadline, const char* what);

}  // namespace tsr
