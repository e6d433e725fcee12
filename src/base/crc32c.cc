#include "base/crc32c.hpp"

#include <isa-l/crc.h>

#include <algorithm>

#include "base/crc32c_field.hpp"

namespace tsr {

uint32_t crc32c(std::span<const std::byte> data, uint32_t crc) {
    constexpr size_t piece = size_t{1} << 30;  // ISA-L counts bytes in an int
    // ISA-L leaves out the inversions before and after that the standard CRC has.
    crc = ~crc;
    while (!data.empty()) {
        const size_t n = std::min(data.size(), piece);
        auto* bytes = reinterpret_cast<unsigned char*>(const_cast<std::byte*>(data.data()));
        crc = crc32_iscsi(bytes, static_cast<int>(n), crc);
        data = data.subspan(n);
    }
    return ~crc;
}

uint32_t crc32c(std::string_view text, uint32_t crc) {
    return crc32c(std::as_bytes(std::span(text.data(), text.size())), crc);
}

uint32_t crc32c_joined(std::span<const uint32_t> parts, size_t part_bytes, size_t bytes) {
    if (parts.empty()) return 0;
    const uint32_t shift = crc32c_shift(part_bytes);
    uint32_t crc = 0;
    for (const uint32_t part : parts.first(parts.size() - 1)) crc = crc32c_times(crc, shift) ^ part;
    return crc32c_times(crc, crc32c_shift(bytes - (parts.size() - 1) * part_bytes)) ^ parts.back();
}

void hex8_to(uint32_t value, char* out) {
    static constexpr char digits[] = "0123456789abcdef";
    for (int i = 7; i >= 0; --i, value >>= 4) out[i] = digits[value & 15];
}

std::string hex8(uint32_t value) {
    std::string text(8, '0');
    hex8_to(value, text.data());
    return text;
}

std::optional<uint32_t> from_hex8(std::string_view text) {
    if (text.size() != 8) return std::nullopt;
    uint32_t value = 0;
    for (const char c : text) {
        uint32_t digit = 0;
        if (c >= '0' && c <= '9') {
            digit = static_cast<uint32_t>(c - '0');
        } else if (c >= 'a' && c <= 'f') {
            digit = static_cast<uint32_t>(c - 'a') + 10;
        } else {
            return std::nullopt;
        }
        value = value << 4 | digit;
    }
    return value;
}

}  // namespace tsr
