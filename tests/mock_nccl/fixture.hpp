// A fixture for tests over simulated devices and a mock of NCCL: what they inject ends, and nothing is left behind.
#pragma once

#include <gtest/gtest.h>

#include "mock_nccl/control.h"
#include "simulated_cuda/control.h"

namespace tsr::testing {

class MockNcclTest : public ::testing::Test {
   protected:
    void TearDown() override {
        simulated_cuda_delay(0, 0);
        simulated_cuda_capacity(0);
        simulated_cuda_fail(nullptr, 0, 0);
        mock_nccl_fail(nullptr, 0, 0);
        mock_nccl_hang(-1);
        mock_nccl_slow(0);
        mock_nccl_speed(0, 0);
        simulated_cuda_use_simulated_clock(0);
        for (int rank = 0; rank < 4; ++rank) {
            mock_nccl_async_error(rank, 0);
            simulated_cuda_break(rank, 0);
        }
        EXPECT_EQ(mock_nccl_communicators(), 0);
        if (breaks_) return;  // a device that has failed frees nothing
        const simulated_cuda_usage left = used();
        EXPECT_EQ(left.bytes, before_.bytes);
        EXPECT_EQ(left.allocations, before_.allocations);
        EXPECT_EQ(left.streams, before_.streams);
        EXPECT_EQ(left.events, before_.events);
    }

    static simulated_cuda_usage used() {
        simulated_cuda_usage now{};
        simulated_cuda_used(&now);
        return now;
    }

    bool breaks_ = false;
    const simulated_cuda_usage before_ = used();
};

}  // namespace tsr::testing
