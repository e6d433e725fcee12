#include "comm/group.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "base/env.hpp"
#include "base/log.hpp"
#include "base/thread.hpp"

namespace tsr {

constinit thread_local const Group* Group::progressing_ = nullptr;

// The last reference is gone. In a completion callback the progress thread cannot end itself at once: it does so when
// it comes back to its loop. A forked child has no progress thread and must not tell the peers that this rank has left:
// what it holds is its parent's, and goes with the process.
void Group::let_go() {
    if (fork_.in_child()) return;
    if (progressing_ == this) {
        orphaned_ = true;
    } else {
        delete this;
    }
}

Group::Issuing::Issuing(const Group& group) : group_(progressing_ == &group ? nullptr : &group) {
    if (group_ == nullptr) return;
    group.refuse_in_child();
    if (!group.issuing_.exchange(true, std::memory_order_acquire)) return;
    group_ = nullptr;
    if (Reentry::is_inside(&group.several_)) return;
    throw Error(Code::invalid_state,
                fmt::format("rank {}: two threads use communicator '{}' at once; serialize the calls with a lock, or "
                            "give each thread its own communicator (split)",
                            group.rank_, group.options_.name))
        .with_rank(group.rank_);
}

Group::Issuing::~Issuing() {
    if (group_ != nullptr) group_->issuing_.store(false, std::memory_order_release);
}

void Group::in_one_call(FunctionRef<void()> body) {
    {
        const Reentry once(this, "communicator", options_.name);
    }  // not in a callback of another
    const Issuing issuing(*this);
    refuse_own_job();
    refuse_in_turn();
    if (!poisoned_.load(std::memory_order_acquire)) throw_if_unusable();  // if poisoned, the calls report the cause
    if (Reentry::is_inside(&several_)) return body();
    const Reentry several(&several_, "communicator", options_.name);
    body();
}

void Group::refuse_in_child() const {
    if (!fork_.in_child()) return;
    throw Error(Code::invalid_state,
                fmt::format("rank {}: communicator '{}' belongs to the parent of this forked process; create "
                            "a new one here, or start children with exec (spawn)",
                            rank_, options_.name))
        .with_rank(rank_);
}

void Group::refuse_own_thread() const {
    if (progressing_ != this) return;
    throw Error(Code::invalid_state,
                fmt::format("rank {}: a blocking call on communicator '{}' in a completion callback of "
                            "its own work would deadlock; call it from another thread",
                            rank_, options_.name))
        .with_rank(rank_);
}

void Group::refuse_own_job() const {
    if (!in_own_job()) return;
    throw Error(
        Code::invalid_state,
        fmt::format("rank {}: asynchronous work on communicator '{}' inside a job of its own queue (such as a bucket "
                    "hook of a model) would deadlock; use the synchronous calls, which run at once",
                    rank_, options_.name))
        .with_rank(rank_);
}

// Jobs that were queued before the turn go on, and so does what follows a failure.
bool Group::is_in_turn() const {
    return turn_of() >= 0 && progressing_ != this && !poisoned_.load(std::memory_order_acquire);
}

void Group::refuse_in_turn() const {
    if (!is_in_turn()) return;
    throw Error(
        Code::invalid_state,
        fmt::format("rank {}: communicator '{}' is used inside the turn of rank {}, in which the others wait; use "
                    "it before or after the turn, or split another communicator before it",
                    rank_, options_.name, turn_of()))
        .with_rank(rank_);
}

void Group::refuse_in_turn(std::string_view what) const {
    const auto refuse = [&](int rank, std::string_view whose) {
        throw Error(
            Code::invalid_state,
            fmt::format("rank {}: {} needs the ranks of communicator '{}', which wait in the turn of rank {}{}; "
                        "call it on all ranks, before or after the turn",
                        rank_, what, options_.name, rank, whose))
            .with_rank(rank_);
    };
    if (is_in_turn()) refuse(turn_of(), "");
    if (progressing_ == this || poisoned_.load(std::memory_order_acquire)) return;
    if (const auto other = relatives_->turn_elsewhere(this)) {
        refuse(other->first, fmt::format(" of communicator '{}'", other->second));
    }
}

// --- issuing

void Group::run_inline(const Request& request) {
    if (is_point_to_point(request.collective)) return transfer_inline(request);
    const Operation operation = operation_of(request);
    const uint64_t sequence = ++collectives_;
    const uint64_t took = run_collective(request, operation, sequence, flight_.started(operation, sequence), timeout());
    count_inline(operation.size_bytes(), took);
}

uint64_t Group::run_collective(const Request& request, const Operation& operation, uint64_t sequence, uint64_t ticket,
                               milliseconds timeout) {
    try {
        transport_->run(request, operation, sequence, timeout);
    } catch (...) {
        const Error error = named(current_error(), request, sequence);
        flight_.ended(ticket, false);
        poison(error);
        throw error;
    }
    return flight_.ended(ticket, true);
}

void Group::transfer_inline(const Request& request) {
    const uint64_t sequence = ++transfers_;
    const Operation operation = operation_of(request);
    const uint64_t ticket = flight_.started(operation, sequence);
    try {
        const auto transfer = transport_->start(request, sequence, Deadline::in(timeout()));
        Transfer* const waiting[] = {transfer.get()};
        const std::atomic<bool> woken{false};
        while (true) {
            const auto progress = transfer->advance();
            if (progress == Transfer::Progress::done) {
                return count_inline(operation.size_bytes(), flight_.ended(ticket, true));
            }
            if (progress == Transfer::Progress::stuck) transport_->wait(waiting, woken);
        }
    } catch (...) {
        const Error error = named(current_error(), request, sequence);
        flight_.ended(ticket, false);
        poison(error);
        throw error;
    }
}

Group::Task Group::enqueue(const Request& request) {
    const Operation operation = operation_of(request);
    const Task task{std::make_shared<const OwnedRequest>(request), std::make_shared<Work>(), operation,
                    flight_.queued(operation), nullptr};
    enqueue(task);
    return task;
}

void Group::enqueue(Task task) {
    task.timeout = timeout();
    {
        const std::lock_guard lock(mutex_);
        if (!thread_.joinable()) thread_ = start_thread("tsr-comm", [this] { progress(); });
        queue_.push_back(std::move(task));
        unfinished_.fetch_add(1, std::memory_order_relaxed);
        queued_.store(true, std::memory_order_seq_cst);
    }
    changed_.notify_all();
    transport_->wake();
}

// A synchronous call queued behind asynchronous ones. The caller's memory must not be accessed after the call returns,
// so an interrupted wait poisons the communicator and then waits until the progress thread has finished the task.
void Group::await(const Task& task) {
    try {
        task.work->wait(Deadline::in(no_timeout));
    } catch (const Error& e) {
        if (task.work->done()) throw;
        poison(e.with_rank(rank_));
        try {
            task.work->wait(Deadline::in(no_timeout));
        } catch (const Error&) {
            // Its error is the interruption that is thrown below.
        }
        while (!task.work->done()) std::this_thread::yield();
        throw;
    }
}

void Group::await_queue() {
    wait_until([this] { return unfinished_.load(std::memory_order_acquire) == 0; }, Deadline::in(no_timeout),
               "issued work");
}

// --- errors

void Group::poison(const Error& error) {
    {
        const std::lock_guard lock(mutex_);
        if (!first_error_) first_error_ = error;
    }
    poisoned_.store(true, std::memory_order_release);
    transport_->abort(error);
    if (device_) device_->abort(aborted_by(error));
    tell_flight();
    if (options_.on_failure) options_.on_failure(error.record().get());
}

void Group::record(std::string_view label, FunctionRef<void()> body) {
    const uint64_t ticket = flight_.started(computation_of(label), 0);
    try {
        body();
    } catch (...) {
        flight_.ended(ticket, false);
        throw;
    }
    flight_.ended(ticket, true);
}

void Group::write_trace(const std::string& path) const {
    refuse_in_child();
    write_flight(path, origin_, flight_, error());
}

void Group::answer_flight_requests() {
    if (!options_.flight_requests) return;
    options_.flight_requests->add(this, [this](const std::string& directory) { tell_flight(directory); });
}

void Group::tell_flight() noexcept {
    const auto directory = env_text("TESSERA_TRACE_DIR");
    if (!directory || fork_.in_child() || flight_told_.exchange(true)) return;
    tell_flight(*directory);
}

void Group::tell_flight(const std::string& directory) const noexcept {
    try {
        write_trace(fmt::format("{}/{}", directory, flight_file_name(origin_)));
    } catch (...) {
        log::warning("rank {}: cannot write the flight record of communicator '{}': {}", rank_, options_.name,
                     current_error().what());
    }
}

Error Group::aborted_by(const Error& cause) const {
    return Error(Code::aborted, fmt::format("rank {}: communicator '{}' is unusable after an earlier error: {}", rank_,
                                            options_.name, cause.what()))
        .with_rank(rank_)
        .with_peer(cause.record()->peer)
        .with_launcher_peer(cause.record()->launcher_peer)
        .caused_by(cause);
}

void Group::throw_if_unusable() const {
    if (poisoned_.load(std::memory_order_acquire)) {
        const std::lock_guard lock(mutex_);
        throw aborted_by(*first_error_);
    }
    if (finalized_.load(std::memory_order_acquire)) {
        throw Error(Code::invalid_state,
                    fmt::format("rank {}: communicator '{}' is already finalized", rank_, options_.name));
    }
    if (left_.load(std::memory_order_acquire)) {
        throw Error(Code::invalid_state,
                    fmt::format("rank {}: communicator '{}' is already destroyed", rank_, options_.name));
    }
}

Error Group::named(const Error& error, const Request& request, uint64_t sequence) const {
    Error result = error;
    if (result.record()->rank < 0) result = result.with_rank(rank_);
    if (result.record()->operation.empty()) {
        result = result.with_operation(std::string(name_of(request.collective)), static_cast<int64_t>(sequence));
    }
    return of_launcher(result, launcher_ranks_);
}

void Group::abort(const std::string& reason) {
    refuse_in_child();
    poison(Error(Code::aborted, fmt::format("rank {} aborted communicator '{}'{}{}", rank_, options_.name,
                                            reason.empty() ? "" : ": ", reason))
               .with_rank(rank_));
    abort_splits(reason, Splits::bound);
}

void Group::abort_splits(const std::string& reason, Splits which) {
    std::vector<std::weak_ptr<Group>> splits;
    {
        const std::lock_guard lock(mutex_);
        splits = splits_;
    }
    for (const auto& weak : splits) {
        const auto split = weak.lock();
        if (!split || (which == Splits::bound && !split->options_.bound)) continue;
        split->abort(reason);
        split->abort_splits(reason, which);
    }
}

void Group::set_timeout(milliseconds timeout) {
    check_timeout(timeout);
    timeout_ms_.store(timeout.count(), std::memory_order_relaxed);
}

void Group::leave() {
    if (fork_.in_child()) return;    // a forked child's copy: its parent stays
    if (device_) device_->settle();  // a rank that waited for its stream has no work
    if (unfinished_.load(std::memory_order_acquire) > 0 || (device_ && !device_->is_idle())) {
        abort("the communicator was destroyed while it had work");
    }
    left_.store(true, std::memory_order_release);
    transport_->leave(device_ ? device_->launched() : 0);
    tell_flight();  // other holders may keep the group until the process ends
}

std::optional<Error> Group::error() const {
    refuse_in_child();
    {
        const std::lock_guard lock(mutex_);
        if (first_error_) return first_error_;
    }
    return finalized_.load(std::memory_order_acquire) ? std::nullopt : transport_->peer_error();
}

// --- where others are

void Group::Relatives::add(const Group* group, std::vector<int> numbers) {
    const std::lock_guard lock(mutex_);
    members_.push_back({group, std::move(numbers)});
}

void Group::Relatives::remove(const Group* group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(members_, [&](const Relative& member) { return member.group == group; });
}

std::vector<int> Group::Relatives::numbers_of(const Group* group) const {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(members_, group, &Relative::group);
    return found != members_.end() ? found->numbers : std::vector<int>{};
}

std::string Group::Relatives::doing(const Group* group, int late) const {
    const std::vector<int> own = numbers_of(group);
    const int number = own.empty() ? late : own[static_cast<size_t>(late)];
    const std::lock_guard lock(mutex_);
    for (const Relative& member : members_) {
        if (member.group == group) continue;
        int there = number;
        if (!member.numbers.empty()) {
            const auto found = std::ranges::find(member.numbers, number);
            if (found == member.numbers.end()) continue;
            there = static_cast<int>(found - member.numbers.begin());
        }
        const std::string doing = member.group->transport_->doing(there);
        if (!doing.empty()) return fmt::format("{} of communicator '{}'", doing, member.group->name());
    }
    return {};
}

std::optional<std::pair<int, std::string>> Group::Relatives::turn_elsewhere(const Group* group) const {
    const std::lock_guard lock(mutex_);
    const auto own = std::ranges::find(members_, group, &Relative::group);
    if (own == members_.end()) return std::nullopt;
    // A root has no list of numbers: it has all.
    const auto has = [](const Relative& member, int number) {
        return member.numbers.empty() || std::ranges::find(member.numbers, number) != member.numbers.end();
    };
    for (const Relative& member : members_) {
        const bool counts = member.group != group && !member.group->poisoned_.load(std::memory_order_acquire);
        const int rank = counts ? member.group->turn_of() : -1;
        if (rank < 0) continue;
        const int number = member.numbers.empty() ? rank : member.numbers[static_cast<size_t>(rank)];
        if (!has(*own, number)) continue;
        for (int other = 0; other < member.group->world_size(); ++other) {
            const int waiting = member.numbers.empty() ? other : member.numbers[static_cast<size_t>(other)];
            if (other != rank && has(*own, waiting)) return std::pair(rank, member.group->name());
        }
    }
    return std::nullopt;
}

// --- collective objects

void Group::finalize() {
    if (finalized_.load(std::memory_order_acquire)) {
        throw Error(Code::invalid_state,
                    fmt::format("rank {}: communicator '{}' is already finalized", rank_, options_.name));
    }
    if (device_) {
        device_->drain(Deadline::in(timeout()));
        device_->forget_graphs();
    }
    Request request;
    request.collective = Collective::finalize;
    run(request);
    finalized_.store(true, std::memory_order_release);
}

std::shared_ptr<Buffer> Group::allocate(size_t size) {
    const Call once = enter();
    if (!runs_inline()) {
        await_queue();
        throw_if_unusable();
    }
    const uint64_t sequence = ++collectives_;
    Request request;
    request.collective = Collective::allocate;
    const Operation operation = allocation_of(size);
    const uint64_t ticket = flight_.started(operation, sequence);
    try {
        auto buffer = transport_->allocate(size, sequence, timeout());
        flight_.ended(ticket, true);
        return buffer;
    } catch (...) {
        flight_.ended(ticket, false);
        const Error error = named(current_error(), request, sequence);
        // All ranks know that there is no memory and go on.
        if (error.code() != Code::no_memory) poison(error);
        throw error;
    }
}

}  // namespace tsr
