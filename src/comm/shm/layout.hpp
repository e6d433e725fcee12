// Layout of the memory that the ranks of a communicator share on one host.
//
//   Header | RankPage x n | staging x n | channels n x n
//
// A staging area has slots, each with an input and a result part; the number of the synchronisation point selects the
// slot (see ShmTransport). channel(i, j) carries messages from rank i to rank j. A peer can overwrite any word in here:
// a word is copied once and then checked before it is used as an address or a length.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/atomic_words.hpp"
#include "base/page_size.hpp"
#include "comm/request.hpp"

namespace tsr::shm {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

inline constexpr size_t cache_line = 64;

// Where ranks sleep. A waker changes `rings` and calls the kernel only if there are sleepers.
struct alignas(cache_line) Bell {
    std::atomic<uint32_t> rings;
    std::atomic<uint32_t> sleepers;
};

// A location in a buffer of the communicator; buffer 0: in none.
struct Location {
    uint64_t buffer;
    uint64_t offset;
};

// What a rank publishes to its peers at a synchronisation point. `stamp` is stored last, once the rest is complete.
struct alignas(2 * cache_line) Arrival {
    static constexpr size_t payload_size = 48;
    std::atomic<uint64_t> stamp;
    uint64_t fingerprint;
    std::array<std::byte, payload_size> payload;  // all data of a small collective, in the cache line of its stamp
    Location input;
    Location output;
};
static_assert(sizeof(Arrival) == 2 * cache_line && offsetof(Arrival, input) == cache_line);

// The operation that a rank started last. Peers may read it at any time to report why they wait. A sequence lock:
// `version` is odd while the words change (base/atomic_words.hpp).
struct alignas(cache_line) Journal {
    std::atomic<uint64_t> version;
    std::atomic<uint64_t> sequence;  // 0: none yet
    std::atomic<uint64_t> finished;  // 1: it is done
    std::array<AtomicWord, words_of<Operation>> operation;
};

// The error that ended a rank's part; written once, before `state` becomes told.
struct alignas(cache_line) FailureRecord {
    static constexpr uint32_t none = 0;
    static constexpr uint32_t told = 1;
    std::atomic<uint32_t> state;
    int32_t code;
    int32_t peer;
    std::array<char, 948> text;
};

struct alignas(page_size) RankPage {
    std::array<Arrival, 2> arrivals;  // by the parity of the synchronisation point
    Bell bell;                        // of this rank's transfers
    Journal journal;
    Journal transfer;  // a send or recv that has been waiting for some time; finished once it no longer waits
    FailureRecord failure;
    alignas(cache_line) std::atomic<uint32_t> left;  // 1: the rank has destroyed its communicator,
    std::atomic<uint64_t> launched;                  // after this collective on a device
};
static_assert(sizeof(RankPage) == page_size);

struct alignas(page_size) Header {
    static constexpr uint64_t current_magic = 0x3130'4d48'5352'5354;  // "TSRSHM01"
    uint64_t magic;
    uint64_t world_size;
    uint64_t channel_size;
    uint64_t total_size;
    alignas(cache_line) std::atomic<uint32_t> alarm;  // not 0: some rank has reported a failure
    Bell bell;                                        // rung when a synchronisation point is complete
};
static_assert(sizeof(Header) == page_size);

// A byte ring from one rank to another. head: bytes ever written, tail: bytes ever read.
struct Channel {
    alignas(2 * cache_line) std::atomic<uint64_t> head;
    alignas(2 * cache_line) std::atomic<uint64_t> tail;
};

// Staging of a rank. 64 KiB was fastest: smaller segments synchronise too often, larger ones do not fit a second-level
// cache that several ranks share (docs/PERFORMANCE.md).
inline constexpr size_t segment_size = size_t{64} << 10;
inline constexpr size_t slot_size = 2 * segment_size;  // input and result

// Offsets of the parts, computed only from the number of ranks, so that all ranks get the same.
struct SegmentPlan {
    size_t world_size;
    size_t channel_size;  // bytes of a ring, a power of two
    // Number of staging slots: a power of two, at least two. Two would suffice, but lines are written faster once the
    // reader's second-level cache (about a megabyte) has evicted them.
    size_t slots;

    explicit SegmentPlan(size_t ranks)
        : world_size(ranks),
          channel_size(size_t{256} << 10),
          slots(std::bit_floor(std::clamp(64 / ranks, size_t{2}, size_t{32}))) {
        // Rings of 256 KiB up to 32 ranks, then smaller, so that all of them stay within 256 MiB of address space.
        while (channel_size > page_size && channel_size * ranks * ranks > (size_t{256} << 20)) channel_size /= 2;
    }
    [[nodiscard]] size_t rank_page(size_t rank) const { return sizeof(Header) + rank * sizeof(RankPage); }
    [[nodiscard]] size_t staging(size_t rank) const { return rank_page(world_size) + rank * slots * slot_size; }
    [[nodiscard]] size_t channel_stride() const { return page_size + channel_size; }
    [[nodiscard]] size_t channel(size_t from, size_t to) const {
        return staging(world_size) + (from * world_size + to) * channel_stride();
    }
    [[nodiscard]] size_t total() const { return channel(world_size, 0); }
};

}  // namespace tsr::shm
