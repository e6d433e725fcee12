// CRC32 as zip and gzip have it: crc32("123456789") is 0xcbf43926, and a value is continued by passing it as `crc`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tsr {

[[nodiscard]] uint32_t crc32(std::span<const std::byte> data, uint32_t crc = 0);
[[nodiscard]] uint32_t crc32(std::string_view text, uint32_t crc = 0);
// The checksum of two neighbours from each one's own, so that parts can be checked by several threads.
[[nodiscard]] uint32_t crc32_joined(uint32_t first, uint32_t second, int64_t second_bytes);

}  // namespace tsr
