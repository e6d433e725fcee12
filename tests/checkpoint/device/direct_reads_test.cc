// Loads that read files straight into devices' memory by cuFile: they have the same values, nothing that may be read so passes
// through the host, and whatever goes wrong ends there, or is the error of any other load.
#include <gmock/gmock.h>

#include <cstdlib>

#include "checkpoint/async_fixture.hpp"
#include "checkpoint/device/fixture.hpp"
#include "checkpoint/page_cache.hpp"
#include "mock_cufile/control.h"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t mib = 1 << 20;
constexpr int not_supported = 801;

class DirectReads : public DeviceCheckpoint {
   protected:
    void SetUp() override {
        ::setenv("TESSERA_GDS", "1", 1);
        mock_cufile_set(MOCK_CUFILE_SOUND);
    }
    void TearDown() override {
        ::unsetenv("TESSERA_GDS");
        EXPECT_EQ(counted().registered, 0U);
        DeviceCheckpoint::TearDown();
    }

    static mock_cufile_counts counted() {
        mock_cufile_counts counts{};
        mock_cufile_counted(&counts);
        return counts;
    }

    // Of one tensor, whose blocks are all its own.
    static void build_aligned(DeviceState& owned, int device = 0) {
        owned.add_whole({"a", DType::f32, {3, mib}}, cuda(device));
    }
    // Of several devices, with blocks of one tensor and of two.
    static void build_mixed(DeviceState& owned) {
        owned.add_whole({"a", DType::f32, {3, mib}}, cuda(0));
        owned.add_whole({"b", DType::bf16, {2 * mib + 5}}, cuda(1));
        owned.add_whole({"c", DType::u8, {3 * mib + 777}}, cuda(2));
        owned.add_whole({"d", DType::f32, {mib}}, cpu);
        owned.add_whole({"e", DType::f64, {5}}, cuda(0));
    }
    // Its file; empty where all files are in memory, which is read by no device.
    template <class Build>
    std::string save(Build build) {
        DeviceState owned;
        build(owned);
        owned.fill(1);
        Saver saver(nullptr, dir_.path(), saver_options());
        saver.save(1, owned.state);
        const std::string file = only_save(dir_.path()) + "/rank-00000.safetensors";
        const bool direct = drop_from_cache(file) && find_write_path(posix_file_system(), dir_.path()).direct;
        return direct ? file : "";
    }
    void load(DeviceState& owned, const std::string& path, Verify verify = Verify::blocks) {
        owned.poison();
        LoadOptions options;
        options.verify = verify;
        (void)Checkpoint::open(path)->load(owned.state, options);
    }
};

#define SAVED_OR_SKIP(file, build)        \
    const std::string file = save(build); \
    if (file.empty()) GTEST_SKIP() << "the directory for temporary files is one that is not read directly"

TEST_F(DirectReads, CopyNothing) {
    SAVED_OR_SKIP(file, [](DeviceState& owned) { build_aligned(owned); });
    DeviceState owned;
    build_aligned(owned, 3);
    // The native format verifies on the device; the file by itself is safetensors, which has nothing to verify.
    for (const std::string& path : {dir_.path(), file}) {
        mock_cufile_set(MOCK_CUFILE_SOUND);
        owned.poison();
        simulated_cuda_fail("cuMemcpyAsync", 0, not_supported);
        (void)Checkpoint::open(path)->load(owned.state);
        simulated_cuda_fail(nullptr, 0, 0);
        EXPECT_EQ(owned.differences(1), 0);
        EXPECT_EQ(counted().reads, 3U);
        EXPECT_EQ(counted().bytes, static_cast<size_t>(12 * mib));
    }
}

TEST_F(DirectReads, HaveTheValuesOnAllDevicesByManyThreads) {
    SAVED_OR_SKIP(file, build_mixed);
    simulated_cuda_delay(100, 3);
    DeviceState owned;
    build_mixed(owned);
    for (const Verify verify : {Verify::blocks, Verify::none}) {
        for (const std::string& path : {dir_.path(), file}) {
            mock_cufile_set(MOCK_CUFILE_SOUND);
            load(owned, path, verify);
            EXPECT_EQ(owned.differences(1), 0);
            EXPECT_GE(counted().bytes, static_cast<size_t>(16 * mib));  // of 19
            EXPECT_EQ(counted().opened, 1U);
        }
    }
}

TEST_F(DirectReads, LeaveToTheHostWhatIsConvertedOrScattered) {
    SAVED_OR_SKIP(file, [](DeviceState& owned) { build_aligned(owned); });
    const Layout columns = Layout::placed({3, mib}, std::vector<int>{2}, std::vector<Placement>{Placement::shard(1)});
    DeviceState half;
    half.add_sharded({"a", DType::f32, {3, mib}}, columns, 1, cuda(0));
    load(half, dir_.path());
    EXPECT_EQ(half.differences(1), 0);
    DeviceState wider;
    wider.add_whole({"a", DType::f64, {3, mib}}, cuda(0));
    LoadOptions options;
    options.cast = Allow::yes;
    (void)Checkpoint::open(dir_.path())->load(wider.state, options);
    EXPECT_EQ(counted().reads, 0U);
}

TEST_F(DirectReads, AreForTheProgramToAskFor) {
    SAVED_OR_SKIP(file, [](DeviceState& owned) { build_aligned(owned); });
    ::unsetenv("TESSERA_GDS");
    DeviceState owned;
    build_aligned(owned);
    load(owned, dir_.path());
    EXPECT_EQ(owned.differences(1), 0);
    EXPECT_EQ(counted().opened, 0U);
    EXPECT_EQ(counted().reads, 0U);
}

TEST_F(DirectReads, LeaveToTheHostWhatItsRanksShare) {
    SAVED_OR_SKIP(file, [](DeviceState& owned) { build_aligned(owned); });
    expect_all_well(run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        DeviceState owned;
        build_aligned(owned, comm->rank());
        owned.poison();
        LoadOptions options;
        options.comm = comm;
        (void)Checkpoint::open(dir_.path())->load(owned.state, options);
        EXPECT_EQ(owned.differences(1), 0);
    }));
    EXPECT_EQ(counted().reads, 0U);
}

TEST_F(DirectReads, OverwriteAfterWhatTheStreamHad) {
    SAVED_OR_SKIP(file, [](DeviceState& owned) { build_aligned(owned); });
    DeviceState owned;
    build_aligned(owned);
    const auto stream = device_api(cuda(0)).new_stream();
    owned.state.set_stream(cuda(0), stream.get());
    const Tensor tensor = owned.piece("a");
    for (const Verify verify : {Verify::blocks, Verify::none}) {
        simulated_cuda_delay(3000, 7);
        for (int i = 0; i < 10; ++i) device_api(cuda(0)).zero(tensor.data, tensor.size_bytes(), stream.get());
        LoadOptions options;
        options.verify = verify;
        (void)Checkpoint::open(dir_.path())->load(owned.state, options);
        synchronize(device_api(cuda(0)), stream.get());
        simulated_cuda_delay(0, 0);
        EXPECT_EQ(owned.differences(1), 0);
    }
    EXPECT_EQ(counted().reads, 6U);
}

class Faults : public DirectReads, public ::testing::WithParamInterface<mock_cufile_fault> {};

TEST_P(Faults, LeaveTheReadToTheHost) {
    SAVED_OR_SKIP(file, build_mixed);
    DeviceState owned;
    build_mixed(owned);
    const bool is_read =
        GetParam() == MOCK_CUFILE_SHORT || GetParam() == MOCK_CUFILE_EIO || GetParam() == MOCK_CUFILE_POINTER;
    for (const std::string& path : {dir_.path(), file}) {
        mock_cufile_set(GetParam());
        load(owned, path);
        EXPECT_EQ(owned.differences(1), 0);
        EXPECT_EQ(counted().reads > 0, is_read);
        EXPECT_EQ(counted().opened, GetParam() == MOCK_CUFILE_NO_DRIVER ? 0U : 1U);
    }
}

INSTANTIATE_TEST_SUITE_P(Of, Faults,
                         ::testing::Values(MOCK_CUFILE_NO_DRIVER, MOCK_CUFILE_COMPATIBLE, MOCK_CUFILE_FILE_SYSTEM,
                                           MOCK_CUFILE_SHORT, MOCK_CUFILE_EIO, MOCK_CUFILE_POINTER));

TEST_F(DirectReads, FindBlocksThatDoNotMatchTheirChecksum) {
    SAVED_OR_SKIP(file, [](DeviceState& owned) { build_aligned(owned); });
    DeviceState owned;
    build_aligned(owned);
    mock_cufile_set(MOCK_CUFILE_WRONG_BYTE);
    const Error error = error_of([&] { load(owned, dir_.path()); });
    EXPECT_EQ(error.code(), Code::corrupt);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr(file), HasSubstr("do not match their checksum"), HasSubstr("tensor 'a'")));
    load(owned, dir_.path(), Verify::none);
    EXPECT_EQ(owned.differences(1), 3);  // one of each read
    mock_cufile_set(MOCK_CUFILE_SOUND);
    load(owned, dir_.path());
    EXPECT_EQ(owned.differences(1), 0);
}

TEST_F(DirectReads, OfADeviceThatBreaksAreItsError) {
    SAVED_OR_SKIP(file, [](DeviceState& owned) { build_aligned(owned); });
    DeviceState owned;
    build_aligned(owned);
    owned.poison();
    const auto checkpoint = Checkpoint::open(dir_.path());
    for (unsigned calls = 0; calls < 4; ++calls) {
        simulated_cuda_fail("cuEventRecord", calls, not_supported);
        const auto error = attempt([&] { (void)checkpoint->load(owned.state); });
        simulated_cuda_fail(nullptr, 0, 0);
        ASSERT_TRUE(error);
        EXPECT_EQ(error->code(), Code::cuda);
        EXPECT_EQ(error->record()->native_code, not_supported);
    }
    (void)checkpoint->load(owned.state);
    EXPECT_EQ(owned.differences(1), 0);
}

// Without the plug-in nothing can be verified on a device.
class WithoutKernels : public DirectReads {};

TEST_F(WithoutKernels, OnlyUnverifiedReadsAreDirect) {
    SAVED_OR_SKIP(file, [](DeviceState& owned) { build_aligned(owned); });
    DeviceState owned;
    build_aligned(owned);
    load(owned, dir_.path());
    EXPECT_EQ(owned.differences(1), 0);
    EXPECT_EQ(counted().reads, 0U);
    load(owned, dir_.path(), Verify::none);
    EXPECT_EQ(owned.differences(1), 0);
    EXPECT_EQ(counted().reads, 3U);
}

class WithoutCuFile : public DirectReads {};

TEST_F(WithoutCuFile, AllGoesThroughTheHost) {
    SAVED_OR_SKIP(file, [](DeviceState& owned) { build_aligned(owned); });
    DeviceState owned;
    build_aligned(owned);
    load(owned, dir_.path());
    EXPECT_EQ(owned.differences(1), 0);
    EXPECT_EQ(counted().opened, 0U);
}

}  // namespace
}  // namespace tsr::testing
