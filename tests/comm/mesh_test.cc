#include "comm/mesh.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ranks.hpp"

namespace tsr {
namespace {

using testing::expect_all_well;
using ::testing::HasSubstr;
using testing::Outcomes;
using testing::run_ranks;
using testing::test_options;

// The sum of the numbers of the ranks that `comm` joins, each told by itself.
float sum_of(Communicator& comm, int own) {
    std::array<float, 1> value{static_cast<float>(own)};
    const Tensor tensor = tensor_of(std::span<float>(value), DType::f32);
    comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
    return value[0];
}

TEST(DeviceMesh, EachDimensionJoinsTheRanksThatDifferInItAlone) {
    expect_all_well(run_ranks(6, test_options(), [](Communicator& comm) {
        const DeviceMesh mesh(comm, MeshShape({"dp", "tp"}, {2, 3}));
        const int dp = mesh.coordinate(0);
        const int tp = mesh.coordinate(1);
        EXPECT_EQ(comm.rank(), dp * 3 + tp);
        EXPECT_EQ(mesh.comm(0)->world_size(), 2);
        EXPECT_EQ(mesh.comm(1)->world_size(), 3);
        EXPECT_EQ(mesh.comm(0)->rank(), dp);
        EXPECT_EQ(mesh.comm(1)->rank(), tp);
        EXPECT_EQ(sum_of(*mesh.comm(0), comm.rank()), static_cast<float>(tp + (3 + tp)));
        EXPECT_EQ(sum_of(*mesh.comm(1), comm.rank()), static_cast<float>(3 * (3 * dp) + 3));
        EXPECT_THAT(mesh.comm(1)->name(), HasSubstr("tp"));
    }));
}

TEST(DeviceMesh, OneDimensionAndSizesOfOneWork) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        const DeviceMesh mesh(comm, MeshShape({"pp", "dp", "tp"}, {1, 3, 1}));
        EXPECT_EQ(mesh.comm(0)->world_size(), 1);
        EXPECT_EQ(mesh.comm(1)->world_size(), 3);
        EXPECT_EQ(mesh.comm(2)->world_size(), 1);
        EXPECT_EQ(sum_of(*mesh.comm(1), comm.rank()), 3.0F);
    }));
}

TEST(DeviceMesh, OutlivesTheCommunicatorThatItWasMadeFrom) {
    const auto store = make_memory_store(milliseconds{30000});
    expect_all_well(testing::run_threads(4, [&](int rank) {
        auto comm = Communicator::create(store, rank, 4, test_options());
        const DeviceMesh mesh(*comm, MeshShape({"a", "b"}, {2, 2}));
        comm.reset();
        EXPECT_EQ(sum_of(*mesh.comm(0), 1), 2.0F);
        EXPECT_EQ(sum_of(*mesh.comm(1), 1), 2.0F);
    }));
}

TEST(DeviceMesh, WrongProductIsRefusedBeforeAnythingIsSent) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        try {
            const DeviceMesh mesh(comm, MeshShape({"dp", "tp"}, {2, 2}));
            ADD_FAILURE() << "a mesh of 4 places over 2 ranks";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::invalid_argument);
            EXPECT_THAT(error.what(), HasSubstr("(dp 2, tp 2) has 4 places, the communicator 2 ranks"));
        }
        EXPECT_EQ(sum_of(comm, 1), 2.0F);
    }));
}

TEST(DeviceMesh, DifferentMeshesAreNamedOnEveryRank) {
    const Outcomes outcomes = run_ranks(4, test_options(), [](Communicator& comm) {
        const bool odd = comm.rank() == 3;
        const DeviceMesh mesh(comm, MeshShape({"dp", "tp"}, {odd ? 4 : 2, odd ? 1 : 2}));
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("rank 3 has (dp 4, tp 1), rank 0 has (dp 2, tp 2)"));
    }
}

}  // namespace
}  // namespace tsr
