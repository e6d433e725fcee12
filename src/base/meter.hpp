// What this process has done so far, in numbers: one page of counters that the agent of `tessera run` reads from outside
// while it grows (launch/meter_pages.hpp). Whoever counts only adds or stores, and never waits. Without an agent the page
// is the process's own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/page_size.hpp"
#include "base/ticks.hpp"

namespace tsr {

// Times are ticks(), which the processes of a host have in common. All orders are relaxed: a reader takes each number by
// itself.
struct Meter {
    std::atomic<uint64_t> steps;       // of training, of this process
    std::atomic<int64_t> step;         // the number of the last one, which a resume continues
    std::atomic<uint64_t> step_ended;  // 0: none has
    std::atomic<uint64_t> step_ticks;  // between the last two
    std::atomic<uint64_t> bytes;       // of collectives and messages: what a flight record says of each
    std::atomic<uint64_t> waited;  // exposed communication: what threads of the program spent in it or waiting for it
    std::atomic<uint64_t> saves;   // committed checkpoints
    std::atomic<uint64_t> failed_saves;
    std::atomic<int64_t> save_step;  // of the last committed one
    std::atomic<uint64_t> save_ended;
    std::atomic<uint64_t> save_ticks;   // from the call to the commit
    std::atomic<uint64_t> saved_bytes;  // of all, by this rank
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Meter) <= page_size);

namespace detail {
extern std::atomic<Meter*> current_meter;
}

// Any thread.
[[nodiscard]] inline Meter& meter() { return *detail::current_meter.load(std::memory_order_acquire); }
// Counts in `page` from now on, which lives as long as the process.
void count_in(Meter& page);

inline void add_to(std::atomic<uint64_t>& counter, uint64_t more) {
    counter.fetch_add(more, std::memory_order_relaxed);
}

// A save that began at `begun` has been committed.
void count_save(int64_t step, uint64_t begun, uint64_t bytes);

// While it exists, the calling thread, unless it is one of the library's, waits for communication.
class ExposedWait {
   public:
    ExposedWait() : begun_(ticks()) {}
    ~ExposedWait();
    ExposedWait(const ExposedWait&) = delete;
    ExposedWait& operator=(const ExposedWait&) = delete;

   private:
    uint64_t begun_;
};

// Counts the steps of one optimizer, model or loop. The best kind that a process has counts. Of several of that kind, the
// one that is ahead counts: two optimizers that take turns make one step together.
class StepCounter {
   public:
    enum class Of { loop, model, optimizer };
    explicit StepCounter(Of of) : of_(of) {}
    // A step has ended. `number`: its number, from 1.
    void count(int64_t number);

   private:
    const Of of_;
    uint64_t own_ = 0;
};

}  // namespace tsr
