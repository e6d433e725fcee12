// The operations of a communicator on a device's streams: launches them, and watches until they are done. A thread, begun with
// the first operation, notices what streams do not report: a deadline that passes, a peer that is lost, an error of the device
// or of the transport. One thread at a time launches; the rest is thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>

#include "base/clock.hpp"
#include "comm/device_transport.hpp"
#include "comm/work.hpp"

namespace tsr {

class DeviceQueue {
   public:
    // An operation as the communicator counts it.
    struct Launch {
        Operation operation;
        uint64_t sequence = 0;
        uint64_t ticket = 0;  // in the flight recorder
        milliseconds timeout{0};
        WorkPtr work;                  // finished when the device is done; may be null
        std::function<void()> verify;  // then called by the watching thread; it may throw why the operation failed
    };
    // Called by the watching thread, or by the one that launches.
    struct Callbacks {
        std::function<std::optional<Error>()> peer_error;
        std::function<std::optional<Error>(const Launch&)> absent;  // why a peer will not take part in a collective
        std::function<Error(const Error&, const Launch&)> named;    // adds to an error what it is about
        std::function<void(const Error&)> failed;                   // the first failure; must call abort()
        std::function<void(const Launch&, bool well)> ended;
    };

    DeviceQueue(std::unique_ptr<DeviceTransport> transport, Callbacks callbacks);
    ~DeviceQueue();  // abort() first, if anything is launched
    DeviceQueue(const DeviceQueue&) = delete;
    DeviceQueue& operator=(const DeviceQueue&) = delete;

    [[nodiscard]] Device device() const;
    [[nodiscard]] DeviceApi& api() const;
    [[nodiscard]] std::string_view name() const;

    void require(const Request& request) const;  // throws UNSUPPORTED
    // Enqueues on the request's stream: what the stream has later sees the result; or, after an event, on a stream of the queue.
    // Throws what failed; everything else that was launched has failed then too. An operation without work on a captured
    // stream becomes part of the graph. A `compute` enqueues nothing: it is done when what the stream has now is.
    void launch(const Request& request, Launch launch, const DeviceEvent* after = nullptr);

    // Whether nothing is launched, or ends soon, and no graph has operations of this queue.
    [[nodiscard]] bool comes_to_rest() const;
    // Collective, once comes_to_rest() on all ranks; one that launches calls it.
    [[nodiscard]] std::unique_ptr<DeviceTransport> split(const DeviceTransport::Part& part, Deadline deadline,
                                                         const std::function<void()>& poll);
    // Returns when all that was launched is done. Throws TIMEOUT, INTERRUPTED or why the queue was aborted.
    void drain(Deadline deadline);
    [[nodiscard]] bool is_idle() const;
    // Returns once the watch has seen the end of what the device has done. Does not throw.
    void settle() const;
    [[nodiscard]] uint64_t launched() const;  // the number of the last collective; 0: none
    // Peers may leave from now on: no graph with operations of this queue runs again.
    void forget_graphs();
    // Fails everything that was launched with `error`, and every later launch. Idempotent.
    void abort(const Error& error);

   private:
    struct State;

    const std::shared_ptr<State> state_;  // the thread's too
    std::thread thread_;
};

}  // namespace tsr
