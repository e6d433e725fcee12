// A sign of life of another host. The end of a process is told by its kernel; a host that loses its power or its network
// tells nothing, and a connection without traffic does not notice. So a rank that waits asks the kernel of one other host,
// now and then, for a TCP connection to a port that a rank there holds: refused, or even accepted, the host lives, whatever
// its processes do. Each rank asks the next host on which ranks are left, so that together they ask all; who finds one silent tells
// the others.
#pragma once

#include <sys/socket.h>

#include <mutex>
#include <optional>

#include "base/clock.hpp"
#include "base/fd.hpp"

namespace tsr::gloo_transport {

class HostProbe {
   public:
    explicit HostProbe(milliseconds patience) : patience_(patience) {}

    // Asks at `address` again when it is time; never blocks. True when the host has not answered for `patience`, during which this was
    // called at least every two seconds: what happened while nobody waited does not count. Any thread.
    [[nodiscard]] bool is_silent(const sockaddr_storage& address, Clock::time_point now = Clock::now());

    // Whether it has asked and knows of no answer yet. Any thread.
    [[nodiscard]] bool is_asking() const;

   private:
    void ask(const sockaddr_storage& address, Clock::time_point now);
    void take_answer(Clock::time_point now);
    void judge(int error, Clock::time_point now);

    const milliseconds patience_;
    mutable std::mutex mutex_;  // guards what follows
    Fd asking_;
    Clock::time_point asked_{};
    Clock::time_point next_{};
    Clock::time_point last_call_{};
    std::optional<Clock::time_point> silent_since_;
};

}  // namespace tsr::gloo_transport
