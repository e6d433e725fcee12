// Block sizes of this transport's collectives.
#pragma once

#include <algorithm>
#include <cstddef>

#include "comm/shm/layout.hpp"

namespace tsr::shm {

// Up to this size every rank reduces everything itself: one synchronisation point instead of two.
inline constexpr size_t one_shot_limit = size_t{16} << 10;
// Results are computed in blocks, so that one block of every rank fits the second-level cache.
inline constexpr size_t block_size = size_t{16} << 10;

// Bytes copied between two checks for interrupts and alarms, a few milliseconds; a multiple of the block.
inline constexpr size_t pulse_bytes = size_t{16} << 20;

// The share of a segment for each of `parts`: a multiple of the cache line, thus of any element. One cache line for
// each of up to most_ranks fits the slot.
inline constexpr size_t most_ranks = slot_size / cache_line;
inline size_t share_of_segment(size_t parts) {
    return std::max(cache_line, segment_size / parts / cache_line * cache_line);
}

}  // namespace tsr::shm
