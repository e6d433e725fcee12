// Devices that fail in the middle of a save or a load: every rank gets the error, with the driver's number, earlier
// checkpoints stay, nothing is left behind, and the next try works where the device does.
#include <gmock/gmock.h>

#include "checkpoint/async_fixture.hpp"
#include "checkpoint/device/fixture.hpp"
#include "checkpoint/root/root.hpp"

namespace tsr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int not_supported = 801;
constexpr int illegal_address = 700;
constexpr int out_of_memory = 2;

std::vector<int64_t> steps_in(const std::string& root) {
    std::vector<int64_t> found;
    for (const SavedStep& save : scan_root(posix_file_system(), root)) {
        if (save.committed) found.push_back(save.step);
    }
    return found;
}

void build(DeviceState& owned, int rank) {
    owned.add_whole({"a", DType::f32, {1500, 1000}}, cuda(rank));
    owned.add_whole({"b", DType::f32, {40}}, cpu);
    owned.add_whole({"c", DType::bf16, {1500, 1000}}, cuda(3));
}

class FailingCall : public DeviceCheckpoint, public ::testing::WithParamInterface<const char*> {};

TEST_P(FailingCall, FailsTheSaveAndNothingElse) {
    DeviceState owned;
    build(owned, 0);
    owned.fill(1);
    int failures = 0;
    for (const bool is_async : {false, true}) {
        for (unsigned calls = 0; calls < 4; ++calls) {
            const std::string root = dir_ / (std::to_string(calls) + (is_async ? " async" : ""));
            Saver saver(nullptr, root, saver_options());
            const auto save = [&](int64_t step) {
                if (!is_async) return saver.save(step, owned.state);
                (void)saver.save_async(step, owned.state);
                saver.wait();
            };
            const bool first_time = calls % 2 == 0;  // streams and pinned memory are made then
            if (!first_time) save(1);
            simulated_cuda_fail(GetParam(), calls, not_supported);
            const auto error = attempt([&] { save(2); });
            simulated_cuda_fail(nullptr, 0, 0);
            if (error) {
                ++failures;
                EXPECT_EQ(error->code(), Code::cuda) << error->what();
                EXPECT_EQ(error->record()->native_code, not_supported);
                EXPECT_THAT(error->what(), HasSubstr("CUDA device"));
                EXPECT_EQ(steps_in(root), first_time ? std::vector<int64_t>{} : std::vector<int64_t>{1});
            }
            save(3);
            OwnedState loaded;
            loaded.add_whole({"a", DType::f32, {1500, 1000}});
            LoadOptions options;
            options.unexpected = Allow::yes;
            (void)Checkpoint::open(root)->load(loaded.state, options);
            EXPECT_EQ(loaded.differences(1), 0);
        }
    }
    EXPECT_GE(failures, 1);
}

TEST_P(FailingCall, FailsTheLoadAndNothingElse) {
    DeviceState owned;
    build(owned, 0);
    owned.fill(1);
    {
        Saver saver(nullptr, dir_.path(), saver_options());
        saver.save(1, owned.state);
    }
    const auto checkpoint = Checkpoint::open(dir_.path());
    for (unsigned calls = 0; calls < 4; ++calls) {
        owned.poison();
        simulated_cuda_fail(GetParam(), calls, not_supported);
        const auto error = attempt([&] { (void)checkpoint->load(owned.state); });
        simulated_cuda_fail(nullptr, 0, 0);
        if (error) {
            EXPECT_EQ(error->code(), Code::cuda) << error->what();
            EXPECT_EQ(error->record()->native_code, not_supported);
        }
        (void)checkpoint->load(owned.state);
        EXPECT_EQ(owned.differences(1), 0);
    }
}

INSTANTIATE_TEST_SUITE_P(Of, FailingCall,
                         ::testing::Values("cuMemcpyAsync", "cuEventCreate", "cuEventRecord", "cuEventQuery",
                                           "cuStreamWaitEvent", "cuStreamCreateWithPriority", "cuMemHostAlloc",
                                           "cuMemHostRegister_v2"));

TEST_F(DeviceCheckpoint, WithoutPinnedMemoryIsNoMemory) {
    DeviceState owned;
    build(owned, 0);
    owned.fill(1);
    Saver saver(nullptr, dir_.path(), saver_options());
    simulated_cuda_fail("cuMemHostAlloc", 1, out_of_memory);
    const Error error = error_of([&] { saver.save(1, owned.state); });
    EXPECT_EQ(error.code(), Code::no_memory);
    EXPECT_EQ(error.record()->native_code, out_of_memory);
    EXPECT_THAT(error.what(), HasSubstr("4194304 bytes of pinned memory"));
    saver.save(1, owned.state);
}

TEST_F(DeviceCheckpoint, ADeviceThatBreaksEndsTheSaveOnEveryRank) {
    for (const bool is_async : {false, true}) {
        const std::string root = dir_ / (is_async ? "async" : "sync");
        const auto outcomes = run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
            DeviceState owned;
            owned.add_whole({"a", DType::f32, {1500, 1000}}, cuda(comm->rank()));
            owned.add_sharded(
                {"b", DType::f32, {64, 64}},
                Layout::placed({64, 64}, std::vector<int>{2}, std::vector<Placement>{Placement::shard(0)}),
                comm->rank(), cuda(comm->rank()));
            owned.fill(1);
            SaverOptions options = saver_options();
            options.plan.split_bytes = 4096;
            Saver saver(comm, root, options);
            saver.save(1, owned.state);
            if (comm->rank() == 1) simulated_cuda_break(1, illegal_address);
            const Error error = error_of([&] {
                if (is_async) {
                    (void)saver.save_async(2, owned.state);
                    saver.wait();
                } else {
                    saver.save(2, owned.state);
                }
            });
            EXPECT_EQ(error.code(), Code::cuda) << error.what();
            EXPECT_EQ(error.record()->native_code, illegal_address);
            EXPECT_THAT(error.what(), HasSubstr("CUDA device 1"));
            // The others go on.
            if (comm->rank() == 1) simulated_cuda_break(1, 0);
        });
        expect_all_well(outcomes);
        EXPECT_THAT(steps_in(root), ElementsAre(1));
        OwnedState loaded;
        loaded.add_whole({"a", DType::f32, {1500, 1000}});
        loaded.add_whole({"b", DType::f32, {64, 64}});
        (void)Checkpoint::open(root)->load(loaded.state);
        EXPECT_EQ(loaded.differences(1), 0);
    }
}

TEST_F(DeviceCheckpoint, ALoadThatFailsOnOneRankFailsOnAll) {
    const auto outcomes = run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        DeviceState owned;
        owned.add_whole({"a", DType::f32, {1500, 1000}}, cuda(comm->rank()));
        owned.fill(1);
        Saver saver(comm, dir_.path(), saver_options());
        saver.save(1, owned.state);
        if (comm->rank() == 1) simulated_cuda_break(1, illegal_address);
        const Error error = error_of([&] { (void)saver.resume(owned.state); });
        EXPECT_EQ(error.code(), Code::cuda) << error.what();
        if (comm->rank() == 1) simulated_cuda_break(1, 0);
        EXPECT_EQ(owned.differences(1), 0);  // it failed before anything was overwritten
    });
    expect_all_well(outcomes);
}

TEST_F(DeviceCheckpoint, AStreamThatHangsIsATimeout) {
    DeviceState owned;
    build(owned, 0);
    owned.fill(1);
    SaverOptions options = saver_options();
    options.timeout = patience(milliseconds{300});
    for (const bool is_async : {false, true}) {
        auto saver = std::make_unique<Saver>(nullptr, dir_ / (is_async ? "async" : "sync"), options);
        HeldStream held(cuda(0), nullptr);
        const Error error = error_of([&] {
            if (is_async) {
                (void)saver->save_async(1, owned.state);
                saver->wait();
            } else {
                saver->save(1, owned.state);
            }
        });
        EXPECT_EQ(error.code(), Code::timeout) << error.what();
        EXPECT_TRUE(held.is_held());
        held.open();
        for (const int device : {0, 3}) settle(device);
        owned.fill(2);
        saver->save(2, owned.state);  // what was left to copy does not disturb it
        EXPECT_EQ(owned.differences(2), 0);
    }
}

TEST_F(DeviceCheckpoint, ASaveThatIsReplacedGivesItsMemoryBackAndTheHostDoesNotWait) {
    DeviceState owned;
    owned.add_whole({"a", DType::f32, {1500, 1000}}, cuda(0));
    owned.add_whole({"c", DType::bf16, {1500, 1000}}, cuda(3));
    owned.fill(1);
    SaverOptions options = saver_options();
    options.when_busy = WhenBusy::replace;
    Saver saver(nullptr, dir_.path(), options);
    {
        HeldStream held(cuda(0), nullptr);
        const auto first = saver.save_async(1, owned.state);
        const auto second = saver.save_async(2, owned.state);
        const auto third = saver.save_async(3, owned.state);
        EXPECT_EQ(code_of(second), Code::aborted);
        EXPECT_TRUE(held.is_held());
        held.open();
        EXPECT_EQ(code_of(first), Code::ok);
        EXPECT_EQ(code_of(third), Code::ok);
    }
    saver.wait();
    OwnedState loaded;
    loaded.add_whole({"a", DType::f32, {1500, 1000}});
    LoadOptions load;
    load.unexpected = Allow::yes;
    (void)Checkpoint::open(dir_.path())->load(loaded.state, load);
    EXPECT_EQ(loaded.differences(1), 0);
}

}  // namespace
}  // namespace tsr::testing
