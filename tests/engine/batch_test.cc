// The arithmetic of batches: every combination of given numbers, at several world sizes, and its messages.
#include "engine/batch.hpp"

#include <gtest/gtest.h>

#include <string>

#include "base/error.hpp"

namespace tsr {
namespace {

constexpr std::nullopt_t none = std::nullopt;

std::string refusal(const BatchConfig& given, int ranks) {
    try {
        (void)solve_batch(given, ranks);
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument);
        return error.what();
    }
    return "nothing was thrown";
}

class BatchOverWorlds : public ::testing::TestWithParam<int> {};

TEST_P(BatchOverWorlds, WhatIsMissingFollowsFromTheRest) {
    const int w = GetParam();
    const BatchSizes all{12 * w, 4, 3};
    EXPECT_EQ(solve_batch({12 * w, 4, 3}, w), all);
    EXPECT_EQ(solve_batch({12 * w, 4, none}, w), all);
    EXPECT_EQ(solve_batch({12 * w, none, 3}, w), all);
    EXPECT_EQ(solve_batch({none, 4, 3}, w), all);
    EXPECT_EQ(solve_batch({12 * w, none, none}, w), (BatchSizes{12 * w, 12, 1}));
    EXPECT_EQ(solve_batch({none, 4, none}, w), (BatchSizes{4 * w, 4, 1}));
}

TEST_P(BatchOverWorlds, OneOfTwoNumbersIsNeeded) {
    const char* const why =
        "the configuration has neither train_batch_size nor train_micro_batch_size_per_gpu; give one of them "
        "(train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel ranks)";
    EXPECT_EQ(refusal({none, none, 3}, GetParam()), why);
    EXPECT_EQ(refusal({none, none, none}, GetParam()), why);
}

INSTANTIATE_TEST_SUITE_P(Ranks, BatchOverWorlds, ::testing::Values(1, 3, 4));

TEST(Batch, WhatDoesNotFitIsRefusedWithAllNumbers) {
    EXPECT_EQ(refusal({8, 4, 2}, 3),
              "train_batch_size 8 does not equal train_micro_batch_size_per_gpu 4 * gradient_accumulation_steps 2 * 3 "
              "data-parallel ranks = 24; leave it out, which fits any number of ranks, or set it to 24");
    EXPECT_EQ(
        refusal({8, 4, none}, 3),
        "train_batch_size 8 does not equal train_micro_batch_size_per_gpu 4 * gradient_accumulation_steps 0 (from 8 / "
        "4 / 3) * 3 data-parallel ranks = 0; leave it out, which fits any number of ranks, or set it to a multiple of "
        "12");
    EXPECT_EQ(refusal({8, none, 1}, 3),
              "train_batch_size 8 does not equal train_micro_batch_size_per_gpu 2 (from 8 / 3 / 1) * "
              "gradient_accumulation_steps 1 * 3 data-parallel ranks = 6; set it to a multiple of 3");
    EXPECT_EQ(refusal({2, none, none}, 4),
              "train_batch_size 2 does not equal train_micro_batch_size_per_gpu 0 (from 2 / 4) * "
              "gradient_accumulation_steps 1 (the default) * 4 data-parallel ranks = 0; set it to a multiple of 4");
}

TEST(Batch, ANumberOutOfRangeIsNamed) {
    EXPECT_EQ(refusal({0, 4, none}, 1), "train_batch_size is 0; it must be at least 1 and at most 2^40");
    EXPECT_EQ(refusal({8, 0, none}, 1), "train_micro_batch_size_per_gpu is 0; it must be at least 1 and at most 2^40");
    EXPECT_EQ(refusal({8, 4, -2}, 1), "gradient_accumulation_steps is -2; it must be at least 1 and at most 2^40");
    EXPECT_EQ(refusal({INT64_MAX, none, none}, 1),
              "train_batch_size is 9223372036854775807; it must be at least 1 and at most 2^40");
}

TEST(Batch, AProductBeyondTheRangeIsRefused) {
    const int64_t most = int64_t{1} << 40;
    EXPECT_EQ(
        refusal({none, most, most}, 4),
        "train_batch_size = train_micro_batch_size_per_gpu 1099511627776 * gradient_accumulation_steps 1099511627776 * "
        "4 data-parallel ranks is above 2^40; use smaller batches");
    EXPECT_EQ(refusal({8, most, most}, 4), refusal({none, most, most}, 4));
    EXPECT_EQ(
        refusal({none, most, none}, 2),
        "train_batch_size = train_micro_batch_size_per_gpu 1099511627776 * gradient_accumulation_steps 1 (the default) "
        "* 2 data-parallel ranks is above 2^40; use smaller batches");
}

TEST(Batch, AnotherTrainBatchChangesTheAccumulation) {
    const BatchSizes now{24, 4, 2};
    EXPECT_EQ(with_train_batch(now, 36, 3), (BatchSizes{36, 4, 3}));
    try {
        (void)with_train_batch(now, 40, 3);
        FAIL() << "40 is not divisible by 12";
    } catch (const Error& error) {
        EXPECT_STREQ(
            error.what(),
            "train_batch_size 40 is not divisible by train_micro_batch_size_per_gpu 4 * 3 data-parallel ranks = 12; "
            "choose a multiple of 12");
    }
    EXPECT_THROW((void)with_train_batch(now, 0, 3), Error);
}

TEST(Batch, AnotherMicroBatchChangesTheTrainBatch) {
    EXPECT_EQ(with_micro_batch({24, 4, 2}, 5, 3), (BatchSizes{30, 5, 2}));
    EXPECT_THROW((void)with_micro_batch({24, 4, 2}, -1, 3), Error);
}

}  // namespace
}  // namespace tsr
