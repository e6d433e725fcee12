#include "parallel/pipeline/microbatches.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "parallel/model.hpp"

namespace tsr::pipeline {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int64_t> counts(int64_t rows, int m) {
    std::vector<int64_t> found;
    int64_t next = 0;
    for (int i = 0; i < m; ++i) {
        const Rows part = rows_of_part(rows, m, i);
        EXPECT_EQ(part.begin, next);
        next = part.begin + part.count;
        found.push_back(part.count);
    }
    EXPECT_EQ(next, rows);
    return found;
}

TEST(Microbatches, AreCutLikeTorchsTensorSplit) {
    EXPECT_THAT(counts(8, 4), ElementsAre(2, 2, 2, 2));
    EXPECT_THAT(counts(10, 4), ElementsAre(3, 3, 2, 2));
    EXPECT_THAT(counts(11, 4), ElementsAre(3, 3, 3, 2));
    EXPECT_THAT(counts(4, 4), ElementsAre(1, 1, 1, 1));
    EXPECT_THAT(counts(7, 1), ElementsAre(7));
}

TEST(Microbatches, AreViewsOfTheBatch) {
    std::vector<float> values(5 * 6);
    std::iota(values.begin(), values.end(), 0.0F);
    Tensor whole = tensor_of(std::span(values), DType::f32);
    whole.shape = Dims{5, 2, 3};
    const Tensor second = part_of({&whole, 1}, 2, 1)[0];
    EXPECT_EQ(second.shape, (Dims{2, 2, 3}));
    EXPECT_EQ(second.as<float>().data(), values.data() + 18);
    Tensor hollow = whole;
    hollow.shape = Dims{5, 0};
    EXPECT_EQ(part_of({&hollow, 1}, 2, 0)[0].shape, (Dims{3, 0}));
}

TEST(Microbatches, NeedARowEach) {
    std::vector<float> values(6);
    Tensor a = tensor_of(std::span(values), DType::f32);
    Tensor b = a;
    b.shape = Dims{3, 2};
    Tensor scalar = a;
    scalar.shape = Dims{};
    const auto error = [](std::vector<Tensor> tensors, int m) {
        return testing::expect_error([&] { static_cast<void>(rows_of(tensors, m, "batch")); }, Code::invalid_argument);
    };
    EXPECT_EQ(rows_of(std::vector{a, a}, 6, "batch"), 6);
    EXPECT_EQ(rows_of({}, 6, "batch"), 0);
    EXPECT_THAT(error({a}, 7).what(), HasSubstr("tensor 0 of the batch has 6 rows, too few for 7 micro-batches"));
    EXPECT_THAT(error({a, b}, 2).what(), HasSubstr("tensor 1 of the batch has 3 rows, tensor 0 has 6"));
    EXPECT_THAT(error({a, scalar}, 2).what(), HasSubstr("tensor 1 of the batch has no dimension"));
}

TEST(Microbatches, WeighAsMuchAsTheirRows) {
    EXPECT_THAT(weights_of({}, 10, 4), ElementsAre(0.3, 0.3, 0.2, 0.2));
    EXPECT_THAT(weights_of({}, 0, 4), ElementsAre(0.25, 0.25, 0.25, 0.25));
    const std::vector<double> given{1, -2};
    EXPECT_THAT(weights_of(given, 10, 2), ElementsAre(1, -2));
    const std::vector<double> wrong{1, std::numeric_limits<double>::quiet_NaN()};
    EXPECT_THAT(
        testing::expect_error([&] { static_cast<void>(weights_of(wrong, 10, 2)); }, Code::invalid_argument).what(),
        HasSubstr("the weight of micro-batch 1 is nan"));
}

}  // namespace
}  // namespace tsr::pipeline
