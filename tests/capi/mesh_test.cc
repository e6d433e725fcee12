// tessera/mesh.h through the C ABI.
#include "api.hpp"

namespace {

TEST(MeshApi, DimensionsHaveTheirCommunicators) {
    api::run_ranks(4, [](tsr_comm* comm, int32_t rank) {
        const std::array<const char*, 2> names{"dp", "tp"};
        const std::array<int32_t, 2> sizes{2, 2};
        api::Owned<tsr_mesh> mesh;
        ASSERT_OK(tsr_mesh_create(comm, names.data(), sizes.data(), 2, mesh.out()));
        int32_t ndim = 0;
        EXPECT_OK(tsr_mesh_ndim(mesh, &ndim));
        EXPECT_EQ(ndim, 2);
        int32_t size = 0;
        int32_t coordinate = -1;
        EXPECT_OK(tsr_mesh_dim(mesh, "tp", &size, &coordinate));
        EXPECT_EQ(size, 2);
        EXPECT_EQ(coordinate, rank % 2);
        EXPECT_OK(tsr_mesh_dim(mesh, "dp", nullptr, &coordinate));
        EXPECT_EQ(coordinate, rank / 2);
        EXPECT_OK(tsr_mesh_dim(mesh, "dp", nullptr, nullptr));

        tsr_comm* tp = nullptr;
        ASSERT_OK(tsr_mesh_comm(mesh, "tp", &tp));
        api::Array<int32_t> own({rank});
        const tsr_tensor tensor = own.tensor();
        ASSERT_OK(tsr_comm_all_reduce(tp, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr));
        EXPECT_EQ(own.values[0], rank < 2 ? 0 + 1 : 2 + 3);

        EXPECT_FAILS(tsr_mesh_dim(mesh, "pp", &size, nullptr), TSR_E_NOT_FOUND, "\"pp\"; it has dp, tp");
        EXPECT_FAILS(tsr_mesh_comm(mesh, "pp", &tp), TSR_E_NOT_FOUND, "\"pp\"");
        EXPECT_EQ(tp, nullptr);
        EXPECT_FAILS(tsr_mesh_dim(mesh, nullptr, &size, nullptr), TSR_E_INVALID_ARGUMENT, "name is NULL");

        api::Owned<tsr_mesh> slice;
        ASSERT_OK(tsr_mesh_slice(mesh, &names[1], 1, slice.out()));
        EXPECT_OK(tsr_mesh_ndim(slice, &ndim));
        EXPECT_EQ(ndim, 1);
        EXPECT_FAILS(tsr_mesh_dim(slice, "dp", &size, nullptr), TSR_E_NOT_FOUND, "\"dp\"; it has tp");
        api::Owned<tsr_mesh> flat;
        ASSERT_OK(tsr_mesh_flatten(mesh, comm, nullptr, flat.out()));
        EXPECT_OK(tsr_mesh_dim(flat, "dp_tp", &size, &coordinate));
        EXPECT_EQ(size, 4);
        EXPECT_EQ(coordinate, rank);
        ASSERT_OK(tsr_mesh_comm(mesh, "tp", &tp));
        EXPECT_FAILS(tsr_mesh_flatten(mesh, tp, "x", flat.out()), TSR_E_INVALID_ARGUMENT, "cannot be flattened");
        EXPECT_FAILS(tsr_mesh_slice(mesh, names.data(), 0, flat.out()), TSR_E_INVALID_ARGUMENT, "0 dimensions");
        EXPECT_FAILS(tsr_mesh_slice(mesh, nullptr, 1, flat.out()), TSR_E_INVALID_ARGUMENT, "names is NULL");

        ASSERT_OK(tsr_mesh_comm(mesh, "dp", &tp));
        mesh.reset();
        tsr_comm* alive = nullptr;
        ASSERT_OK(tsr_mesh_comm(slice, "tp", &alive));
        EXPECT_OK(tsr_comm_barrier(alive, nullptr));
        int32_t gone = 0;
        EXPECT_FAILS(tsr_comm_rank(tp, &gone), TSR_E_INVALID_STATE, "destroyed");
    });
}

TEST(MeshApi, BadShapesAreRefused) {
    const api::Owned<tsr_comm> comm = api::alone();
    const std::array<const char*, 2> names{"dp", "dp"};
    const std::array<int32_t, 2> sizes{1, 1};
    api::Owned<tsr_mesh> mesh;
    EXPECT_FAILS(tsr_mesh_create(comm, names.data(), sizes.data(), 2, mesh.out()), TSR_E_INVALID_ARGUMENT,
                 "two mesh dimensions");
    EXPECT_FAILS(tsr_mesh_create(comm, names.data(), sizes.data(), 0, mesh.out()), TSR_E_INVALID_ARGUMENT,
                 "0 dimensions");
    EXPECT_FAILS(tsr_mesh_create(comm, names.data(), sizes.data(), 9, mesh.out()), TSR_E_INVALID_ARGUMENT,
                 "9 dimensions");
    EXPECT_FAILS(tsr_mesh_create(comm, nullptr, sizes.data(), 1, mesh.out()), TSR_E_INVALID_ARGUMENT, "names is NULL");
    EXPECT_FAILS(tsr_mesh_create(comm, names.data(), nullptr, 1, mesh.out()), TSR_E_INVALID_ARGUMENT, "sizes is NULL");
    const std::array<int32_t, 1> two{2};
    EXPECT_FAILS(tsr_mesh_create(comm, names.data(), two.data(), 1, mesh.out()), TSR_E_INVALID_ARGUMENT,
                 "(dp 2) needs 2 ranks, but the communicator has 1");
}

// On one rank alone it is told to all, at once, and the communicator is as it was.
TEST(MeshApi, AMeshThatOneRankAsksForBadlyIsRefusedOnAll) {
    struct Asked {
        std::vector<const char*> names{"dp", "tp"};
        std::vector<int32_t> sizes{1, 3};
    };
    struct Bad {
        std::function<void(Asked&)> change;
        const char* said;
    };
    const std::vector<Bad> cases{
        {[](Asked& asked) { asked.sizes[1] = 2; }, "(dp 1, tp 2) needs 2 ranks, but the communicator has 3"},
        {[](Asked& asked) { asked.sizes[0] = 0; }, "mesh dimension \"dp\" has size 0"},
        {[](Asked& asked) { asked.names[1] = "dp"; }, "two mesh dimensions are named \"dp\""},
        {[](Asked& asked) { asked.names[0] = ""; }, "mesh dimension 0 has no name"},
        {[](Asked& asked) { asked.names[0] = nullptr; }, "a dimension's name is NULL"},
        {[](Asked& asked) { asked.names.clear(); }, "the mesh has 0 dimensions"}};
    for (const Bad& bad : cases) {
        api::run_ranks(3, [&](tsr_comm* comm, int32_t rank) {
            const auto create = [&](const Asked& asked, tsr_mesh** out) {
                return tsr_mesh_create(comm, asked.names.data(), asked.sizes.data(),
                                       static_cast<int32_t>(asked.names.size()), out);
            };
            Asked asked;
            if (rank == 1) bad.change(asked);
            api::Owned<tsr_mesh> mesh;
            EXPECT_FAILS(create(asked, mesh.out()), TSR_E_INVALID_ARGUMENT, bad.said);
            if (rank != 1) {
                EXPECT_THAT(api::message(), ::testing::StartsWith("rank 1: "));
                EXPECT_EQ(tsr_error_peer(tsr_error_last()), 1);
            }
            ASSERT_OK(create({}, mesh.out())) << "nothing else has happened";
        });
    }
}

TEST(MeshApi, AMeshThatOneRankFlattensBadlyIsRefusedOnAll) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        const char* const name = "dp";
        const int32_t size = 2;
        api::Owned<tsr_mesh> mesh;
        ASSERT_OK(tsr_mesh_create(comm, &name, &size, 1, mesh.out()));
        api::Owned<tsr_mesh> flat;
        EXPECT_FAILS(tsr_mesh_flatten(rank == 0 ? nullptr : static_cast<tsr_mesh*>(mesh), comm, "x", flat.out()),
                     TSR_E_INVALID_ARGUMENT, rank == 0 ? "mesh is NULL" : "rank 0: mesh is NULL");
        ASSERT_OK(tsr_mesh_flatten(mesh, comm, "x", flat.out()));
    });
}

}  // namespace
