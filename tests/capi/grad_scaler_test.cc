// tessera/grad_scaler.h through the C ABI.
#include "tessera/grad_scaler.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "api.hpp"
#include "temporary_directory.hpp"

namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr float infinite = std::numeric_limits<float>::infinity();

api::Owned<tsr_grad_scaler> scaler_with(double init_scale, int64_t interval) {
    tsr_grad_scaler_options options;
    EXPECT_OK(tsr_grad_scaler_options_init(&options, sizeof options));
    options.init_scale = init_scale;
    options.growth_interval = interval;
    api::Owned<tsr_grad_scaler> scaler;
    EXPECT_OK(tsr_grad_scaler_create(&options, scaler.out()));
    return scaler;
}

double scale_of(const tsr_grad_scaler* scaler) {
    double scale = 0;
    EXPECT_OK(tsr_grad_scaler_scale(scaler, &scale));
    return scale;
}

// One parameter of three elements with its gradient, and plain SGD over it.
struct Local {
    api::Array<float> value{{3}, 1};
    api::Array<float> grad{{3}, 0};
    api::Owned<tsr_optimizer> optimizer;

    explicit Local(double lr = 1) {
        const tsr_param param{"w", value.tensor()};
        const tsr_tensor gradient = grad.tensor();
        tsr_sgd_options options;
        EXPECT_OK(tsr_sgd_options_init(&options, sizeof options));
        options.lr = lr;
        EXPECT_OK(tsr_sgd_create(&param, &gradient, 1, &options, optimizer.out()));
    }
};

TEST(GradScalerApi, HasPyTorchsDefaults) {
    tsr_grad_scaler_options options;
    ASSERT_OK(tsr_grad_scaler_options_init(&options, sizeof options));
    EXPECT_EQ(options.init_scale, 65536);
    EXPECT_EQ(options.growth_factor, 2);
    EXPECT_EQ(options.backoff_factor, 0.5);
    EXPECT_EQ(options.growth_interval, 2000);
    api::Owned<tsr_grad_scaler> scaler;
    ASSERT_OK(tsr_grad_scaler_create(nullptr, scaler.out()));
    EXPECT_EQ(scale_of(scaler), 65536);
}

TEST(GradScalerApi, StepsAreMadeOrLeftOutAndTheScaleFollows) {
    Local local;
    const auto scaler = scaler_with(8, 2);
    const auto iterate = [&](float grad, int32_t expected) {
        local.grad.values = {grad * static_cast<float>(scale_of(scaler)), 0, 0};
        int32_t stepped = -1;
        ASSERT_OK(tsr_grad_scaler_step(scaler, local.optimizer, &stepped));
        EXPECT_EQ(stepped, expected);
        ASSERT_OK(tsr_grad_scaler_update(scaler));
    };
    iterate(0.25F, 1);
    EXPECT_THAT(local.value.values, ElementsAre(0.75F, 1, 1));
    EXPECT_EQ(scale_of(scaler), 8);
    iterate(0.25F, 1);
    EXPECT_EQ(scale_of(scaler), 16) << "after two steps";
    iterate(infinite, 0);
    EXPECT_THAT(local.value.values, ElementsAre(0.5F, 1, 1)) << "left out";
    EXPECT_EQ(scale_of(scaler), 8);
    iterate(0, 1);
    iterate(std::nanf(""), 0);
    EXPECT_EQ(scale_of(scaler), 4);
    iterate(0, 1);
    EXPECT_EQ(scale_of(scaler), 4) << "it counts from the last that was left out";
    iterate(0, 1);
    EXPECT_EQ(scale_of(scaler), 8);
    int64_t steps = 0;
    EXPECT_OK(tsr_optimizer_steps(local.optimizer, &steps));
    EXPECT_EQ(steps, 5);
}

TEST(GradScalerApi, GradientsMayBeBoundedBeforeTheStep) {
    Local local;
    const auto scaler = scaler_with(4, 2);
    local.grad.values = {12, 0, 16};  // of a norm of 5, unscaled
    ASSERT_OK(tsr_grad_scaler_unscale(scaler, local.optimizer));
    EXPECT_THAT(local.grad.values, ElementsAre(3, 0, 4));
    double norm = 0;
    ASSERT_OK(tsr_optimizer_clip_grad_norm(local.optimizer, 1, 2, &norm));
    EXPECT_EQ(norm, 5);
    ASSERT_OK(tsr_grad_scaler_step(scaler, local.optimizer, nullptr));
    EXPECT_NEAR(local.value.values[0], 1 - 0.6, 1e-5) << "not divided once more";
}

TEST(GradScalerApi, OneOverflowOfSeveralOptimizersMakesTheScaleSmaller) {
    Local first;
    Local second;
    const auto scaler = scaler_with(4, 1);
    first.grad.values = {4, 4, 4};
    second.grad.values = {4, infinite, 4};
    int32_t stepped = -1;
    ASSERT_OK(tsr_grad_scaler_step(scaler, first.optimizer, &stepped));
    EXPECT_EQ(stepped, 1);
    ASSERT_OK(tsr_grad_scaler_step(scaler, second.optimizer, &stepped));
    EXPECT_EQ(stepped, 0);
    EXPECT_THAT(first.value.values, Each(0));
    EXPECT_THAT(second.value.values, Each(1));
    ASSERT_OK(tsr_grad_scaler_update(scaler));
    EXPECT_EQ(scale_of(scaler), 2);
}

TEST(GradScalerApi, TheScaleStaysANumber) {
    Local local;
    const auto large = scaler_with(std::ldexp(1.0, 127), 1);
    ASSERT_OK(tsr_grad_scaler_step(large, local.optimizer, nullptr));
    ASSERT_OK(tsr_grad_scaler_update(large));
    EXPECT_EQ(scale_of(large), std::ldexp(1.0, 127)) << "twice that is beyond f32";
    const auto small = scaler_with(std::ldexp(1.0, -126), 1);
    local.grad.values = {infinite, 0, 0};
    ASSERT_OK(tsr_grad_scaler_step(small, local.optimizer, nullptr));
    ASSERT_OK(tsr_grad_scaler_update(small));
    EXPECT_EQ(scale_of(small), std::ldexp(1.0, -126)) << "0 would be the end of all gradients";
}

// A rank's rows alone overflow; all leave the step out.
TEST(GradScalerApi, OverAShardedModelAllRanksDecideAlike) {
    api::run_ranks(3, [](tsr_comm* comm, int32_t rank) {
        api::Array<float> weight({6}, 1);
        const tsr_param param{"w", weight.tensor()};
        const tsr_fsdp_unit unit{"u", &param, 1, nullptr, 1, 0, 0, {}};
        api::Owned<tsr_fsdp> fsdp;
        ASSERT_OK(tsr_fsdp_create(comm, &unit, 1, nullptr, fsdp.out()));
        api::Owned<tsr_optimizer> optimizer;
        ASSERT_OK(tsr_fsdp_adamw(fsdp, nullptr, optimizer.out()));
        const auto scaler = scaler_with(8, 1);
        tsr_param shard{};
        ASSERT_OK(tsr_fsdp_shard(fsdp, 0, &shard));
        const auto* const values = static_cast<const float*>(shard.tensor.data);
        const auto iterate = [&](float last) {  // of the last row, which rank 2 has
            ASSERT_OK(tsr_fsdp_backward(fsdp, 0));
            tsr_tensor grad{};
            ASSERT_OK(tsr_fsdp_grad(fsdp, 0, &grad));
            for (int i = 0; i < 6; ++i) static_cast<float*>(grad.data)[i] = i < 5 ? 4 : last;
            ASSERT_OK(tsr_fsdp_grads_ready(fsdp, 0));
            ASSERT_OK(tsr_fsdp_wait(fsdp));
        };
        int32_t stepped = -1;
        auto scale = scale_of(scaler);
        for (const float overflown : {infinite, std::numeric_limits<float>::quiet_NaN()}) {
            iterate(overflown);
            ASSERT_OK(tsr_grad_scaler_step(scaler, optimizer, &stepped));
            EXPECT_EQ(stepped, 0) << overflown << " on rank " << rank;
            EXPECT_EQ(values[0], 1);
            ASSERT_OK(tsr_grad_scaler_update(scaler));
            EXPECT_EQ(scale_of(scaler), scale /= 2);
        }
        int64_t steps = -1;
        EXPECT_OK(tsr_optimizer_steps(optimizer, &steps));
        EXPECT_EQ(steps, 0) << "moments begin with the first step that is made";
        iterate(2);
        ASSERT_OK(tsr_grad_scaler_step(scaler, optimizer, &stepped));
        EXPECT_EQ(stepped, 1);
        EXPECT_LT(values[0], 1);
        ASSERT_OK(tsr_grad_scaler_update(scaler));
        EXPECT_EQ(scale_of(scaler), 4);
    });
}

TEST(GradScalerApi, IsSavedAndLoadedWithPyTorchsNames) {
    const tsr::testing::TemporaryDirectory directory;
    const auto comm = api::alone();
    api::Owned<tsr_saver> saver;
    ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
    Local local;
    const auto scaler = scaler_with(32, 5);
    for (int step = 0; step < 3; ++step) {
        ASSERT_OK(tsr_grad_scaler_step(scaler, local.optimizer, nullptr));
        ASSERT_OK(tsr_grad_scaler_update(scaler));
    }
    api::Owned<tsr_state> state;
    ASSERT_OK(tsr_state_create(state.out()));
    ASSERT_OK(tsr_state_add_grad_scaler(state, "scaler", scaler));
    ASSERT_OK(tsr_saver_save(saver, 3, state));

    const auto other = scaler_with(1, 2000);
    ASSERT_OK(tsr_grad_scaler_unscale(other, local.optimizer));
    api::Owned<tsr_state> loaded;
    ASSERT_OK(tsr_state_create(loaded.out()));
    ASSERT_OK(tsr_state_add_grad_scaler(loaded, "scaler", other));
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, loaded, &step));
    EXPECT_EQ(scale_of(other), 32);
    EXPECT_FAILS(tsr_grad_scaler_update(other), TSR_E_INVALID_STATE, "unscaled");  // what had begun is forgotten
    for (int more = 0; more < 2; ++more) {                                         // the fourth and fifth of five
        ASSERT_OK(tsr_grad_scaler_step(other, local.optimizer, nullptr));
        ASSERT_OK(tsr_grad_scaler_update(other));
    }
    EXPECT_EQ(scale_of(other), 64);

    api::Owned<tsr_state> values;  // what another program, such as PyTorch's, would read
    ASSERT_OK(tsr_state_create(values.out()));
    ASSERT_OK(tsr_state_set_double(values, "scaler.scale", 0));
    ASSERT_OK(tsr_state_set_double(values, "scaler.growth_factor", 0));
    ASSERT_OK(tsr_state_set_double(values, "scaler.backoff_factor", 0));
    ASSERT_OK(tsr_state_set_int64(values, "scaler.growth_interval", 0));
    ASSERT_OK(tsr_state_set_int64(values, "scaler._growth_tracker", 0));
    ASSERT_OK(tsr_saver_resume(saver, values, &step));
    double scale = 0;
    int64_t tracker = 0;
    EXPECT_OK(tsr_state_get_double(values, "scaler.scale", &scale));
    EXPECT_OK(tsr_state_get_int64(values, "scaler._growth_tracker", &tracker));
    EXPECT_EQ(scale, 32);
    EXPECT_EQ(tracker, 3);

    // A scale that is none changes nothing.
    ASSERT_OK(tsr_state_set_double(values, "scaler.scale", -1));
    ASSERT_OK(tsr_saver_save(saver, 4, values));
    EXPECT_FAILS(tsr_saver_resume(saver, loaded, &step), TSR_E_INVALID_ARGUMENT, "scale is -1");
    EXPECT_EQ(scale_of(other), 64);
}

TEST(GradScalerApi, BadArgumentsAndOrdersAreRefused) {
    const auto refused = [](const std::function<void(tsr_grad_scaler_options&)>& change, const char* said) {
        tsr_grad_scaler_options options;
        ASSERT_OK(tsr_grad_scaler_options_init(&options, sizeof options));
        change(options);
        api::Owned<tsr_grad_scaler> scaler;
        EXPECT_FAILS(tsr_grad_scaler_create(&options, scaler.out()), TSR_E_INVALID_ARGUMENT, said);
    };
    for (const double bad : {0.0, -1.0, std::nan(""), HUGE_VAL, 1e-300, 1e300}) {
        refused([&](auto& options) { options.init_scale = bad; }, "init_scale is");
    }
    for (const double bad : {1.0, 0.5, std::nan(""), HUGE_VAL}) {
        refused([&](auto& options) { options.growth_factor = bad; }, "growth_factor is");
    }
    for (const double bad : {0.0, 1.0, -0.5, std::nan("")}) {
        refused([&](auto& options) { options.backoff_factor = bad; }, "backoff_factor is");
    }
    refused([](auto& options) { options.growth_interval = 0; }, "growth_interval is 0");
    refused([](auto& options) { options.struct_size = 0; }, "struct_size");
    EXPECT_FAILS(tsr_grad_scaler_create(nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "out is NULL");

    Local local;
    const auto scaler = scaler_with(4, 1);
    EXPECT_FAILS(tsr_grad_scaler_scale(scaler, nullptr), TSR_E_INVALID_ARGUMENT, "scale is NULL");
    EXPECT_FAILS(tsr_grad_scaler_step(scaler, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "optimizer is NULL");
    EXPECT_FAILS(tsr_grad_scaler_unscale(nullptr, local.optimizer), TSR_E_INVALID_ARGUMENT, "scaler is NULL");
    EXPECT_FAILS(tsr_grad_scaler_update(scaler), TSR_E_INVALID_STATE, "no gradients were unscaled");
    ASSERT_OK(tsr_grad_scaler_unscale(scaler, local.optimizer));
    EXPECT_FAILS(tsr_grad_scaler_unscale(scaler, local.optimizer), TSR_E_INVALID_STATE, "already unscaled");
    ASSERT_OK(tsr_grad_scaler_step(scaler, local.optimizer, nullptr));
    EXPECT_FAILS(tsr_grad_scaler_unscale(scaler, local.optimizer), TSR_E_INVALID_STATE, "already stepped");
    EXPECT_FAILS(tsr_grad_scaler_step(scaler, local.optimizer, nullptr), TSR_E_INVALID_STATE, "call update() first");
    ASSERT_OK(tsr_grad_scaler_update(scaler));

    // Another optimizer at the address of one that has ended is another.
    auto ended = std::make_unique<Local>();
    ASSERT_OK(tsr_grad_scaler_unscale(scaler, ended->optimizer));
    for (int i = 0; i < 20; ++i) {
        ended = std::make_unique<Local>();
        ASSERT_OK(tsr_grad_scaler_unscale(scaler, ended->optimizer)) << i;
    }
}

TEST(GradScalerApi, AStepThatIsRefusedLeavesTheGradientsAsTheyAre) {
    const auto comm = api::alone();
    api::Array<float> value({3}, 1);
    const tsr_param param{"w", value.tensor()};
    api::Owned<tsr_ddp> ddp;
    ASSERT_OK(tsr_ddp_create(comm, &param, 1, nullptr, ddp.out()));
    tsr_sgd_options options;
    ASSERT_OK(tsr_sgd_options_init(&options, sizeof options));
    options.lr = 0.5;
    api::Owned<tsr_optimizer> optimizer;
    ASSERT_OK(tsr_ddp_sgd(ddp, &options, optimizer.out()));
    const auto scaler = scaler_with(4, 10);
    tsr_tensor grad{};
    ASSERT_OK(tsr_ddp_grad(ddp, 0, &grad));
    const std::span<float> grads(static_cast<float*>(grad.data), 3);
    for (int step = 1; step <= 2; ++step) {
        std::ranges::fill(grads, 8.0F);
        EXPECT_FAILS(tsr_grad_scaler_step(scaler, optimizer, nullptr), TSR_E_INVALID_STATE, "the optimizer steps");
        EXPECT_THAT(grads, Each(8)) << "not reduced, not unscaled";
        ASSERT_OK(tsr_ddp_ready_all(ddp));
        ASSERT_OK(tsr_ddp_wait(ddp));
        ASSERT_OK(tsr_grad_scaler_step(scaler, optimizer, nullptr));
        ASSERT_OK(tsr_grad_scaler_update(scaler));
        EXPECT_THAT(value.values, Each(1 - static_cast<float>(step))) << "8 / 4 * 0.5 a step";
    }
}

TEST(GradScalerApi, UnscalingThatIsRefusedLeavesTheGradientsAsTheyAre) {
    const auto comm = api::alone();
    api::Array<float> weight({6}, 1);
    const tsr_param param{"w", weight.tensor()};
    const tsr_fsdp_unit unit{"u", &param, 1, nullptr, 1, 0, 0, {}};
    api::Owned<tsr_fsdp> fsdp;
    ASSERT_OK(tsr_fsdp_create(comm, &unit, 1, nullptr, fsdp.out()));
    api::Owned<tsr_optimizer> optimizer;
    ASSERT_OK(tsr_fsdp_sgd(fsdp, nullptr, optimizer.out()));
    tsr_tensor grad{};
    ASSERT_OK(tsr_fsdp_shard_grad(fsdp, 0, &grad));
    const std::span<float> grads(static_cast<float*>(grad.data), 6);
    std::ranges::fill(grads, 8.0F);
    ASSERT_OK(tsr_comm_finalize(comm));
    const auto scaler = scaler_with(4, 10);
    EXPECT_FAILS(tsr_grad_scaler_unscale(scaler, optimizer), TSR_E_INVALID_STATE, "finalized");
    EXPECT_THAT(grads, Each(8));
}

// One that steps in backward has made its step before anybody could look at its gradients.
TEST(GradScalerApi, AnOptimizerThatStepsInBackwardIsRefused) {
    const auto comm = api::alone();
    api::Array<float> value({3}, 1);
    const tsr_param param{"w", value.tensor()};
    api::Owned<tsr_ddp> ddp;
    ASSERT_OK(tsr_ddp_create(comm, &param, 1, nullptr, ddp.out()));
    api::Owned<tsr_optimizer> optimizer;
    ASSERT_OK(tsr_ddp_sgd(ddp, nullptr, optimizer.out()));
    ASSERT_OK(tsr_ddp_step_in_backward(ddp, optimizer));
    const auto scaler = scaler_with(4, 1);
    EXPECT_FAILS(tsr_grad_scaler_step(scaler, optimizer, nullptr), TSR_E_INVALID_STATE, "the step is already done");
    EXPECT_FAILS(tsr_grad_scaler_unscale(scaler, optimizer), TSR_E_INVALID_STATE, "cannot be unscaled");
    EXPECT_FAILS(tsr_grad_scaler_update(scaler), TSR_E_INVALID_STATE, "no gradients were unscaled");
}

}  // namespace
