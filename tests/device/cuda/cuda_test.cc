// The CUDA device over simulated devices (simulated_cuda/control.h).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "base/error.hpp"
#include "device/device.hpp"
#include "simulated_cuda/control.h"
#include "simulated_cuda/device_test.hpp"
#include "simulated_cuda/hold.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using ::testing::Not;

constexpr int invalid_context = 201;
constexpr int illegal_address = 700;

class CudaDevice : public DeviceTest {};

TEST_F(CudaDevice, ARecordedEventIsDoneAfterWhatTheStreamHadBefore) {
    simulated_cuda_delay(2000, 1);
    const auto stream = device().new_stream();
    const auto memory = device().allocate(1 << 20);
    const auto host = device().allocate_host(1 << 20);
    for (int round = 0; round < 20; ++round) {
        for (int value = 0; value < 3; ++value) {
            std::vector<uint8_t> values(1 << 20, static_cast<uint8_t>(round + value));
            device().copy(memory.get(), bytes_of(values), values.size(), stream.get());
        }
        device().copy(host.get(), memory.get(), 1 << 20, stream.get());
        const auto event = device().record(stream.get());
        event->wait(soon());
        EXPECT_TRUE(event->done());
        EXPECT_EQ(std::to_integer<int>(host.get()[12345]), round + 2);
    }
}

TEST_F(CudaDevice, CopiesOfPinnedMemoryRunBesideTheHost) {
    const auto stream = device().new_stream();
    const auto memory = device().allocate_zeroed(16);
    std::vector<std::byte> ours(16, std::byte{1});
    const auto pinned = device().register_host(ours.data(), ours.size());
    const Hold hold(device(), stream.get());
    device().copy(memory.get(), ours.data(), ours.size(), stream.get());
    const auto event = device().record(stream.get());
    EXPECT_FALSE(event->done());
    ours.assign(16, std::byte{2});  // what the copy reads, since it has not run yet
    const Error late = failure([&] { event->wait(Deadline::in(milliseconds{1})); });
    EXPECT_EQ(late.code(), Code::timeout);
    hold.release();
    event->wait(soon());
    EXPECT_EQ(content(device(), memory.get(), 16), std::vector<uint8_t>(16, 2));
}

TEST_F(CudaDevice, AStreamWaitsForTheEventOfAnother) {
    simulated_cuda_delay(3000, 2);
    const auto writer = device().new_stream();
    const auto reader = device().new_stream();
    const auto memory = device().allocate_zeroed(64);
    const auto copy = device().allocate_zeroed(64);
    for (int round = 1; round <= 20; ++round) {
        std::vector<uint8_t> values(64, static_cast<uint8_t>(round));
        device().copy(memory.get(), bytes_of(values), 64, writer.get());
        device().wait(reader.get(), *device().record(writer.get()));
        device().copy(copy.get(), memory.get(), 64, reader.get());
        device().wait(writer.get(), *device().record(reader.get()));
        EXPECT_EQ(content(device(), copy.get(), 64, reader.get()), values);
    }
}

TEST_F(CudaDevice, WithoutMemoryIsNoMemoryAndGoesOn) {
    simulated_cuda_capacity(1 << 20);
    const auto first = device().allocate(1 << 19);
    const Error error = failure([] { (void)device().allocate((1 << 19) + 1); });
    EXPECT_EQ(error.code(), Code::no_memory);
    EXPECT_EQ(error.record()->native_code, 2);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("CUDA device 0"), HasSubstr("524289 bytes"), HasSubstr("out of memory")));
    EXPECT_NO_THROW((void)device().allocate(1 << 19));
}

TEST_F(CudaDevice, AnIllegalAddressEndsTheDevice) {
    const auto stream = device().new_stream();
    const auto target = device().allocate(100);
    const std::byte* const gone = device().allocate(100).get();  // and freed
    device().copy(target.get(), gone, 100, stream.get());
    const Error error = failure([&] { synchronize(device(), stream.get()); });
    EXPECT_EQ(error.code(), Code::cuda);
    EXPECT_EQ(error.record()->native_code, illegal_address);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS (700)"), HasSubstr("can no longer use the device")));
    EXPECT_EQ(failure([] { (void)device().allocate(1); }).code(), Code::cuda);
    EXPECT_NO_THROW((void)device(1).allocate(1));  // another device is well
    simulated_cuda_break(0, 0);
}

TEST_F(CudaDevice, AFailedCallNamesWhatItWas) {
    const auto memory = device().allocate(8);
    simulated_cuda_fail("cuMemsetD8Async", 0, 802);
    const Error error = failure([&] { device().zero(memory.get(), 8, nullptr); });
    EXPECT_EQ(error.code(), Code::cuda);
    EXPECT_EQ(error.record()->native_domain, NativeDomain::cuda);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("CUDA device 0: zeroing 8 bytes"), HasSubstr("(802)")));
    EXPECT_THAT(error.what(), Not(HasSubstr("can no longer")));
    device().zero(memory.get(), 8, nullptr);
    // One that the driver does not know by name.
    simulated_cuda_fail("cuMemsetD8Async", 0, 4242);
    EXPECT_THAT(failure([&] { device().zero(memory.get(), 8, nullptr); }).what(), HasSubstr("CUDA error 4242"));
}

TEST_F(CudaDevice, WhatIsOfAnotherDeviceIsRefused) {
    const auto there = device(1).new_stream();
    EXPECT_NO_THROW(device(1).check_stream(there.get()));
    EXPECT_NO_THROW(device(0).check_stream(nullptr));
    EXPECT_THAT(failure([&] { device(0).check_stream(there.get()); }).what(), HasSubstr("a stream of another device"));

    const auto memory = device(1).allocate(100);
    EXPECT_NO_THROW(device(1).check_memory(memory.get()));
    EXPECT_NO_THROW(device(1).check_memory(memory.get() + 99));
    EXPECT_THAT(failure([&] { device(0).check_memory(memory.get()); }).what(),
                HasSubstr("is memory of CUDA device 1, not of CUDA device 0"));
    std::vector<std::byte> host(8);
    EXPECT_THAT(failure([&] { device(0).check_memory(host.data()); }).what(),
                HasSubstr("is memory of the host, not of CUDA device 0"));
    const auto pinned = device(0).allocate_host(8);
    EXPECT_THAT(failure([&] { device(0).check_memory(pinned.get()); }).what(),
                HasSubstr("is memory of the host, not of CUDA device 0"));
    for (const int index : {-1, 4}) {
        const Error error = failure([&] { (void)device(index); });
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_THAT(error.what(), HasSubstr("this process has 4"));
    }
}

TEST_F(CudaDevice, LeavesTheThreadsContextAsItWas) {
    const auto stream = device(1).new_stream();
    const auto memory = device(1).allocate(8);
    device(1).zero(memory.get(), 8, stream.get());
    synchronize(device(1), stream.get());
    // What the program does on its current device, which is none, fails as it did before.
    EXPECT_EQ(simulated_cuda_launch(nullptr, [](void*) { return 0; }, nullptr), invalid_context);
}

}  // namespace
}  // namespace tsr::testing
