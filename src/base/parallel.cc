#include "base/parallel.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/thread.hpp"

namespace tsr {

void run_parallel(size_t tasks, int threads, const std::function<void(size_t task, int worker)>& run,
                  const std::function<void()>& poll) {
    const auto workers = std::min(tasks, static_cast<size_t>(std::max(threads, 1)));
    if (workers <= 1) {
        for (size_t task = 0; task < tasks; ++task) {
            poll_interrupt();
            run(task, 0);
            if (poll) poll();
        }
        return;
    }

    std::atomic<size_t> next{0};  // relaxed: it only hands out numbers, the mutex below publishes results
    std::atomic<bool> stop{false};
    std::mutex mutex;
    std::condition_variable changed;
    size_t running = 0;          // guarded by mutex
    std::optional<Error> error;  // guarded by mutex
    const auto work = [&](int worker) {
        // A waiting task is interrupted as soon as the loop stops: the caller returns only when all tasks have
        // returned.
        const InterruptedBy stopped(stop);
        while (!stop.load(std::memory_order_relaxed)) {
            const size_t task = next.fetch_add(1, std::memory_order_relaxed);
            if (task >= tasks) break;
            try {
                run(task, worker);
            } catch (...) {
                const std::lock_guard lock(mutex);
                if (!error) error = current_error();
                stop = true;
            }
        }
        const std::lock_guard lock(mutex);
        --running;
        changed.notify_all();
    };

    std::vector<std::thread> pool;
    try {
        for (size_t worker = 0; worker < workers; ++worker) {
            {
                const std::lock_guard lock(mutex);
                ++running;
            }
            pool.push_back(start_thread("tsr-worker", [&work, worker] { work(static_cast<int>(worker)); }));
        }
    } catch (...) {
        // No more threads available: the running ones do all the work, unless there are none.
        const std::lock_guard lock(mutex);
        --running;
        if (pool.empty()) error = current_error();
    }
    {
        std::unique_lock lock(mutex);
        while (running > 0) {
            changed.wait_for(lock, poll_slice);
            lock.unlock();
            try {
                poll_interrupt();
                if (poll) poll();
            } catch (...) {
                const std::lock_guard inner(mutex);
                if (!error) error = current_error();
                stop = true;
            }
            lock.lock();
        }
    }
    for (std::thread& thread : pool) thread.join();
    if (error) throw Error(*error);
}

}  // namespace tsr
