// Checksums as polynomials over GF(2) modulo CRC32C's: what a checksum becomes when bytes follow. Bit 31 is the coefficient of
// x^0. The checksum of two parts is that of the first times x^(8 * bytes of the second), plus that of the second, where plus is
// exclusive or (W. W. Peterson, D. T. Brown: Cyclic Codes for Error Detection, 1961).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.hpp"

namespace tsr {

inline constexpr uint32_t crc32c_polynomial = 0x82f63b78U;

// The checksum's register after 8 zero bits.
TSR_HD constexpr uint32_t crc32c_of_byte(uint32_t crc) {
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1U) != 0 ? crc32c_polynomial : 0U);
    return crc;
}

TSR_HD constexpr uint32_t crc32c_times(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int power = 31; power >= 0; --power) {
        if ((a >> power & 1U) != 0) product ^= b;
        b = b >> 1 ^ ((b & 1U) != 0 ? crc32c_polynomial : 0U);
    }
    return product;
}

// x^(8 * bytes)
TSR_HD constexpr uint32_t crc32c_shift(size_t bytes) {
    uint32_t shift = 1U << 31;
    for (uint32_t square = 1U << 23; bytes != 0; bytes >>= 1, square = crc32c_times(square, square)) {
        if ((bytes & 1U) != 0) shift = crc32c_times(shift, square);
    }
    return shift;
}

}  // namespace tsr
