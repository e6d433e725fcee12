#include "comm/mesh.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "patience.hpp"
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

TEST(DeviceMesh, OfACommunicatorWithTheLongestNameHasRoomForItsOwn) {
    CommOptions options = test_options();
    options.name = std::string(128, 'x');
    expect_all_well(run_ranks(2, options, [](Communicator& comm) {
        const DeviceMesh mesh(comm, MeshShape({"dp"}, {2}));
        EXPECT_EQ(mesh.comm(0)->name(), std::string(125, 'x') + "/dp");
        EXPECT_EQ(sum_of(*mesh.comm(0), 1), 2.0F);
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
    const auto store = make_memory_store(testing::patience(milliseconds{30000}));
    expect_all_well(testing::run_threads(4, [&](int rank) {
        auto comm = testing::join_job(store, rank, 4, test_options());
        const DeviceMesh mesh(*comm, MeshShape({"a", "b"}, {2, 2}));
        comm.reset();
        EXPECT_EQ(sum_of(*mesh.comm(0), 1), 2.0F);
        EXPECT_EQ(sum_of(*mesh.comm(1), 1), 2.0F);
    }));
}

TEST(DeviceMesh, SlicesShareTheirCommunicators) {
    expect_all_well(run_ranks(8, test_options(), [](Communicator& comm) {
        const DeviceMesh mesh(comm, MeshShape({"pp", "dp", "tp"}, {2, 2, 2}));
        const std::vector<std::string> names{"pp", "tp"};
        const DeviceMesh part = mesh.slice(names);
        EXPECT_EQ(part.shape().str(), "pp 2, tp 2");
        EXPECT_EQ(part.comm(0), mesh.comm(0));
        EXPECT_EQ(part.comm(1), mesh.comm(2));
        EXPECT_EQ(part.coordinate(1), comm.rank() % 2);
        const std::vector<std::string> inner{"tp"};
        EXPECT_EQ(part.slice(inner).comm(0), mesh.comm(2));

        const auto refused = [&](const std::vector<std::string>& wrong, Code code, const char* why) {
            try {
                (void)mesh.slice(wrong);
                ADD_FAILURE() << "a slice of " << why;
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), code);
                EXPECT_THAT(error.what(), HasSubstr(why));
            }
        };
        refused({"tp", "dp"}, Code::invalid_argument, "in the mesh's order");
        refused({"tp", "tp"}, Code::invalid_argument, "each dimension once");
        refused({"ep"}, Code::not_found, "\"ep\"; it has pp, dp, tp");
        refused({}, Code::invalid_argument, "0 sizes");
    }));
}

TEST(DeviceMesh, ASliceOutlivesItsMesh) {
    expect_all_well(run_ranks(4, test_options(), [](Communicator& comm) {
        std::optional<DeviceMesh> mesh(DeviceMesh(comm, MeshShape({"dp", "tp"}, {2, 2})));
        const std::vector<std::string> names{"tp"};
        const DeviceMesh part = mesh->slice(names);
        const std::weak_ptr<Communicator> dp = mesh->comm(0);
        mesh.reset();
        EXPECT_TRUE(dp.expired());
        EXPECT_EQ(sum_of(*part.comm(0), 1), 2.0F);
    }));
}

TEST(DeviceMesh, FlattenedDimensionsAreOneCommunicator) {
    expect_all_well(run_ranks(8, test_options(), [](Communicator& comm) {
        const DeviceMesh mesh(comm, MeshShape({"dp", "cp", "tp"}, {2, 2, 2}));
        const std::vector<std::string> names{"dp", "cp"};
        const DeviceMesh data = mesh.slice(names).flatten(comm, "");
        EXPECT_EQ(data.shape().str(), "dp_cp 4");
        EXPECT_EQ(data.coordinate(0), comm.rank() / 2);
        EXPECT_EQ(data.comm(0)->world_size(), 4);
        EXPECT_THAT(data.comm(0)->name(), HasSubstr("dp_cp"));
        EXPECT_EQ(sum_of(*data.comm(0), comm.rank()), comm.rank() % 2 == 0 ? 0.0F + 2 + 4 + 6 : 1.0F + 3 + 5 + 7);

        // Dimensions that do not follow each other, all of them, and what is flat already.
        const std::vector<std::string> outer{"dp", "tp"};
        const DeviceMesh model = mesh.slice(outer).flatten(comm, "model");
        EXPECT_EQ(model.shape().str(), "model 4");
        const int cp = comm.rank() / 2 % 2;
        EXPECT_EQ(model.coordinate(0), comm.rank() / 4 * 2 + comm.rank() % 2);
        EXPECT_EQ(sum_of(*model.comm(0), comm.rank()), static_cast<float>(0 + 1 + 4 + 5 + 4 * 2 * cp));
        const DeviceMesh whole = mesh.flatten(comm, "world");
        EXPECT_EQ(whole.coordinate(0), comm.rank());
        EXPECT_EQ(sum_of(*whole.comm(0), 1), 8.0F);
        EXPECT_EQ(sum_of(*data.flatten(comm, "again").comm(0), 1), 4.0F);
    }));
}

TEST(DeviceMesh, FlattenedDifferentlyIsNamedOnEveryRank) {
    const Outcomes outcomes = run_ranks(4, test_options(), [](Communicator& comm) {
        const DeviceMesh mesh(comm, MeshShape({"dp", "tp"}, {2, 2}));
        const std::vector<std::string> one{comm.rank() == 2 ? "tp" : "dp"};
        (void)mesh.slice(one).flatten(comm, "flat");
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("rank 2 has (tp 2) as \"flat\" of (dp 2, tp 2), rank 0 has (dp 2) as"));
    }
}

TEST(DeviceMesh, IsFlattenedOnlyOverTheRanksItWasMadeOf) {
    expect_all_well(run_ranks(4, test_options(), [](Communicator& comm) {
        const DeviceMesh mesh(comm, MeshShape({"dp", "tp"}, {2, 2}));
        try {
            (void)mesh.flatten(*mesh.comm(0), "");
            ADD_FAILURE() << "flattened over a dimension";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::invalid_argument);
            EXPECT_THAT(error.what(), HasSubstr("of 4 cannot be flattened over a communicator in which this is rank"));
        }
    }));
}

TEST(DeviceMesh, WrongProductIsRefusedBeforeAnythingIsSent) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        try {
            const DeviceMesh mesh(comm, MeshShape({"dp", "tp"}, {2, 2}));
            ADD_FAILURE() << "a mesh of 4 places over 2 ranks";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::invalid_argument);
            EXPECT_THAT(error.what(), HasSubstr("(dp 2, tp 2) needs 4 ranks, but the communicator has 2"));
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

TEST(DeviceMesh, ARankThatCallsSomethingElseIsToldWhatTheOthersCompare) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        if (comm.rank() == 1) return comm.run({});
        const DeviceMesh mesh(comm, MeshShape({"dp"}, {2}));
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("rank 0 called all_gather of 48 u8 (comparing the ranks' meshes), "
                                               "rank 1 barrier"));
    }
}

}  // namespace
}  // namespace tsr
