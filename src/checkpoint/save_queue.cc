#include "checkpoint/save_queue.hpp"

#include <fmt/format.h>

#include <system_error>
#include <utility>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/thread.hpp"

namespace tsr {

SaveQueue::SaveQueue(std::function<void()> begin) : begin_(std::move(begin)) {}

SaveQueue::~SaveQueue() {
    if (owner_ != ::getpid()) {
        // A forked child has no such thread; what it waits on cannot be taken apart, so it stays.
        if (thread_.joinable()) thread_.detach();
        static_cast<void>(new std::shared_ptr<State>(state_));  // NOLINT(cppcoreguidelines-owning-memory)
        return;
    }
    std::deque<SavePtr> dropped;
    {
        const std::lock_guard lock(state_->mutex);
        state_->closed = true;
        if (is_own_thread()) dropped.swap(state_->waiting);
    }
    state_->changed.notify_all();
    for (const SavePtr& save : dropped) {
        save->work->end(
            Error(Code::aborted, fmt::format("the saver was destroyed before its save of step {} began", save->step)));
    }
    if (is_own_thread()) {
        thread_.detach();  // in the callback of its own save, which has ended
    } else if (thread_.joinable()) {
        thread_.join();  // the saves' votes have deadlines
    }
    for (const auto& [number, error] : state_->failures) {
        log::warning("a save in the background failed, and nobody waited for it: {}", error.what());
    }
}

bool SaveQueue::start() {
    if (thread_.joinable()) return true;
    try {
        thread_ = start_thread("tsr-saver", [state = state_, begin = begin_] {
            begin();
            loop(state);
        });
        return true;
    } catch (const std::system_error& error) {
        log::warning("no thread for a save in the background ({}); it runs in the foreground", error.what());
        return false;
    }
}

void SaveQueue::push(SavePtr save) {
    save->number = ++pushed_;
    if (!thread_.joinable()) return run(*state_, save);
    {
        const std::lock_guard lock(state_->mutex);
        save->at_once = state_->waiting.empty() && state_->running == nullptr;
        state_->waiting.push_back(std::move(save));
    }
    state_->changed.notify_all();
}

void SaveQueue::run(State& state, const SavePtr& save) {
    std::optional<Error> error;
    try {
        save->run();
    } catch (...) {
        error = current_error();
        log::warning("the save of step {} failed: {}", save->step, error->what());
    }
    save->run = nullptr;  // frees what it holds
    {
        const std::lock_guard lock(state.mutex);
        if (error) state.failures.emplace_back(save->number, *error);
        state.ended = save->number;
        state.last = save->work;
        state.running = nullptr;
    }
    state.changed.notify_all();
    save->work->end(error);  // a callback of it may destroy the saver
}

void SaveQueue::loop(const std::shared_ptr<State>& state) {
    while (true) {
        SavePtr save;
        {
            std::unique_lock lock(state->mutex);
            // Endless only while nobody wants anything: push and the destructor wake it.
            while (state->waiting.empty() && !state->closed) state->changed.wait(lock);
            if (state->waiting.empty()) return;
            save = std::move(state->waiting.front());
            state->waiting.pop_front();
            state->running = save;
        }
        run(*state, save);
        std::shared_ptr<const void> owner;  // may be the last one of the queue itself
        const std::lock_guard lock(state->mutex);
        owner.swap(state->owner);
    }
}

SaveQueue::SavePtr SaveQueue::withdraw() {
    const std::lock_guard lock(state_->mutex);
    if (state_->waiting.empty() || state_->waiting.back()->at_once) return nullptr;
    SavePtr save = std::move(state_->waiting.back());
    state_->waiting.pop_back();
    return save;
}

void SaveQueue::put_back(SavePtr save) {
    if (save == nullptr) return;
    {
        const std::lock_guard lock(state_->mutex);
        state_->waiting.push_back(std::move(save));
    }
    state_->changed.notify_all();
}

bool SaveQueue::idle() const {
    const std::lock_guard lock(state_->mutex);
    return state_->waiting.empty() && state_->running == nullptr;
}

uint64_t SaveQueue::ended() const {
    const std::lock_guard lock(state_->mutex);
    return state_->ended;
}

void SaveQueue::wait() const {
    std::unique_lock lock(state_->mutex);
    while (!state_->waiting.empty() || state_->running != nullptr) {
        state_->changed.wait_for(lock, poll_slice);
        lock.unlock();
        poll_interrupt();
        lock.lock();
    }
    const WorkPtr last = state_->last;
    lock.unlock();
    if (last == nullptr) return;
    try {
        last->wait(Deadline::in(milliseconds{60000}));  // some instructions of the other thread
    } catch (const Error&) {
        if (!last->done()) throw;  // its own error is told elsewhere
    }
}

std::optional<Error> SaveQueue::failure(uint64_t number) {
    const std::lock_guard lock(state_->mutex);
    std::optional<Error> first;
    std::erase_if(state_->failures, [&](const auto& failure) {
        if (failure.first > number) return false;
        if (!first) first = failure.second;
        return true;
    });
    return first;
}

bool SaveQueue::keep_while_running(std::shared_ptr<const void> owner) {
    if (!is_own_thread()) return false;
    const std::lock_guard lock(state_->mutex);
    if (state_->running == nullptr) return false;
    state_->owner = std::move(owner);
    return true;
}

bool SaveQueue::is_own_thread() const { return thread_.get_id() == std::this_thread::get_id(); }

}  // namespace tsr
