// Answers to requests for flight records: a thread looks for one every poll slice, and has every communicator that takes
// part write its record, whatever the trainer's threads are doing or waiting for. Communicators that are split off take
// part too, since they have the same options.
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
    // The directory of a request that was not told before, if there is one.
    using Next = std::function<std::optional<std::string>()>;
    explicit FlightRequests(Next next);
    FlightRequests(const FlightRequests&) = delete;
    FlightRequests& operator=(const FlightRequests&) = delete;
    ~FlightRequests();

    // `write` must not throw; it is called on this thread until remove() has returned.
    void add(const void* who, std::function<void(const std::string& directory)> write);
    void remove(const void* who);
    // A forked child's copy has no thread that answers.
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
