#include "tensor/convert.hpp"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "seed.hpp"

namespace tsr {
namespace {

template <class To, class From>
To converted(From value, DType from, DType to) {
    To out{};
    convert(reinterpret_cast<const std::byte*>(&value), from, reinterpret_cast<std::byte*>(&out), to, 1);
    return out;
}

TEST(Convert, EveryHalfAndBrainFloatSurvivesTheWayThroughWiderTypes) {
    for (const DType narrow : {DType::f16, DType::bf16}) {
        for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
            const auto half = static_cast<uint16_t>(bits);
            const auto wide = converted<float>(half, narrow, DType::f32);
            const auto back = converted<uint16_t>(wide, DType::f32, narrow);
            if (std::isnan(wide)) {
                ASSERT_TRUE(std::isnan(converted<double>(back, narrow, DType::f64)));
            } else {
                ASSERT_EQ(back, half);
                ASSERT_EQ(converted<uint16_t>(converted<double>(half, narrow, DType::f64), DType::f64, narrow), half);
            }
        }
    }
}

TEST(Convert, BrainFloatsAreTheUpperHalfOfFloats) {
    std::mt19937 random(5);
    for (int i = 0; i < 100000; ++i) {
        const auto bits = static_cast<uint32_t>(random());
        const auto value = std::bit_cast<float>(bits);
        if (std::isnan(value)) continue;
        // Round to nearest, ties to even, by integer arithmetic.
        const uint32_t expected = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        ASSERT_EQ(converted<uint16_t>(value, DType::f32, DType::bf16), expected) << value;
    }
}

TEST(Convert, HalvesRoundToNearestEven) {
    const auto half = [](double value) { return converted<uint16_t>(value, DType::f64, DType::f16); };
    EXPECT_EQ(half(1.0), 0x3c00);
    EXPECT_EQ(half(1.0 + 0x1p-11), 0x3c00);            // a tie, to even
    EXPECT_EQ(half(1.0 + 3 * 0x1p-11), 0x3c02);        // a tie, to even
    EXPECT_EQ(half(1.0 + 0x1p-11 + 0x1p-40), 0x3c01);  // just above a tie
    EXPECT_EQ(half(65504.0), 0x7bff);
    EXPECT_EQ(half(65519.9), 0x7bff);
    EXPECT_EQ(half(65520.0), 0x7c00);
    EXPECT_EQ(half(-1e300), 0xfc00);
    EXPECT_EQ(half(0x1p-24), 0x0001);
    EXPECT_EQ(half(0x1p-25), 0x0000);
    EXPECT_EQ(half(0x1p-25 + 0x1p-60), 0x0001);
    EXPECT_EQ(half(-0.0), 0x8000);
    EXPECT_EQ(half(0x1p-14 - 0x1p-26), 0x0400);  // rounds up to the smallest normal number
}

// As the conversion of one element at a time, which the tests above are of.
TEST(Convert, EachSetOfInstructionsGivesTheSameBits) {
    constexpr size_t count = 1031;
    constexpr std::array dtypes{DType::f16, DType::bf16, DType::f32, DType::f64};
    const testing::Seed seed;
    std::mt19937_64 random(seed);
    for (const DType from : dtypes) {
        for (const DType to : dtypes) {
            std::vector<std::byte> in(1 + count * size_of(from));  // from the second byte on: not aligned
            for (std::byte& byte : in) byte = static_cast<std::byte>(random());
            std::vector<std::byte> expected(count * size_of(to));
            for (size_t i = 0; i < count; ++i) {
                convert(in.data() + 1 + i * size_of(from), from, expected.data() + i * size_of(to), to, 1,
                        Vectors::plain);
            }
            for (const Vectors vectors : {Vectors::plain, Vectors::avx2, Vectors::avx512}) {
                if (vectors > widest_vectors()) break;
                std::vector<std::byte> out(1 + count * size_of(to));
                convert(in.data() + 1, from, out.data() + 1, to, count, vectors);
                EXPECT_EQ(std::memcmp(out.data() + 1, expected.data(), expected.size()), 0)
                    << name_of(from) << " to " << name_of(to) << ", vectors " << static_cast<int>(vectors);
            }
        }
    }
}

}  // namespace
}  // namespace tsr
