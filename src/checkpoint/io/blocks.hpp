// Blocks: each block_bytes of a file's data have one checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/io/stream.hpp"

namespace tsr {

inline constexpr int64_t block_bytes = int64_t{1} << 20;

// Sets the checksums of the blocks of `chunk`, which begins at byte `at` of the data, on a block boundary.
void set_block_crcs(std::vector<uint32_t>& crcs, int64_t at, std::span<const std::byte> chunk);
// The checksum of each block of the stream, computed on `threads` threads. Waits for data that is not available yet.
[[nodiscard]] std::vector<uint32_t> block_crcs(const ChunkSource& stream, int threads);

}  // namespace tsr
