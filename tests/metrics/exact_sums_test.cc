#include "base/exact_sums.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "base/error.hpp"
#include "metrics/bytes.hpp"
#include "metrics/totals.hpp"
#include "seed.hpp"

namespace tsr::metrics {
namespace {

double sum_of(const std::vector<double>& values) {
    ExactSums sums(1);
    for (const double value : values) sums.add(0, value);
    return sums.value(0);
}

TEST(ExactSums, RoundOnce) {
    EXPECT_EQ(sum_of({}), 0);
    EXPECT_EQ(sum_of({0.0, -0.0}), 0);
    EXPECT_EQ(sum_of({1e16, 1, 1}), 1e16 + 2);
    EXPECT_EQ(sum_of({1e300, 1, -1e300}), 1);
    EXPECT_EQ(sum_of({-1e16, -1, -1}), -1e16 - 2);
    EXPECT_EQ(sum_of({0.1, 0.2, 0.3, -0.1, -0.2, -0.3}), 0);
    EXPECT_EQ(sum_of({1.5, 0x1p-60, -1.5}), 0x1p-60);
    EXPECT_EQ(sum_of({5e-324, 5e-324}), 1e-323);
    EXPECT_EQ(sum_of({-5e-324}), -5e-324);
    EXPECT_EQ(sum_of({0x1p-1022, 5e-324, -0x1p-1022}), 5e-324);
    const double largest = std::numeric_limits<double>::max();
    EXPECT_EQ(sum_of({largest, largest, -largest}), largest);
    EXPECT_EQ(sum_of({largest, largest}), std::numeric_limits<double>::infinity());
}

TEST(ExactSums, TiesGoToEven) {
    EXPECT_EQ(sum_of({1, 0x1p-53}), 1);
    EXPECT_EQ(sum_of({1, 0x1p-53, 0x1p-300}), 1 + 0x1p-52);
    EXPECT_EQ(sum_of({1 + 0x1p-52, 0x1p-53}), 1 + 0x1p-51);
    EXPECT_EQ(sum_of({-1, -0x1p-53, -0x1p-300}), -1 - 0x1p-52);
}

TEST(ExactSums, DoNotDependOnOrderOrPartition) {
    std::mt19937_64 random(testing::Seed{});
    std::vector<double> values;
    std::uniform_real_distribution<double> mantissa(-1, 1);
    std::uniform_int_distribution<int> exponent(-60, 60);
    for (int i = 0; i < 5000; ++i) values.push_back(std::ldexp(mantissa(random), exponent(random)));
    const double expected = sum_of(values);
    for (int round = 0; round < 5; ++round) {
        std::ranges::shuffle(values, random);
        ExactSums parts[2] = {ExactSums(1), ExactSums(1)};
        for (const double value : values) parts[random() % 2].add(0, value);
        parts[0].merge(parts[1]);
        EXPECT_EQ(parts[0].value(0), expected);
    }
}

TEST(ExactSums, ProductsAreExact) {
    ExactSums sums(2);
    const double x = 1 + 0x1p-30;
    sums.add_product(1, x, x);
    sums.add(1, -(1 + 0x1p-29));
    EXPECT_EQ(sums.value(1), 0x1p-60);
    EXPECT_EQ(sums.value(0), 0);
}

TEST(ExactSums, APairHasTheRestToo) {
    ExactSums sums(1);
    sums.add(0, 1);
    sums.add(0, 0x1p-80);
    const auto [high, low] = sums.pair(0);
    EXPECT_EQ(high, 1);
    EXPECT_EQ(low, 0x1p-80);
}

TEST(Totals, JoinCountsAndWeights) {
    Totals totals(2);
    totals.count(0, (int64_t{1} << 53) + 1);
    EXPECT_TRUE(totals.is_counted());
    totals.add(0, 0.5);
    EXPECT_EQ(totals.value(0), 0x1p53 + 2);  // 2^53 + 1.5
    totals.count(0, -1);
    totals.add(1, 0.25);
    EXPECT_EQ(totals.value(0), 0x1p53);
    EXPECT_EQ(totals.value(1), 0.25);
}

TEST(Totals, AreSavedAndRefuseOthersBytes) {
    Totals totals(3);
    totals.count(1, 7);
    totals.add(2, 1e-3);
    ByteWriter out;
    totals.save(out);
    const std::string bytes = out.take();
    ByteReader in(bytes);
    Totals loaded(3);
    loaded.load(in);
    in.end();
    EXPECT_EQ(loaded.counted(1), 7);
    EXPECT_EQ(loaded.value(2), 1e-3);

    Totals other(2);
    ByteReader again(bytes);
    EXPECT_THROW(other.load(again), Error);
    for (size_t size = 0; size < bytes.size(); ++size) {
        ByteReader cut(std::string_view(bytes).substr(0, size));
        Totals damaged(3);
        EXPECT_THROW(damaged.load(cut), Error) << size;
    }
}

}  // namespace
}  // namespace tsr::metrics
