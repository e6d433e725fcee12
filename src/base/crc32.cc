#include "base/crc32.hpp"

#include <isa-l/crc.h>

namespace tsr {

namespace {

// Polynomials over GF(2) modulo the CRC's, bit 31 being the coefficient of x^0.
constexpr uint32_t modulus = 0xedb88320;

uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
        if ((a & bit) != 0) product ^= b;
        b = (b & 1) != 0 ? (b >> 1) ^ modulus : b >> 1;
    }
    return product;
}

uint32_t power_of_x(uint64_t exponent) {
    uint32_t result = uint32_t{1} << 31;
    for (uint32_t square = uint32_t{1} << 30; exponent != 0; exponent >>= 1) {
        if ((exponent & 1) != 0) result = multiply(result, square);
        square = multiply(square, square);
    }
    return result;
}

}  // namespace

uint32_t crc32(std::span<const std::byte> data, uint32_t crc) {
    return crc32_gzip_refl(crc, reinterpret_cast<const unsigned char*>(data.data()), data.size());
}

uint32_t crc32(std::string_view text, uint32_t crc) {
    return crc32(std::as_bytes(std::span(text.data(), text.size())), crc);
}

uint32_t crc32_joined(uint32_t first, uint32_t second, int64_t second_bytes) {
    return multiply(first, power_of_x(static_cast<uint64_t>(second_bytes) * 8)) ^ second;
}

}  // namespace tsr
