#include "parallel/ddp/bucket_plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

namespace tsr {
namespace {

using ::testing::ElementsAre;

Tensor of(int64_t elements, DType dtype = DType::f32) { return {nullptr, Dims{elements}, dtype, {}}; }

std::vector<size_t> params_of(const Bucket& bucket) {
    std::vector<size_t> params;
    for (const auto& slot : bucket.slots) params.push_back(slot.param);
    return params;
}

TEST(BucketPlan, TakesParametersInReverseAndClosesAtTheLimit) {
    const std::vector<Tensor> params{of(100), of(100), of(100), of(100), of(100)};  // 400 bytes each, 448 padded
    const auto plan = plan_buckets(params, {.first_bytes = 400, .bytes = 800}, reverse_order(5));
    ASSERT_EQ(plan.size(), 3U);
    EXPECT_THAT(params_of(plan[0]), ElementsAre(4));
    EXPECT_THAT(params_of(plan[1]), ElementsAre(3, 2));
    EXPECT_THAT(params_of(plan[2]), ElementsAre(1, 0));
}

TEST(BucketPlan, ParametersAreTakenInTheOrderOfArrival) {
    const std::vector<Tensor> params{of(100), of(100), of(100), of(100), of(100)};
    const auto plan = plan_buckets(params, {.first_bytes = 400, .bytes = 800}, std::vector<size_t>{2, 0, 4, 3, 1});
    ASSERT_EQ(plan.size(), 3U);
    EXPECT_THAT(params_of(plan[0]), ElementsAre(2));
    EXPECT_THAT(params_of(plan[1]), ElementsAre(0, 4));
    EXPECT_THAT(params_of(plan[2]), ElementsAre(3, 1));
}

TEST(BucketPlan, ABucketHoldsParametersOfOneDevice) {
    std::vector<Tensor> params{of(16), of(16), of(16), of(16)};
    params[1].device = params[3].device = {DeviceType::cuda, 1};
    params[2].device = {DeviceType::cuda, 0};
    const auto plan = plan_buckets(params, {.first_bytes = 1 << 20, .bytes = 1 << 20}, reverse_order(4));
    ASSERT_EQ(plan.size(), 3U);
    EXPECT_THAT(params_of(plan[0]), ElementsAre(2));
    EXPECT_THAT(params_of(plan[1]), ElementsAre(3, 1));
    EXPECT_THAT(params_of(plan[2]), ElementsAre(0));
}

TEST(BucketPlan, EachDtypeHasItsOwnBucketsAndLimits) {
    const std::vector<Tensor> params{of(16), of(16, DType::f64), of(16), of(16, DType::f64), of(16)};
    const auto plan = plan_buckets(params, {.first_bytes = 1, .bytes = 1 << 20}, reverse_order(5));
    ASSERT_EQ(plan.size(), 4U);
    EXPECT_THAT(params_of(plan[0]), ElementsAre(4));     // f32, the first one: closes at once
    EXPECT_THAT(params_of(plan[1]), ElementsAre(3));     // f64, its first one
    EXPECT_THAT(params_of(plan[2]), ElementsAre(1));     // f64, completed by parameter 1
    EXPECT_THAT(params_of(plan[3]), ElementsAre(2, 0));  // f32, completed by parameter 0, the last of a reverse pass
}

TEST(BucketPlan, SlotsAreAlignedDisjointAndInside) {
    std::mt19937 random(20261121);
    const std::array dtypes{DType::f16, DType::bf16, DType::f32, DType::f64};
    for (int round = 0; round < 50; ++round) {
        std::vector<Tensor> params;
        for (int i = 0; i < 40; ++i) params.push_back(of(random() % 300, dtypes[random() % dtypes.size()]));
        const auto plan = plan_buckets(params, {.first_bytes = 256, .bytes = 1024}, reverse_order(params.size()));
        std::map<size_t, int> seen;
        for (const Bucket& bucket : plan) {
            size_t end = 0;
            for (const auto& [param, offset] : bucket.slots) {
                ++seen[param];
                EXPECT_EQ(params[param].dtype, bucket.dtype);
                EXPECT_EQ(offset % 64, 0U);
                EXPECT_GE(offset, end);
                end = offset + params[param].size_bytes();
            }
            EXPECT_GE(bucket.size, end);
            EXPECT_EQ(bucket.size % 64, 0U);
        }
        EXPECT_EQ(seen.size(), params.size());
        for (const auto& [param, times] : seen) EXPECT_EQ(times, 1);
    }
}

TEST(BucketPlan, EmptyParametersHaveASlotWithoutBytes) {
    const auto plan = plan_buckets(std::vector<Tensor>{of(0), of(0)}, {.first_bytes = 1, .bytes = 1}, reverse_order(2));
    ASSERT_EQ(plan.size(), 1U);
    EXPECT_EQ(plan[0].size, 0U);
    EXPECT_THAT(params_of(plan[0]), ElementsAre(1, 0));
}

TEST(BucketLabel, CountsInDecimal) {
    EXPECT_EQ(bucket_label(0), "bucket 0");
    EXPECT_EQ(bucket_label(42), "bucket 42");
    EXPECT_EQ(bucket_label(999), "bucket 999");
    EXPECT_EQ(bucket_label(1000), "a bucket beyond 999");
}

}  // namespace
}  // namespace tsr
