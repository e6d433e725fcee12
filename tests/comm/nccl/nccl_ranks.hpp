// What tests of communicators with NCCL share: simulated devices (simulated_cuda/control.h), a mock of NCCL
// (mock_nccl/control.h), and ranks as threads, each with a device of its own.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "device/device.hpp"
#include "mock_nccl/control.h"
#include "ranks.hpp"
#include "simulated_cuda/control.h"
#include "soon.hpp"

namespace tsr::testing {

inline CommOptions nccl_options() {
    const std::string cpu = test_backend();
    return test_options(("cpu:" + cpu + ",cuda:nccl").c_str());
}

// Memory of a rank's device, and its content on the host.
class DeviceMemory {
   public:
    DeviceMemory(int device, size_t size)
        : api_(cuda_device(device)), size_(size), memory_(api_.allocate_zeroed(size)) {}

    [[nodiscard]] std::byte* data() const { return memory_.get(); }
    void write(const std::vector<std::byte>& content, StreamHandle stream = nullptr) {
        api_.copy(memory_.get(), content.data(), size_, stream);
    }
    [[nodiscard]] std::vector<std::byte> read(StreamHandle stream = nullptr) const {
        std::vector<std::byte> content(size_);
        api_.copy(content.data(), memory_.get(), size_, stream);
        api_.record(stream)->wait(soon());
        return content;
    }

   private:
    DeviceApi& api_;
    size_t size_;
    std::shared_ptr<std::byte> memory_;
};

inline Tensor on_device(const DeviceMemory& memory, int64_t count, DType dtype, int device, size_t offset = 0) {
    return {memory.data() + offset, Dims{count}, dtype, {DeviceType::cuda, device}};
}

class Nccl : public ::testing::Test {
   protected:
    void TearDown() override {
        simulated_cuda_delay(0, 0);
        simulated_cuda_fail(nullptr, 0, 0);
        mock_nccl_fail(nullptr, 0, 0);
        mock_nccl_slow(0);
        for (int rank = 0; rank < 4; ++rank) {
            mock_nccl_async_error(rank, 0);
            simulated_cuda_break(rank, 0);
        }
        EXPECT_EQ(mock_nccl_communicators(), 0);
        if (breaks_) return;  // a device that has failed frees nothing
        const simulated_cuda_usage left = used();
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

inline Error only_error(const Outcomes& outcomes, size_t rank) {
    if (!outcomes[rank]) {
        ADD_FAILURE() << "rank " << rank << " has no error";
        return {Code::internal, ""};
    }
    return *outcomes[rank];
}

}  // namespace tsr::testing
