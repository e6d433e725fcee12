#include "comm/flight_requests.hpp"

#include <unistd.h>

#include <utility>

#include "base/clock.hpp"
#include "base/thread.hpp"

namespace tsr {

FlightRequests::FlightRequests(Next next) : next_(std::move(next)) {
    thread_ = start_thread("tsr-flight", [this] { answer(); });
}

FlightRequests::~FlightRequests() {
    if (in_child()) {
        thread_.detach();
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void FlightRequests::add(const void* who, std::function<void(const std::string& directory)> write) {
    const std::lock_guard lock(mutex_);
    writers_[who] = std::move(write);
}

void FlightRequests::remove(const void* who) {
    const std::lock_guard lock(mutex_);
    writers_.erase(who);
}

void FlightRequests::answer() {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, poll_slice, [this] { return stopping_; })) {
        const auto directory = next_();
        if (!directory) continue;
        for (const auto& [who, write] : writers_) write(*directory);
    }
}

}  // namespace tsr
