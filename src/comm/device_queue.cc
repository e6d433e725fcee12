#include "comm/device_queue.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "base/thread.hpp"

namespace tsr {

namespace {

// Between two looks at what is launched: short at first, since most operations are.
constexpr std::chrono::microseconds first_pause{20};
constexpr std::chrono::microseconds longest_pause{1000};
// Between two questions to the transport and about the peers.
constexpr milliseconds check_interval{50};
// How long a process of a device may take to end, or to say why it gives up, after it has closed its connections.
constexpr milliseconds time_to_end{5000};
// How long a split waits for operations before it does without the transport.
constexpr milliseconds time_to_rest{1000};
constexpr size_t most_spare = 64;  // events

// Which all ranks take part in.
bool is_collective(Collective c) { return !is_point_to_point(c) && c != Collective::compute; }

}  // namespace

struct DeviceQueue::State {
    struct Pending {
        Launch launch;
        Deadline deadline;
        std::shared_ptr<DeviceEvent> event;  // null while it is being launched
        StreamHandle stream = nullptr;
    };
    using PendingPtr = std::shared_ptr<Pending>;

    State(std::unique_ptr<DeviceTransport> moved, Callbacks given)
        : transport(std::move(moved)), callbacks(std::move(given)), api(device_api(transport->device())) {}

    void launch(const Request& request, Launch launch, const DeviceEvent* after);
    void watch_graph(const PendingPtr& one);
    void watch();
    // What is done, taken out, and the first operation that failed.
    struct Found {
        std::list<PendingPtr> done;
        PendingPtr failed;
        std::optional<Error> error;
    };
    [[nodiscard]] Found look(bool ask);
    // Whether whom the callbacks are of is still there: a completion callback may have destroyed it.
    [[nodiscard]] bool has_owner() const {
        const std::lock_guard lock(mutex);
        return !stopping;
    }
    [[nodiscard]] Error told(const Error& error, const Launch& launch) const;
    void fail(const PendingPtr& one, const Error& error);
    void finish(const Pending& one, std::optional<Error> error) const;
    void keep(std::shared_ptr<DeviceEvent> event);

    const std::unique_ptr<DeviceTransport> transport;
    const Callbacks callbacks;
    DeviceApi& api;
    std::shared_ptr<void> own_stream;  // the launching thread's

    mutable std::mutex mutex;  // guards all below
    std::condition_variable changed;
    std::list<PendingPtr> pending;
    PendingPtr in_graphs;  // the last that was captured; null if none was, or after a failure
    std::vector<std::shared_ptr<DeviceEvent>> spare;  // done and not used by anybody: to be recorded again
    std::optional<Error> failure;
    uint64_t last_collective = 0;  // its number
    bool stopping = false;
};

DeviceQueue::DeviceQueue(std::unique_ptr<DeviceTransport> transport, Callbacks callbacks)
    : state_(std::make_shared<State>(std::move(transport), std::move(callbacks))) {}

DeviceQueue::~DeviceQueue() {
    {
        const std::lock_guard lock(state_->mutex);
        state_->stopping = true;
    }
    state_->changed.notify_all();
    if (!thread_.joinable()) return;
    if (thread_.get_id() == std::this_thread::get_id()) {
        thread_.detach();  // in a completion callback: the thread ends when it comes back
    } else {
        thread_.join();
    }
}

Device DeviceQueue::device() const { return state_->transport->device(); }
DeviceApi& DeviceQueue::api() const { return state_->api; }
std::string_view DeviceQueue::name() const { return state_->transport->name(); }

void DeviceQueue::require(const Request& request) const { state_->transport->require(request); }

void DeviceQueue::launch(const Request& request, Launch launch, const DeviceEvent* after) {
    if (!thread_.joinable()) thread_ = start_thread("tsr-device", [state = state_] { state->watch(); });
    state_->launch(request, std::move(launch), after);
}

// The operation is watched from before it is enqueued: the transport may wait for peers while it enqueues.
void DeviceQueue::State::launch(const Request& request, Launch launched, const DeviceEvent* after) {
    const Deadline deadline = Deadline::in(launched.timeout);
    const auto one = std::make_shared<Pending>(Pending{std::move(launched), deadline, nullptr, nullptr});
    const bool captured = after == nullptr && api.is_captured(request.stream);
    std::shared_ptr<DeviceEvent> event;
    {
        const std::lock_guard lock(mutex);
        if (failure) throw Error(*failure);
        if (pending.empty()) changed.notify_all();  // else the thread is watching
        pending.push_back(one);
        if (is_collective(one->launch.operation.collective)) last_collective = one->launch.sequence;
        if (!captured && !spare.empty()) {
            event = std::move(spare.back());
            spare.pop_back();
        }
    }
    try {
        StreamHandle stream = request.stream;
        if (after != nullptr) {
            if (!own_stream) own_stream = api.new_stream();
            stream = own_stream.get();
            api.wait(stream, *after);
        }
        if (request.collective != Collective::compute) transport->enqueue(request, stream);
        if (captured) return watch_graph(one);
        if (event) {
            api.record_again(*event, stream);
        } else {
            event = api.record(stream);
        }
        if (one->launch.work) one->launch.work->launched(api, event);
        const std::lock_guard lock(mutex);
        one->event = std::move(event);
        one->stream = stream;
    } catch (...) {
        const Error error = told(current_error(), one->launch);
        {
            const std::lock_guard lock(mutex);
            if (failure) throw Error(*failure);  // the watch has ended it
        }
        fail(one, error);
        throw error;
    }
}

// A graph runs again and again, without a call of this queue: the operation has neither an end nor a deadline there. But peers
// and the transport are watched from now on.
void DeviceQueue::State::watch_graph(const PendingPtr& one) {
    {
        const std::lock_guard lock(mutex);
        if (failure) throw Error(*failure);
        pending.remove(one);
        in_graphs = one;
    }
    finish(*one, std::nullopt);
}

void DeviceQueue::State::watch() {
    auto pause = first_pause;
    auto next_check = Clock::now() + check_interval;
    while (true) {
        {
            std::unique_lock lock(mutex);
            const auto is_busy = [this] { return stopping || !pending.empty(); };
            if (in_graphs) {
                changed.wait_until(lock, next_check, is_busy);
            } else {
                changed.wait(lock, [&] { return is_busy() || in_graphs; });
            }
            if (stopping) return;
        }
        const bool ask = Clock::now() >= next_check;
        if (ask) next_check = Clock::now() + check_interval;
        const Found found = look(ask);
        for (const PendingPtr& one : found.done) {
            finish(*one, std::nullopt);
            keep(std::move(one->event));
        }
        if (found.failed && has_owner()) fail(found.failed, *found.error);
        pause = found.done.empty() ? std::min(pause * 2, longest_pause) : first_pause;
        std::unique_lock lock(mutex);
        changed.wait_for(lock, pause, [this] { return stopping; });
    }
}

DeviceQueue::State::Found DeviceQueue::State::look(bool ask) {
    Found found;
    const auto failed = [&](const PendingPtr& one) {
        if (found.failed) return;
        found.failed = one;
        found.error = current_error();
    };
    PendingPtr first;
    std::vector<StreamHandle> busy;  // what a stream has comes to an end in order, so its first operation says enough
    const auto is_done = [&](const Pending& one) {
        if (!one.event || std::ranges::find(busy, one.stream) != busy.end()) return false;
        if (one.event->done()) return true;
        busy.push_back(one.stream);
        return false;
    };
    PendingPtr collective;  // the first of those
    {
        const std::lock_guard lock(mutex);
        for (auto next = pending.begin(); next != pending.end();) {
            const auto one = next++;
            const Pending& now = **one;
            try {
                if (is_done(now)) {
                    if (now.launch.verify) now.launch.verify();
                    found.done.splice(found.done.end(), pending, one);
                } else if (now.deadline.expired()) {
                    throw Error(Code::timeout, fmt::format("{} on {} did not finish within {} ms",
                                                           headline(now.launch.operation, now.launch.sequence),
                                                           api.name(), now.launch.timeout.count()));
                }
            } catch (...) {
                failed(*one);
            }
        }
        first = pending.empty() ? in_graphs : pending.front();
        for (auto next = pending.begin(); ask && !collective && next != pending.end(); ++next) {
            if (is_collective((*next)->launch.operation.collective)) collective = *next;
        }
    }
    if (ask && first && !found.failed) {
        try {
            transport->check();
            if (const auto lost = callbacks.peer_error()) throw Error(*lost);
        } catch (...) {
            failed(first);
        }
        if (!found.failed && collective && (found.error = callbacks.absent(collective->launch))) {
            found.failed = collective;
        }
    }
    if (found.failed) found.error = told(*found.error, found.failed->launch);
    return found;
}

// A transport that lost a connection does not know why. Who closed it is about to end, which the other transport notices, or
// to tell its reason there.
Error DeviceQueue::State::told(const Error& error, const Launch& launch) const {
    if (error.code() != Code::peer_lost || error.record()->peer >= 0) return callbacks.named(error, launch);
    std::optional<Error> reason;
    const auto is_known = [&] { return !has_owner() || (reason = callbacks.peer_error()).has_value(); };
    try {
        wait_until(is_known, Deadline::in(time_to_end), "the reason");
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): it stays unknown
    }
    return callbacks.named(reason.value_or(error), launch);
}

// An event is created by the driver: that takes longer than all else here.
void DeviceQueue::State::keep(std::shared_ptr<DeviceEvent> event) {
    if (event.use_count() != 1) return;  // a work's, which may still order a stream by it
    const std::lock_guard lock(mutex);
    if (spare.size() < most_spare) spare.push_back(std::move(event));
}

void DeviceQueue::State::fail(const PendingPtr& one, const Error& error) {
    bool is_graphs = false;  // which ended for this queue when it was captured
    {
        const std::lock_guard lock(mutex);
        is_graphs = pending.remove(one) == 0;
    }
    callbacks.failed(error);
    if (!is_graphs) finish(*one, error);
}

void DeviceQueue::State::finish(const Pending& one, std::optional<Error> error) const {
    if (has_owner()) callbacks.ended(one.launch, !error);
    if (one.launch.work) one.launch.work->finish(std::move(error));
}

bool DeviceQueue::comes_to_rest() const {
    const auto is_at_rest = [this] {
        const std::lock_guard lock(state_->mutex);
        return std::ranges::all_of(state_->pending, [](const State::PendingPtr& one) {
            return one->launch.operation.collective == Collective::compute;
        });
    };
    // Interrupts are left to what the caller waits for next.
    for (const Deadline deadline = Deadline::in(time_to_rest); !is_at_rest();) {
        if (deadline.expired()) return false;
        std::this_thread::sleep_for(longest_pause);
    }
    const std::lock_guard lock(state_->mutex);
    return !state_->failure && !state_->in_graphs;
}

std::unique_ptr<DeviceTransport> DeviceQueue::split(const DeviceTransport::Part& part, Deadline deadline,
                                                    const std::function<void()>& poll) {
    return state_->transport->split(part, deadline, poll);
}

void DeviceQueue::drain(Deadline deadline) {
    wait_until([this] { return is_idle(); }, deadline, "operations on the device");
    const std::lock_guard lock(state_->mutex);
    if (state_->failure) throw Error(*state_->failure);
}

void DeviceQueue::forget_graphs() {
    const std::lock_guard lock(state_->mutex);
    state_->in_graphs = nullptr;
}

// In a completion callback, on the watching thread, what is done is seen when the callback returns.
void DeviceQueue::settle() const {
    if (thread_.get_id() == std::this_thread::get_id()) return;
    const auto is_seen = [this] {
        const std::lock_guard lock(state_->mutex);
        return state_->pending.empty() || std::ranges::any_of(state_->pending, [](const State::PendingPtr& one) {
                   try {
                       return !one->event || !one->event->done();
                   } catch (const Error&) {
                       return true;  // which the watch finds, too
                   }
               });
    };
    while (!is_seen()) std::this_thread::sleep_for(longest_pause);
}

uint64_t DeviceQueue::launched() const {
    const std::lock_guard lock(state_->mutex);
    return state_->last_collective;
}

bool DeviceQueue::is_idle() const {
    const std::lock_guard lock(state_->mutex);
    return state_->pending.empty();
}

void DeviceQueue::abort(const Error& error) {
    std::list<State::PendingPtr> pending;
    {
        const std::lock_guard lock(state_->mutex);
        if (!state_->failure) state_->failure = error;
        pending.swap(state_->pending);
        state_->in_graphs = nullptr;
    }
    state_->transport->abort();
    for (const State::PendingPtr& one : pending) state_->finish(*one, error);
}

}  // namespace tsr
