#include "comm/work.hpp"

#include <utility>

#include "base/meter.hpp"
#include "device/device.hpp"

namespace tsr {

void Work::finish(std::optional<Error> error) {
    std::function<void(const std::optional<Error>&)> callback;
    {
        const std::lock_guard lock(mutex_);
        if (done_) return;
        done_ = true;
        error_ = std::move(error);
        callback = std::move(callback_);
    }
    changed_.notify_all();
    if (callback) callback(error_);  // error_ no longer changes
}

void Work::launched(DeviceApi& device, std::shared_ptr<const DeviceEvent> event) {
    {
        const std::lock_guard lock(mutex_);
        device_ = &device;
        event_ = std::move(event);
    }
    changed_.notify_all();
}

void Work::begin_again() {
    const std::lock_guard lock(mutex_);
    done_ = false;
    device_ = nullptr;
    event_.reset();
    error_.reset();
}

void Work::wait_for(FunctionRef<bool()> ready, Deadline deadline, std::unique_lock<std::mutex>& lock) const {
    if (ready()) return;
    const ExposedWait exposed;
    while (!ready()) {
        if (deadline.expired()) throw Error(Code::not_ready, "the work is not done yet").retry_may_help();
        changed_.wait_for(lock, deadline.slice());
        if (ready()) return;
        lock.unlock();
        poll_interrupt();
        lock.lock();
    }
}

void Work::wait(Deadline deadline) const {
    std::unique_lock lock(mutex_);
    wait_for([this] { return done_; }, deadline, lock);
    if (error_) throw Error(*error_);
}

void Work::order(void* stream, Deadline deadline) const {
    std::unique_lock lock(mutex_);
    wait_for([this] { return done_ || device_ != nullptr; }, deadline, lock);
    if (error_) throw Error(*error_);
    if (done_) return;
    DeviceApi& device = *device_;
    const auto event = event_;
    lock.unlock();
    device.check_stream(stream);
    device.wait(stream, *event);
}

bool Work::done() const {
    const std::lock_guard lock(mutex_);
    return done_;
}

std::optional<Error> Work::error() const {
    const std::lock_guard lock(mutex_);
    if (!done_) throw Error(Code::not_ready, "the work is not done yet").retry_may_help();
    return error_;
}

void Work::on_done(std::function<void(const std::optional<Error>&)> callback) {
    {
        const std::lock_guard lock(mutex_);
        if (has_callback_) throw Error(Code::invalid_state, "the work already has a completion callback");
        has_callback_ = true;
        if (!done_) {
            callback_ = std::move(callback);
            return;
        }
    }
    callback(error_);
}

}  // namespace tsr
