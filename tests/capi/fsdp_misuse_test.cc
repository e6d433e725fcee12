// What tessera/fsdp.h refuses through the C ABI: bad arguments, gradients that were not written, models that one rank
// registers badly or destroys, and calls after a failure.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

#include "api.hpp"
#include "fsdp_model.hpp"

namespace {

using api::backward;
using api::defaults;
using api::floats;
using api::Model;
using ::testing::Each;

TEST(FsdpApi, BadArgumentsAreRefused) {
    const auto comm = api::alone();
    Model model(1);
    api::Owned<tsr_fsdp> fsdp;
    const auto refused = [&](const std::function<void(tsr_fsdp_unit&, tsr_fsdp_options&)>& change, tsr_status status,
                             const char* said) {
        auto units = model.units;
        tsr_fsdp_options options = defaults();
        change(units[0], options);
        EXPECT_FAILS(tsr_fsdp_create(comm, units.data(), units.size(), &options, fsdp.out()), status, said);
    };
    refused([](auto& unit, auto&) { unit.name = nullptr; }, TSR_E_INVALID_ARGUMENT, "name is NULL");
    refused([](auto& unit, auto&) { unit.params = nullptr; }, TSR_E_INVALID_ARGUMENT, "params is NULL");
    refused([](auto& unit, auto&) { unit.n = 0; }, TSR_E_INVALID_ARGUMENT, "has no parameters");
    refused([](auto& unit, auto&) { unit.reshard_after_forward = 2; }, TSR_E_INVALID_ARGUMENT,
            "a divisor of the 1 ranks of a shard group");
    refused([](auto& unit, auto&) { unit.reshard_after_forward = -1; }, TSR_E_INVALID_ARGUMENT,
            "reshard_after_forward is -1");
    refused([](auto& unit, auto&) { unit.flat = 2; }, TSR_E_INVALID_ARGUMENT, "flat is 2");
    refused([](auto& unit, auto&) { unit.row_block = -3; }, TSR_E_INVALID_ARGUMENT, "row_block is -3");
    refused([](auto& unit, auto&) { unit.flat = unit.row_block = 1; }, TSR_E_INVALID_ARGUMENT,
            "a flat unit cannot have a row_block");
    refused([](auto& unit, auto&) { unit.reserved = 1; }, TSR_E_UNSUPPORTED, "reserved");
    refused([](auto& unit, auto&) { unit.param_dtype = 99; }, TSR_E_INVALID_ARGUMENT, "param_dtype is unknown");
    refused([](auto& unit, auto&) { unit.reduce_dtype = -1; }, TSR_E_INVALID_ARGUMENT, "reduce_dtype is unknown");
    refused([](auto&, auto& options) { options.struct_size = 0; }, TSR_E_INVALID_ARGUMENT, "struct_size");
    refused([](auto&, auto& options) { options.op = TSR_REDUCE_MAX; }, TSR_E_INVALID_ARGUMENT, "AVG or SUM");
    refused([](auto&, auto& options) { options.param_dtype = 99; }, TSR_E_INVALID_ARGUMENT, "param_dtype is unknown");
    refused([](auto&, auto& options) { options.reduce_dtype = TSR_DTYPE_I8; }, TSR_E_INVALID_ARGUMENT,
            "reduce_dtype is i8");
    refused([](auto&, auto& options) { options.shard_ranks = -1; }, TSR_E_INVALID_ARGUMENT, "shard_ranks is -1");
    refused([](auto&, auto& options) { options.sync_values = 3; }, TSR_E_INVALID_ARGUMENT, "sync_values is 3");
    refused([](auto&, auto& options) { options.pre_divide = NAN; }, TSR_E_INVALID_ARGUMENT, "pre_divide");
    const std::array<int32_t, 2> flags{1, 5};
    refused([&](auto& unit, auto&) { unit.trained = flags.data(); }, TSR_E_INVALID_ARGUMENT, "trained is 5");
    EXPECT_FAILS(tsr_fsdp_create(comm, nullptr, 1, nullptr, fsdp.out()), TSR_E_INVALID_ARGUMENT, "units is NULL");
    EXPECT_FAILS(tsr_fsdp_create(comm, nullptr, 0, nullptr, fsdp.out()), TSR_E_INVALID_ARGUMENT,
                 "the model has no units");
    EXPECT_FAILS(tsr_fsdp_create(comm, model.units.data(), 2, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "out is NULL");
    const auto well = model.create(comm);
    EXPECT_FAILS(tsr_fsdp_param(well, 3, nullptr, nullptr, nullptr), TSR_E_INVALID_ARGUMENT,
                 "parameter 3 does not exist; the model has 3 parameters (0 to 2)");
    const char* name = nullptr;
    EXPECT_FAILS(tsr_fsdp_unit_name(well, 2, &name), TSR_E_INVALID_ARGUMENT,
                 "unit 2 does not exist; the model has 2 units (0 to 1)");
    EXPECT_FAILS(tsr_fsdp_unit_name(well, 0, nullptr), TSR_E_INVALID_ARGUMENT, "name is NULL");
    int32_t phase = 0;
    EXPECT_FAILS(tsr_fsdp_unit_phase(well, 2, &phase), TSR_E_INVALID_ARGUMENT,
                 "unit 2 does not exist; the model has 2 units (0 to 1)");
    EXPECT_FAILS(tsr_fsdp_unit_phase(well, 0, nullptr), TSR_E_INVALID_ARGUMENT, "phase is NULL");
    EXPECT_FAILS(tsr_fsdp_forward(well, 2), TSR_E_INVALID_ARGUMENT,
                 "unit 2 does not exist; the model has 2 units (0 to 1)");
    EXPECT_FAILS(tsr_fsdp_whole(well, 0, nullptr), TSR_E_INVALID_STATE, "is sharded; access it between");
    EXPECT_FAILS(tsr_fsdp_shard(well, 0, nullptr), TSR_E_INVALID_ARGUMENT, "shard is NULL");
}

TEST(FsdpApi, GradientsThatWereNotWrittenToTheirEndsAreNamed) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t) {
        Model model(1);
        const auto fsdp = model.create(comm);
        ASSERT_OK(tsr_fsdp_backward(fsdp, 0));
        tsr_tensor weight{};
        tsr_tensor bias{};
        ASSERT_OK(tsr_fsdp_grad(fsdp, 0, &weight));
        ASSERT_OK(tsr_fsdp_grad(fsdp, 1, &bias));
        EXPECT_FAILS(tsr_fsdp_grads_ready(fsdp, 0), TSR_E_INVALID_STATE,
                     "2 of 2 gradients of unit \"fc1\" were not written: \"fc1.weight\", \"fc1.bias\"");
        for (float& g : floats(weight)) g = 2;
        for (float& g : floats(bias).first(4)) g = 2;  // as one does who takes it for shorter
        EXPECT_FAILS(tsr_fsdp_grads_ready(fsdp, 0), TSR_E_INVALID_STATE,
                     "1 of 2 gradients of unit \"fc1\" were not written: \"fc1.bias\"");
        floats(bias)[4] = 2;
        ASSERT_OK(tsr_fsdp_grads_ready(fsdp, 0));
        ASSERT_OK(tsr_fsdp_backward(fsdp, 1));
        ASSERT_OK(tsr_fsdp_unused(fsdp, 2));
        ASSERT_OK(tsr_fsdp_grads_ready(fsdp, 1));
        ASSERT_OK(tsr_fsdp_wait(fsdp));
        ASSERT_OK(tsr_fsdp_shard_grad(fsdp, 1, &bias));
        EXPECT_THAT(floats(bias), Each(2.0F));
    });
}

TEST(FsdpApi, AUnitIsNotShardedInItsBackwardNorBeforeItsRowsHaveCome) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Model model(static_cast<float>(3 + rank));
        const auto fsdp = model.create(comm);
        int32_t phase = -1;
        for (int again = 0; again < 10; ++again) {  // what was on its way arrives first
            ASSERT_OK(tsr_fsdp_unshard(fsdp, 0));
            ASSERT_OK(tsr_fsdp_reshard(fsdp, 0));
            EXPECT_OK(tsr_fsdp_unit_phase(fsdp, 0, &phase));
            EXPECT_EQ(phase, TSR_FSDP_SHARDED);
        }
        ASSERT_OK(tsr_fsdp_backward(fsdp, 1));
        EXPECT_FAILS(tsr_fsdp_reshard(fsdp, 1), TSR_E_INVALID_STATE, "unit \"fc2\" is in its backward");
        tsr_tensor whole{};
        ASSERT_OK(tsr_fsdp_whole(fsdp, 2, &whole)) << "it still is";
        EXPECT_THAT(floats(whole), Each(3.0F));
        tsr_tensor grad{};
        ASSERT_OK(tsr_fsdp_grad(fsdp, 2, &grad));
        for (float& g : floats(grad)) g = 1;
        ASSERT_OK(tsr_fsdp_grads_ready(fsdp, 1));
        ASSERT_OK(tsr_fsdp_reshard(fsdp, 1)) << "it is sharded while its gradients are reduced";
    });
}

// --- what ranks do badly

// On one rank alone it is told to all, at once, and the communicator is as it was.
TEST(FsdpApi, AModelThatOneRankRegistersBadlyIsRefusedOnAll) {
    struct Bad {
        std::function<void(Model&, tsr_fsdp_options&)> change;
        tsr_status status;
        const char* said;
    };
    static const std::array<int64_t, 2> columns{1, 5};
    const std::vector<Bad> cases{
        {[](auto& model, auto&) { model.second_params[0] = model.first_params[1]; }, TSR_E_INVALID_ARGUMENT,
         "two parameters are named \"fc1.bias\", one in unit \"fc1\" and one in unit \"fc2\"; names must be unique "
         "in the model"},
        {[](auto& model, auto&) { model.first_params[0].tensor.strides = columns.data(); }, TSR_E_INVALID_ARGUMENT,
         "parameter 0 (\"module.fc1.weight\") of unit \"fc1\" is not contiguous"},
        {[](auto& model, auto&) { model.units[1].name = nullptr; }, TSR_E_INVALID_ARGUMENT, "a unit's name is NULL"},
        {[](auto& model, auto&) { model.units[1].row_block = -1; }, TSR_E_INVALID_ARGUMENT, "row_block is -1"},
        {[](auto& model, auto&) { model.units[0].reserved = 4; }, TSR_E_UNSUPPORTED, "reserved field of unit 0"},
        {[](auto&, auto& options) { options.sync_values = 2; }, TSR_E_INVALID_ARGUMENT, "sync_values is 2"}};
    for (const Bad& bad : cases) {
        api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
            Model model(1);
            tsr_fsdp_options options = defaults();
            if (rank == 1) bad.change(model, options);
            api::Owned<tsr_fsdp> fsdp;
            EXPECT_FAILS(tsr_fsdp_create(comm, model.units.data(), 2, &options, fsdp.out()), bad.status, bad.said);
            if (rank == 0) {
                EXPECT_THAT(api::message(), ::testing::StartsWith("rank 1: "));
            }
            Model good(1);
            backward(good.create(comm), 1);
        });
    }
}

TEST(FsdpApi, UnitsThatDifferBetweenRanksAreNamedOnAll) {
    struct Other {
        std::function<void(Model&)> change;
        const char* said;
    };
    const std::vector<Other> cases{
        {[](Model& model) { model.units[1].name = "head"; }, "rank 1 has unit \"head\" of 1 parameters"},
        {[](Model& model) { model.units[0].n = 1; }, "rank 1 has unit \"fc1\" of 1 parameters"},
        {[](Model& model) { std::swap(model.units[0], model.units[1]); }, "rank 1 has unit \"fc2\" of 1 parameters"},
        {[](Model& model) { model.last.shape[0] = 1; }, "\"fc2.weight\" f32 [1]"},
        {[](Model& model) { model.units[1].flat = 1; }, "rank 1 has unit \"fc2\" with flat 1"}};
    for (const Other& other : cases) {
        api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
            Model model(1);
            if (rank == 1) other.change(model);
            api::Owned<tsr_fsdp> fsdp;
            EXPECT_FAILS(tsr_fsdp_create(comm, model.units.data(), 2, nullptr, fsdp.out()), TSR_E_MISMATCH, other.said);
        });
    }
}

// The memory that ranks share, by inode, mapped in this process.
std::set<std::string> shared_memory() {
    std::ifstream maps("/proc/self/maps");
    std::set<std::string> inodes;
    for (std::string line; std::getline(maps, line);) {
        if (line.find("memfd:tessera") == std::string::npos) continue;
        std::istringstream fields(line);
        std::string range, access, offset, device, inode;
        fields >> range >> access >> offset >> device >> inode;
        inodes.insert(inode);
    }
    return inodes;
}

// Wherever it is in its step, on all ranks alike, and without waiting for anything.
TEST(FsdpApi, AModelMayBeDestroyedWhileItsCollectivesAreInFlight) {
    const auto write_grads = [](tsr_fsdp* fsdp) {
        tsr_tensor grad{};
        ASSERT_OK(tsr_fsdp_grad(fsdp, 2, &grad));
        for (float& g : floats(grad)) g = 1;
    };
    const std::vector<std::function<void(tsr_fsdp*)>> begun{
        [](tsr_fsdp* fsdp) { ASSERT_OK(tsr_fsdp_unshard(fsdp, 0)); },
        [](tsr_fsdp* fsdp) {
            ASSERT_OK(tsr_fsdp_unshard(fsdp, 1));
            ASSERT_OK(tsr_fsdp_await(fsdp, 1));
        },
        [](tsr_fsdp* fsdp) { ASSERT_OK(tsr_fsdp_forward(fsdp, 0)); },  // the second unit is on its way
        [](tsr_fsdp* fsdp) { ASSERT_OK(tsr_fsdp_backward(fsdp, 1)); },
        [&](tsr_fsdp* fsdp) {
            ASSERT_OK(tsr_fsdp_backward(fsdp, 1));
            write_grads(fsdp);
            ASSERT_OK(tsr_fsdp_grads_ready(fsdp, 1));
        }};
    const std::set<std::string> before = shared_memory();  // former tests' may still be going
    api::run_ranks(3, [&](tsr_comm* comm, int32_t) {
        for (const auto& begin : begun) {
            Model model(1);
            auto fsdp = model.create(comm);
            begin(fsdp);
            fsdp.reset();
            backward(model.create(comm), 1);  // the communicator goes on
        }
    });
    // A communicator whose last user was its own thread goes by itself, a moment later.
    EXPECT_TRUE(api::becomes_true([&] { return std::ranges::includes(before, shared_memory()); }));
}

TEST(FsdpApi, WhoWaitsForARankThatDestroyedItsModelIsToldSo) {
    const std::vector<std::function<tsr_status(tsr_fsdp*)>> waits{
        [](tsr_fsdp* fsdp) { return tsr_fsdp_forward(fsdp, 0); },
        [](tsr_fsdp* fsdp) { return tsr_fsdp_backward(fsdp, 1); },
        [](tsr_fsdp* fsdp) {
            EXPECT_OK(tsr_fsdp_unshard(fsdp, 1));
            return tsr_fsdp_await(fsdp, 1);
        }};
    for (const auto& wait : waits) {
        api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
            Model model(1);
            auto fsdp = model.create(comm);
            if (rank == 1) return fsdp.reset();
            EXPECT_FAILS(wait(fsdp), TSR_E_PEER_LOST, "rank 1");
            EXPECT_FAILS(tsr_fsdp_forward(fsdp, 0), TSR_E_ABORTED, "cannot be used after an earlier error");
        });
    }
}

TEST(FsdpApi, NoStepIsMadeAfterACollectiveThatFailed) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Model model(2);
        auto fsdp = model.create(comm);
        api::Owned<tsr_optimizer> optimizer;
        ASSERT_OK(tsr_fsdp_adamw(fsdp, nullptr, optimizer.out()));
        backward(fsdp, 1);
        if (rank == 1) {
            EXPECT_OK(tsr_comm_abort(comm, "rank 1 gives up"));
            return fsdp.reset();
        }
        EXPECT_NE(tsr_fsdp_backward(fsdp, 1), TSR_OK);
        EXPECT_FAILS(tsr_optimizer_step(optimizer), TSR_E_ABORTED, "cannot be used after an earlier error");
        EXPECT_FAILS(tsr_optimizer_clip_grad_norm(optimizer, 1, 2, nullptr), TSR_E_ABORTED,
                     "cannot be used after an earlier error");
        EXPECT_FAILS(tsr_optimizer_zero_grad(optimizer), TSR_E_ABORTED, "cannot be used after an earlier error");
        EXPECT_FAILS(tsr_fsdp_zero_grad(fsdp), TSR_E_ABORTED, "cannot be used after an earlier error");
        EXPECT_FAILS(tsr_fsdp_abandon(fsdp), TSR_E_ABORTED, "cannot be used after an earlier error");
        tsr_param shard{};
        ASSERT_OK(tsr_fsdp_shard(fsdp, 0, &shard));
        EXPECT_THAT(floats(shard.tensor), Each(2.0F)) << "as it was before";
    });
}

}  // namespace
