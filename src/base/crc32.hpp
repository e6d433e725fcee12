// CRC32 as in zip and gzip: crc32("123456789") is 0xcbf43926. Pass a previous value as `crc` to continue it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tsr {

[[nodiscard]] uint32_t crc32(std::span<const std::byte> data, uint32_t crc = 0);
[[nodiscard]] uint32_t crc32(std::string_view text, uint32_t crc = 0);
// The checksum of two adjacent parts from the checksum of each, so that several threads can check parts.
[[nodiscard]] uint32_t crc32_joined(uint32_t first, uint32_t second, int64_t second_bytes);

}  // namespace tsr
