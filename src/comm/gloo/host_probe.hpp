// Probes whether another host is alive. A kernel reports the end of a process, but a host that loses power or network
// reports nothing, and an idle connection does not notice. So a waiting rank periodically requests a TCP connection to
// a port that a rank on one other host reserves: whether refused or accepted, the host is alive, whatever its processes
// do. Each rank probes the next host that still has ranks, so that together they probe all; a rank that finds a host
// silent tells the others.
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

    // Probes `address` again when due; never blocks. Returns true if the host has not answered for `patience`, during
    // which this was called at least every two seconds: silence while nobody waited does not count. Thread-safe.
    [[nodiscard]] bool is_silent(const sockaddr_storage& address, Clock::time_point now = Clock::now());

    // Whether a probe is pending. Thread-safe.
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
