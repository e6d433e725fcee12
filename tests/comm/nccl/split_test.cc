// How a split connects devices: by NCCL's own split where all ranks can take part, else anew.
#include <gmock/gmock.h>

#include <array>

#include "base/attempt.hpp"
#include "comm/mesh.hpp"
#include "comm/nccl/nccl_ranks.hpp"
#include "device/captured_graph.hpp"
#include "simulated_cuda/hold.hpp"

namespace tsr::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

class NcclSplit : public Nccl {
   protected:
    // Calls since the test began.
    [[nodiscard]] unsigned inits() const { return mock_nccl_calls("ncclCommInitRankConfig") - inits_before_; }
    [[nodiscard]] unsigned splits() const { return mock_nccl_calls("ncclCommSplit") - splits_before_; }

   private:
    const unsigned inits_before_ = mock_nccl_calls("ncclCommInitRankConfig");
    const unsigned splits_before_ = mock_nccl_calls("ncclCommSplit");
};

CommOptions without_device(const Communicator& comm) {
    CommOptions options = comm.options();
    options.backend = "auto";
    return options;
}

TEST_F(NcclSplit, ConnectsNothingAnew) {
    expect_all_well(run_ranks(4, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        const auto half = comm.split(rank % 2, -rank, comm.options());
        EXPECT_EQ(half->rank(), rank < 2 ? 1 : 0);
        EXPECT_EQ(half->device(), comm.device());
        EXPECT_EQ(sum_of_numbers(*half, rank), rank % 2 == 0 ? 4 : 6);
        // Of a part, too.
        const auto alone = half->split(half->rank(), 0, half->options());
        EXPECT_EQ(sum_of_numbers(*alone, rank), rank + 1);
        EXPECT_EQ(sum_of_numbers(comm, rank), 10);
    }));
    EXPECT_EQ(inits(), 4U);
    EXPECT_EQ(splits(), 8U);
}

TEST_F(NcclSplit, OfAMeshIsOneForEachDimension) {
    expect_all_well(run_ranks(4, nccl_options(), [](Communicator& comm) {
        const DeviceMesh mesh(comm, MeshShape({"dp", "tp"}, {2, 2}));
        EXPECT_EQ(sum_of_numbers(*mesh.comm(0), comm.rank()), comm.rank() % 2 == 0 ? 4 : 6);
        EXPECT_EQ(sum_of_numbers(*mesh.comm(1), comm.rank()), comm.rank() < 2 ? 3 : 7);
    }));
    EXPECT_EQ(inits(), 4U);
    EXPECT_EQ(splits(), 8U);
}

TEST_F(NcclSplit, TakesAllRanksAlsoThoseOfNoGroupOrWithoutADevice) {
    expect_all_well(run_ranks(4, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        const std::array<int, 4> colors{0, 0, 1, -1};
        const auto part =
            comm.split(colors.at(static_cast<size_t>(rank)), 0, rank < 2 ? comm.options() : without_device(comm));
        ASSERT_EQ(part == nullptr, rank == 3);
        if (rank < 2) {
            EXPECT_EQ(sum_of_numbers(*part, rank), 3);
        } else if (rank == 2) {
            EXPECT_EQ(part->device(), std::nullopt);
        }
    }));
    EXPECT_EQ(inits(), 4U);
    EXPECT_EQ(splits(), 4U);
}

TEST_F(NcclSplit, IsNotNecessaryForGroupsWithoutDevices) {
    expect_all_well(run_ranks(2, nccl_options(),
                              [](Communicator& comm) { EXPECT_NE(comm.split(0, 0, without_device(comm)), nullptr); }));
    EXPECT_EQ(splits(), 0U);
}

TEST_F(NcclSplit, OntoAnotherDeviceConnectsAnew) {
    expect_all_well(run_ranks(2, nccl_options(), [](Communicator& comm) {
        CommOptions options = comm.options();
        options.device = comm.rank() == 1 ? 3 : 0;
        const auto moved = comm.split(0, 0, options);
        EXPECT_EQ(sum_of_numbers(*moved, options.device), 5);
    }));
    EXPECT_EQ(inits(), 4U);
    EXPECT_EQ(splits(), 0U);
}

// Nobody knows whether the graph runs meanwhile.
TEST_F(NcclSplit, BesideAGraphConnectsAnew) {
    expect_all_well(run_ranks(2, nccl_options(), [](Communicator& comm) {
        DeviceApi& api = cuda_device(comm.rank());
        const auto stream = api.new_stream();
        const DeviceMemory memory(comm.rank(), 8);
        const Tensor tensor = on_device(memory, 1, DType::f64, comm.rank());
        comm.run({.collective = Collective::barrier});
        const CapturedGraph graph(api, stream.get(), [&] {
            comm.run({.collective = Collective::all_reduce,
                      .outputs = {&tensor, 1},
                      .op = ReduceOp::sum,
                      .stream = stream.get()});
        });
        const auto both = comm.split(0, 0, comm.options());
        EXPECT_EQ(sum_of_numbers(*both, comm.rank()), 3);
        comm.finalize();
    }));
    EXPECT_EQ(inits(), 4U);
    EXPECT_EQ(splits(), 0U);
}

// An operation that waits for what nobody knows.
TEST_F(NcclSplit, BesideAnOperationThatDoesNotEndConnectsAnew) {
    expect_all_well(run_ranks(2, nccl_options(), [](Communicator& comm) {
        DeviceApi& api = cuda_device(comm.rank());
        const auto stream = api.new_stream();
        const DeviceMemory memory(comm.rank(), 8);
        const Tensor tensor = on_device(memory, 1, DType::f64, comm.rank());
        const Hold hold(api, stream.get());
        const WorkPtr work = comm.submit({.collective = Collective::all_reduce,
                                          .outputs = {&tensor, 1},
                                          .op = ReduceOp::sum,
                                          .stream = stream.get()});
        const auto both = comm.split(0, 0, comm.options());
        EXPECT_FALSE(work->done());
        hold.release();
        work->wait(soon());
        EXPECT_EQ(sum_of_numbers(*both, comm.rank()), 3);
        comm.finalize();
    }));
    EXPECT_EQ(inits(), 4U);
    EXPECT_EQ(splits(), 0U);
}

TEST_F(NcclSplit, OfAGroupThatCannotBeMadeLeavesTheOthers) {
    expect_all_well(run_ranks(3, nccl_options(), [](Communicator& comm) {
        const int rank = comm.rank();
        const CommOptions options = rank < 2 ? comm.options() : without_device(comm);
        if (rank == 0) {
            EXPECT_EQ(sum_of_numbers(*comm.split(0, 0, options), rank), 1);
        } else {
            const auto error = attempt([&] { static_cast<void>(comm.split(1, 0, options)); });
            ASSERT_TRUE(error);
            EXPECT_EQ(error->code(), Code::mismatch) << error->what();
        }
        EXPECT_EQ(sum_of_numbers(comm, rank), 6);
    }));
    EXPECT_EQ(splits(), 0U);
}

// Whose split is not the first call to fail must not wait for the others.
TEST_F(NcclSplit, ThatFailsOnOneRankFailsAll) {
    mock_nccl_fail("ncclCommSplit", 1, 2);
    const auto outcomes = run_ranks(3, nccl_options(), [](Communicator& comm) {
        try {
            static_cast<void>(comm.split(comm.rank() == 2 ? -1 : 0, 0, comm.options()));
            ADD_FAILURE() << "no error";
        } catch (const Error& error) {
            EXPECT_TRUE(comm.error().has_value()) << "the ranks of the communicator are out of step";
            throw;
        }
    });
    size_t by_nccl = 0;
    for (size_t rank = 0; rank < 3; ++rank) {
        const Error error = only_error(outcomes, rank);
        by_nccl += error.code() == Code::nccl ? 1 : 0;
        EXPECT_THAT(error.code(), AnyOf(Code::nccl, Code::aborted, Code::peer_lost)) << error.what();
    }
    EXPECT_EQ(by_nccl, 1U);
}

TEST_F(NcclSplit, ThatHangsEndsAtItsDeadline) {
    const auto outcomes = run_ranks(2, nccl_options(), [](Communicator& comm) {
        comm.run({.collective = Collective::barrier});
        if (comm.rank() == 0) mock_nccl_hang(1);
        CommOptions options = comm.options();
        options.timeout = patience(milliseconds{1000});
        static_cast<void>(comm.split(0, 0, options));
    });
    bool timed_out = false;
    for (size_t rank = 0; rank < 2; ++rank) {
        const Error error = only_error(outcomes, rank);
        EXPECT_THAT(error.code(), AnyOf(Code::timeout, Code::aborted, Code::peer_lost)) << error.what();
        if (error.code() == Code::timeout) timed_out = true;
    }
    EXPECT_TRUE(timed_out);
}

// A rank that could not make its part of the group on the host says so before NCCL waits for it.
TEST_F(NcclSplit, ARankWithADeviceThatDoesNotExistIsNamed) {
    const auto outcomes = run_ranks(3, nccl_options(), [](Communicator& comm) {
        CommOptions options = comm.options();
        if (comm.rank() == 1) options.device = 9;
        const auto part = comm.split(comm.rank() == 0 ? 0 : 1, 0, options);
        EXPECT_EQ(sum_of_numbers(*part, 0), 1);
    });
    EXPECT_FALSE(outcomes[0]);
    for (const size_t rank : {1, 2}) {
        const Error error = only_error(outcomes, rank);
        EXPECT_EQ(error.code(), Code::invalid_argument) << error.what();
        EXPECT_THAT(error.what(), HasSubstr("CUDA device 9 does not exist"));
    }
}

}  // namespace
}  // namespace tsr::testing
