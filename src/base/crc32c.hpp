// CRC32C (Castagnoli), the checksum of every block, header and manifest. Standard convention: crc32c("123456789") is
// 0xe3069283. Pass a previous value as `crc` to continue it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tsr {

[[nodiscard]] uint32_t crc32c(std::span<const std::byte> data, uint32_t crc = 0);
[[nodiscard]] uint32_t crc32c(std::string_view text, uint32_t crc = 0);

// The checksum of bytes whose parts, each of `part_bytes` but the last, have these checksums. `bytes`: of all parts.
[[nodiscard]] uint32_t crc32c_joined(std::span<const uint32_t> parts, size_t part_bytes, size_t bytes);

// Eight lower-case hexadecimal digits, the stored form of checksums.
[[nodiscard]] std::string hex8(uint32_t value);
void hex8_to(uint32_t value, char* out);  // writes 8 characters
[[nodiscard]] std::optional<uint32_t> from_hex8(std::string_view text);

}  // namespace tsr
