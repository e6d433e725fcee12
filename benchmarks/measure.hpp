// Timing shared by the collective benchmarks, so that ours and the peers' are measured by the same code: batches of
// calls back to back, no barrier in between, the median over the batches of the time a call took. Beside it, how long the
// machine's processors were busy for a call, all ranks and the kernel together: where that is the time of a call times
// the processors, these are what limits it.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

namespace bench {

inline double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Microseconds of all processors since the machine was started: in programs, in the kernel and in its interrupts. Of the
// machine and not of the ranks' processes, because what carries bytes between hosts is done by whichever process runs. In
// steps of 10 ms.
inline double busy_us() {
    std::ifstream stat("/proc/stat");
    std::string name;
    double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, interrupts = 0, soft_interrupts = 0;
    stat >> name >> user >> nice >> system >> idle >> waiting >> interrupts >> soft_interrupts;
    return (user + nice + system + interrupts + soft_interrupts) * 1e6 / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

struct Timing {
    double us = 0;       // of a call, on this rank
    double busy_us = 0;  // for a call, of all processors; nothing else may run
};

inline std::vector<size_t> parse_sizes(const char* text) {
    std::vector<size_t> sizes;
    char* end = nullptr;
    while (*text != '\0') {
        sizes.push_back(std::strtoull(text, &end, 10));
        text = *end == ',' ? end + 1 : end;
    }
    return sizes;
}

// How many calls make one batch: the same for every peer and rank, from size and ranks alone. With many ranks on few cores
// a call of Gloo takes 20 ms whatever its size.
inline int calls_a_batch(size_t bytes, int ranks) {
    if (bytes <= (size_t{64} << 10)) return ranks <= 4 ? 100 : 20;
    if (bytes <= (size_t{1} << 20)) return 20;
    return 3;
}

inline constexpr int batches = 7;

// Of one call: the median of the batches, and the mean of what they kept busy. Every rank must run it; the first batch
// warms up.
inline Timing timing(size_t bytes, int ranks, const std::function<void()>& call, const std::function<void()>& barrier) {
    std::vector<double> times;
    const int calls = calls_a_batch(bytes, ranks);
    double busy_before = 0;
    for (int batch = 0; batch <= batches; ++batch) {
        barrier();
        if (batch == 1) busy_before = busy_us();
        const double start = now_us();
        for (int i = 0; i < calls; ++i) call();
        if (batch > 0) times.push_back((now_us() - start) / calls);
    }
    const double busy = (busy_us() - busy_before) / (batches * calls);
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return {times[times.size() / 2], busy};
}

// One JSON line, printed by rank 0.
inline void report(const char* library, const char* mode, int ranks, size_t bytes, Timing taken, bool correct) {
    std::printf(
        "{\"library\":\"%s\",\"mode\":\"%s\",\"ranks\":%d,\"bytes\":%zu,\"us\":%.3f,\"busy_us\":%.3f,\"correct\":%s}\n",
        library, mode, ranks, bytes, taken.us, taken.busy_us, correct ? "true" : "false");
    std::fflush(stdout);
}

// An input whose sum over ranks 0..n-1 is exactly representable, and its check.
inline void fill(float* data, size_t count, int rank) {
    for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>(i % 97) + static_cast<float>(rank);
}
inline bool is_sum(const float* data, size_t count, int ranks) {
    const auto extra = static_cast<float>(ranks * (ranks - 1) / 2);
    for (size_t i = 0; i < count; ++i) {
        if (data[i] != static_cast<float>(ranks) * static_cast<float>(i % 97) + extra) return false;
    }
    return true;
}

}  // namespace bench
