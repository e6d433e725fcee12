#include "checkpoint/save/save_queue.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <utility>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/thread.hpp"

namespace tsr {

namespace {

constexpr milliseconds silence{2000};  // how long the end of a program waits without a word

// Bypasses the log, whose sink may be a function of the program. Does nothing if standard error is closed.
void tell(const std::string& line) {
    const std::string text = fmt::format("tessera[{}]: {}\n", ::getpid(), line);
    (void)!::write(STDERR_FILENO, text.data(), text.size());
}

std::string steps_text(const std::vector<SaveQueue::SavePtr>& saves) {
    std::vector<int64_t> steps;
    for (const SaveQueue::SavePtr& save : saves) steps.push_back(save->step);
    return fmt::format("the save{} of step{} {}", steps.size() == 1 ? "" : "s", steps.size() == 1 ? "" : "s",
                       fmt::join(steps, ", "));
}

// Adds to the error which save failed, after the number of the rank if the message begins with it.
Error of_step(const Error& error, int64_t step) {
    ErrorRecord record = *error.record();
    const std::string rank = fmt::format("rank {}: ", record.rank);
    record.message.insert(record.message.starts_with(rank) ? rank.size() : 0,
                          fmt::format("the save of step {} failed: ", step));
    return Error(std::make_shared<const ErrorRecord>(std::move(record)));
}

}  // namespace

// The queues of this process that have a thread.
struct SaveQueue::Open {
    const pid_t process = ::getpid();
    std::mutex mutex;
    std::vector<std::weak_ptr<State>> queues;  // guarded by mutex

    // Never destroyed, as saves may begin and end while the process exits. A forked child gets its own: the parent's
    // has no thread there, and its mutex may have been locked when it was copied.
    static std::atomic<Open*>& instance() {
        static std::atomic<Open*> open{nullptr};
        return open;
    }
    static Open& of_this_process() {
        Open* now = instance().load();
        while (now == nullptr || now->process != ::getpid()) {
            auto fresh = std::make_unique<Open>();
            if (instance().compare_exchange_strong(now, fresh.get())) now = fresh.release();
        }
        return *now;
    }
};

void SaveQueue::remember(const std::shared_ptr<State>& state) {
    // Registered after the library's statics, so it runs before their destructors, or when the library is unloaded.
    static const int registered = std::atexit([] { finish_all(); });
    if (registered != 0)
        log::warning("could not register an exit handler; the program will not wait for saves when it exits");
    Open& open = Open::of_this_process();
    const std::lock_guard lock(open.mutex);
    std::erase_if(open.queues, [](const std::weak_ptr<State>& queue) { return queue.expired(); });
    open.queues.push_back(state);
}

void SaveQueue::finish_all() noexcept {
    Open* open = Open::instance().load();
    if (open == nullptr || open->process != ::getpid()) return;
    try {
        std::vector<std::weak_ptr<State>> queues;
        {
            const std::lock_guard lock(open->mutex);
            queues = open->queues;
        }
        for (const auto& queue : queues) {
            if (const auto state = queue.lock()) finish(*state);
        }
    } catch (...) {
        tell(fmt::format("could not wait for saves at program exit: {}", current_error().what()));
    }
}

void SaveQueue::finish(State& state) {
    const auto in_flight = [&] {
        std::vector<SavePtr> saves(state.waiting.begin(), state.waiting.end());
        if (state.running != nullptr) saves.insert(saves.begin(), state.running);
        return saves;
    };
    const Clock::time_point begin = Clock::now();
    const Deadline deadline(begin + state.of.patience);
    std::unique_lock lock(state.mutex);
    std::vector<SavePtr> saves = in_flight();
    const char* why = nullptr;
    if (state.thread == std::this_thread::get_id()) {
        why = "the program exits in a callback of the save";
    } else if (state.of.calls_program || log::has_sink()) {
        why = "it calls functions of the program (progress, storage or log callbacks), which are no longer available";
    } else if (!std::ranges::all_of(saves, [](const SavePtr& save) { return save->work->staged()->done(); })) {
        why = "the state was not fully copied yet (copy_on_demand)";
    } else {
        for (bool told = false; !saves.empty() && !deadline.expired(); saves = in_flight()) {
            if (!told && Clock::now() - begin >= silence) {
                told = true;
                tell(fmt::format("the program is exiting; waiting for {} into {}, {} s at most", steps_text(saves),
                                 state.of.root, state.of.patience.count() / 1000));
            }
            state.changed.wait_for(lock, deadline.slice());
        }
        why = "it took longer than the saver's timeout";
    }
    if (saves.empty()) return;
    lock.unlock();
    tell(fmt::format(
        "the program is exiting, and {} into {} may be lost: {}. The previous checkpoint is intact. Wait for the saver "
        "(tsr_saver_wait) or destroy it (tsr_saver_destroy) before the program exits",
        steps_text(saves), state.of.root, why));
}

SaveQueue::SaveQueue(std::function<void()> begin, Owner owner) : begin_(std::move(begin)) {
    state_->of = std::move(owner);
}

SaveQueue::~SaveQueue() {
    if (owner_ != ::getpid()) {
        // A forked child has no such thread. The condition variable it waits on cannot be destroyed, so it leaks.
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
        log::warning("a background save failed and was never waited for: {}", error.what());
    }
}

bool SaveQueue::start() {
    if (thread_.joinable()) return true;
    try {
        thread_ = start_thread("tsr-saver", [state = state_, begin = begin_] {
            {
                const std::lock_guard lock(state->mutex);
                state->thread = std::this_thread::get_id();
            }
            begin();
            loop(state);
        });
        remember(state_);
        return true;
    } catch (const std::system_error& error) {
        log::warning("could not start a thread for background saves ({}); saving in the foreground", error.what());
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
        error = of_step(current_error(), save->step);
        log::warning("{}", error->what());
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
            // No timeout is needed: push and the destructor wake it.
            while (state->waiting.empty() && !state->closed) state->changed.wait(lock);
            if (state->waiting.empty()) return;
            save = std::move(state->waiting.front());
            state->waiting.pop_front();
            state->running = save;
        }
        run(*state, save);
        std::shared_ptr<const void> owner;  // may be the last reference to the queue itself
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
        if (!last->done()) throw;  // its own error is reported elsewhere
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
