// One operation in flight. Shared by the threads that run it and those that wait for it; finished exactly once.
// Thread-safe.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/function_ref.hpp"

namespace tsr {

class DeviceApi;
class DeviceEvent;

class Work {
   public:
    Work() = default;
    virtual ~Work() = default;
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;

    // Called by the producers. The first call counts; it runs the completion callback on its thread.
    void finish(std::optional<Error> error);

    // Called by the producer of an operation on a device once it is launched: the event is done when the operation is.
    void launched(DeviceApi& device, std::shared_ptr<const DeviceEvent> event);

    // Resets finished work so that it can be finished again. All earlier waits must have returned.
    void begin_again();

    // Returns when done; throws the operation's error, NOT_READY if `deadline` passes first, or INTERRUPTED.
    void wait(Deadline deadline) const;
    // Makes the stream wait for the operation, while the caller goes on. An operation that is not on a device, or not yet
    // launched there, is waited for as by wait().
    void order(void* stream, Deadline deadline) const;
    [[nodiscard]] bool done() const;
    [[nodiscard]] std::optional<Error> error() const;  // NOT_READY is thrown while not done
    // One callback per work; called at once if the work is already done. Throws INVALID_STATE for a second callback.
    void on_done(std::function<void(const std::optional<Error>&)> callback);

   private:
    mutable std::mutex mutex_;  // guards all below
    mutable std::condition_variable changed_;
    DeviceApi* device_ = nullptr;  // null until it is launched on a device
    std::shared_ptr<const DeviceEvent> event_;
    bool done_ = false;
    bool has_callback_ = false;
    std::optional<Error> error_;
    std::function<void(const std::optional<Error>&)> callback_;

    void wait_for(FunctionRef<bool()> ready, Deadline deadline, std::unique_lock<std::mutex>& lock) const;
};

using WorkPtr = std::shared_ptr<Work>;

}  // namespace tsr
