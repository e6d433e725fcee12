// How data is stored where another rank reads it next: through the caches, or past them.
//
// A line that another core has read must be taken from its cache before it is written again. Cores that share a cache do
// that in no time; where they do not (two dies, two sockets), each line takes a turn between them, and to write past the
// caches is several times faster, though the reader then fetches the lines from memory. No table of the system's tells
// reliably which it is, least of all in a virtual machine: it is measured, on segments that pass anyway.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/clock.hpp"
#include "comm/request.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tsr::shm {

// Past the caches. Whoever publishes what was stored calls fence_streams() before.
inline void copy_streaming(std::byte* to, const std::byte* from, size_t n) {
#if defined(__SSE2__) && !defined(TESSERA_SANITIZES_THREADS)  // ThreadSanitizer does not see such stores
    const size_t head = std::min(n, (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64);
    std::memcpy(to, from, head);
    size_t done = head;
    for (; done + 64 <= n; done += 64) {
        const auto* source = reinterpret_cast<const __m128i*>(from + done);
        auto* line = reinterpret_cast<__m128i*>(to + done);
        const __m128i first = _mm_loadu_si128(source);
        const __m128i second = _mm_loadu_si128(source + 1);
        const __m128i third = _mm_loadu_si128(source + 2);
        const __m128i fourth = _mm_loadu_si128(source + 3);
        _mm_stream_si128(line, first);
        _mm_stream_si128(line + 1, second);
        _mm_stream_si128(line + 2, third);
        _mm_stream_si128(line + 3, fourth);
    }
    if (done < n) std::memcpy(to + done, from + done, n - done);
#else
    if (n > 0) std::memcpy(to, from, n);
#endif
}

inline void fence_streams() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// Learns which is faster. All ranks of a communicator call it alike, so that all try the same at a time; each then does
// what was faster for itself. A trial compares what is alike: segments within one kind of collective, or whole collectives
// of a segment at most and of one size.
class Stores {
   public:
    static constexpr size_t least = 4096;  // of one store; with less there is nothing to choose

    explicit Stores(
        size_t slots, Clock::time_point (*now)() = [] { return Clock::now(); })
        : slots_(static_cast<int>(slots)), now_(now) {}

    [[nodiscard]] bool stream() const { return stream_; }

    void begin_collective() {
        staged_ = 0;
        laps_ = 0;
    }
    // Before what others will read is stored.
    void stage(size_t n) {
        if (staged_ == 0 && kept_ == 0) begun_ = last_ = now_();
        staged_ += n;
    }
    // A segment has passed; `alike`: it took what the one just before it takes.
    void lap(Collective collective, bool alike) {
        ++laps_;
        if (is_kept()) return;
        const auto now = now_();
        if (alike) count({collective, 0}, now - last_);
        last_ = now;
    }
    void end_collective(Collective collective) {
        if (staged_ == 0 || laps_ > 1 || !all_stage(collective) || (laps_ == 0 && is_kept())) return;
        if (kept_ == 0) count({collective, staged_}, now_() - begun_);
    }

   private:
    static constexpr int samples = 10;  // of each way, after one round through the slots
    static constexpr int most_others = 1000;
    static constexpr int64_t most_kept = int64_t{1} << 14;  // 1 GiB: threads move to other cores

    struct Kind {
        Collective collective{};
        size_t size = 0;  // 0: segments of longer ones
        bool operator==(const Kind&) const = default;
    };

    static bool all_stage(Collective collective) {
        return collective == Collective::all_reduce || collective == Collective::reduce_scatter ||
               collective == Collective::all_gather || collective == Collective::all_to_all;
    }
    bool is_kept() {
        if (kept_ == 0) return false;
        --kept_;
        return true;
    }
    void count(const Kind& kind, Clock::duration took) {
        // What others take tells nothing; if they are all that comes, one of them is tried.
        if (kind != kind_ && (tried_ == 0 || ++others_ > most_others)) try_anew(kind);
        if (kind != kind_) return;
        // The first ones after a change find the lines where the other way left them.
        const int of_one_way = slots_ + samples;
        if (tried_++ % of_one_way >= slots_) least_[stream_ ? 1 : 0] = std::min(least_[stream_ ? 1 : 0], took);
        if (tried_ == of_one_way) stream_ = !stream_;
        if (tried_ < 2 * of_one_way) return;
        stream_ = least_[1] < least_[0] * 4 / 5;
        try_anew(kind);
        kept_ = keep_;
        keep_ = std::min(2 * keep_, most_kept);
    }
    void try_anew(const Kind& kind) {
        kind_ = kind;
        others_ = tried_ = 0;
        least_ = {Clock::duration::max(), Clock::duration::max()};
    }

    const int slots_;  // of staging, which take turns
    Clock::time_point (*const now_)();
    bool stream_ = false;
    size_t staged_ = 0;  // bytes, of this collective
    int laps_ = 0;
    Clock::time_point begun_;
    Clock::time_point last_;

    Kind kind_;       // of this trial
    int tried_ = 0;   // samples of it
    int others_ = 0;  // that did not count
    std::array<Clock::duration, 2> least_{};
    int64_t kept_ = 0;  // segments until the next trial
    int64_t keep_ = int64_t{1} << 12;
};

}  // namespace tsr::shm
