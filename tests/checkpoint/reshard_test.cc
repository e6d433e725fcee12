// Save at one world size and layout, load at another: every element arrives, bit by bit.
#include <gtest/gtest.h>

#include <random>

#include "fixture.hpp"

namespace tsr::testing {
namespace {

// Boxes of an explicit layout: the tensor is cut into a grid and the cells are dealt to random ranks, some to two.
Layout dealt_boxes(const Dims& shape, int world_size, std::mt19937& random) {
    std::vector<std::vector<Box>> of_rank(static_cast<size_t>(world_size));
    const Layout grid = Layout::placed(shape, std::vector<int>{2, 2},
                                       std::vector<Placement>{Placement::shard(0), Placement::shard(shape.ndim() - 1)});
    for (int cell = 0; cell < grid.shard_count(); ++cell) {
        const Box box = grid.shard(cell);
        if (box.empty()) continue;
        const auto first = random() % static_cast<uint32_t>(world_size);
        of_rank[first].push_back(box);
        const auto second = random() % static_cast<uint32_t>(world_size);
        if (second != first && random() % 2 == 0) of_rank[second].push_back(box);
    }
    std::vector<Box> boxes;
    std::vector<int> counts;
    for (const auto& list : of_rank) {
        boxes.insert(boxes.end(), list.begin(), list.end());
        counts.push_back(static_cast<int>(list.size()));
    }
    return Layout::from_boxes(shape, boxes, counts);
}

Layout random_layout(const Dims& shape, int world_size, std::mt19937& random) {
    if (random() % 5 == 0) return dealt_boxes(shape, world_size, random);
    std::vector<int> mesh;
    for (int rest = world_size; rest > 1 || mesh.empty();) {
        int divisor = 1 + static_cast<int>(random() % static_cast<uint32_t>(rest));
        while (rest % divisor != 0) --divisor;
        mesh.push_back(divisor);
        rest /= divisor;
        if (mesh.size() == 3) {
            mesh.back() *= rest;
            break;
        }
    }
    std::vector<Placement> placements;
    for (size_t m = 0; m < mesh.size(); ++m) {
        placements.push_back(random() % 3 == 0
                                 ? Placement::replicate()
                                 : Placement::shard(static_cast<int>(random() % static_cast<uint32_t>(shape.ndim()))));
    }
    return Layout::placed(shape, mesh, placements);
}

const std::vector<Spec>& specs() {
    static const std::vector<Spec> list{
        {"model.embed", DType::f32, {61, 33}},   {"model.layer.weight", DType::bf16, {16, 8, 5}},
        {"model.layer.bias", DType::f16, {17}},  {"model.large", DType::f32, {700, 500}},
        {"model.mask", DType::boolean, {3, 2}},  {"optim.count", DType::i64, {}},
        {"optim.nothing", DType::f32, {0, 4}},   {"optim.bytes", DType::u8, {4099}},
        {"optim.halves", DType::i16, {2, 1, 9}}, {"optim.double", DType::f64, {1, 700, 3}},
    };
    return list;
}

void build(OwnedState& owned, int rank, int world_size, uint32_t seed) {
    std::mt19937 random(seed);
    for (const Spec& spec : specs()) {
        if (spec.shape.ndim() == 0 || spec.shape.product() == 0 || random() % 3 == 0) {
            owned.add_whole(spec);
        } else {
            owned.add_sharded(spec, random_layout(spec.shape, world_size, random), rank);
        }
    }
    owned.state.set_value("epoch", Json(int64_t{3}));
}

class Reshard : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(Reshard, EveryElementArrivesWhateverTheLayouts) {
    const auto [saved_world, loaded_world] = GetParam();
    for (uint32_t seed = 1; seed <= 4; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        const TempDir dir;
        const auto save = [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            build(owned, comm->rank(), comm->world_size(), seed);
            owned.fill();
            SaverOptions options = saver_options();
            // Small enough that the larger tensors are split over their replicas.
            options.plan = {.split_bytes = 2000, .pack_bytes = 1000};
            Saver saver(comm, dir.path(), options);
            saver.save(seed, owned.state);
        };
        expect_all_well(run_meeting(saved_world, save));
        Checkpoint::open(dir.path())->check(Checkpoint::Depth::everything);

        const auto load = [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            build(owned, comm->rank(), comm->world_size(), seed + 100);
            owned.poison();
            owned.state.set_value("epoch", Json(int64_t{0}));
            Saver saver(comm, dir.path(), saver_options());
            EXPECT_EQ(saver.resume(owned.state), static_cast<int64_t>(seed));
            EXPECT_EQ(owned.differences(), 0);
            EXPECT_EQ(owned.state.value("epoch"), Json(int64_t{3}));
        };
        expect_all_well(run_meeting(loaded_world, load));

        // One process, no job at all: every tensor whole, with and without checks.
        for (const Verify verify : {Verify::blocks, Verify::none}) {
            OwnedState whole;
            for (const Spec& spec : specs()) whole.add_whole(spec);
            whole.state.set_value("epoch", Json(int64_t{0}));
            whole.poison();
            LoadOptions options;
            options.verify = verify;
            (void)Checkpoint::open(dir.path())->load(whole.state, options);
            EXPECT_EQ(whole.differences(), 0);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Reshard, ::testing::Combine(::testing::Range(1, 6), ::testing::Range(1, 6)),
                         [](const auto& worlds) {
                             return "From" + std::to_string(std::get<0>(worlds.param)) + "To" +
                                    std::to_string(std::get<1>(worlds.param));
                         });

}  // namespace
}  // namespace tsr::testing
