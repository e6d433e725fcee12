#include "comm/work.hpp"

#include <utility>

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

void Work::begin_again() {
    const std::lock_guard lock(mutex_);
    done_ = false;
    error_.reset();
}

void Work::wait(Deadline deadline) const {
    std::unique_lock lock(mutex_);
    while (!done_) {
        if (deadline.expired()) throw Error(Code::not_ready, "the work is not done yet").retry_may_help();
        changed_.wait_for(lock, deadline.slice());
        if (done_) break;
        lock.unlock();
        poll_interrupt();
        lock.lock();
    }
    if (error_) throw Error(*error_);
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
