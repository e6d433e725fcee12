// States with tensors on the CPU and on devices, saved and loaded in every format: a checkpoint is not bound to devices.
#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <tuple>

#include "checkpoint/async_fixture.hpp"
#include "checkpoint/device/fixture.hpp"
#include "checkpoint/export/export.hpp"
#include "checkpoint/model/state_gather.hpp"
#include "sampling.hpp"
#include "sanitized.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

// Several chunks and parts of one, at odd places.
const std::vector<Spec>& specs() {
    static const std::vector<Spec> list{
        {"a.large", DType::f32, {1300, 1001}}, {"b.empty", DType::i64, {0, 3}},  {"c.scalar", DType::f64, {}},
        {"d.odd", DType::u8, {4099}},          {"e.bf16", DType::bf16, {33, 7}}, {"f.f64", DType::f64, {512, 1024}},
        {"g.small", DType::f32, {5}},
    };
    return list;
}

// Tensor i on the i-th of `devices`, which are taken in turn.
void build(DeviceState& owned, const std::vector<Device>& devices) {
    for (size_t i = 0; i < specs().size(); ++i) owned.add_whole(specs()[i], devices[i % devices.size()]);
    owned.state.set_value("epoch", Json(int64_t{1}));
}

const std::vector<std::vector<Device>>& placements() {
    static const std::vector<std::vector<Device>> all{
        {cpu}, {cuda(0)}, {cpu, cuda(1)}, {cuda(2), cuda(0), cpu}, {cuda(3), cuda(1)}};
    return all;
}

enum class How { sync, async, ring };

class RoundTrip : public DeviceCheckpoint, public ::testing::WithParamInterface<std::tuple<SaveFormat, How>> {};

TEST_P(RoundTrip, FromAnyDevicesToAnyOthers) {
    const auto [format, how] = GetParam();
    simulated_cuda_delay(100, 7);
    int64_t step = 0;
    uint64_t pair = 0;
    const Sample sample(sanitized ? 3 : 1);
    for (const auto& from : placements()) {
        SaverOptions options = saver_options();
        options.format = format;
        if (how == How::ring) options.staging_bytes = 2 * chunk_bytes;
        const std::string root = dir_ / std::to_string(++step);
        {
            DeviceState owned;
            build(owned, from);
            Saver saver(nullptr, root, options);
            for (const uint64_t salt : {1, 2}) {
                owned.fill(salt);
                if (how == How::sync) {
                    saver.save(static_cast<int64_t>(salt), owned.state);
                } else {
                    const auto work = saver.save_async(static_cast<int64_t>(salt), owned.state);
                    owned.poison();
                    work->wait(soon());
                    EXPECT_TRUE(work->staged()->done());
                }
            }
        }
        Checkpoint::open(root)->check(Checkpoint::Depth::everything);
        for (const auto& to : placements()) {
            if (!sample.takes(pair++, placements().size() * placements().size())) continue;
            DeviceState owned;
            build(owned, to);
            owned.poison();
            const LoadReport report = Checkpoint::open(root)->load(owned.state);
            EXPECT_TRUE(report.verified);
            EXPECT_EQ(owned.differences(2), 0);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Formats, RoundTrip,
                         ::testing::Combine(::testing::Values(SaveFormat::native, SaveFormat::torch_dcp),
                                            ::testing::Values(How::sync, How::async, How::ring)));

class ExportedTo : public DeviceCheckpoint, public ::testing::WithParamInterface<ExportFormat> {};

TEST_P(ExportedTo, LoadsToDevices) {
    DeviceState owned;
    build(owned, {cuda(0), cpu});
    owned.fill(1);
    Saver saver(nullptr, dir_ / "root", saver_options());
    saver.save(1, owned.state);
    Peers peers(nullptr);
    ExportOptions options;
    options.format = GetParam();
    (void)export_checkpoint(*Checkpoint::open(dir_ / "root"), peers, dir_ / "out", options);
    DeviceState other;
    build(other, {cuda(1)});
    other.poison();
    LoadOptions load;
    load.missing = Allow::yes;  // the value
    (void)Checkpoint::open(dir_ / "out")->load(other.state, load);
    EXPECT_EQ(other.differences(1), 0);
}

INSTANTIATE_TEST_SUITE_P(Formats, ExportedTo,
                         ::testing::Values(ExportFormat::safetensors, ExportFormat::torch_dcp,
                                           ExportFormat::torch_save));

TEST_F(DeviceCheckpoint, ALoadConvertsOnTheWayToADevice) {
    const Spec narrow{"w", DType::bf16, {1500, 1001}};
    DeviceState owned;
    owned.add_whole(narrow, cuda(0));
    owned.fill();
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(1, owned.state);
    for (const DType dtype : {DType::f32, DType::f64, DType::f16}) {
        OwnedState there;
        there.add_whole({"w", dtype, narrow.shape});
        DeviceState here;
        here.add_whole({"w", dtype, narrow.shape}, cuda(1));
        here.poison();
        LoadOptions options;
        options.cast = Allow::yes;
        const auto checkpoint = Checkpoint::open(dir_.path());
        (void)checkpoint->load(there.state, options);
        (void)checkpoint->load(here.state, options);
        const Tensor expected = there.state.tensors().at("w").piece(0);
        std::vector<std::byte> got(expected.size_bytes());
        device_api(cuda(1)).copy(got.data(), here.piece("w").data, got.size(), nullptr);
        synchronize(device(1));
        EXPECT_EQ(std::memcmp(got.data(), expected.data, got.size()), 0);
    }
}

Layout cut(const Dims& shape, int world_size, int dim) {
    return Layout::placed(shape, std::vector<int>{world_size}, std::vector<Placement>{Placement::shard(dim)});
}

// Rows, columns and whole tensors, on devices and not, as `seed` draws them.
void build_shards(DeviceState& owned, int rank, int world_size, uint32_t seed) {
    std::mt19937 random(seed);
    const auto device = [&] { return random() % 4 == 0 ? cpu : cuda(rank); };
    for (const Spec& spec : specs()) {
        const auto choice = random() % 3;
        if (spec.shape.ndim() == 0 || spec.shape.product() == 0 || choice == 0) {
            owned.add_whole(spec, device());
        } else {
            const int dim = static_cast<int>(choice - 1) % spec.shape.ndim();
            owned.add_sharded(spec, cut(spec.shape, world_size, dim), rank, device());
        }
    }
}

class Resharded : public DeviceCheckpoint, public ::testing::WithParamInterface<std::tuple<int, int, SaveFormat>> {};

TEST_P(Resharded, EveryElementArrives) {
    const auto [saved_world, loaded_world, format] = GetParam();
    for (uint32_t seed = 1; seed <= 3; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        const std::string root = dir_ / std::to_string(seed);
        expect_all_well(run_with_comm(saved_world, [&, format = format](const std::shared_ptr<Communicator>& comm) {
            DeviceState owned;
            build_shards(owned, comm->rank(), comm->world_size(), seed);
            owned.fill();
            SaverOptions options = saver_options();
            options.format = format;
            options.plan = {.split_bytes = 2000, .pack_bytes = 1000};
            options.check_replicas = CheckReplicas::yes;
            Saver saver(comm, root, options);
            saver.save(seed, owned.state);
        }));
        expect_all_well(run_with_comm(loaded_world, [&](const std::shared_ptr<Communicator>& comm) {
            DeviceState owned;
            build_shards(owned, comm->rank(), comm->world_size(), seed + 100);
            owned.poison();
            SaverOptions options = saver_options();
            options.least_shared_bytes = 1;
            Saver saver(comm, root, options);
            EXPECT_EQ(saver.resume(owned.state), seed);
            EXPECT_EQ(owned.differences(), 0);
        }));
    }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Resharded,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Values(1, 4),
                                            ::testing::Values(SaveFormat::native, SaveFormat::torch_dcp)));

TEST_F(DeviceCheckpoint, PartsAtChangingDistancesArrive) {
    const Spec spec{"w", DType::f32, {7, 24, 10}};
    const Layout layout = Layout::placed(spec.shape, std::vector<int>{2, 2},
                                         std::vector<Placement>{Placement::shard(1), Placement::shard(2)});
    expect_all_well(run_meeting(4, [&](const std::shared_ptr<Communicator>& comm) {
        DeviceState owned;
        owned.add_sharded(spec, layout, comm->rank(), cuda(comm->rank()));
        owned.fill(1);
        Saver saver(comm, dir_.path(), saver_options());
        saver.save(1, owned.state);
    }));
    DeviceState whole;
    whole.add_whole(spec, cuda(2));
    whole.poison();
    (void)Checkpoint::open(dir_.path())->load(whole.state);
    EXPECT_EQ(whole.differences(1), 0);
}

void expect_replicas_compared(const std::filesystem::path& dir) {
    const auto outcomes = run_meeting(3, [&](const std::shared_ptr<Communicator>& comm) {
        DeviceState owned;
        owned.add_whole({"a", DType::f32, {1500, 1000}}, comm->rank() == 2 ? cpu : cuda(comm->rank()));
        owned.add_whole({"b", DType::f32, {10}}, cpu);
        owned.fill();
        SaverOptions options = saver_options();
        options.check_replicas = CheckReplicas::yes;
        Saver saver(comm, dir, options);
        saver.save(1, owned.state);
        if (comm->rank() == 1) device_api(cuda(1)).zero(owned.piece("a").data + 5'000'000, 4, nullptr);
        saver.save(2, owned.state);
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("tensor 'a' differs between replicas: rank 1 differs from rank 0"));
    }
}

TEST_F(DeviceCheckpoint, ReplicasOnDevicesAreCompared) { expect_replicas_compared(dir_.path()); }

// In a process of its own: this one has the kernels.
TEST_F(DeviceCheckpoint, ReplicasOnDevicesAreComparedWithoutKernelsToo) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const auto run = [this] {
        ::setenv("TESSERA_CUDA_KERNELS", "/nowhere/libtessera_cuda.so", 1);
        EXPECT_THROW(device_api(cuda(0)).require_kernels(), Error);
        expect_replicas_compared(dir_.path());
        std::_Exit(HasFailure() ? 1 : 0);
    };
    EXPECT_EXIT(run(), ::testing::ExitedWithCode(0), "");
}

TEST_F(DeviceCheckpoint, TiedTensorsAreSavedOnce) {
    DeviceState owned;
    owned.add_whole({"head", DType::f32, {100}}, cuda(0));
    owned.state.add_tensor("tail", owned.piece("head"));
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(1, owned.state);
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().aliases.at("tail"), "head");
}

TEST_F(DeviceCheckpoint, OneTensorIsReadToADevice) {
    DeviceState owned;
    build(owned, {cpu});
    owned.fill(3);
    Saver saver(nullptr, dir_.path(), saver_options());
    saver.save(3, owned.state);
    DeviceState other;
    build(other, {cuda(2)});
    other.poison();
    const auto checkpoint = Checkpoint::open(dir_.path());
    for (const Spec& spec : specs()) checkpoint->read(spec.name, other.piece(spec.name));
    EXPECT_EQ(other.differences(3), 0);
}

TEST_F(DeviceCheckpoint, PartsOnDevicesAreGathered) {
    const Spec spec{"w", DType::f32, {301, 700}};
    expect_all_well(run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
        for (const int dim : {0, 1, -1}) {
            DeviceState owned;
            if (dim < 0) {
                owned.add_whole(spec, cuda(comm->rank()));
            } else {
                owned.add_sharded(spec, cut(spec.shape, 3, dim), comm->rank(), comm->rank() == 1 ? cpu : cuda(0));
            }
            owned.fill(6);
            for (const int root : {-1, 2}) {
                OwnedState whole;
                whole.add_whole(spec);
                whole.poison();
                gather_tensor(*comm, owned.state, "w", root, [&] { return whole.state.tensors().at("w").piece(0); });
                if (root < 0 || comm->rank() == root) {
                    EXPECT_EQ(whole.differences(6), 0);
                }
            }
        }
    }));
}

TEST_F(DeviceCheckpoint, WhatIsNotWhereItSaysIsRefused) {
    State state;
    std::vector<std::byte> host(40);
    const Error on_host = error_of([&] { state.add_tensor("w", {host.data(), {10}, DType::f32, cuda(0)}); });
    EXPECT_EQ(on_host.code(), Code::invalid_argument);
    EXPECT_THAT(on_host.what(), HasSubstr("tensor 'w' is memory of the host, not of CUDA device 0"));
    const auto memory = device_api(cuda(1)).allocate(40);
    EXPECT_THAT(error_of([&] { state.add_tensor("w", {memory.get(), {10}, DType::f32, cuda(0)}); }).what(),
                HasSubstr("is memory of CUDA device 1, not of CUDA device 0"));
    EXPECT_THAT(error_of([&] { state.add_tensor("w", {memory.get(), {10}, DType::f32, cuda(9)}); }).what(),
                HasSubstr("CUDA device 9 does not exist"));
    const Layout boxes = Layout::from_boxes({10}, std::vector<Box>{{{0}, {4}}, {{4}, {6}}}, std::vector<int>{2});
    const std::vector<Tensor> pieces{{memory.get(), {4}, DType::f32, cuda(1)}, {host.data(), {6}, DType::f32, cpu}};
    EXPECT_EQ(error_of([&] { state.add_sharded("w", boxes, DType::f32, pieces, 0); }).code(), Code::unsupported);
    const auto stream = device_api(cuda(1)).new_stream();
    EXPECT_EQ(error_of([&] { state.set_stream(cuda(0), stream.get()); }).code(), Code::invalid_argument);
    EXPECT_TRUE(state.tensors().empty());
}

}  // namespace
}  // namespace tsr::testing
