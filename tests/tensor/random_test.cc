#include "tensor/random.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "seed.hpp"
#include "tensor/convert.hpp"

namespace tsr {
namespace {

// A tensor with its memory, which begins at an odd address.
struct Filled {
    std::vector<std::byte> memory;
    Tensor tensor;

    Filled(const Dims& shape, DType dtype) {
        tensor.shape = shape;
        tensor.dtype = dtype;
        memory.resize(tensor.size_bytes() + 1);
        tensor.data = memory.data() + 1;
    }
    [[nodiscard]] const std::byte* element(int64_t i) const {
        return tensor.data + static_cast<size_t>(i) * size_of(tensor.dtype);
    }
    template <class T>
    [[nodiscard]] std::vector<T> as() const {
        std::vector<T> values(static_cast<size_t>(tensor.numel()));
        std::memcpy(values.data(), tensor.data, tensor.size_bytes());
        return values;
    }
    [[nodiscard]] std::vector<double> numbers() const {
        std::vector<double> values(static_cast<size_t>(tensor.numel()));
        convert(tensor.data, tensor.dtype, reinterpret_cast<std::byte*>(values.data()), DType::f64, tensor.numel());
        return values;
    }
};

using Fill = std::function<void(const Tensor& output, const RandomPart& part)>;
const Fill uniform = [](const Tensor& output, const RandomPart& part) { fill_uniform(output, part, -0.25, 0.5); };
const Fill unit = [](const Tensor& output, const RandomPart& part) { fill_uniform(output, part, 0, 1); };
const Fill normal = [](const Tensor& output, const RandomPart& part) { fill_normal(output, part, 0, 1); };
const Fill bernoulli = [](const Tensor& output, const RandomPart& part) { fill_bernoulli(output, part, 0.9); };

Filled filled(const Fill& fill, const Dims& shape, DType dtype, const RandomPart& part) {
    Filled result(shape, dtype);
    fill(result.tensor, part);
    return result;
}

std::string refusal(const std::function<void()>& call, Code code = Code::invalid_argument) {
    try {
        call();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), code) << error.what();
        return error.what();
    }
    return "nothing";
}

// From kat_vectors of the authors' library Random123.
TEST(Random, PhiloxGivesThePublishedAnswers) {
    using Words = std::array<uint32_t, 4>;
    EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
    EXPECT_EQ(philox4x32({~0U, ~0U, ~0U, ~0U}, {~0U, ~0U}), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
    EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
              (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// The header's definition, in its own words.
double unit_number(uint64_t element, uint64_t seed, uint64_t stream) {
    const auto words = philox4x32({static_cast<uint32_t>(element / 2), static_cast<uint32_t>(element / 2 >> 32),
                                   static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)},
                                  {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    const uint64_t bits = uint64_t{words[2 * (element % 2) + 1]} << 32 | words[2 * (element % 2)];
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

TEST(Random, AnElementHasTheBitsOfItsIndexSeedAndStream) {
    const uint64_t seed = 0xfedcba9876543210;
    const uint64_t stream = 0x123456789abcdef0;
    const std::vector<double> values = filled(unit, {3000}, DType::f64, {.seed = seed, .stream = stream}).numbers();
    for (uint64_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], unit_number(i, seed, stream)) << i;
    // The last columns of the last rows of a tensor of nearly 2^63 elements.
    const Dims huge{int64_t{1} << 31, (int64_t{1} << 32) - 1};
    const Box corner{{huge[0] - 2, huge[1] - 3}, {2, 3}};
    const std::vector<int> counts{1};
    const Layout layout = Layout::from_boxes(huge, std::span(&corner, 1), counts);
    const auto far = filled(unit, {2, 3}, DType::f64, {.seed = seed, .stream = stream, .layout = &layout}).numbers();
    for (int64_t row = 0; row < 2; ++row) {
        for (int64_t column = 0; column < 3; ++column) {
            const int64_t element = (huge[0] - 2 + row) * huge[1] + huge[1] - 3 + column;
            EXPECT_EQ(far[static_cast<size_t>(row * 3 + column)],
                      unit_number(static_cast<uint64_t>(element), seed, stream));
        }
    }
}

// The elements of a box of a tensor, in order.
std::vector<int64_t> elements_of(const Box& box, const Dims& shape) {
    std::vector<int64_t> elements;
    for (int64_t i = 0; i < box.numel(); ++i) {
        int64_t rest = i;
        int64_t element = 0;
        int64_t stride = 1;
        for (int d = shape.ndim() - 1; d >= 0; --d) {
            element += (box.offsets[d] + rest % box.sizes[d]) * stride;
            rest /= box.sizes[d];
            stride *= shape[d];
        }
        elements.push_back(element);
    }
    return elements;
}

void expect_parts_of_whole(const Layout& layout, const Fill& fill, DType dtype) {
    const RandomPart one{.seed = 11, .stream = 5};
    const Filled whole = filled(fill, layout.shape(), dtype, one);
    for (int rank = 0; rank < layout.world_size(); ++rank) {
        std::vector<int64_t> elements;
        for (const Box& box : layout.boxes_of(rank)) {
            for (const int64_t element : elements_of(box, layout.shape())) elements.push_back(element);
        }
        RandomPart part = one;
        part.layout = &layout;
        part.rank = rank;
        const Filled held = filled(fill, {static_cast<int64_t>(elements.size())}, dtype, part);
        for (size_t i = 0; i < elements.size(); ++i) {
            ASSERT_EQ(std::memcmp(held.element(static_cast<int64_t>(i)), whole.element(elements[i]), size_of(dtype)), 0)
                << name_of(dtype) << " element " << i << " of rank " << rank << " of " << layout.str();
        }
    }
}

Layout placed(const Dims& shape, const std::vector<int>& mesh, const std::vector<Placement>& placements) {
    return Layout::placed(shape, mesh, placements);
}

TEST(Random, EveryPartHasTheBitsOfTheWhole) {
    std::vector<Box> boxes{{{1, 0}, {1, 7}}, {{4, 2}, {2, 3}}, {{0, 0}, {1, 7}}, {{2, 1}, {1, 1}}};
    const std::vector<int> counts{2, 0, 2};
    std::vector<Box> flat = boxes_of_range({5, 3, 7}, {10, 61});
    const auto rest = boxes_of_range({5, 3, 7}, {61, 105});
    const std::vector<int> flat_counts{static_cast<int>(flat.size()), static_cast<int>(rest.size())};
    flat.insert(flat.end(), rest.begin(), rest.end());
    const std::vector<Layout> layouts{
        Layout::replicated({9, 7}, 2),
        placed({9, 7}, {4}, {Placement::shard(0)}),
        placed({9, 7}, {4}, {Placement::shard(1)}),
        placed({5, 6, 7}, {2, 3}, {Placement::shard(1), Placement::shard(1)}),
        placed({5, 6, 7}, {2, 2, 2}, {Placement::shard(2), Placement::replicate(), Placement::shard(0)}),
        placed({}, {2}, {Placement::replicate()}),
        placed({0, 3}, {2}, {Placement::shard(0)}),
        placed({2}, {3}, {Placement::shard(0)}),
        placed({40, 1031}, {3}, {Placement::shard(1)}),
        Layout::from_boxes({6, 7}, boxes, counts),
        Layout::from_boxes({5, 3, 7}, flat, flat_counts),
    };
    for (const Layout& layout : layouts) {
        for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
            for (const Fill& fill : {uniform, normal, bernoulli}) expect_parts_of_whole(layout, fill, dtype);
        }
        for (const DType dtype : {DType::boolean, DType::i16, DType::i32, DType::u64})
            expect_parts_of_whole(layout, bernoulli, dtype);
    }
}

TEST(Random, EachSetOfInstructionsGivesTheSameBits) {
    const testing::Seed seed;
    std::mt19937_64 random(seed);
    const Dims shape{7, 1000 + static_cast<int64_t>(random() % 2000)};
    const Layout layout = placed(shape, {2}, {Placement::shard(1)});
    for (const Fill& fill : {uniform, normal, bernoulli}) {
        for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
            RandomPart part{.seed = random(), .stream = random(), .layout = &layout, .rank = 1};
            part.vectors = Vectors::plain;
            const Dims held = layout.boxes_of(1).front().sizes;
            const Filled expected = filled(fill, held, dtype, part);
            for (const Vectors vectors : {Vectors::avx2, Vectors::avx512}) {
                if (vectors > widest_vectors()) continue;
                part.vectors = vectors;
                EXPECT_EQ(filled(fill, held, dtype, part).memory, expected.memory) << name_of(dtype);
            }
        }
    }
}

// Recorded once: compilers, their options and processors must all agree.
TEST(Random, BitsAreThoseThatWereRecorded) {
    const auto hash = [](const Fill& fill, DType dtype) {
        uint64_t sum = 0xcbf29ce484222325;  // FNV-1a
        for (const std::byte byte : filled(fill, {20011}, dtype, {.seed = 1, .stream = 2}).memory)
            sum = (sum ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
        return sum;
    };
    EXPECT_EQ(hash(uniform, DType::f64), 0xd2b1626a30ac0ddbU);
    EXPECT_EQ(hash(uniform, DType::f16), 0x49dc084b2efd05eeU);
    EXPECT_EQ(hash(normal, DType::f64), 0x12aa4e8ec6916879U);
    EXPECT_EQ(hash(normal, DType::f32), 0xa1abc7ff7d81a6f1U);
    EXPECT_EQ(hash(normal, DType::bf16), 0x72e2b8883accca01U);
    EXPECT_EQ(hash(bernoulli, DType::u8), 0xd25d9b23ab8dc8c3U);
}

TEST(Random, NormalNumbersAreQuantiles) {
    EXPECT_NEAR(upper_normal_quantile(0.025), 1.959963984540054, 1e-15);
    EXPECT_NEAR(upper_normal_quantile(0.25), 0.6744897501960817, 1e-15);
    EXPECT_NEAR(upper_normal_quantile(1e-10), 6.361340902404056, 1e-14);
    EXPECT_NEAR(upper_normal_quantile(0x1p-54), 8.292361075813595, 1e-14);
    // The way back, by the C library's error function. A quantile's own rounding counts z^2 times in its tail.
    for (double k = 0x1p-54; k < 0.5; k *= 1.01) {
        const double z = upper_normal_quantile(k);
        EXPECT_NEAR(0.5 * std::erfc(z / std::sqrt(2.0)) / k, 1, 1e-15 * (20 + z * z)) << k;
    }
    const auto values = filled(normal, {1000}, DType::f64, {.seed = 3}).numbers();
    for (size_t i = 0; i < values.size(); ++i) {
        const auto words = philox4x32({static_cast<uint32_t>(i / 2), 0, 0, 0}, {3, 0});
        const uint64_t bits = uint64_t{words[2 * (i % 2) + 1]} << 32 | words[2 * (i % 2)];
        const double z = upper_normal_quantile((static_cast<double>(bits >> 12) + 0.5) * 0x1p-53);
        ASSERT_EQ(values[i], bits % 2 == 0 ? z : -z) << i;
    }
}

// With a fixed seed, so a bound of 4 standard errors holds always or never.
TEST(Random, MomentsAreThoseOfTheDistributions) {
    constexpr int64_t count = 1000000;
    const auto moment = [](const std::vector<double>& values, double middle, int power) {
        double sum = 0;
        for (const double value : values) sum += std::pow(value - middle, power);
        return sum / static_cast<double>(values.size());
    };
    const double error = 4 / std::sqrt(static_cast<double>(count));
    const auto flat = filled(unit, {count}, DType::f32, {.seed = 42, .stream = 1}).numbers();
    EXPECT_NEAR(moment(flat, 0, 1), 0.5, error * std::sqrt(1.0 / 12));
    EXPECT_NEAR(moment(flat, 0.5, 2), 1.0 / 12, error * std::sqrt(1.0 / 80 - 1.0 / 144));
    std::vector<int> tenths(10);
    for (const double value : flat) ++tenths[static_cast<size_t>(value * 10)];
    for (const int in_tenth : tenths) EXPECT_NEAR(in_tenth, count / 10, 4 * std::sqrt(count * 0.09));

    const auto bell = filled(normal, {count}, DType::f32, {.seed = 42, .stream = 2}).numbers();
    EXPECT_NEAR(moment(bell, 0, 1), 0, error);
    EXPECT_NEAR(moment(bell, 0, 2), 1, error * std::sqrt(2.0));
    EXPECT_NEAR(moment(bell, 0, 3), 0, error * std::sqrt(15.0));
    EXPECT_NEAR(moment(bell, 0, 4), 3, error * std::sqrt(96.0));
    double neighbours = 0;
    double elsewhere = 0;
    const auto next = filled(normal, {count}, DType::f32, {.seed = 42, .stream = 3}).numbers();
    for (size_t i = 1; i < bell.size(); ++i) {
        neighbours += bell[i] * bell[i - 1] / count;
        elsewhere += bell[i] * next[i] / count;
    }
    EXPECT_NEAR(neighbours, 0, error);
    EXPECT_NEAR(elsewhere, 0, error);

    const auto coins = filled(bernoulli, {count}, DType::f32, {.seed = 42, .stream = 4}).numbers();
    EXPECT_NEAR(moment(coins, 0, 1), 0.9, error * 0.3);
}

TEST(Random, MeanAndDeviationScaleTheSameNumbers) {
    const RandomPart part{.seed = 4};
    const auto plain = filled(normal, {5000}, DType::f64, part).numbers();
    const Fill other = [](const Tensor& output, const RandomPart& of) { fill_normal(output, of, 3, 0.5); };
    const auto scaled = filled(other, {5000}, DType::f64, part).numbers();
    for (size_t i = 0; i < plain.size(); ++i) ASSERT_EQ(scaled[i], 3 + 0.5 * plain[i]);
    const Fill constant = [](const Tensor& output, const RandomPart& of) { fill_normal(output, of, 3, 0); };
    for (const double value : filled(constant, {100}, DType::f16, part).numbers()) ASSERT_EQ(value, 3);
}

TEST(Random, NarrowDtypesAreRoundedOnce) {
    const Fill wide = [](const Tensor& output, const RandomPart& of) { fill_normal(output, of, 0, 1e-5); };
    for (const Fill& fill : {normal, wide}) {  // the latter: subnormal halves
        const Filled exact = filled(fill, {100000}, DType::f64, {.seed = 8});
        for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
            Filled rounded({100000}, dtype);
            convert(exact.tensor.data, DType::f64, rounded.tensor.data, dtype, 100000);
            EXPECT_EQ(filled(fill, {100000}, dtype, {.seed = 8}).memory, rounded.memory) << name_of(dtype);
        }
    }
}

TEST(Random, UniformNumbersStayInTheirRange) {
    struct Bounds {
        double low;
        double high;
    };
    for (const Bounds bounds : {Bounds{0, 1}, {-1, 1}, {0.1, 0.103}, {-65504, 65504}, {1, 1.01}, {-3e-8, 7e-8}}) {
        const Fill fill = [&](const Tensor& output, const RandomPart& part) {
            fill_uniform(output, part, bounds.low, bounds.high);
        };
        for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
            if (dtype == DType::bf16 && bounds.low == 0.1) continue;  // its bounds are neighbours there
            const auto values = filled(fill, {100000}, dtype, {.seed = 9}).numbers();
            const auto [least, most] = std::ranges::minmax(values);
            EXPECT_GE(least, bounds.low) << name_of(dtype);
            EXPECT_LT(most, bounds.high) << name_of(dtype);
            EXPECT_LT(least, most) << name_of(dtype);
        }
    }
    const Fill same = [](const Tensor& output, const RandomPart& part) { fill_uniform(output, part, 0.1, 0.1); };
    for (const double value : filled(same, {100}, DType::f32, {}).numbers()) ASSERT_EQ(value, double{0.1F});
}

TEST(Random, ProbabilitiesOfZeroAndOneAreCertain) {
    for (const double p : {0.0, 1.0}) {
        const Fill fill = [&](const Tensor& output, const RandomPart& part) { fill_bernoulli(output, part, p); };
        for (const double value : filled(fill, {10000}, DType::bf16, {}).numbers()) ASSERT_EQ(value, p);
        for (const auto value : filled(fill, {10000}, DType::i64, {}).as<int64_t>()) {
            ASSERT_EQ(value, static_cast<int64_t>(p));
        }
        for (const auto value : filled(fill, {10000}, DType::boolean, {}).as<uint8_t>()) ASSERT_EQ(value, p);
    }
}

TEST(Random, OtherSeedsAndStreamsGiveOtherNumbers) {
    std::set<std::vector<std::byte>> seen;
    size_t calls = 0;
    for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, ~uint64_t{0}}) {
        for (const uint64_t stream : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, ~uint64_t{0}}) {
            seen.insert(filled(bernoulli, {1000}, DType::u8, {.seed = seed, .stream = stream}).memory);
            ++calls;
        }
    }
    EXPECT_EQ(seen.size(), calls);
}

TEST(Random, ShapesAreThoseOfThePart) {
    const Layout rows = placed({6, 4}, {4}, {Placement::shard(0)});
    const auto of = [&](const Layout& layout, int rank, const Dims& shape) {
        return refusal([&] { filled(unit, shape, DType::f32, {.layout = &layout, .rank = rank}); });
    };
    EXPECT_EQ(of(rows, 1, {2, 4}), "nothing");
    EXPECT_EQ(of(rows, 1, {8}), "nothing");
    EXPECT_EQ(of(rows, 3, {0, 4}), "nothing");
    EXPECT_EQ(of(rows, 3, {0}), "nothing");
    EXPECT_EQ(of(rows, 1, {6, 4}),
              "output has shape [6, 4], but rank 1 holds 8 elements of the tensor of shape [6, 4]: output needs shape "
              "[2, 4] or [8]");
    EXPECT_THAT(of(rows, 1, {4, 2}), ::testing::HasSubstr("output needs shape [2, 4] or [8]"));
    EXPECT_THAT(of(rows, 3, {1}), ::testing::HasSubstr("rank 3 holds 0 elements"));
    EXPECT_THAT(of(rows, 4, {2, 4}), ::testing::HasSubstr("rank 4"));
    // Two boxes of rows make a tensor; others only a list of elements.
    const std::vector<Box> boxes{{{0, 0}, {1, 4}}, {{4, 0}, {2, 4}}, {{1, 0}, {1, 2}}, {{1, 2}, {2, 1}}};
    const std::vector<int> counts{2, 2};
    const Layout joined = Layout::from_boxes({6, 4}, boxes, counts);
    EXPECT_EQ(of(joined, 0, {3, 4}), "nothing");
    EXPECT_EQ(of(joined, 1, {4}), "nothing");
    EXPECT_THAT(of(joined, 0, {4, 3}), ::testing::HasSubstr("output needs shape [3, 4] or [12]"));
    EXPECT_THAT(of(joined, 1, {2, 2}), ::testing::EndsWith("output needs shape [4]"));
}

TEST(Random, BadNumbersAndDtypesAreRefused) {
    Filled half({4}, DType::f16);
    const Tensor& output = half.tensor;
    const auto flat = [&](double low, double high) { return refusal([&] { fill_uniform(output, {}, low, high); }); };
    EXPECT_EQ(flat(1, 0), "low is 1 and high is 0; low must not exceed high");
    EXPECT_EQ(flat(NAN, 0), "low is nan; it must be a finite number");
    EXPECT_EQ(flat(0, INFINITY), "high is inf; it must be a finite number");
    EXPECT_EQ(flat(0, 70000), "high is 70000; f16 has numbers up to 65504");
    EXPECT_EQ(flat(1.0001, 1.0002), "low is 1.0001 and high is 1.0002; f16 has no number from low to below high");
    const auto bell = [&](double mean, double deviation) {
        return refusal([&] { fill_normal(output, {}, mean, deviation); });
    };
    EXPECT_EQ(bell(0, -1), "deviation is -1; it must not be negative");
    EXPECT_EQ(bell(-INFINITY, 1), "mean is -inf; it must be a finite number");
    EXPECT_EQ(bell(0, 1e6), "deviation is 1000000; f16 has numbers up to 65504");
    for (const double p : {-0.1, 1.1, double{NAN}}) {
        EXPECT_THAT(refusal([&] { fill_bernoulli(output, {}, p); }), ::testing::HasSubstr("it is a probability"));
    }
    Filled wide({4}, DType::f64);
    EXPECT_THAT(refusal([&] { fill_uniform(wide.tensor, {}, -1e308, 1e308); }), ::testing::HasSubstr("difference"));
    Filled whole({4}, DType::i32);
    EXPECT_EQ(refusal([&] { fill_uniform(whole.tensor, {}, 0, 1); }),
              "output has dtype i32; such numbers are f16, bf16, f32 or f64");
    Filled complex({4}, DType::c64);
    EXPECT_THAT(refusal([&] { fill_bernoulli(complex.tensor, {}, 1); }), ::testing::HasSubstr("dtype c64"));
    Tensor elsewhere = output;
    elsewhere.device.type = DeviceType::cuda;
    EXPECT_THAT(refusal([&] { fill_bernoulli(elsewhere, {}, 1); }, Code::unsupported), ::testing::HasSubstr("the CPU"));
}

}  // namespace
}  // namespace tsr
