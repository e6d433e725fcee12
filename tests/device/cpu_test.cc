#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "base/error.hpp"
#include "device/device.hpp"
#include "soon.hpp"

namespace tsr {
namespace {

TEST(CpuDevice, AllocatesAlignedMemory) {
    for (const size_t size : {size_t{0}, size_t{1}, size_t{5000}}) {
        const std::shared_ptr<std::byte> memory = cpu_device().allocate(size);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % 4096, 0U);
        for (size_t i = 0; i < size; ++i) memory.get()[i] = std::byte{7};
    }
}

TEST(CpuDevice, MemoryThatThereIsNotIsNoMemory) {
    try {
        (void)cpu_device().allocate(size_t{1} << 60);
        ADD_FAILURE();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::no_memory);
        EXPECT_THAT(error.what(), ::testing::HasSubstr("1152921504606846976 bytes"));
    }
}

TEST(CpuDevice, CopiesRowsAtTheirDistances) {
    std::vector<uint8_t> from(12);
    std::iota(from.begin(), from.end(), uint8_t{0});
    std::vector<uint8_t> to(10, 99);
    const auto bytes = [](std::vector<uint8_t>& v) { return reinterpret_cast<std::byte*>(v.data()); };
    cpu_device().copy_rows({bytes(to), 5}, {bytes(from) + 1, 6}, 2, 3, nullptr);
    EXPECT_EQ(to, (std::vector<uint8_t>{1, 2, 3, 99, 99, 7, 8, 9, 99, 99}));
    cpu_device().copy_rows({bytes(to), 5}, {bytes(from), 5}, 2, 5, nullptr);
    EXPECT_EQ(to, (std::vector<uint8_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
    cpu_device().zero(bytes(to), 9, nullptr);
    EXPECT_EQ(to.back(), 9);
    EXPECT_EQ(to.front(), 0);
}

TEST(CpuDevice, HasNoStreams) {
    int stream = 0;
    std::byte byte{};
    EXPECT_THROW(cpu_device().zero(&byte, 1, &stream), Error);
    EXPECT_THROW((void)cpu_device().record(&stream), Error);
    const auto event = cpu_device().record(nullptr);
    EXPECT_TRUE(event->done());
    event->wait(testing::soon());
    cpu_device().wait(nullptr, *event);
}

TEST(DeviceApi, WithoutADriverCudaIsUnsupported) {
    if (::access("/dev/nvidiactl", F_OK) == 0) GTEST_SKIP() << "this machine has an NVIDIA driver";
    try {
        (void)device_api({DeviceType::cuda, 0});
        ADD_FAILURE();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::unsupported);
        EXPECT_THAT(error.what(), ::testing::HasSubstr("there is no NVIDIA driver (libcuda.so.1"));
    }
}

TEST(DeviceApi, AnUnknownTypeIsRefused) {
    try {
        (void)device_api({static_cast<DeviceType>(7), 0});
        ADD_FAILURE();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_THAT(error.what(), ::testing::HasSubstr("device type 7"));
    }
}

}  // namespace
}  // namespace tsr
