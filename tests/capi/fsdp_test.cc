// tessera/fsdp.h through the C ABI: training, what was registered, units by hand, accumulation, and optimizers over
// shards.
#include <cmath>
#include <utility>

#include "api.hpp"
#include "fsdp_model.hpp"
#include "sanitized.hpp"

namespace {

using api::backward;
using api::defaults;
using api::floats;
using api::Model;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

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
        EXPECT_FAILS(tsr_fsdp_whole(fsdp, 0, &whole), TSR_E_INVALID_STATE,
                     "parameter \"fc1.weight\" of unit \"fc1\" is sharded");
        for (const size_t unit : {0, 1}) {
            ASSERT_OK(tsr_fsdp_forward(fsdp, unit));
            ASSERT_OK(tsr_fsdp_whole(fsdp, unit * 2, &whole));
            EXPECT_EQ(whole.shape[0], unit == 0 ? 5 : 2);
            EXPECT_THAT(floats(whole), Each(1.0F));
            ASSERT_OK(tsr_fsdp_forward_done(fsdp, unit));
        }
        EXPECT_FAILS(tsr_fsdp_wait(fsdp), TSR_E_INVALID_STATE, "\"fc1\", \"fc2\"");
        EXPECT_FAILS(tsr_fsdp_grads_ready(fsdp, 0), TSR_E_INVALID_STATE, "without a backward in this step");
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
        EXPECT_FAILS(tsr_fsdp_await(fsdp, 1), TSR_E_INVALID_STATE, "call unshard() first");
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
        EXPECT_FAILS(tsr_fsdp_zero_grad(fsdp), TSR_E_INVALID_STATE, "is unsharded");
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
        EXPECT_FAILS(tsr_fsdp_set_sync(fsdp, 1), TSR_E_INVALID_STATE, "during a backward pass");
        EXPECT_FAILS(tsr_fsdp_set_accumulate(fsdp, 1), TSR_E_INVALID_STATE, "during a backward pass");
        EXPECT_FAILS(tsr_fsdp_set_all_reduce(fsdp, 0), TSR_E_INVALID_STATE, "during a backward pass");
        EXPECT_OK(tsr_fsdp_unused(fsdp, 2));
        EXPECT_OK(tsr_fsdp_grads_ready(fsdp, 1));
        EXPECT_OK(tsr_fsdp_wait(fsdp));
        int32_t used = 7;
        EXPECT_OK(tsr_fsdp_used(fsdp, 2, &used));
        EXPECT_EQ(used, 1) << "of the last step that was reduced";
        EXPECT_FAILS(tsr_fsdp_used(fsdp, 3, &used), TSR_E_INVALID_ARGUMENT, "3");
        EXPECT_FAILS(tsr_fsdp_used(fsdp, 2, nullptr), TSR_E_INVALID_ARGUMENT, "used");
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

TEST(FsdpApi, DefaultsOfAUnitComeFromTheLibrary) {
    tsr_fsdp_unit unit{"u", nullptr, 7, nullptr, 7, 7, 7, 7, 7, 7};
    ASSERT_OK(tsr_fsdp_unit_init(&unit, sizeof unit));
    EXPECT_EQ(unit.name, nullptr);
    EXPECT_EQ(unit.reshard_after_forward, 1);
    EXPECT_THAT((std::array{unit.param_dtype, unit.reduce_dtype, unit.row_block, unit.flat, unit.reserved}), Each(0));
    EXPECT_FAILS(tsr_fsdp_unit_init(&unit, 8), TSR_E_INVALID_ARGUMENT, "struct_size is 8");
    EXPECT_FAILS(tsr_fsdp_unit_init(nullptr, sizeof unit), TSR_E_INVALID_ARGUMENT, "unit");
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
        EXPECT_FAILS(tsr_fsdp_create(comm, &unit, 1, nullptr, fsdp.out()), TSR_E_NO_MEMORY,
                     "not have enough memory for its shards");
    });
}

}  // namespace
