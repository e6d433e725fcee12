// The reduction kernels against plain loops, on random bits, special values and every number of inputs.
#include "comm/reduce.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <random>
#include <vector>

#include "seed.hpp"
#include "values.hpp"

namespace tsr::testing {
namespace {

template <class T>
std::vector<const std::byte*> pointers(const std::vector<std::vector<T>>& inputs) {
    std::vector<const std::byte*> result;
    for (const auto& input : inputs) result.push_back(reinterpret_cast<const std::byte*>(input.data()));
    return result;
}

template <class T>
std::vector<T> reduced(const std::vector<std::vector<T>>& inputs, DType dtype, ReduceOp op) {
    std::vector<T> out(inputs[0].size());
    reduce(reinterpret_cast<std::byte*>(out.data()), pointers(inputs), out.size(), dtype, op);
    return out;
}

template <class T>
std::vector<T> one_of_each(const std::vector<T>& values, DType dtype, ReduceOp op) {
    std::vector<std::vector<T>> inputs;
    for (const T value : values) inputs.push_back({value});
    return reduced(inputs, dtype, op);
}

TEST(Reduce, FloatSumsInRankOrderForEveryNumberOfInputs) {
    const Seed seed;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 1000);
    for (size_t n = 1; n <= 17; ++n) {
        std::vector<std::vector<float>> inputs(n, std::vector<float>(5003));
        for (auto& input : inputs) {
            for (float& value : input) value = normal(random);
        }
        const auto sum = reduced(inputs, DType::f32, ReduceOp::sum);
        const auto mean = reduced(inputs, DType::f32, ReduceOp::avg);
        for (size_t i = 0; i < sum.size(); ++i) {
            float expected = inputs[0][i];
            for (size_t k = 1; k < n; ++k) expected += inputs[k][i];
            ASSERT_EQ(sum[i], expected) << n << " inputs, element " << i;
            ASSERT_EQ(mean[i], expected / static_cast<float>(n));
        }
    }
}

TEST(Reduce, OutputMayBeAnyInput) {
    for (size_t n : {2, 3, 4, 5, 8}) {
        for (size_t at = 0; at < n; ++at) {
            std::vector<std::vector<int32_t>> inputs(n, std::vector<int32_t>(4100));
            for (size_t k = 0; k < n; ++k) {
                for (size_t i = 0; i < 4100; ++i) inputs[k][i] = static_cast<int32_t>(i * (k + 1));
            }
            reduce(reinterpret_cast<std::byte*>(inputs[at].data()), pointers(inputs), 4100, DType::i32, ReduceOp::sum);
            for (size_t i = 0; i < 4100; ++i) ASSERT_EQ(inputs[at][i], static_cast<int32_t>(i * n * (n + 1) / 2));
        }
    }
}

// All 65536 bit patterns: adding zero must give the same number back.
TEST(Reduce, EveryHalfSurvivesItsConversions) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
        std::vector<uint16_t> all(65536);
        for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
        const int mantissa_bits = dtype == DType::f16 ? 10 : 7;
        const uint16_t exponent = static_cast<uint16_t>(0x7fff & ~((1 << mantissa_bits) - 1));
        const auto out = reduced<uint16_t>({all, std::vector<uint16_t>(all.size(), 0)}, dtype, ReduceOp::sum);
        for (size_t i = 0; i < all.size(); ++i) {
            const bool nan = (i & 0x7fff) > exponent;
            if (nan) {
                ASSERT_GT(out[i] & 0x7fff, exponent) << std::hex << i;
            } else if (i == 0x8000) {
                ASSERT_EQ(out[i], 0);  // -0 + 0
            } else {
                ASSERT_EQ(out[i], i) << std::hex << i;
            }
        }
    }
}

// The plain code is the reference: random bits, so that infinities, NaNs, subnormals and wraps come too, in lengths that end
// anywhere in a vector, at places that are aligned to the element alone.
TEST(Reduce, EveryInstructionSetGivesTheSameBits) {
    const Seed seed;
    std::mt19937 random(seed);
    const auto is_nan = [](DType dtype, const std::byte* element) {
        return dtype == DType::f32   ? std::isnan(*reinterpret_cast<const float*>(element))
               : dtype == DType::f64 ? std::isnan(*reinterpret_cast<const double*>(element))
                                     : false;
    };
    for (const Vectors vectors : {Vectors::avx2, Vectors::avx512}) {
        if (vectors > widest_vectors()) {
            std::cout << "not tested: this processor has no " << (vectors == Vectors::avx2 ? "AVX2" : "AVX-512")
                      << "\n";
            break;
        }
        for (const DType dtype :
             {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i8, DType::u8, DType::i32, DType::i64}) {
            const size_t element = size_of(dtype);
            for (const size_t n : {2, 3, 4, 5, 8, 11}) {
                for (const size_t count : {1, 7, 33, 130, 1100}) {
                    std::vector<std::vector<uint64_t>> memory(n, std::vector<uint64_t>(count + 1));
                    std::vector<const std::byte*> inputs;
                    for (auto& input : memory) {
                        for (uint64_t& word : input) word = static_cast<uint64_t>(random()) << 32 | random();
                        inputs.push_back(reinterpret_cast<const std::byte*>(input.data()) + element);
                    }
                    for (const ReduceOp op :
                         {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod}) {
                        std::vector<uint64_t> expected(count + 1);
                        std::vector<uint64_t> got(count + 1);
                        auto* want = reinterpret_cast<std::byte*>(expected.data());
                        auto* have = reinterpret_cast<std::byte*>(got.data());
                        reduce(want, inputs, count, dtype, op, n, Vectors::plain);
                        reduce(have, inputs, count, dtype, op, n, vectors);
                        for (size_t i = 0; i <= count; ++i, want += element, have += element) {
                            if (is_nan(dtype, want) && is_nan(dtype, have)) continue;
                            ASSERT_EQ(std::memcmp(want, have, element), 0)
                                << name_of(dtype) << " " << name_of(op) << " of " << n << ", element " << i << " of "
                                << count << ", instruction set " << static_cast<int>(vectors);
                        }
                    }
                }
            }
        }
    }
}

// However many elements a call has, and so whichever instructions do it, each element gets the same bits.
TEST(Reduce, BitsDoNotDependOnTheLengthOfTheCall) {
    const Seed seed;
    std::mt19937 random(seed);
    for (const DType dtype : {DType::f16, DType::bf16}) {
        for (const size_t n : {2, 3, 5}) {
            std::vector<std::vector<uint16_t>> inputs(n, std::vector<uint16_t>(20000));
            for (auto& input : inputs) {
                for (uint16_t& bits : input)
                    bits = static_cast<uint16_t>(random());  // infinities, NaNs, subnormals too
            }
            for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod}) {
                const auto together = reduced(inputs, dtype, op);
                auto pointers_here = pointers(inputs);
                for (size_t i = 0; i < together.size(); ++i) {
                    uint16_t alone = 0;
                    reduce(reinterpret_cast<std::byte*>(&alone), pointers_here, 1, dtype, op);
                    for (const std::byte*& pointer : pointers_here) pointer += sizeof(uint16_t);
                    ASSERT_EQ(together[i], alone)
                        << name_of(dtype) << " " << name_of(op) << " of " << n << ", element " << i;
                }
            }
        }
    }
}

// Neighbouring halves' sums fall between representable numbers, on ties too.
TEST(Reduce, HalfRoundsOnceToNearestEven) {
    const Seed seed;
    std::mt19937 random(seed);
    std::vector<std::vector<uint16_t>> inputs(3, std::vector<uint16_t>(20000));
    for (auto& input : inputs) {
        for (uint16_t& bits : input) bits = static_cast<uint16_t>((random() & 0x83ff) | ((10 + random() % 12) << 10));
    }
    const auto sums = reduced(inputs, DType::f16, ReduceOp::sum);
    for (size_t i = 0; i < sums.size(); ++i) {
        float exact = 0;
        for (const auto& input : inputs) exact += static_cast<float>(half_to_double(input[i]));
        const double got = half_to_double(sums[i]);
        // The nearest half: no neighbour is nearer, and on a tie the last bit is even.
        for (const int step : {-1, 1}) {
            const uint16_t other = static_cast<uint16_t>(sums[i] + step);
            if ((sums[i] & 0x7fff) == 0) continue;
            const double distance = std::fabs(got - static_cast<double>(exact));
            const double other_distance = std::fabs(half_to_double(other) - static_cast<double>(exact));
            ASSERT_TRUE(distance < other_distance || (distance == other_distance && sums[i] % 2 == 0)) << i;
        }
    }
}

TEST(Reduce, HalfOverflowsToInfinityAndUnderflowsGradually) {
    EXPECT_EQ(one_of_each<uint16_t>({0x7bff, 0x7bff}, DType::f16, ReduceOp::sum)[0], 0x7c00);  // 65504 + 65504
    EXPECT_EQ(one_of_each<uint16_t>({0x7bff, 0x4c00}, DType::f16, ReduceOp::sum)[0],
              0x7c00);  // + 16: a tie, up to infinity
    EXPECT_EQ(one_of_each<uint16_t>({0x7bff, 0x4b80}, DType::f16, ReduceOp::sum)[0], 0x7bff);   // + 15: down
    EXPECT_EQ(one_of_each<uint16_t>({0x0400, 0x3800}, DType::f16, ReduceOp::prod)[0], 0x0200);  // 2^-14 / 2
    EXPECT_EQ(one_of_each<uint16_t>({0x0001, 0x3800}, DType::f16, ReduceOp::prod)[0], 0x0000);  // 2^-25: a tie, to even
    EXPECT_EQ(one_of_each<uint16_t>({0x0003, 0x3800}, DType::f16, ReduceOp::prod)[0], 0x0002);
}

// 256 + 1 + ... is lost in f16's and bf16's own precision, not in f32.
TEST(Reduce, SmallFloatsAccumulateInSingle) {
    const std::vector<uint16_t> bf16 = {0x4380, 0x3f80, 0x3f80, 0x3f80, 0x3f80};    // 256, 1, 1, 1, 1
    EXPECT_EQ(one_of_each<uint16_t>(bf16, DType::bf16, ReduceOp::sum)[0], 0x4382);  // 260
    const std::vector<uint16_t> f16 = {0x6800, 0x3c00, 0x3c00};                     // 2048, 1, 1
    EXPECT_EQ(one_of_each<uint16_t>(f16, DType::f16, ReduceOp::sum)[0], 0x6801);    // 2050
}

TEST(Reduce, NanWinsWhereverItIs) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const ReduceOp op : {ReduceOp::min, ReduceOp::max, ReduceOp::sum, ReduceOp::prod, ReduceOp::avg}) {
        for (size_t n : {2, 3, 4, 5, 8, 9}) {
            for (size_t at = 0; at < n; ++at) {
                std::vector<float> values(n, 1);
                values[at] = nan;
                EXPECT_TRUE(std::isnan(one_of_each(values, DType::f32, op)[0]))
                    << name_of(op) << " " << at << " of " << n;
                std::vector<uint16_t> halves(n, 0x3c00);
                halves[at] = 0x7e01;
                EXPECT_GT(one_of_each(halves, DType::f16, op)[0] & 0x7fff, 0x7c00);
            }
        }
    }
}

TEST(Reduce, IntegersWrapInSumButNotInAverage) {
    EXPECT_EQ(one_of_each<int8_t>({100, 100}, DType::i8, ReduceOp::sum)[0], -56);
    EXPECT_EQ(one_of_each<int8_t>({100, 101}, DType::i8, ReduceOp::avg)[0], 100);
    EXPECT_EQ(one_of_each<int8_t>({-100, -101}, DType::i8, ReduceOp::avg)[0], -100);
    EXPECT_EQ(one_of_each<uint8_t>({255, 254}, DType::u8, ReduceOp::avg)[0], 254);
    const int32_t big = std::numeric_limits<int32_t>::max();
    EXPECT_EQ(one_of_each<int32_t>({big, big, big}, DType::i32, ReduceOp::avg)[0], big);
    const int64_t large = std::numeric_limits<int64_t>::max();
    EXPECT_EQ(one_of_each<int64_t>({large, large}, DType::i64, ReduceOp::avg)[0], large);
    EXPECT_EQ(one_of_each<int64_t>({large, 1}, DType::i64, ReduceOp::sum)[0], std::numeric_limits<int64_t>::min());
    EXPECT_EQ(one_of_each<int8_t>({16, 16}, DType::i8, ReduceOp::prod)[0], 0);
    EXPECT_EQ(one_of_each<int32_t>({65536, 65536}, DType::i32, ReduceOp::prod)[0], 0);
}

// Multiples of the divisor and what is beside them, and the ends of the range; of one input and of as many as there may be.
template <class T>
void expect_exact_averages(DType dtype) {
    using Limits = std::numeric_limits<T>;
    constexpr size_t most = 4096;
    for (size_t divisor = 1; divisor <= most; ++divisor) {
        std::vector<T> values{Limits::min(), Limits::max(), static_cast<T>(Limits::min() + 1),
                              static_cast<T>(Limits::max() - 1)};
        for (const uint64_t k : {0, 1, 2, 3, 5, 7, 100, 524'287}) {
            const auto around = static_cast<T>(k * divisor);
            for (const T value : {around, static_cast<T>(around - 1), static_cast<T>(around + 1)}) {
                values.push_back(value);
                values.push_back(static_cast<T>(-value));
            }
        }
        const auto* data = reinterpret_cast<const std::byte*>(values.data());
        for (const size_t inputs : {size_t{1}, divisor}) {
            if (inputs > 64 && inputs < most && inputs % 512 != 1) continue;
            std::vector<T> out(values.size());
            reduce(reinterpret_cast<std::byte*>(out.data()), std::vector<const std::byte*>(inputs, data), out.size(),
                   dtype, ReduceOp::avg, divisor);
            for (size_t i = 0; i < out.size(); ++i) {
                const __int128 sum = static_cast<__int128>(values[i]) * static_cast<__int128>(inputs);
                ASSERT_EQ(out[i], static_cast<T>(sum / static_cast<__int128>(divisor)))
                    << +values[i] << " from each of " << inputs << ", by " << divisor;
            }
        }
    }
}

TEST(Reduce, AveragesOfIntegersAreExactForEveryDivisor) {
    expect_exact_averages<int8_t>(DType::i8);
    expect_exact_averages<uint8_t>(DType::u8);
    expect_exact_averages<int32_t>(DType::i32);
    expect_exact_averages<int64_t>(DType::i64);
}

// --- random values of every dtype against loops that know nothing of the library

using Wide = __int128;

// An integer of any kind, often at an end of its range or beside zero.
template <class T>
T any_integer(std::mt19937_64& random) {
    constexpr T ends[] = {std::numeric_limits<T>::min(), std::numeric_limits<T>::max(), static_cast<T>(-1), 0, 1};
    switch (random() % 3) {
        case 0: return ends[random() % std::size(ends)];
        case 1: return static_cast<T>(static_cast<int>(random() % 17) - 8);
        default: return static_cast<T>(random());
    }
}

template <class T>
T plain_result(const std::vector<T>& values, ReduceOp op) {
    uint64_t sum = 0;
    uint64_t product = 1;
    Wide exact = 0;
    for (const T value : values) {
        sum += static_cast<uint64_t>(value);
        product *= static_cast<uint64_t>(value);
        exact += value;
    }
    switch (op) {
        case ReduceOp::sum: return static_cast<T>(sum);
        case ReduceOp::prod: return static_cast<T>(product);
        case ReduceOp::min: return *std::ranges::min_element(values);
        case ReduceOp::max: return *std::ranges::max_element(values);
        default: return static_cast<T>(exact / static_cast<Wide>(values.size()));
    }
}

// A float of any kind: random bits, a plain number, or a special one.
template <class T>
T any_float(std::mt19937_64& random) {
    using Limits = std::numeric_limits<T>;
    const T special[] = {Limits::infinity(),
                         -Limits::infinity(),
                         Limits::quiet_NaN(),
                         Limits::max(),
                         Limits::lowest(),
                         Limits::denorm_min(),
                         T{0},
                         -T{0}};
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    switch (random() % 8) {
        case 0: return special[random() % std::size(special)];
        case 1: return std::bit_cast<T>(static_cast<Bits>(random()));
        default: return static_cast<T>(std::normal_distribution<double>(0, 100)(random));
    }
}

template <std::floating_point T>
T plain_result(const std::vector<T>& values, ReduceOp op) {
    T result = values[0];
    for (size_t k = 1; k < values.size(); ++k) {
        const T value = values[k];
        if (op == ReduceOp::prod) {
            result *= value;
        } else if (op == ReduceOp::sum || op == ReduceOp::avg) {
            result += value;
        } else if (std::isnan(value) || std::isnan(result)) {
            result = std::numeric_limits<T>::quiet_NaN();
        } else {
            result = op == ReduceOp::min ? std::min(result, value) : std::max(result, value);
        }
    }
    return op == ReduceOp::avg ? result / static_cast<T>(values.size()) : result;
}

// A type of 16 bits: the numbers that its patterns stand for, and the nearest of them by looking at all.
class SmallFloat {
   public:
    explicit SmallFloat(int mantissa_bits) : mantissa_bits_(mantissa_bits), infinity_(exponents() << mantissa_bits) {
        for (int bits = 0; bits <= infinity_; ++bits) numbers_.push_back(magnitude(bits));
    }
    [[nodiscard]] float value(uint16_t bits) const {
        const int rest = bits & 0x7fff;
        const float sign = bits >= 0x8000 ? -1 : 1;
        if (rest > infinity_) return std::numeric_limits<float>::quiet_NaN();
        if (rest == infinity_) return sign * std::numeric_limits<float>::infinity();
        return sign * static_cast<float>(numbers_[static_cast<size_t>(rest)]);
    }
    [[nodiscard]] uint16_t nearest(float value) const {
        if (std::isnan(value)) return static_cast<uint16_t>(infinity_ | 1 << (mantissa_bits_ - 1));  // the only NaN
        const int sign = std::signbit(value) ? 0x8000 : 0;
        const double wanted = std::fabs(static_cast<double>(value));
        // Infinity's place is where the number after the largest would be.
        const auto above = std::ranges::upper_bound(numbers_, wanted);
        if (above == numbers_.end()) return static_cast<uint16_t>(sign | infinity_);
        const int upper = static_cast<int>(above - numbers_.begin());
        const double to_upper = *above - wanted;
        const double to_lower = wanted - *(above - 1);
        const bool up = to_upper < to_lower || (to_upper == to_lower && upper % 2 == 0);
        return static_cast<uint16_t>(sign | (up ? upper : upper - 1));
    }
    [[nodiscard]] uint16_t any(std::mt19937_64& random) const {
        const auto bits = static_cast<uint16_t>(random());
        if (random() % 8 == 0) return bits;
        if (random() % 8 == 0) return static_cast<uint16_t>((bits & 0x8000) | infinity_);
        return nearest(static_cast<float>(std::normal_distribution<double>(0, 100)(random)));
    }

   private:
    [[nodiscard]] int exponents() const { return (1 << (15 - mantissa_bits_)) - 1; }
    [[nodiscard]] double magnitude(int bits) const {
        const int exponent = bits >> mantissa_bits_;
        const int mantissa = bits & ((1 << mantissa_bits_) - 1);
        const int lowest = 1 - exponents() / 2 - mantissa_bits_;  // the exponent of the last bit of subnormals
        if (exponent == 0) return std::ldexp(mantissa, lowest);
        return std::ldexp(mantissa + (1 << mantissa_bits_), lowest + exponent - 1);
    }

    int mantissa_bits_;
    int infinity_;
    std::vector<double> numbers_;  // by pattern, without signs
};

// Compares what reduce() gives of inputs that `any` makes with what `plain` makes of one element of each.
template <class T>
void expect_plain_results(DType dtype, unsigned seed, const std::function<T(std::mt19937_64&)>& any,
                          const std::function<T(const std::vector<T>&, ReduceOp)>& plain,
                          const std::function<bool(T, T, ReduceOp)>& same) {
    std::mt19937_64 random(seed);
    for (const size_t n : {2, 3, 4, 5, 8, 9}) {
        std::vector<std::vector<T>> inputs(n, std::vector<T>(1003));
        for (auto& input : inputs) std::ranges::generate(input, [&] { return any(random); });
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod}) {
            const std::vector<T> got = reduced(inputs, dtype, op);
            for (size_t i = 0; i < got.size(); ++i) {
                std::vector<T> values;
                for (const auto& input : inputs) values.push_back(input[i]);
                const T expected = plain(values, op);
                ASSERT_TRUE(same(got[i], expected, op))
                    << name_of(dtype) << " " << name_of(op) << " of " << ::testing::PrintToString(values) << " is "
                    << ::testing::PrintToString(expected) << ", not " << ::testing::PrintToString(got[i]);
            }
        }
    }
}

template <class T>
void expect_plain_integers(DType dtype, unsigned seed) {
    expect_plain_results<T>(
        dtype, seed, any_integer<T>, [](const auto& v, ReduceOp op) { return plain_result(v, op); },
        [](T a, T b, ReduceOp) { return a == b; });
}

// To the bit, but for which NaN it is, and which zero is the smaller one.
template <class T>
void expect_plain_floats(DType dtype, unsigned seed) {
    expect_plain_results<T>(
        dtype, seed, any_float<T>, [](const auto& v, ReduceOp op) { return plain_result(v, op); },
        [](T a, T b, ReduceOp op) {
            if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
            const bool compares = op == ReduceOp::min || op == ReduceOp::max;
            return a == b && (compares || std::signbit(a) == std::signbit(b));
        });
}

// In f32, rounded once.
void expect_plain_small_floats(DType dtype, int mantissa_bits, unsigned seed) {
    const SmallFloat small(mantissa_bits);
    expect_plain_results<uint16_t>(
        dtype, seed, [&](auto& random) { return small.any(random); },
        [&](const auto& patterns, ReduceOp op) {
            std::vector<float> values;
            for (const uint16_t bits : patterns) values.push_back(small.value(bits));
            return small.nearest(plain_result(values, op));
        },
        [](uint16_t a, uint16_t b, ReduceOp op) {
            const bool zeros = (a & 0x7fff) == 0 && (b & 0x7fff) == 0;
            return a == b || (zeros && (op == ReduceOp::min || op == ReduceOp::max));
        });
}

TEST(Reduce, RandomValuesOfEveryDtypeAndOpGiveWhatPlainLoopsGive) {
    const Seed seed;
    expect_plain_integers<int8_t>(DType::i8, seed);
    expect_plain_integers<uint8_t>(DType::u8, seed);
    expect_plain_integers<int32_t>(DType::i32, seed);
    expect_plain_integers<int64_t>(DType::i64, seed);
    expect_plain_floats<float>(DType::f32, seed);
    expect_plain_floats<double>(DType::f64, seed);
    expect_plain_small_floats(DType::f16, 10, seed);
    expect_plain_small_floats(DType::bf16, 7, seed);
}

}  // namespace
}  // namespace tsr::testing
