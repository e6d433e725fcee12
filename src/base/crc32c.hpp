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

// Eight lower-case hexadecimal digits, the stored form of checksums.
[[nodiscard]] std::string hex8(uint32_t value);
void hex8_to(uint32_t value, char* out);  // writes 8 characters
[[nodiscard]] std::optional<uint32_t> from_hex8(std::string_view text);

}  // namespace tsr
