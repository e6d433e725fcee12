// How a rank waits for its peers: it spins, then yields, then sleeps in the kernel in slices. The kernel is asked to
// wake sleepers only if there are any.
//
// Why nobody sleeps for ever: a waker stores what the sleeper waits for, then loads `sleepers`; a sleeper adds itself to
// `sleepers`, then loads what it waits for. All four are sequentially consistent, so either the waker sees the sleeper
// and rings, or the sleeper sees the news. A ring between the sleeper's last look and its sleep changes `rings`, which the
// kernel compares before it sleeps. And each sleep ends by itself after a slice.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

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

// Not the private kind: the word is shared between processes.
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

// After a sequentially consistent store of what the sleepers wait for.
inline void ring(Bell& bell) {
    if (bell.sleepers.load(std::memory_order_seq_cst) != 0) ring_always(bell);
}

struct WaitPolicy {
    int spins = 200;
    int yields = 64;
    // Where cores are contended a yield may take milliseconds; then sleeping is better.
    std::chrono::milliseconds yield_time{10};
};

// Returns when ready() is true; ready() loads with sequential consistency. `alarmed()` ends spinning early; `check()` is
// called about each poll slice and at once when alarmed, and throws to end the wait.
template <class Ready, class Alarmed, class Check>
void wait(Bell& bell, const WaitPolicy& policy, Ready&& ready, Alarmed&& alarmed, Check&& check) {
    for (int spin = 0; spin < policy.spins; ++spin) {
        if (ready()) return;
        relax_cpu();
    }
    const auto begin = Clock::now();
    for (int yield = 0; yield < policy.yields; ++yield) {
        if (ready()) return;
        if (alarmed() || Clock::now() - begin > policy.yield_time) break;
        ::sched_yield();
    }
    auto checked = Clock::now();
    while (true) {
        bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t rings = bell.rings.load(std::memory_order_seq_cst);
        const bool now = ready();
        if (!now && !alarmed()) futex_wait(bell.rings, rings, poll_slice / 2);
        bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (now || ready()) return;
        if (alarmed() || Clock::now() - checked >= poll_slice / 2) {
            check();
            checked = Clock::now();
        }
    }
}

}  // namespace tsr::shm
