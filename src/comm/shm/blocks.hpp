// How much the collectives of this transport take at a time.
#pragma once

#include <algorithm>
#include <cstddef>

#include "comm/shm/layout.hpp"

namespace tsr::shm {

// Up to here every rank reduces everything by itself: one point instead of two.
inline constexpr size_t one_shot_limit = size_t{16} << 10;
// Results are made a block at a time, so that a block of every rank stays in the second-level cache.
inline constexpr size_t block_size = size_t{16} << 10;

// Between two looks at interruptions and alarms, some milliseconds of copying; a multiple of the block.
inline constexpr size_t pulse_bytes = size_t{16} << 20;

// What each of `parts` gets of a segment: a multiple of the cache line, thus of any element. The lines of up to
// most_ranks fit the slot.
inline constexpr size_t most_ranks = slot_size / cache_line;
inline size_t share_of_segment(size_t parts) {
    return std::max(cache_line, segment_size / parts / cache_line * cache_line);
}

}  // namespace tsr::shm
