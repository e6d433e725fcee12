// How a rank waits for its peers: it spins, then yields, then sleeps in the kernel in slices. The kernel is called to
// wake sleepers only if there are any.
//
// Why no wake-up is lost: a waker stores the awaited value, then loads `sleepers`; a sleeper increments `sleepers`,
// then loads the awaited value. All four accesses are sequentially consistent, so either the waker sees the sleeper and
// rings, or the sleeper sees the value. A ring between the sleeper's last check and its sleep changes `rings`, which
// the kernel compares before it sleeps. And each sleep ends after a slice in any case.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

#include "base/clock.hpp"
#include "comm/shm/layout.hpp"

namespace tsr::shm {

inline void relax_cpu() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

// Not FUTEX_PRIVATE: the word is shared between processes.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, milliseconds slice) {
    timespec span{};
    span.tv_sec = slice.count() / 1000;
    span.tv_nsec = (slice.count() % 1000) * 1000000;
    ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &span, nullptr, 0);
}

inline void ring_always(Bell& bell) {
    bell.rings.fetch_add(1, std::memory_order_seq_cst);
    ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.rings), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Call after a sequentially consistent store of the value that the sleepers wait for.
inline void ring(Bell& bell) {
    if (bell.sleepers.load(std::memory_order_seq_cst) != 0) ring_always(bell);
}

// How long a rank spins and whether it yields before it sleeps. It adapts:
//  - A yield that returns at once found nothing else to run on this core: the awaited rank runs on another core, and
//    spinning longer would have sufficed. A yield that takes longer ran something else here: spinning only delays it.
//  - Yielding is fastest when only ranks share the cores (each yield runs the next rank), and slowest when other
//    programs run too, since the kernel then gives one of them a complete time slice. After such a long yield the next
//    waits sleep at once; yielding is tried again after an ever larger number of waits.
struct Patience {
    int spins = 10;
    int least = 10;
    int most = 10;
    int sleeps_left = 0;  // number of waits that must not yield
    int sleeps = first_sleeps;

    static constexpr int first_sleeps = 64;
    static constexpr int most_sleeps = 1 << 16;

    void spin_longer() { spins = spins < most / 2 ? 2 * spins + 1 : most; }
    void spin_shorter() { spins = std::max(least, spins / 2); }
    void yield_was_long() {
        sleeps_left = sleeps;
        sleeps = std::min(most_sleeps, 2 * sleeps);
    }
};

// Half of the promised slice, so that a slice and the work in it stay within the promise.
inline constexpr milliseconds check_slice = poll_slice / 2;

inline constexpr int spins_before_look = 1 << 14;  // about a millisecond
inline constexpr int max_yields = 64;
inline constexpr std::chrono::nanoseconds empty_yield{1500};
inline constexpr std::chrono::microseconds long_yield{500};

// Returns when ready() is true; ready() loads with sequential consistency. `alarmed()` ends spinning early; `check()`
// is called about each poll slice and at once when alarmed, and throws to end the wait.
template <class Ready, class Alarmed, class Check>
void wait(Bell& bell, Patience& patience, Ready&& ready, Alarmed&& alarmed, Check&& check) {
    Clock::time_point looked{};
    for (int spin = 0; spin < patience.spins; ++spin) {
        if (ready()) return;
        relax_cpu();
        // Even with millions of spins, failures are noticed in time.
        if (spin % spins_before_look != spins_before_look - 1) continue;
        const auto now = Clock::now();
        if (looked == Clock::time_point{}) looked = now;
        if (!alarmed() && now - looked < check_slice) continue;
        check();
        looked = now;
    }
    const auto begin = Clock::now();
    if (patience.sleeps_left > 0) {
        --patience.sleeps_left;
        patience.spin_shorter();
    } else {
        auto last = begin;
        bool alone = true;
        for (int yield = 0; yield < max_yields; ++yield) {
            if (ready()) {
                patience.sleeps = Patience::first_sleeps;
                return alone ? patience.spin_longer() : patience.spin_shorter();
            }
            if (alarmed()) break;
            ::sched_yield();
            const auto now = Clock::now();
            alone = alone && now - last < empty_yield;
            if (now - last > long_yield) {
                patience.yield_was_long();
                break;
            }
            last = now;
        }
        patience.spin_shorter();
    }
    auto checked = begin;
    while (true) {
        bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t rings = bell.rings.load(std::memory_order_seq_cst);
        const bool now = ready();
        if (!now && !alarmed()) futex_wait(bell.rings, rings, check_slice);
        bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (now || ready()) return;
        if (alarmed() || Clock::now() - checked >= check_slice) {
            check();
            checked = Clock::now();
        }
    }
}

}  // namespace tsr::shm
