// Answers requests for flight records: a thread polls for a request once per poll slice and has every registered
// communicator write its record, whatever the trainer's threads are doing or waiting for. Split communicators are
// registered too, since they inherit the options.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace tsr {

class FlightRequests {
   public:
    // Returns the directory of the next request, or nullopt if there is none.
    using Next = std::function<std::optional<std::string>()>;
    explicit FlightRequests(Next next);
    FlightRequests(const FlightRequests&) = delete;
    FlightRequests& operator=(const FlightRequests&) = delete;
    ~FlightRequests();

    // `write` must not throw. It may be called on the polling thread until remove() has returned.
    void add(const void* who, std::function<void(const std::string& directory)> write);
    void remove(const void* who);
    // True for the copy in a forked child, which has no polling thread.
    [[nodiscard]] bool in_child() const { return owner_ != ::getpid(); }

   private:
    void answer();

    const Next next_;
    const pid_t owner_ = ::getpid();
    std::mutex mutex_;  // guards both below
    std::map<const void*, std::function<void(const std::string& directory)>> writers_;
    bool stopping_ = false;
    std::condition_variable changed_;
    std::thread thread_;
};

}  // namespace tsr
