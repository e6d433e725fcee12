// States over tessera/fsdp.h through the C ABI. Ranks save shards of one step only, load them at any number of ranks,
// and refuse to load into a whole unit.
#include "api.hpp"
#include "fsdp_model.hpp"
#include "temporary_directory.hpp"

namespace {

using api::backward;
using api::floats;
using api::Model;

// One rank leaves a step out: its shards are of another step than the others'.
TEST(FsdpApi, ShardsOfDifferentStepsAreNotSaved) {
    const tsr::testing::TemporaryDirectory directory;
    api::run_ranks(3, [&](tsr_comm* comm, int32_t rank) {
        Model model(1);
        const auto fsdp = model.create(comm);
        api::Owned<tsr_optimizer> sgd;
        ASSERT_OK(tsr_fsdp_sgd(fsdp, nullptr, sgd.out()));
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        ASSERT_OK(tsr_state_add_fsdp(state, "model", fsdp));
        ASSERT_OK(tsr_state_add_optimizer(state, "optim", sgd));
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
        backward(fsdp, 1);
        if (rank != 1) {
            EXPECT_OK(tsr_optimizer_step(sgd));
        }
        EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_MISMATCH,
                     "rank 1: state differs from rank 0's: it has value 'optim.param_groups.0.step' of 0 where "
                     "rank 0 has value 'optim.param_groups.0.step' of 1");
        if (rank == 1) {
            EXPECT_OK(tsr_optimizer_step(sgd));
        }
        EXPECT_OK(tsr_saver_save(saver, 1, state));
    });
}

TEST(FsdpApi, StatesHoldShardsAtAnyNumberOfRanks) {
    const tsr::testing::TemporaryDirectory directory;
    for (const int32_t world : {3, 1, 2}) {
        api::run_ranks(world, [&](tsr_comm* comm, int32_t) {
            Model model(0);
            const auto fsdp = model.create(comm);
            api::Owned<tsr_optimizer> optimizer;
            if (world == 3) {
                ASSERT_OK(tsr_fsdp_adamw(fsdp, nullptr, optimizer.out()));
            } else {
                tsr_adamw_options options;
                ASSERT_OK(tsr_adamw_options_init(&options, sizeof options));
                options.lr = 7;  // the saved one counts
                ASSERT_OK(tsr_fsdp_adamw(fsdp, &options, optimizer.out()));
            }
            api::Owned<tsr_state> state;
            ASSERT_OK(tsr_state_create(state.out()));
            ASSERT_OK(tsr_state_add_fsdp(state, "model", fsdp));
            ASSERT_OK(tsr_state_add_optimizer(state, "optim", optimizer));
            api::Owned<tsr_saver> saver;
            ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
            int64_t step = -1;
            ASSERT_OK(tsr_saver_resume(saver, state, &step));
            EXPECT_EQ(step, world == 3 ? 0 : world == 1 ? 1 : 2);
            double lr = 0;
            EXPECT_OK(tsr_optimizer_lr(optimizer, &lr));
            EXPECT_EQ(lr, 1e-3);
            tsr_param shard{};
            ASSERT_OK(tsr_fsdp_shard(fsdp, 1, &shard));
            const float before = -1e-3F * static_cast<float>(step);  // each step of Adam is as long, of equal gradients
            for (const float value : floats(shard.tensor)) EXPECT_NEAR(value, before, 1e-6F);
            backward(fsdp, 1);
            ASSERT_OK(tsr_optimizer_step(optimizer));
            ASSERT_OK(tsr_saver_save(saver, step + 1, state));
        });
    }
}

// Two replicas of two shards each: what of one rank differs from its replica's, is told where that is asked for.
TEST(FsdpApi, ReplicasOfShardsAreCompared) {
    const tsr::testing::TemporaryDirectory directory;
    api::run_ranks(4, [&](tsr_comm* comm, int32_t rank) {
        Model model(1);
        tsr_fsdp_options options = api::defaults();
        options.shard_ranks = 2;
        const auto fsdp = model.create(comm, &options);
        api::Owned<tsr_optimizer> adamw;
        ASSERT_OK(tsr_fsdp_adamw(fsdp, nullptr, adamw.out()));
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        ASSERT_OK(tsr_state_add_fsdp(state, "model", fsdp));
        ASSERT_OK(tsr_state_add_optimizer(state, "optim", adamw));
        tsr_saver_options saving;
        ASSERT_OK(tsr_saver_options_init(&saving, sizeof saving));
        saving.check_replicas = 1;
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), &saving, saver.out()));
        backward(fsdp, 1);
        ASSERT_OK(tsr_optimizer_step(adamw));
        ASSERT_OK(tsr_saver_save(saver, 1, state));
        tsr_param shard{};
        ASSERT_OK(tsr_fsdp_shard(fsdp, 0, &shard));
        const float before = floats(shard.tensor)[0];
        if (rank == 3) floats(shard.tensor)[0] += 1;
        EXPECT_FAILS(
            tsr_saver_save(saver, 2, state), TSR_E_MISMATCH,
            "tensor 'model.fc1.weight' (part [3:5, 0:2]) differs between replicas: rank 3 differs from rank 1;");
        floats(shard.tensor)[0] = before;
        if (rank == 0) {
            ASSERT_OK(tsr_optimizer_set_lr(adamw, 7));
        }
        EXPECT_FAILS(tsr_saver_save_async(saver, 2, state, nullptr), TSR_E_MISMATCH,
                     "value 'optim.param_groups.0.lr' differs between replicas: rank 0 differs from rank 1;");
        ASSERT_OK(tsr_optimizer_set_lr(adamw, 7));
        ASSERT_OK(tsr_saver_save(saver, 2, state));
    });
}

TEST(FsdpApi, NothingIsLoadedWhileUnitsAreWhole) {
    const tsr::testing::TemporaryDirectory directory;
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        Model model(1);
        const auto fsdp = model.create(comm);
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        ASSERT_OK(tsr_state_add_fsdp(state, "model", fsdp));
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
        ASSERT_OK(tsr_fsdp_forward(fsdp, 0));
        ASSERT_OK(tsr_saver_save(saver, 1, state)) << "that only reads the shards";
        int64_t step = -1;
        EXPECT_FAILS(tsr_saver_resume(saver, state, &step), TSR_E_INVALID_STATE,
                     "a checkpoint cannot be loaded into the shards while unit \"fc1\" is unsharded");
        ASSERT_OK(tsr_fsdp_abandon(fsdp));
        if (rank == 1) {  // on one rank, all refuse
            ASSERT_OK(tsr_fsdp_unshard(fsdp, 0));
        }
        EXPECT_FAILS(tsr_saver_resume(saver, state, &step), TSR_E_INVALID_STATE, "rank 1");
        if (rank == 0) {
            ASSERT_OK(tsr_fsdp_unshard(fsdp, 0));
        }
        ASSERT_OK(tsr_fsdp_reshard(fsdp, 0));
        EXPECT_OK(tsr_saver_resume(saver, state, &step));
        EXPECT_EQ(step, 1);
    });
}

}  // namespace
