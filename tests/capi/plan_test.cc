// tessera/plan.h through the C ABI.
#include "api.hpp"

namespace {

TEST(PlanApi, IsLaunchedAgainAndAgain) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        api::Array<float> sum({4}, static_cast<float>(rank + 1));
        const tsr_tensor tensor = sum.tensor();
        api::Owned<tsr_plan> plan;
        ASSERT_OK(tsr_plan_create(comm, TSR_COLLECTIVE_ALL_REDUCE, nullptr, 0, &tensor, 1, TSR_REDUCE_SUM, -1, nullptr,
                                  plan.out()));
        EXPECT_OK(tsr_plan_wait(plan, 0)) << "never started";
        EXPECT_OK(tsr_plan_run(plan));
        EXPECT_OK(tsr_plan_run(plan));
        EXPECT_EQ(sum.values[3], 6.0F);
        EXPECT_OK(tsr_plan_start(plan));
        EXPECT_OK(tsr_plan_wait(plan, -1));
        EXPECT_EQ(sum.values[0], 12.0F);
        // Of one rank only: it meets the other's ordinary call.
        if (rank == 0) {
            EXPECT_OK(tsr_plan_run(plan));
        } else {
            EXPECT_OK(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr));
        }
        EXPECT_EQ(sum.values[0], 24.0F);
    });
}

TEST(PlanApi, WhatCannotBeDoneIsRefusedWhenItIsPrepared) {
    const api::Owned<tsr_comm> comm = api::alone();
    api::Array<float> one({4}, 1.0F);
    const tsr_tensor tensor = one.tensor();
    api::Owned<tsr_plan> plan;
    EXPECT_FAILS(tsr_plan_create(comm, 0, nullptr, 0, &tensor, 1, 0, -1, nullptr, plan.out()), TSR_E_INVALID_ARGUMENT,
                 "collective is 0");
    EXPECT_FAILS(tsr_plan_create(comm, 11, nullptr, 0, &tensor, 1, 0, -1, nullptr, plan.out()), TSR_E_INVALID_ARGUMENT,
                 "collective is 11");
    EXPECT_FAILS(tsr_plan_create(comm, TSR_COLLECTIVE_BROADCAST, nullptr, 0, &tensor, 1, 0, 3, nullptr, plan.out()),
                 TSR_E_INVALID_ARGUMENT, "root 3");
    EXPECT_FAILS(tsr_plan_create(comm, TSR_COLLECTIVE_BARRIER, nullptr, 0, nullptr, 0, 0, -1, &plan, plan.out()),
                 TSR_E_UNSUPPORTED, "CUDA stream");
    EXPECT_FAILS(tsr_plan_create(comm, TSR_COLLECTIVE_ALL_REDUCE, nullptr, 0, nullptr, 1, TSR_REDUCE_SUM, -1, nullptr,
                                 plan.out()),
                 TSR_E_INVALID_ARGUMENT, "outputs");
}

}  // namespace
