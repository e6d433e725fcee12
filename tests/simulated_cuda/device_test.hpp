// A fixture for tests over simulated devices: numbers in a device's memory, and nothing is left behind.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "device/device.hpp"
#include "device/on_device.hpp"
#include "simulated_cuda/control.h"
#include "soon.hpp"
#include "tensor/tensor.hpp"

namespace tsr::testing {

class DeviceTest : public OnDevice {
   protected:
    void TearDown() override {
        simulated_cuda_delay(0, 0);
        simulated_cuda_capacity(0);
        simulated_cuda_fail(nullptr, 0, 0);
        simulated_cuda_break(0, 0);
        simulated_cuda_usage left{};
        simulated_cuda_used(&left);
        EXPECT_EQ(left.allocations, 0U);
        EXPECT_EQ(left.bytes, 0U);
        EXPECT_EQ(left.streams, 0U);
        EXPECT_EQ(left.events, 0U);
        EXPECT_EQ(left.pinned, 0U);
    }
};

// Numbers in the memory of a device, from the `skipped`-th element of an allocation on.
template <class T>
class OnDeviceMemory {
   public:
    OnDeviceMemory(DeviceApi& device, const std::vector<T>& values, size_t skipped = 0)
        : device_(device),
          count_(values.size()),
          memory_(device.allocate((values.size() + skipped) * sizeof(T))),
          skipped_(skipped) {
        write(values);
    }

    [[nodiscard]] std::byte* data() const { return memory_.get() + skipped_ * sizeof(T); }
    [[nodiscard]] Tensor tensor(DType dtype, int index = 0) const {
        return {data(), Dims{static_cast<int64_t>(count_)}, dtype, {DeviceType::cuda, index}};
    }
    // In the order of the default stream.
    void write(const std::vector<T>& values) {
        device_.copy(data(), reinterpret_cast<const std::byte*>(values.data()), count_ * sizeof(T), nullptr);
    }
    // After all that the default stream has.
    [[nodiscard]] std::vector<T> read() const { return content<T>(device_, data(), count_); }

    template <class Element>
    static std::vector<Element> content(DeviceApi& device, const std::byte* data, size_t count) {
        std::vector<Element> values(count);
        device.copy(reinterpret_cast<std::byte*>(values.data()), data, count * sizeof(Element), nullptr);
        device.record(nullptr)->wait(soon());
        return values;
    }

   private:
    DeviceApi& device_;
    size_t count_;
    std::shared_ptr<std::byte> memory_;
    size_t skipped_;
};

}  // namespace tsr::testing
