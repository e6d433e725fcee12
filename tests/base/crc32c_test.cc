#include "base/crc32c.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace tsr {
namespace {

// RFC 3720, appendix B.4, and the customary check value.
TEST(Crc32c, StandardVectors) {
    EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
    EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
    EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
    EXPECT_EQ(crc32c(""), 0u);
}

uint32_t bitwise(std::string_view text) {
    uint32_t crc = ~0u;
    for (const char c : text) {
        crc ^= static_cast<unsigned char>(c);
        for (int i = 0; i < 8; ++i) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

TEST(Crc32c, EveryLengthAndAlignmentEqualsTheBitwiseDefinition) {
    std::mt19937 random(17);
    std::string text(700, '\0');
    for (char& c : text) c = static_cast<char>(random());
    for (size_t begin = 0; begin < 9; ++begin) {
        for (size_t length = 0; length < 600; length += 7) {
            const std::string_view part = std::string_view(text).substr(begin, length);
            ASSERT_EQ(crc32c(part), bitwise(part)) << begin << " " << length;
        }
    }
}

TEST(Crc32c, OfPartsIsJoined) {
    std::mt19937 random(23);
    std::string text(700, '\0');
    for (char& c : text) c = static_cast<char>(random());
    for (const size_t part_bytes : {1, 7, 64, 699, 700, 1000}) {
        for (const size_t bytes : {0, 1, 63, 64, 65, 699, 700}) {
            std::vector<uint32_t> parts;
            for (size_t at = 0; at < bytes; at += part_bytes) {
                parts.push_back(crc32c(std::string_view(text).substr(at, std::min(part_bytes, bytes - at))));
            }
            EXPECT_EQ(crc32c_joined(parts, part_bytes, bytes), crc32c(std::string_view(text).substr(0, bytes)))
                << bytes << " in parts of " << part_bytes;
        }
    }
}

TEST(Crc32c, ContinuesOverPieces) {
    EXPECT_EQ(crc32c("456789", crc32c("123")), 0xe3069283u);
    EXPECT_EQ(crc32c("", crc32c("123456789")), 0xe3069283u);
}

TEST(Hex8, RoundTripsAndRefusesOtherForms) {
    EXPECT_EQ(hex8(0x00c0ffee), "00c0ffee");
    EXPECT_EQ(from_hex8("00c0ffee"), 0x00c0ffeeu);
    EXPECT_EQ(from_hex8("00C0FFEE"), std::nullopt);
    EXPECT_EQ(from_hex8("c0ffee"), std::nullopt);
    EXPECT_EQ(from_hex8("0x00ffee"), std::nullopt);
}

}  // namespace
}  // namespace tsr
