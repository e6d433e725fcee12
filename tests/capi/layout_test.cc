// tessera/layout.h through the C ABI: who holds what of a tensor, by mesh, by boxes or as ranks gather it.
#include "api.hpp"

namespace {

using ::testing::ElementsAre;

TEST(LayoutApi, TellsWhoHoldsWhat) {
    const std::array<int64_t, 2> shape{10, 4};
    const std::array<int32_t, 2> mesh{2, 2};
    const std::array<tsr_placement, 2> placements{{{TSR_PLACE_REPLICATE, 0}, {TSR_PLACE_SHARD, 0}}};
    api::Owned<tsr_layout> layout;
    ASSERT_OK(tsr_layout_create(shape.data(), 2, mesh.data(), placements.data(), 2, layout.out()));
    int32_t count = 0;
    ASSERT_OK(tsr_layout_box_count(layout, 3, &count));
    EXPECT_EQ(count, 1);
    tsr_box box{};
    ASSERT_OK(tsr_layout_box(layout, 3, 0, &box));
    EXPECT_THAT(box.offsets, ElementsAre(5, 0, 0, 0, 0, 0, 0, 0));
    EXPECT_THAT(box.sizes, ElementsAre(5, 4, 0, 0, 0, 0, 0, 0));

    EXPECT_FAILS(tsr_layout_box(layout, 3, 1, &box), TSR_E_INVALID_ARGUMENT, "box 1 of rank 3");
    EXPECT_FAILS(tsr_layout_box_count(layout, 4, &count), TSR_E_INVALID_ARGUMENT,
                 "rank 4 is out of range for a layout of 4 ranks");
    EXPECT_FAILS(tsr_layout_box_count(nullptr, 0, &count), TSR_E_INVALID_ARGUMENT, "layout is NULL");
    api::Owned<tsr_layout> other;
    EXPECT_FAILS(tsr_layout_create(shape.data(), 9, mesh.data(), placements.data(), 2, other.out()),
                 TSR_E_INVALID_ARGUMENT, "9 dimensions");
    EXPECT_FAILS(tsr_layout_create(shape.data(), 2, nullptr, placements.data(), 2, other.out()), TSR_E_INVALID_ARGUMENT,
                 "mesh_sizes is NULL");
    EXPECT_FAILS(tsr_layout_create(shape.data(), 1, mesh.data(), placements.data(), 9, other.out()),
                 TSR_E_INVALID_ARGUMENT, "the mesh has 9 dimensions");
    const std::array<tsr_placement, 1> unknown{{{7, 0}}};
    EXPECT_FAILS(tsr_layout_create(shape.data(), 2, mesh.data(), unknown.data(), 1, other.out()),
                 TSR_E_INVALID_ARGUMENT, "unknown kind 7");
    EXPECT_EQ(static_cast<tsr_layout*>(other), nullptr);
}

TEST(LayoutApi, TakesExplicitBoxes) {
    const std::array<int64_t, 1> shape{6};
    std::array<tsr_box, 2> boxes{};
    boxes[0].sizes[0] = 4;
    boxes[1].offsets[0] = 4;
    boxes[1].sizes[0] = 2;
    const std::array<int32_t, 2> counts{0, 2};
    api::Owned<tsr_layout> layout;
    ASSERT_OK(tsr_layout_from_boxes(shape.data(), 1, boxes.data(), counts.data(), 2, layout.out()));
    int32_t count = -1;
    ASSERT_OK(tsr_layout_box_count(layout, 0, &count));
    EXPECT_EQ(count, 0);
    ASSERT_OK(tsr_layout_box_count(layout, 1, &count));
    EXPECT_EQ(count, 2);
    boxes[1].offsets[0] = 3;
    EXPECT_FAILS(tsr_layout_from_boxes(shape.data(), 1, boxes.data(), counts.data(), 2, layout.out()),
                 TSR_E_INVALID_ARGUMENT, "overlap partly");
}

// Rank 1 holds rows 1 and 2 of a tensor of 4 rows, rank 0 the others; nobody tells a rank what the other has.
TEST(LayoutApi, RanksGatherWhatEachHolds) {
    const api::TemporaryDirectory directory;
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        const std::array<int64_t, 2> shape{4, 3};
        std::array<tsr_box, 2> boxes{};
        for (tsr_box& box : boxes) box.sizes[1] = 3;
        boxes[0] = {{rank == 0 ? 0 : 1}, {rank == 0 ? 1 : 2, 3}};
        boxes[1] = {{3}, {1, 3}};
        api::Owned<tsr_layout> layout;
        ASSERT_OK(tsr_layout_gather(comm, shape.data(), 2, boxes.data(), rank == 0 ? 2 : 1, layout.out()));
        int32_t count = 0;
        ASSERT_OK(tsr_layout_box_count(layout, 0, &count));
        EXPECT_EQ(count, 2);
        tsr_box box{};
        ASSERT_OK(tsr_layout_box(layout, 1, 0, &box));
        EXPECT_EQ(box.offsets[0], 1);

        api::Array<float> first(rank == 0 ? std::vector<float>{0, 1, 2} : std::vector<float>{3, 4, 5, 6, 7, 8});
        api::Array<float> last({9, 10, 11});
        first.shape = {rank == 0 ? 1 : 2, 3};
        last.shape = {1, 3};
        const std::array<tsr_tensor, 2> pieces{first.tensor(), last.tensor()};
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        ASSERT_OK(tsr_state_add_sharded(state, "rows", layout, TSR_DTYPE_F32, pieces.data(), rank));
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
        ASSERT_OK(tsr_saver_save(saver, 1, state));

        // What is wrong on one rank is told to both, and leaves the communicator whole.
        EXPECT_FAILS(tsr_layout_gather(comm, shape.data(), rank == 0 ? 2 : 9, nullptr, 0, layout.out()),
                     TSR_E_INVALID_ARGUMENT, "rank 1: shape has 9 dimensions");
        EXPECT_FAILS(tsr_layout_gather(comm, shape.data(), 2, nullptr, rank == 0 ? 1 : 0, layout.out()),
                     TSR_E_INVALID_ARGUMENT, "rank 0: boxes is NULL");
        EXPECT_FAILS(tsr_layout_gather(comm, shape.data(), 2, boxes.data(), -rank, layout.out()),
                     TSR_E_INVALID_ARGUMENT, "rank 1: count is -1");
        EXPECT_FAILS(tsr_layout_gather(comm, shape.data(), 2 - rank, nullptr, 0, layout.out()), TSR_E_MISMATCH,
                     "rank 1 passes boxes of a tensor of shape [4], but rank 0 of shape [4, 3]");
        EXPECT_EQ(static_cast<tsr_layout*>(layout), nullptr);
        EXPECT_OK(tsr_comm_barrier(comm, nullptr));
    });
    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(tsr_checkpoint_open(directory.path().c_str(), checkpoint.out()));
    api::Array<float> rows({4, 3}, 0.0F);
    const tsr_tensor tensor = rows.tensor();
    ASSERT_OK(tsr_checkpoint_read(checkpoint, "rows", &tensor));
    for (size_t i = 0; i < 12; ++i) EXPECT_EQ(rows.values[i], static_cast<float>(i));
}

}  // namespace
