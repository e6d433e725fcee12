// The progress thread of a Group.
#include "comm/group.hpp"

namespace tsr {

void Group::progress() {
    progressing_ = this;
    std::vector<ActiveTransfer> active;
    while (true) {
        if (orphaned_) {
            if (unfinished_.load(std::memory_order_acquire) > 0)
                abort("the communicator was destroyed while it had work");
            if (const auto cause = error()) fail_everything(active, *cause);
            thread_.detach();
            delete this;
            return;
        }
        Task task;
        {
            std::unique_lock lock(mutex_);
            if (active.empty()) changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
            if (stopping_ && queue_.empty() && active.empty()) return;
            if (active.empty() && !queue_.front().is_transfer()) {
                task = queue_.pop_front();
            }
        }
        if (poisoned_.load(std::memory_order_acquire)) {
            const Error cause = *error();
            if (task.work) complete(task, aborted_by(cause));
            fail_everything(active, cause);
            continue;
        }
        if (task.work) {
            std::optional<Error> error;
            try {
                if (task.job) {
                    run_job(*task.job);
                } else if (task.request->is_on_device()) {
                    launch(task);
                } else {
                    const uint64_t sequence = ++collectives_;
                    flight_.started(task.ticket, sequence);
                    run_collective(task.request->view(), task.operation, sequence, task.ticket, task.timeout);
                    add_to(meter().bytes, task.operation.size_bytes());
                }
            } catch (...) {
                error = current_error();
            }
            complete(task, std::move(error));
            continue;
        }
        try {
            start_queued_transfers(active);
            progress_transfers(active);
        } catch (...) {
            const Error cause = current_error();
            poison(cause);
            fail_everything(active, cause);
        }
    }
}

void Group::run_job(const std::function<void()>& job) {
    in_job_ = true;
    try {
        job();
    } catch (...) {
        in_job_ = false;
        const Error error = current_error();
        poison(error);
        throw error;
    }
    in_job_ = false;
}

// Sends and receives at the head of the queue go on together, so that two ranks that both send first do not wait for
// each other for ever. A collective waits until those before it are done.
void Group::start_queued_transfers(std::vector<ActiveTransfer>& active) {
    queued_.store(false, std::memory_order_seq_cst);
    while (true) {
        Task task;
        {
            const std::lock_guard lock(mutex_);
            if (queue_.empty() || !queue_.front().is_transfer()) return;
            task = queue_.pop_front();
        }
        const Request request = task.request->view();
        const uint64_t sequence = ++transfers_;
        flight_.started(task.ticket, sequence);
        active.push_back({std::move(task), sequence, nullptr});
        try {
            active.back().transfer = transport_->start(request, sequence, Deadline::in(active.back().task.timeout));
        } catch (...) {
            const Error error = named(current_error(), request, sequence);
            Task failed = std::move(active.back().task);
            active.pop_back();
            poison(
                error);  // before completing: a waiter may destroy the communicator, which would report another cause
            complete(failed, error);
            throw error;
        }
    }
}

void Group::progress_transfers(std::vector<ActiveTransfer>& active) {
    bool moved = false;
    for (size_t i = 0; i < active.size();) {
        Transfer::Progress progress{};
        try {
            progress = active[i].transfer->advance();
        } catch (...) {
            const Error error = named(current_error(), active[i].task.request->view(), active[i].sequence);
            Task task = std::move(active[i].task);
            active.erase(active.begin() + static_cast<std::ptrdiff_t>(i));
            poison(error);
            complete(task, error);
            throw error;
        }
        moved = moved || progress != Transfer::Progress::stuck;
        if (progress != Transfer::Progress::done) {
            ++i;
            continue;
        }
        Task task = std::move(active[i].task);
        active.erase(active.begin() + static_cast<std::ptrdiff_t>(i));
        complete(task, std::nullopt);
    }
    if (moved || active.empty()) return;
    std::vector<Transfer*> waiting;
    for (const ActiveTransfer& a : active) waiting.push_back(a.transfer.get());
    try {
        transport_->wait(waiting, queued_);
    } catch (...) {
        const Error error = named(current_error(), active.front().task.request->view(), active.front().sequence);
        poison(error);
        for (ActiveTransfer& a : active) {
            a.transfer.reset();
            complete(a.task, error);
        }
        active.clear();
        throw error;
    }
}

void Group::complete(Task& task, std::optional<Error> error) {
    if (error && task.request && task.request->is_on_device()) fail_on_device(task, *error);
    task.job.reset();  // releases what the job holds before the waiter continues
    if (task.is_transfer()) {
        flight_.ended(task.ticket, !error);
        if (!error) add_to(meter().bytes, task.operation.size_bytes());
    }
    // Decrement the count first, so that a returning waiter finds the queue empty and runs its next call inline.
    unfinished_.fetch_sub(1, std::memory_order_release);
    task.work->finish(std::move(error));
}

void Group::fail_everything(std::vector<ActiveTransfer>& active, const Error& cause) {
    for (ActiveTransfer& a : active) {
        a.transfer.reset();
        complete(a.task, aborted_by(cause));
    }
    active.clear();
    Ring<Task> queue;
    {
        const std::lock_guard lock(mutex_);
        std::swap(queue, queue_);
    }
    while (!queue.empty()) {
        Task task = queue.pop_front();
        complete(task, aborted_by(cause));
    }
}

}  // namespace tsr
