// Blocks: so many bytes of a file's data have one checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/io/stream.hpp"

namespace tsr {

inline constexpr int64_t block_bytes = int64_t{1} << 20;

// Sets those of the blocks of `chunk`, which begins at byte `at` of the data, at the begin of a block.
void set_block_crcs(std::vector<uint32_t>& crcs, int64_t at, std::span<const std::byte> chunk);
// The checksum of each block of the stream, on `threads` threads. Waits for what of it is not there yet.
[[nodiscard]] std::vector<uint32_t> block_crcs(const ChunkSource& stream, int threads);

}  // namespace tsr
