// What every driver has to do, a simulated one and, by ./dev test --gpu, that of a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "device/captured_graph.hpp"
#include "device/on_device.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CudaDriver : public OnDevice {};

TEST_F(CudaDriver, CopiesToAndFromTheHost) {
    std::vector<uint8_t> values(10000);
    std::iota(values.begin(), values.end(), uint8_t{0});
    const auto memory = device().allocate(values.size());
    device().copy(memory.get(), bytes_of(values), values.size(), nullptr);
    EXPECT_EQ(content(device(), memory.get(), values.size()), values);
    const auto zeroed = device().allocate_zeroed(100);
    EXPECT_EQ(content(device(), zeroed.get(), 100), std::vector<uint8_t>(100));
    device().copy(memory.get() + 50, zeroed.get(), 100, nullptr);
    std::fill_n(values.begin() + 50, 100, uint8_t{0});
    EXPECT_EQ(content(device(), memory.get(), values.size()), values);
}

TEST_F(CudaDriver, CopiesRowsAtTheirDistances) {
    std::vector<uint8_t> from(12);
    std::iota(from.begin(), from.end(), uint8_t{0});
    const auto stream = device().new_stream();
    const auto memory = device().allocate_zeroed(20);
    device().copy_rows({memory.get() + 1, 9}, {bytes_of(from), 6}, 2, 3, stream.get());
    EXPECT_EQ(content(device(), memory.get(), 14, stream.get()),
              (std::vector<uint8_t>{0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 6, 7, 8, 0}));
    std::vector<uint8_t> back(8, 99);
    device().copy_rows({bytes_of(back), 4}, {memory.get() + 1, 9}, 2, 3, stream.get());
    synchronize(device(), stream.get());
    EXPECT_EQ(back, (std::vector<uint8_t>{0, 1, 2, 99, 6, 7, 8, 99}));
}

TEST_F(CudaDriver, ItsMemoryIsNotTheHosts) {
    const auto memory = device().allocate(4096);
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    EXPECT_EQ(::write(ends[1], memory.get(), 1), -1);
    EXPECT_EQ(errno, EFAULT);
    ::close(ends[0]);
    ::close(ends[1]);
}

TEST_F(CudaDriver, AStreamWaitsForTheEventOfAnother) {
    constexpr size_t size = 64 << 20;
    const auto writer = device().new_stream();
    const auto reader = device().new_stream();
    const auto host = device().allocate_host(size);
    const auto memory = device().allocate_zeroed(size);
    const auto copy = device().allocate_zeroed(size);
    for (int round = 1; round <= 3; ++round) {
        std::fill_n(host.get(), size, static_cast<std::byte>(round));
        device().copy(memory.get(), host.get(), size, writer.get());
        device().wait(reader.get(), *device().record(writer.get()));
        device().copy(copy.get(), memory.get(), size, reader.get());
        EXPECT_EQ(content(device(), copy.get() + size - 3, 3, reader.get()),
                  std::vector<uint8_t>(3, static_cast<uint8_t>(round)));
    }
}

TEST_F(CudaDriver, ARangeShowsOnePieceOfPagesAfterAnother) {
    constexpr size_t size = 3000000;                // no whole pages
    const auto range = device().reserve(2 * size);  // ranges have room for all pages that they show
    const auto other = device().reserve(2 * size);
    std::byte* const at = range->data();
    EXPECT_THROW(device().check_memory(at), Error);
    const auto fill = [&](std::byte* data, uint8_t value) {
        std::vector<uint8_t> values(size, value);
        device().copy(data, bytes_of(values), size, nullptr);
    };
    auto first = device().allocate_pages(size);
    const auto second = device().allocate_pages(2 * size);
    range->show(first);
    EXPECT_NO_THROW(device().check_memory(at + size - 1));
    fill(at, 1);
    synchronize(device());
    range->show(second);
    fill(at, 2);
    other->show(second);  // the same pages in two ranges
    EXPECT_EQ(content(device(), other->data(), 100), std::vector<uint8_t>(100, 2));
    range->show(first);
    EXPECT_EQ(range->data(), at);
    first.reset();  // they live as long as they are shown
    EXPECT_EQ(content(device(), at, size), std::vector<uint8_t>(size, 1));
    range->show(second);
    EXPECT_EQ(content(device(), at + size - 3, 3), std::vector<uint8_t>(3, 2));
}

TEST_F(CudaDriver, PagesThatDoNotFitAreNoMemory) {
    const Error error = failure([] { (void)device().allocate_pages(size_t{1} << 46); });
    EXPECT_EQ(error.code(), Code::no_memory);
    EXPECT_THAT(error.what(), HasSubstr("70368744177664 bytes"));
}

TEST_F(CudaDriver, ACapturedStreamRunsNothingAndIsNotDisturbedByEvents) {
    const auto stream = device().new_stream();
    const auto other = device().new_stream();
    const auto from = device().allocate_zeroed(64 << 20);
    const auto to = device().allocate_zeroed(64 << 20);
    device().zero(to.get(), 1, stream.get());
    synchronize(device(), stream.get());
    EXPECT_FALSE(device().is_captured(stream.get()));
    EXPECT_FALSE(device().is_captured(nullptr));
    const auto before = device().record(other.get());
    const CapturedGraph graph(device(), stream.get(), [&] {
        EXPECT_TRUE(device().is_captured(stream.get()));
        EXPECT_FALSE(device().is_captured(other.get()));
        device().copy(to.get(), from.get(), 100, stream.get());
        before->wait(soon());
        EXPECT_EQ(failure([&] { (void)device().record(stream.get()); }).code(), Code::invalid_state);
    });
    EXPECT_FALSE(device().is_captured(stream.get()));
    for (uint8_t round = 1; round <= 2; ++round) {
        std::vector<uint8_t> values(100, round);
        device().copy(from.get(), bytes_of(values), values.size(), stream.get());
        EXPECT_NE(content(device(), to.get(), 100, stream.get()), values);
        graph.launch();
        EXPECT_EQ(content(device(), to.get(), 100, stream.get()), values);
    }
}

TEST_F(CudaDriver, TellsItsMemoryFromTheHosts) {
    const auto memory = device().allocate(100);
    EXPECT_NO_THROW(device().check_memory(memory.get()));
    EXPECT_NO_THROW(device().check_memory(memory.get() + 99));
    std::vector<std::byte> host(8);
    const auto pinned = device().allocate_host(8);
    const auto registered = device().register_host(host.data(), host.size());
    for (const std::byte* data :
         {static_cast<const std::byte*>(host.data()), static_cast<const std::byte*>(pinned.get())}) {
        EXPECT_THAT(failure([&] { device().check_memory(data); }).what(),
                    HasSubstr("is memory of the host, not of CUDA device 0"));
    }
    const auto stream = device().new_stream();
    EXPECT_NO_THROW(device().check_stream(stream.get()));
    EXPECT_NO_THROW(device().check_stream(nullptr));
}

TEST_F(CudaDriver, WithoutMemoryIsNoMemory) {
    const Error error = failure([] { (void)device().allocate(size_t{1} << 46); });
    EXPECT_EQ(error.code(), Code::no_memory);
    EXPECT_EQ(error.record()->native_code, 2);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("CUDA device 0"), HasSubstr("70368744177664 bytes")));
    EXPECT_NO_THROW((void)device().allocate(100));
}

TEST_F(CudaDriver, AForkedChildIsRefused) {
    (void)device();
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        bool well = false;
        try {
            (void)device();
        } catch (const Error& error) {
            well = error.code() == Code::unsupported && std::string(error.what()).find("forked") != std::string::npos;
        }
        ::_exit(well ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace tsr::testing
