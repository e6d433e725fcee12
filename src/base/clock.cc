#include "base/clock.hpp"

#include <algorithm>
#include <thread>
#include <utility>

namespace tsr {

namespace {

struct Interrupt {
    InterruptFn fn = nullptr;
    void* user_data = nullptr;
};

thread_local Interrupt interrupt;
thread_local const InterruptedBy* innermost = nullptr;

}  // namespace

milliseconds Deadline::remaining() const {
    const auto left = std::chrono::ceil<milliseconds>(at_ - Clock::now());
    return std::max(left, milliseconds{0});
}

milliseconds Deadline::slice() const { return std::min(remaining(), poll_slice); }

void set_interrupt(InterruptFn fn, void* user_data) { interrupt = {fn, user_data}; }

InterruptedBy::InterruptedBy(const std::atomic<bool>& flag, Code code)
    : flag_(flag), code_(code), outer_(std::exchange(innermost, this)) {}

InterruptedBy::~InterruptedBy() { innermost = outer_; }

void poll_interrupt() {
    if (interrupt.fn != nullptr && interrupt.fn(interrupt.user_data) != 0) {
        throw Error(Code::interrupted, "interrupted by the caller's interrupt callback");
    }
    for (const InterruptedBy* one = innermost; one != nullptr; one = one->outer_) {
        if (one->flag_.load()) throw Error(one->code_, "no longer needed");
    }
}

void wait_until(const std::function<bool()>& ready, Deadline deadline, const char* what) {
    auto pause = std::chrono::microseconds{50};
    auto next_poll = Clock::now() + poll_slice;
    while (!ready()) {
        if (deadline.expired()) throw Error(Code::timeout, std::string("timed out waiting for ") + what);
        if (Clock::now() >= next_poll) {
            poll_interrupt();
            next_poll = Clock::now() + poll_slice;
        }
        std::this_thread::sleep_for(pause);
        pause = std::min(pause * 2, std::chrono::microseconds{5000});
    }
}

}  // namespace tsr
