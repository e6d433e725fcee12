// tessera/fsdp.h, and optimizers and states over it, through the C ABI.
#include <chrono>
#include <cmath>
#include <fstream>
#include <thread>

#include "api.hpp"
#include "patience.hpp"
#include "sanitized.hpp"
#include "temporary_directory.hpp"

namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

std::span<float> floats(const tsr_tensor& tensor) {
    size_t count = 1;
    for (int32_t d = 0; d < tensor.ndim; ++d) count *= static_cast<size_t>(tensor.shape[d]);
    return {reinterpret_cast<float*>(static_cast<char*>(tensor.data) + tensor.byte_offset), count};
}

tsr_fsdp_options defaults() {
    tsr_fsdp_options options;
    EXPECT_OK(tsr_fsdp_options_init(&options, sizeof options));
    return options;
}

// Two units: "fc1" of a weight and a bias, "fc2" of a weight.
struct Model {
    api::Array<float> weight;
    api::Array<float> bias;
    api::Array<float> last;
    std::array<tsr_param, 2> first_params{{{"module.fc1.weight", weight.tensor()}, {"module.fc1.bias", bias.tensor()}}};
    std::array<tsr_param, 1> second_params{{{"fc2.weight", last.tensor()}}};
    std::array<tsr_fsdp_unit, 2> units{
        {{"fc1", first_params.data(), 2, nullptr, 1, {}}, {"fc2", second_params.data(), 1, nullptr, 1, {}}}};

    explicit Model(float value) : weight({5, 2}, value), bias({5}, value), last({2}, value) {}
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    [[nodiscard]] api::Owned<tsr_fsdp> create(tsr_comm* comm, const tsr_fsdp_options* options = nullptr) const {
        api::Owned<tsr_fsdp> fsdp;
        EXPECT_OK(tsr_fsdp_create(comm, units.data(), units.size(), options, fsdp.out()));
        return fsdp;
    }
};

// A backward whose gradients are all `value`.
void backward(tsr_fsdp* fsdp, float value) {
    for (const size_t unit : {1, 0}) {
        ASSERT_OK(tsr_fsdp_backward(fsdp, unit));
        for (size_t i = 0; i < 3; ++i) {
            size_t of = 9;
            ASSERT_OK(tsr_fsdp_param(fsdp, i, nullptr, &of, nullptr));
            if (of != unit) continue;
            tsr_tensor grad{};
            ASSERT_OK(tsr_fsdp_grad(fsdp, i, &grad));
            for (float& g : floats(grad)) g = value;
        }
        ASSERT_OK(tsr_fsdp_grads_ready(fsdp, unit));
    }
    ASSERT_OK(tsr_fsdp_wait(fsdp));
}

TEST(FsdpApi, TrainsAModelOnThreeRanks) {
    api::run_ranks(3, [](tsr_comm* comm, int32_t rank) {
        Model model(static_cast<float>(rank + 1));
        const auto fsdp = model.create(comm);
        size_t count = 0;
        EXPECT_OK(tsr_fsdp_unit_count(fsdp, &count));
        EXPECT_EQ(count, 2U);
        EXPECT_OK(tsr_fsdp_param_count(fsdp, &count));
        EXPECT_EQ(count, 3U);
        tsr_param shard{};
        ASSERT_OK(tsr_fsdp_shard(fsdp, 0, &shard));
        EXPECT_STREQ(shard.name, "fc1.weight") << "without the wrapper's prefix";
        ASSERT_EQ(shard.tensor.ndim, 2);
        EXPECT_EQ(shard.tensor.shape[0], rank < 2 ? 2 : 1);
        EXPECT_EQ(shard.tensor.shape[1], 2);
        EXPECT_THAT(floats(shard.tensor), Each(1.0F)) << "rank 0's values";
        api::Owned<tsr_layout> layout;
        ASSERT_OK(tsr_fsdp_layout(fsdp, 0, layout.out()));
        tsr_box box{};
        ASSERT_OK(tsr_layout_box(layout, rank, 0, &box));
        EXPECT_EQ(box.offsets[0], 2 * rank);

        tsr_sgd_options options;
        ASSERT_OK(tsr_sgd_options_init(&options, sizeof options));
        options.lr = 0.5;
        api::Owned<tsr_optimizer> optimizer;
        ASSERT_OK(tsr_fsdp_sgd(fsdp, &options, optimizer.out()));
        tsr_tensor whole{};
        EXPECT_FAILS(tsr_fsdp_whole(fsdp, 0, &whole), TSR_E_INVALID_STATE, "\"fc1.weight\" is not whole");
        for (const size_t unit : {0, 1}) {
            ASSERT_OK(tsr_fsdp_forward(fsdp, unit));
            ASSERT_OK(tsr_fsdp_whole(fsdp, unit * 2, &whole));
            EXPECT_EQ(whole.shape[0], unit == 0 ? 5 : 2);
            EXPECT_THAT(floats(whole), Each(1.0F));
            ASSERT_OK(tsr_fsdp_forward_done(fsdp, unit));
        }
        EXPECT_FAILS(tsr_fsdp_wait(fsdp), TSR_E_INVALID_STATE, "\"fc1\", \"fc2\"");
        EXPECT_FAILS(tsr_fsdp_grads_ready(fsdp, 0), TSR_E_INVALID_STATE, "did not begin");
        backward(fsdp, static_cast<float>(rank));
        tsr_tensor grad{};
        ASSERT_OK(tsr_fsdp_shard_grad(fsdp, 0, &grad));
        EXPECT_THAT(floats(grad), Each(1.0F)) << "the average of 0, 1, 2";
        double norm = 0;
        EXPECT_OK(tsr_optimizer_clip_grad_norm(optimizer, 100, 2, &norm));
        EXPECT_DOUBLE_EQ(norm, std::sqrt(17.0));
        EXPECT_OK(tsr_optimizer_clip_grad_value(optimizer, 0.5));
        EXPECT_OK(tsr_optimizer_step(optimizer));
        EXPECT_THAT(floats(shard.tensor), Each(0.75F));
        EXPECT_OK(tsr_fsdp_zero_grad(fsdp));
        EXPECT_THAT(floats(grad), Each(0.0F));
    });
}

TEST(FsdpApi, AStepTakesGradientsThatWereReducedSinceTheLast) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t) {
        Model model(1);
        const auto fsdp = model.create(comm);
        api::Owned<tsr_optimizer> sgd;
        ASSERT_OK(tsr_fsdp_sgd(fsdp, nullptr, sgd.out()));
        tsr_param shard{};
        ASSERT_OK(tsr_fsdp_shard(fsdp, 0, &shard));
        const auto refused = [&](const char* why) {
            const std::vector<float> before(floats(shard.tensor).begin(), floats(shard.tensor).end());
            EXPECT_FAILS(tsr_optimizer_step(sgd), TSR_E_INVALID_STATE, why);
            EXPECT_THAT(floats(shard.tensor), ElementsAreArray(before));
        };
        refused("before any gradients were reduced");
        backward(fsdp, 1);
        api::Owned<tsr_optimizer> another;
        ASSERT_OK(tsr_fsdp_sgd(fsdp, nullptr, another.out()));
        ASSERT_OK(tsr_optimizer_step(sgd));
        refused("no gradients were reduced since its last step");
        EXPECT_OK(tsr_optimizer_step(another)) << "each optimizer has its own count";

        ASSERT_OK(tsr_fsdp_set_sync(fsdp, 0));
        backward(fsdp, 1);
        refused("no gradients were reduced since its last step");
        ASSERT_OK(tsr_fsdp_set_sync(fsdp, 1));
        ASSERT_OK(tsr_fsdp_set_all_reduce(fsdp, 0));
        backward(fsdp, 1);
        refused("no gradients were reduced since its last step");
        ASSERT_OK(tsr_fsdp_set_all_reduce(fsdp, 1));
        backward(fsdp, 1);
        EXPECT_OK(tsr_optimizer_step(sgd));

        ASSERT_OK(tsr_fsdp_backward(fsdp, 1));
        ASSERT_OK(tsr_fsdp_abandon(fsdp));
        refused("no gradients were reduced since its last step");
    });
}

TEST(FsdpApi, MemoryThatIsLeftToUnitsHasWhatShardsHave) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t) {
        Model model(1);
        const auto fsdp = model.create(comm);
        EXPECT_FAILS(tsr_fsdp_set_reshard_after_backward(fsdp, 2, 0), TSR_E_INVALID_ARGUMENT, "unit");
        EXPECT_FAILS(tsr_fsdp_set_reshard_after_backward(fsdp, 0, 2), TSR_E_INVALID_ARGUMENT, "reshard");
        for (const size_t unit : {0, 1}) ASSERT_OK(tsr_fsdp_set_reshard_after_backward(fsdp, unit, 0));
        tsr_sgd_options options;
        ASSERT_OK(tsr_sgd_options_init(&options, sizeof options));
        options.lr = 0.25;
        api::Owned<tsr_optimizer> optimizer;
        ASSERT_OK(tsr_fsdp_sgd(fsdp, &options, optimizer.out()));
        for (const auto& [expected, steps_after] :
             {std::pair(1.0F, 0), std::pair(1.0F, 1), std::pair(0.75F, 0), std::pair(0.75F, 0)}) {
            for (const size_t unit : {0, 1}) {
                ASSERT_OK(tsr_fsdp_forward(fsdp, unit));
                tsr_tensor whole{};
                ASSERT_OK(tsr_fsdp_whole(fsdp, unit * 2, &whole));
                EXPECT_THAT(floats(whole), Each(expected));
                ASSERT_OK(tsr_fsdp_forward_done(fsdp, unit));
            }
            backward(fsdp, 1);
            int32_t phase = -1;
            ASSERT_OK(tsr_fsdp_unit_phase(fsdp, 0, &phase));
            EXPECT_EQ(phase, TSR_FSDP_SHARDED);
            if (steps_after == 1) {
                EXPECT_OK(tsr_optimizer_step(optimizer));
            }
        }
    });
}

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
                     "rank 1: its state differs from rank 0's: it has value 'optim.param_groups.0.step' of 0 where "
                     "rank 0 has value 'optim.param_groups.0.step' of 1");
        if (rank == 1) {
            EXPECT_OK(tsr_optimizer_step(sgd));
        }
        EXPECT_OK(tsr_saver_save(saver, 1, state));
    });
}

TEST(FsdpApi, TellsWhatWasRegistered) {
    const auto comm = api::alone();
    Model model(1);
    const std::array<int32_t, 2> trained{1, 0};
    model.units[0].trained = trained.data();
    const auto fsdp = model.create(comm);
    const std::array<std::string, 3> names{"fc1.weight", "fc1.bias", "fc2.weight"};
    for (size_t i = 0; i < 3; ++i) {
        tsr_param param{};
        size_t unit = 9;
        int32_t is_trained = 9;
        ASSERT_OK(tsr_fsdp_param(fsdp, i, &param, &unit, &is_trained));
        EXPECT_EQ(param.name, names.at(i));
        EXPECT_EQ(param.tensor.data, nullptr);
        EXPECT_EQ(param.tensor.dtype, TSR_DTYPE_F32);
        ASSERT_EQ(param.tensor.ndim, i == 0 ? 2 : 1);
        EXPECT_EQ(param.tensor.shape[0], i == 2 ? 2 : 5);
        EXPECT_EQ(unit, i == 2 ? 1U : 0U);
        EXPECT_EQ(is_trained, i == 1 ? 0 : 1);
    }
    for (size_t u = 0; u < 2; ++u) {
        const char* name = nullptr;
        ASSERT_OK(tsr_fsdp_unit_name(fsdp, u, &name));
        EXPECT_STREQ(name, u == 0 ? "fc1" : "fc2");
    }
}

// "big" is as large as three cache lines, so that four ranks have parts of it.
TEST(FsdpApi, AFlatUnitHasPartsOfParametersAndItsNormCountsReplicasOnce) {
    api::run_ranks(8, [](tsr_comm* comm, int32_t rank) {
        api::Array<float> scalar({}, 2);
        api::Array<float> big({3, 30}, 1);
        const std::array<tsr_param, 2> params{{{"scalar", scalar.tensor()}, {"big", big.tensor()}}};
        tsr_fsdp_unit unit{};
        unit.name = "all";
        unit.params = params.data();
        unit.n = params.size();
        unit.flat = 1;
        tsr_fsdp_options options = defaults();
        options.shard_ranks = 4;
        api::Owned<tsr_fsdp> fsdp;
        ASSERT_OK(tsr_fsdp_create(comm, &unit, 1, &options, fsdp.out()));
        tsr_param shard{};
        ASSERT_OK(tsr_fsdp_shard(fsdp, 1, &shard));
        ASSERT_EQ(shard.tensor.ndim, 1);
        const std::array<int64_t, 4> elements{0, 32, 32, 26};  // the first cache line is the scalar's
        EXPECT_EQ(shard.tensor.shape[0], elements.at(static_cast<size_t>(rank % 4)));
        api::Owned<tsr_layout> layout;
        ASSERT_OK(tsr_fsdp_layout(fsdp, 1, layout.out()));
        int32_t boxes = 0;
        ASSERT_OK(tsr_layout_box_count(layout, rank, &boxes));
        EXPECT_EQ(boxes, rank % 4 == 0 ? 0 : rank % 4 == 2 ? 2 : rank % 4 == 1 ? 2 : 1);

        api::Owned<tsr_optimizer> optimizer;
        ASSERT_OK(tsr_fsdp_sgd(fsdp, nullptr, optimizer.out()));
        ASSERT_OK(tsr_fsdp_backward(fsdp, 0));
        for (const size_t i : {0, 1}) {
            tsr_tensor grad{};
            ASSERT_OK(tsr_fsdp_grad(fsdp, i, &grad));
            for (float& g : floats(grad)) g = 1;
        }
        ASSERT_OK(tsr_fsdp_grads_ready(fsdp, 0));
        ASSERT_OK(tsr_fsdp_wait(fsdp));
        double norm = 0;
        EXPECT_OK(tsr_optimizer_clip_grad_norm(optimizer, 100, 2, &norm));
        EXPECT_DOUBLE_EQ(norm, std::sqrt(91.0));
    });
}

TEST(FsdpApi, UnitsAreMadeWholeByHand) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t) {
        Model model(3);
        const auto fsdp = model.create(comm);
        EXPECT_FAILS(tsr_fsdp_await(fsdp, 1), TSR_E_INVALID_STATE, "unshard it first");
        ASSERT_OK(tsr_fsdp_unshard(fsdp, 1));
        ASSERT_OK(tsr_fsdp_unshard(fsdp, 1));
        int32_t phase = -1;
        EXPECT_OK(tsr_fsdp_unit_phase(fsdp, 1, &phase));
        EXPECT_EQ(phase, TSR_FSDP_ON_ITS_WAY);
        ASSERT_OK(tsr_fsdp_await(fsdp, 1));
        EXPECT_OK(tsr_fsdp_unit_phase(fsdp, 1, &phase));
        EXPECT_EQ(phase, TSR_FSDP_WHOLE);
        tsr_tensor whole{};
        ASSERT_OK(tsr_fsdp_whole(fsdp, 2, &whole));
        EXPECT_THAT(floats(whole), Each(3.0F));
        EXPECT_FAILS(tsr_fsdp_zero_grad(fsdp), TSR_E_INVALID_STATE, "is whole");
        ASSERT_OK(tsr_fsdp_reshard(fsdp, 1));
        ASSERT_OK(tsr_fsdp_reshard(fsdp, 1));
        EXPECT_OK(tsr_fsdp_zero_grad(fsdp));
    });
}

TEST(FsdpApi, AccumulatesInEachWay) {
    api::run_ranks(4, [](tsr_comm* comm, int32_t rank) {
        Model model(0);
        tsr_fsdp_options options = defaults();
        options.shard_ranks = 2;
        const auto fsdp = model.create(comm, &options);
        tsr_tensor grad{};
        ASSERT_OK(tsr_fsdp_shard_grad(fsdp, 2, &grad));
        EXPECT_OK(tsr_fsdp_set_accumulate(fsdp, 1));
        backward(fsdp, 1);
        backward(fsdp, static_cast<float>(rank));
        EXPECT_THAT(floats(grad), Each(2.5F));
        EXPECT_OK(tsr_fsdp_set_accumulate(fsdp, 0));
        EXPECT_OK(tsr_fsdp_set_all_reduce(fsdp, 0));
        backward(fsdp, 8);
        EXPECT_THAT(floats(grad), Each(2.5F));
        EXPECT_OK(tsr_fsdp_set_all_reduce(fsdp, 1));
        backward(fsdp, static_cast<float>(rank));
        EXPECT_THAT(floats(grad), Each(9.5F));
        EXPECT_OK(tsr_fsdp_set_sync(fsdp, 0));
        ASSERT_OK(tsr_fsdp_backward(fsdp, 1));
        tsr_tensor whole{};
        ASSERT_OK(tsr_fsdp_grad(fsdp, 2, &whole));
        EXPECT_THAT(floats(whole), Each(0.0F)) << "what adds up is zero at first";
        EXPECT_FAILS(tsr_fsdp_set_sync(fsdp, 1), TSR_E_INVALID_STATE, "in the middle of a backward");
        EXPECT_FAILS(tsr_fsdp_set_accumulate(fsdp, 1), TSR_E_INVALID_STATE, "in the middle of a backward");
        EXPECT_FAILS(tsr_fsdp_set_all_reduce(fsdp, 0), TSR_E_INVALID_STATE, "in the middle of a backward");
        EXPECT_OK(tsr_fsdp_unused(fsdp, 2));
        EXPECT_OK(tsr_fsdp_grads_ready(fsdp, 1));
        EXPECT_OK(tsr_fsdp_wait(fsdp));
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
                     "a checkpoint cannot be loaded into the shards while unit \"fc1\" is whole");
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

TEST(FsdpApi, EveryOptimizerIsMadeOverIt) {
    const auto comm = api::alone();
    Model model(1);
    const auto fsdp = model.create(comm);
    for (const auto& make : {+[](tsr_fsdp* m, tsr_optimizer** out) { return tsr_fsdp_sgd(m, nullptr, out); },
                             +[](tsr_fsdp* m, tsr_optimizer** out) { return tsr_fsdp_adam(m, nullptr, out); },
                             +[](tsr_fsdp* m, tsr_optimizer** out) { return tsr_fsdp_adamw(m, nullptr, out); }}) {
        api::Owned<tsr_optimizer> optimizer;
        ASSERT_OK(make(fsdp, optimizer.out()));
        backward(fsdp, 1);
        EXPECT_OK(tsr_optimizer_step(optimizer));
        ASSERT_OK(tsr_fsdp_unshard(fsdp, 0));
        EXPECT_FAILS(tsr_optimizer_step(optimizer), TSR_E_INVALID_STATE, "cannot change the shards");
        EXPECT_FAILS(tsr_optimizer_clip_grad_norm(optimizer, 1, 2, nullptr), TSR_E_INVALID_STATE, "cannot change");
        ASSERT_OK(tsr_fsdp_reshard(fsdp, 0));
    }
}

TEST(FsdpApi, ARankThatIsRefusedTheNormMayAskAgainWhileTheOthersWait) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Model model(1);
        const auto fsdp = model.create(comm);
        api::Owned<tsr_optimizer> sgd;
        ASSERT_OK(tsr_fsdp_sgd(fsdp, nullptr, sgd.out()));
        api::Owned<tsr_grad_scaler> scaler;
        ASSERT_OK(tsr_grad_scaler_create(nullptr, scaler.out()));
        backward(fsdp, 1);
        ASSERT_OK(tsr_fsdp_unshard(fsdp, 0));
        if (rank == 1) {
            EXPECT_FAILS(tsr_optimizer_clip_grad_norm(sgd, -1, 2, nullptr), TSR_E_INVALID_ARGUMENT, "max_norm");
            EXPECT_FAILS(tsr_optimizer_clip_grad_norm(sgd, 1, 2, nullptr), TSR_E_INVALID_STATE, "cannot change");
            EXPECT_FAILS(tsr_grad_scaler_unscale(scaler, sgd), TSR_E_INVALID_STATE, "cannot change");
        }
        ASSERT_OK(tsr_fsdp_reshard(fsdp, 0));
        EXPECT_OK(tsr_optimizer_clip_grad_norm(sgd, 100, 2, nullptr));
        EXPECT_OK(tsr_grad_scaler_unscale(scaler, sgd));
    });
}

// The last row is rank 1's: so is the NaN, whichever rank had it in its gradient.
TEST(FsdpApi, ANanOfOneRankMakesTheNormInfiniteOnAllAndGradientsStay) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        api::Array<float> weight({4, 2}, 1);
        const tsr_param param{"w", weight.tensor()};
        const tsr_fsdp_unit unit{"u", &param, 1, nullptr, 1, 0, 0, {}};
        api::Owned<tsr_fsdp> fsdp;
        ASSERT_OK(tsr_fsdp_create(comm, &unit, 1, nullptr, fsdp.out()));
        api::Owned<tsr_optimizer> sgd;
        ASSERT_OK(tsr_fsdp_sgd(fsdp, nullptr, sgd.out()));
        ASSERT_OK(tsr_fsdp_backward(fsdp, 0));
        tsr_tensor grad{};
        ASSERT_OK(tsr_fsdp_grad(fsdp, 0, &grad));
        for (float& g : floats(grad)) g = 3;
        if (rank == 0) floats(grad)[7] = std::nanf("");
        ASSERT_OK(tsr_fsdp_grads_ready(fsdp, 0));
        ASSERT_OK(tsr_fsdp_wait(fsdp));
        for (const double p : {1.0, 2.0, static_cast<double>(INFINITY)}) {
            double norm = 0;
            ASSERT_OK(tsr_optimizer_clip_grad_norm(sgd, 1, p, &norm));
            EXPECT_EQ(norm, INFINITY) << "p " << p << ", rank " << rank;
        }
        ASSERT_OK(tsr_fsdp_shard_grad(fsdp, 0, &grad));
        EXPECT_THAT(floats(grad).first(3), Each(3.0F)) << "as they were";
        EXPECT_EQ(std::isnan(floats(grad)[3]), rank == 1);
    });
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

TEST(FsdpApi, ParametersMayComeWithoutValues) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        const std::array<int64_t, 2> shape{1 << 20, 1 << 20};  // 4 TiB, of which nobody has a byte beyond its rows
        const std::array<int64_t, 2> some{3, 2};
        tsr_tensor tensor{};
        tensor.shape = some.data();
        tensor.ndim = 2;
        tensor.dtype = TSR_DTYPE_F32;
        tensor.device_type = TSR_DEVICE_CPU;
        tsr_param param{"w", tensor};
        const tsr_fsdp_unit unit{"u", &param, 1, nullptr, 1, {}};
        {
            api::Owned<tsr_fsdp> fsdp;
            ASSERT_OK(tsr_fsdp_create(comm, &unit, 1, nullptr, fsdp.out()));
            tsr_param shard{};
            ASSERT_OK(tsr_fsdp_shard(fsdp, 0, &shard));
            EXPECT_THAT(floats(shard.tensor), Each(0.0F));
            for (float& value : floats(shard.tensor)) value = static_cast<float>(rank + 1);
            ASSERT_OK(tsr_fsdp_forward(fsdp, 0));
            tsr_tensor whole{};
            ASSERT_OK(tsr_fsdp_whole(fsdp, 0, &whole));
            EXPECT_THAT(floats(whole), ElementsAre(1, 1, 1, 1, 2, 2));
        }
        if (tsr::testing::sanitized) return;  // what cannot be had ends the program there
        param.tensor.shape = shape.data();
        api::Owned<tsr_fsdp> fsdp;
        EXPECT_FAILS(tsr_fsdp_create(comm, &unit, 1, nullptr, fsdp.out()), TSR_E_NO_MEMORY, "no memory for its shards");
    });
}

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
            "of which 1 ranks are a multiple");
    refused([](auto& unit, auto&) { unit.reshard_after_forward = -1; }, TSR_E_INVALID_ARGUMENT,
            "reshard_after_forward is -1");
    refused([](auto& unit, auto&) { unit.flat = 2; }, TSR_E_INVALID_ARGUMENT, "flat is 2");
    refused([](auto& unit, auto&) { unit.row_block = -3; }, TSR_E_INVALID_ARGUMENT, "row_block is -3");
    refused([](auto& unit, auto&) { unit.flat = unit.row_block = 1; }, TSR_E_INVALID_ARGUMENT, "one of these");
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
    EXPECT_FAILS(tsr_fsdp_create(comm, nullptr, 0, nullptr, fsdp.out()), TSR_E_INVALID_ARGUMENT, "without units");
    EXPECT_FAILS(tsr_fsdp_create(comm, model.units.data(), 2, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "out is NULL");
    const auto well = model.create(comm);
    EXPECT_FAILS(tsr_fsdp_param(well, 3, nullptr, nullptr, nullptr), TSR_E_INVALID_ARGUMENT,
                 "parameter 3 of a model with 3 parameters, numbered 0 to 2");
    const char* name = nullptr;
    EXPECT_FAILS(tsr_fsdp_unit_name(well, 2, &name), TSR_E_INVALID_ARGUMENT,
                 "unit 2 of a model with 2 units, numbered 0 to 1");
    EXPECT_FAILS(tsr_fsdp_unit_name(well, 0, nullptr), TSR_E_INVALID_ARGUMENT, "name is NULL");
    int32_t phase = 0;
    EXPECT_FAILS(tsr_fsdp_unit_phase(well, 2, &phase), TSR_E_INVALID_ARGUMENT,
                 "unit 2 of a model with 2 units, numbered 0 to 1");
    EXPECT_FAILS(tsr_fsdp_unit_phase(well, 0, nullptr), TSR_E_INVALID_ARGUMENT, "phase is NULL");
    EXPECT_FAILS(tsr_fsdp_forward(well, 2), TSR_E_INVALID_ARGUMENT, "unit 2 of a model with 2 units, numbered 0 to 1");
    EXPECT_FAILS(tsr_fsdp_whole(well, 0, nullptr), TSR_E_INVALID_STATE, "not whole");
    EXPECT_FAILS(tsr_fsdp_shard(well, 0, nullptr), TSR_E_INVALID_ARGUMENT, "shard is NULL");
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
         "two parameters are named \"fc1.bias\", one of unit \"fc1\" and one of unit \"fc2\"; names are of the whole "
         "model"},
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

// Mappings of memory that ranks share.
size_t shared_mappings() {
    std::ifstream maps("/proc/self/maps");
    size_t count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("memfd:tessera") != std::string::npos ? 1 : 0;
    return count;
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
    const size_t before = shared_mappings();
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
    EXPECT_TRUE(api::becomes_true([&] { return shared_mappings() == before; }))
        << shared_mappings() - before << " are left";
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
            EXPECT_FAILS(tsr_fsdp_forward(fsdp, 0), TSR_E_ABORTED, "out of use since an earlier error");
        });
    }
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
        EXPECT_FAILS(tsr_optimizer_step(optimizer), TSR_E_ABORTED, "out of use since an earlier error");
        EXPECT_FAILS(tsr_optimizer_clip_grad_norm(optimizer, 1, 2, nullptr), TSR_E_ABORTED, "out of use");
        EXPECT_FAILS(tsr_optimizer_zero_grad(optimizer), TSR_E_ABORTED, "out of use");
        EXPECT_FAILS(tsr_fsdp_zero_grad(fsdp), TSR_E_ABORTED, "out of use");
        EXPECT_FAILS(tsr_fsdp_abandon(fsdp), TSR_E_ABORTED, "out of use");
        tsr_param shard{};
        ASSERT_OK(tsr_fsdp_shard(fsdp, 0, &shard));
        EXPECT_THAT(floats(shard.tensor), Each(2.0F)) << "as it was before";
    });
}

}  // namespace
