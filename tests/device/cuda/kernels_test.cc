// The kernels' bodies on the host against the CPU's own loops, through the driver's interface.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "device/convert.hpp"
#include "device/copy_streams.hpp"
#include "device/launch.hpp"
#include "seed.hpp"
#include "simulated_cuda/device_test.hpp"
#include "tensor/arithmetic.hpp"
#include "tensor/convert.hpp"
#include "tensor/convert_element.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Bytes = std::vector<uint8_t>;

class Kernels : public DeviceTest {};

// Any bits, so that subnormals, infinities and NaN occur.
Bytes any_numbers(DType dtype, size_t count, std::mt19937_64& random) {
    Bytes bytes(count * size_of(dtype));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    return bytes;
}

// Sizes around a thread's pack, a block's chunk, and more than a table's tensors.
std::vector<size_t> sizes() {
    std::vector<size_t> result{1, 2, 3, 7, 8191, 8192, 8193, 20001, 0, 5};
    result.resize(result.size() + 150, 9);
    return result;
}

size_t total(const std::vector<size_t>& counts) { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }

struct Divisors {
    double before;
    double after;
};

// Of arrays of so many elements, one after the other.
std::vector<ConvertedRange> ranges_of(const std::vector<size_t>& counts, std::byte* source, DType from,
                                      std::byte* target, DType to) {
    std::vector<ConvertedRange> ranges;
    for (const size_t count : counts) {
        ranges.push_back({source, target, count});
        source += count * size_of(from);
        target += count * size_of(to);
    }
    return ranges;
}

Bytes converted_on_cpu(Bytes values, DType from, DType to, const Divisors& divisors) {
    const auto n = static_cast<int64_t>(values.size() / size_of(from));
    Bytes results(static_cast<size_t>(n) * size_of(to));
    if (divisors.before != 1) divide({bytes_of(values), Dims{n}, from, {}}, divisors.before);
    convert(bytes_of(values), from, bytes_of(results), to, n);
    if (divisors.after != 1) divide({bytes_of(results), Dims{n}, to, {}}, divisors.after);
    return results;
}

TEST_F(Kernels, ChecksumsAreThoseOfTheCpu) {
    const Seed seed;
    std::mt19937_64 random(seed);
    std::vector<size_t> lengths = sizes();
    for (const size_t each : {15, 16, 17, 4080, 4095, 4096, 4097, 4112}) lengths.push_back(each);
    CopyStreams copies(soon().remaining());
    CopyStream& stream = *copies.of({DeviceType::cuda, 0});
    for (const size_t skipped : {0, 1}) {
        const Bytes bytes = any_numbers(DType::u8, total(lengths), random);
        const OnDeviceMemory<uint8_t> memory(device(), bytes, skipped);
        std::vector<std::span<const std::byte>> ranges;
        std::vector<uint32_t> expected;
        size_t at = 0;
        for (const size_t length : lengths) {
            ranges.emplace_back(memory.data() + at, length);
            expected.push_back(crc32c(std::as_bytes(std::span(bytes).subspan(at, length))));
            at += length;
        }
        stream.follow(nullptr);
        EXPECT_EQ(stream.checksums(ranges), expected);
    }
}

TEST_F(Kernels, ConvertAndDivideAsTheCpuDoes) {
    const Seed seed;
    std::mt19937_64 random(seed);
    constexpr std::array floating{DType::f16, DType::bf16, DType::f32, DType::f64};
    for (const DType from : floating) {
        for (const DType to : floating) {
            for (const auto& [before, after] : {Divisors{1, 1}, Divisors{3, 1}, Divisors{1, 7.5}, Divisors{2, 0.75}}) {
                SCOPED_TRACE(std::string(name_of(from)) + " to " + std::string(name_of(to)));
                const std::vector<size_t> counts = sizes();
                const size_t count = total(counts);
                const Bytes values = any_numbers(from, count, random);
                const OnDeviceMemory<uint8_t> source(device(), values);
                OnDeviceMemory<uint8_t> target(device(), Bytes(count * size_of(to)));
                const auto ranges = ranges_of(counts, source.data(), from, target.data(), to);
                convert_on(device(), ranges, from, to, nullptr, before, after);
                ASSERT_EQ(target.read(), converted_on_cpu(values, from, to, {before, after})) << before << ' ' << after;
            }
        }
    }
}

// Of NaN, only that it is one: which of two comes out of a sum is the processor's affair.
template <class T>
void expect_same_sums(const Bytes& sums, const Bytes& wanted) {
    for (size_t at = 0; at < wanted.size(); at += sizeof(T)) {
        T sum{};
        T want{};
        std::memcpy(&sum, &sums[at], sizeof(T));
        std::memcpy(&want, &wanted[at], sizeof(T));
        if (wide(sum) != wide(sum) && wide(want) != wide(want)) continue;
        ASSERT_EQ(std::memcmp(&sum, &want, sizeof(T)), 0) << "element " << at / sizeof(T);
    }
}

TEST_F(Kernels, ConvertAndAddAsTheCpuDoes) {
    const Seed seed;
    std::mt19937_64 random(seed);
    constexpr std::array floating{DType::f16, DType::bf16, DType::f32, DType::f64};
    for (const DType from : floating) {
        for (const DType to : floating) {
            for (const auto& [before, after] : {Divisors{1, 1}, Divisors{0.75, 3}}) {
                SCOPED_TRACE(std::string(name_of(from)) + " to " + std::string(name_of(to)));
                const std::vector<size_t> counts = sizes();
                const size_t count = total(counts);
                const Bytes values = any_numbers(from, count, random);
                Bytes expected = any_numbers(to, count, random);
                const OnDeviceMemory<uint8_t> source(device(), values);
                OnDeviceMemory<uint8_t> target(device(), expected);
                const auto ranges = ranges_of(counts, source.data(), from, target.data(), to);
                add_on(device(), {{{from, to}, ranges}}, nullptr, before, after);

                Bytes more = converted_on_cpu(values, from, to, {before, after});
                const auto n = static_cast<int64_t>(count);
                add({bytes_of(expected), Dims{n}, to, {}}, {bytes_of(more), Dims{n}, to, {}});
                switch (to) {
                    case DType::f16: expect_same_sums<Half>(target.read(), expected); break;
                    case DType::bf16: expect_same_sums<BFloat>(target.read(), expected); break;
                    case DType::f32: expect_same_sums<float>(target.read(), expected); break;
                    default: expect_same_sums<double>(target.read(), expected);
                }
            }
        }
    }
}

TEST_F(Kernels, DivideTensorsOfSeveralDtypesInPlace) {
    const OnDeviceMemory<float> a(device(), std::vector<float>(9000, 3));
    const OnDeviceMemory<double> b(device(), {1, 2, -4}, 1);
    const std::array tensors{a.tensor(DType::f32), b.tensor(DType::f64)};
    divide_on(device(), tensors, 4, nullptr);
    EXPECT_EQ(a.read(), std::vector<float>(9000, 0.75F));
    EXPECT_EQ(b.read(), (std::vector<double>{0.25, 0.5, -1}));
}

TEST_F(Kernels, RunInTheOrderOfTheirStream) {
    simulated_cuda_delay(2000, 3);
    const auto stream = device().new_stream();
    const auto other = device().new_stream();
    OnDeviceMemory<float> a(device(), std::vector<float>(100, 1));
    OnDeviceMemory<double> b(device(), std::vector<double>(100, 0));
    device().wait(stream.get(), *device().record(nullptr));
    const ConvertedRange widened{a.data(), b.data(), 100};
    const std::array tensors{b.tensor(DType::f64)};
    for (int round = 0; round < 5; ++round) {
        convert_on(device(), {&widened, 1}, DType::f32, DType::f64, stream.get());
        for (int i = 0; i < 3; ++i) divide_on(device(), tensors, 2, stream.get());
        device().wait(other.get(), *device().record(stream.get()));
        divide_on(device(), tensors, 2, other.get());
        device().wait(stream.get(), *device().record(other.get()));
    }
    device().wait(nullptr, *device().record(stream.get()));
    EXPECT_EQ(b.read(), std::vector<double>(100, 1.0 / 16));
}

TEST_F(Kernels, ALaunchThatFailsNamesTheKernel) {
    const OnDeviceMemory<float> a(device(), {1});
    const std::array tensors{a.tensor(DType::f32)};
    simulated_cuda_fail("cuLaunchKernel", 0, 719);
    const Error error = failure([&] { divide_on(device(), tensors, 2, nullptr); });
    EXPECT_EQ(error.code(), Code::cuda);
    EXPECT_EQ(error.record()->native_code, 719);
    EXPECT_THAT(error.what(), HasSubstr("CUDA device 0: launching tessera_convert_f32_f32"));
    divide_on(device(), tensors, 2, nullptr);
    EXPECT_EQ(a.read(), std::vector<float>{0.5F});
}

// Device 3 is used by no other test of this program, and loads its kernels here.
TEST_F(Kernels, WithoutCodeForADeviceAreUnsupportedThere) {
    simulated_cuda_fail("cuModuleLoadData", 0, 209);
    const Error error = failure([] { device(3).require_kernels(); });
    EXPECT_EQ(error.code(), Code::unsupported);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("CUDA device 3: libtessera_cuda.so has no kernels for this device"),
                                    HasSubstr("CUDA_ERROR_NO_BINARY_FOR_GPU (209)"), HasSubstr("./dev build --cuda")));
    simulated_cuda_fail("cuModuleLoadData", 0, 2);
    EXPECT_EQ(failure([] { device(3).require_kernels(); }).code(), Code::no_memory);
    EXPECT_NO_THROW(device(3).require_kernels());
}

TEST_F(Kernels, ThatTouchWhatIsNotAllocatedEndTheDevice) {
    const OnDeviceMemory<float> a(device(), std::vector<float>(10, 1));
    const Tensor beyond{a.data(), Dims{11}, DType::f32, {DeviceType::cuda, 0}};
    divide_on(device(), {&beyond, 1}, 2, nullptr);
    const Error error = failure([] { device().record(nullptr)->wait(soon()); });
    EXPECT_THAT(error.what(), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS (700)"));
    simulated_cuda_break(0, 0);
}

TEST_F(Kernels, TheCpuHasNone) {
    EXPECT_EQ(failure([] { cpu_device().require_kernels(); }).code(), Code::unsupported);
}

}  // namespace
}  // namespace tsr::testing
