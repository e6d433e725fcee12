// Saves and loads in the order of the program's streams: what a background save has is what was there when it was called,
// whatever the program puts on its stream afterwards, and the host waits for none of it.
#include <gmock/gmock.h>

#include "checkpoint/device/fixture.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr::testing {
namespace {

constexpr int64_t rows = 1500;  // of 4000 bytes: chunks with parts of two tensors, and with parts of one

struct Streamed {
    explicit Streamed(Device at, bool default_stream = false) : device(at) {
        if (!default_stream) stream = device_api(at).new_stream();
        for (const char* name : {"a", "b", "c"}) owned.add_whole({name, DType::f32, {rows, 1000}}, at);
        owned.add_whole({"host", DType::f32, {100}}, cpu);
        if (!default_stream) owned.state.set_stream(at, stream.get());
        owned.fill(1);
    }
    // These put it on the stream.
    void copy_from(const Streamed& other) const {
        for (const char* name : {"a", "b", "c"}) {
            const Tensor from = other.owned.piece(name);
            device_api(device).copy(owned.piece(name).data, from.data, from.size_bytes(), stream.get());
        }
    }
    void overwrite(const char* name) const {
        const Tensor tensor = owned.piece(name);
        device_api(device).zero(tensor.data, tensor.size_bytes(), stream.get());
    }
    void overwrite_all() const {
        for (const char* name : {"a", "b", "c"}) overwrite(name);
    }

    Device device;
    std::shared_ptr<void> stream;
    DeviceState owned;
};

int64_t differences_of(const std::string& path, uint64_t salt) {
    OwnedState whole;
    for (const char* name : {"a", "b", "c"}) whole.add_whole({name, DType::f32, {rows, 1000}});
    whole.add_whole({"host", DType::f32, {100}});
    whole.poison();
    (void)Checkpoint::open(path)->load(whole.state);
    return whole.differences(salt);
}

class DeviceOrder : public DeviceCheckpoint, public ::testing::WithParamInterface<bool> {};

TEST_P(DeviceOrder, ABackgroundSaveHasTheOldValuesAndTheHostDoesNotWait) {
    simulated_cuda_delay(300, 5);
    Streamed one(cuda(1), GetParam());
    Streamed other(cuda(1), GetParam());
    SaverOptions options = saver_options();
    Saver saver(nullptr, dir_.path(), options);
    for (int64_t step = 1; step <= 3; ++step) {
        other.owned.fill(static_cast<uint64_t>(step));
        one.owned.fill(static_cast<uint64_t>(step));  // what is on the host, too
        one.overwrite_all();
        HeldStream held(one.device, one.stream.get());
        one.copy_from(other);
        const auto work = saver.save_async(step, one.owned.state);
        one.overwrite_all();
        EXPECT_TRUE(held.is_held());
        EXPECT_FALSE(work->staged()->done());
        EXPECT_FALSE(work->done());
        held.open();
        work->staged()->wait(soon());
        work->wait(soon());
        EXPECT_EQ(differences_of(dir_.path(), static_cast<uint64_t>(step)), 0);
        synchronize(device_api(one.device), one.stream.get());
    }
}

TEST_P(DeviceOrder, ASaveWaitsForWhatTheStreamHad) {
    simulated_cuda_delay(3000, 6);
    Streamed one(cuda(0), GetParam());
    Streamed other(cuda(0), GetParam());
    other.owned.fill(9);
    one.copy_from(other);
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(1, one.owned.state);
    OwnedState host;
    host.add_whole({"a", DType::f32, {rows, 1000}});
    LoadOptions options;
    options.unexpected = Allow::yes;
    (void)Checkpoint::open(dir_.path())->load(host.state, options);
    EXPECT_EQ(host.differences(9), 0);
}

TEST_P(DeviceOrder, ALoadOverwritesAfterWhatTheStreamHad) {
    simulated_cuda_delay(3000, 7);
    Streamed one(cuda(0), GetParam());
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(1, one.owned.state);
    one.overwrite_all();
    EXPECT_EQ(saver.resume(one.owned.state), 1);
    EXPECT_EQ(one.owned.differences(1), 0);
}

INSTANTIATE_TEST_SUITE_P(Streams, DeviceOrder, ::testing::Bool());

TEST_F(DeviceCheckpoint, TheDeviceWaitsForTheCopiesAtOnceUnlessTheyAreGuarded) {
    // The call of the driver after the one that makes the copies follow the program is the one that makes it wait.
    constexpr int out_of_order = 802;
    Streamed one(cuda(0));
    const std::array<const char*, 3> names{"a", "b", "c"};
    std::vector<Memory> owned;
    for (const char* name : names) {
        const Tensor tensor = one.owned.piece(name);
        owned.emplace_back(tensor.data, tensor.size_bytes());
    }
    SaverOptions options = saver_options();
    Saver at_once(nullptr, dir_ / "at once", options);
    simulated_cuda_fail("cuStreamWaitEvent", 1, out_of_order);
    EXPECT_EQ(error_of([&] {
                  (void)at_once.save_async(1, one.owned.state);
                  at_once.wait();
              }).code(),
              Code::cuda);
    settle(0);

    const auto barrier = std::make_shared<WriteBarrier>(owned);
    one.owned.state.add_barrier(barrier);
    options.copies = Copies::on_demand;
    Saver on_demand(nullptr, dir_ / "on demand", options);
    simulated_cuda_fail("cuStreamWaitEvent", 1, out_of_order);
    {
        HeldStream held(one.device, one.stream.get());
        const auto work = on_demand.save_async(1, one.owned.state);
        simulated_cuda_fail(nullptr, 0, 0);
        for (size_t i = 0; i < owned.size(); ++i) {
            barrier->before_write(owned[i]);
            one.overwrite(names.at(i));
        }
        EXPECT_TRUE(held.is_held());
        held.open();
        work->wait(soon());
    }
    EXPECT_EQ(differences_of(dir_ / "on demand", 1), 0);

    // Not announced, but destroyed: then it waits as well.
    settle(0);
    one.owned.fill(2);
    simulated_cuda_delay(2000, 3);
    (void)on_demand.save_async(2, one.owned.state);
    barrier->before_write_all();
    one.overwrite_all();
    on_demand.wait();
    simulated_cuda_delay(0, 0);
    EXPECT_EQ(differences_of(dir_ / "on demand", 2), 0);

    // Memory beside it that nobody guards is copied first, and waited for.
    one.owned.add_whole({"d", DType::f32, {10}}, cuda(0));
    simulated_cuda_fail("cuStreamWaitEvent", 1, out_of_order);
    EXPECT_EQ(error_of([&] {
                  (void)on_demand.save_async(3, one.owned.state);
                  on_demand.wait();
              }).code(),
              Code::cuda);
}

// The load has the tensor alone that the save copies last.
TEST_F(DeviceCheckpoint, ALoadOverwritesAfterWhatASaveHasYetToCopy) {
    const auto stream = device_api(cuda(0)).new_stream();
    DeviceState all;
    OwnedState saved;
    std::vector<Memory> guarded;
    for (int i = 10; i < 50; ++i) {
        const Spec spec{"t" + std::to_string(i), DType::f32, {1000}};
        all.add_whole(spec, cuda(0));
        saved.add_whole(spec);
        const Tensor tensor = all.piece(spec.name);
        guarded.emplace_back(tensor.data, tensor.size_bytes());
    }
    State last;
    last.add_tensor("t49", all.piece("t49"));
    const auto barrier = std::make_shared<WriteBarrier>(guarded);
    for (State* state : {&all.state, &last}) {
        state->set_stream(cuda(0), stream.get());
        state->add_barrier(barrier);
    }
    all.fill(1);
    Saver(nullptr, dir_ / "at once", saver_options()).save(1, all.state);
    all.fill(2);

    SaverOptions options = saver_options();
    options.copies = Copies::on_demand;
    Saver on_demand(nullptr, dir_ / "on demand", options);
    simulated_cuda_delay(2000, 5);
    (void)on_demand.save_async(2, all.state);
    LoadOptions some;
    some.unexpected = Allow::yes;
    (void)Checkpoint::open(dir_ / "at once")->load(last, some);
    on_demand.wait();
    simulated_cuda_delay(0, 0);
    EXPECT_EQ(all.differences(2), 1000);
    (void)Checkpoint::open(dir_ / "on demand")->load(saved.state);
    EXPECT_EQ(saved.differences(2), 0);
}

TEST_F(DeviceCheckpoint, StagingMemoryIsPinnedOnceAndGivenBack) {
    Streamed one(cuda(0));
    Saver saver(nullptr, dir_.path(), saver_options());
    const auto pinned = [] {
        simulated_cuda_usage used{};
        simulated_cuda_used(&used);
        return used.pinned;
    };
    (void)saver.save_async(1, one.owned.state);
    saver.wait();
    const size_t first = pinned();
    EXPECT_GE(first, 5U);
    (void)saver.save_async(2, one.owned.state);
    saver.wait();
    EXPECT_EQ(pinned(), first);
    simulated_cuda_usage used{};
    simulated_cuda_used(&used);
    EXPECT_EQ(used.events, 0U);
    saver.trim();
    EXPECT_EQ(pinned(), 0U);
}

}  // namespace
}  // namespace tsr::testing
