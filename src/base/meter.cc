#include "base/meter.hpp"

#include <pthread.h>

#include "base/thread.hpp"

namespace tsr {

namespace {

constinit Meter own_meter{};
// Of all that have counted a step in this process.
constinit std::atomic<int> best_kind{0};

}  // namespace

namespace detail {
constinit std::atomic<Meter*> current_meter{&own_meter};
}

void count_in(Meter& page) {
    // What a forked child does is not this process's.
    static const int registered =
        ::pthread_atfork(nullptr, nullptr, [] { detail::current_meter.store(&own_meter, std::memory_order_relaxed); });
    (void)registered;
    detail::current_meter.store(&page, std::memory_order_release);
}

void count_save(int64_t step, uint64_t begun, uint64_t bytes) {
    Meter& page = meter();
    const uint64_t now = ticks();
    page.save_step.store(step, std::memory_order_relaxed);
    page.save_ticks.store(now - begun, std::memory_order_relaxed);
    page.save_ended.store(now, std::memory_order_relaxed);
    add_to(page.saved_bytes, bytes);
    add_to(page.saves, 1);
}

ExposedWait::~ExposedWait() {
    if (!is_library_thread) add_to(meter().waited, ticks() - begun_);
}

void StepCounter::count(int64_t number) {
    const int kind = static_cast<int>(of_);
    int best = best_kind.load(std::memory_order_relaxed);
    while (best < kind && !best_kind.compare_exchange_weak(best, kind, std::memory_order_relaxed)) {
    }
    if (best > kind) return;
    Meter& page = meter();
    const uint64_t known = page.steps.load(std::memory_order_relaxed);
    if (own_ == 0) own_ = known;  // goes on from the others
    if (++own_ <= known) return;  // another is ahead
    const uint64_t now = ticks();
    const uint64_t last = page.step_ended.load(std::memory_order_relaxed);
    page.step.store(number, std::memory_order_relaxed);
    page.step_ticks.store(last == 0 ? 0 : now - last, std::memory_order_relaxed);
    page.step_ended.store(now, std::memory_order_relaxed);
    page.steps.store(own_, std::memory_order_relaxed);
}

}  // namespace tsr
