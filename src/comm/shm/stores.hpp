// How data is stored for another rank to read next: through the caches, or past them (streaming stores).
//
// A line that another core has read must be taken from that core's cache before it is written again. This is fast
// between cores that share a cache; otherwise (two dies, two sockets) every line costs a round trip between them, and
// writing past the caches is several times faster, although the reader then fetches the lines from memory. The system
// does not reliably report which case applies, least of all in a virtual machine, so it is measured on segments that
// are sent anyway.
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

// Copies past the caches. Call fence_streams() before publishing the data.
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

// Learns which way is faster. All ranks of a communicator make the same calls, so that all try the same way at the same
// time; each then uses the way that was faster for itself. A trial compares like with like: segments within one kind of
// collective, or complete collectives of one size, at most a segment.
class Stores {
   public:
    static constexpr size_t least = 4096;  // bytes of one store; below this there is no choice

    explicit Stores(
        size_t slots, Clock::time_point (*now)() = [] { return Clock::now(); })
        : slots_(static_cast<int>(slots)), now_(now) {}

    [[nodiscard]] bool stream() const { return stream_; }

    void begin_collective() {
        staged_ = 0;
        laps_ = 0;
    }
    // Call before storing `n` bytes that others will read.
    void stage(size_t n) {
        if (staged_ == 0 && kept_ == 0) begun_ = last_ = now_();
        staged_ += n;
    }
    // Call after a segment; `alike`: it is comparable to the one before.
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
        // The time of another kind is not comparable; if no other comes, switch to it.
        if (kind != kind_ && (tried_ == 0 || ++others_ > most_others)) try_anew(kind);
        if (kind != kind_) return;
        // The first samples after a switch find the lines where the other way left them.
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
