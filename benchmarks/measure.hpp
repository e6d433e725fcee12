// Timing shared by the collective benchmarks, so that ours and the peers' are measured by the same code: batches of
// calls back to back, no barrier in between, the median over the batches of the time a call took.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace bench {

inline double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

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

// Median microseconds of one call on this rank. Every rank must run it; the first batch warms up.
inline double median_us(size_t bytes, int ranks, const std::function<void()>& call,
                        const std::function<void()>& barrier) {
    std::vector<double> times;
    const int calls = calls_a_batch(bytes, ranks);
    for (int batch = 0; batch <= batches; ++batch) {
        barrier();
        const double start = now_us();
        for (int i = 0; i < calls; ++i) call();
        if (batch > 0) times.push_back((now_us() - start) / calls);
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
}

// One JSON line, printed by rank 0.
inline void report(const char* library, const char* mode, int ranks, size_t bytes, double us, bool correct) {
    std::printf("{\"library\":\"%s\",\"mode\":\"%s\",\"ranks\":%d,\"bytes\":%zu,\"us\":%.3f,\"correct\":%s}\n", library,
                mode, ranks, bytes, us, correct ? "true" : "false");
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
