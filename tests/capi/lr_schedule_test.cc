// tessera/lr_schedule.h through the C ABI.
#include "tessera/lr_schedule.h"

#include <array>
#include <cmath>
#include <limits>

#include "api.hpp"
#include "temporary_directory.hpp"

namespace {

using Schedule = api::Owned<tsr_lr_schedule>;

double lr_at(const tsr_lr_schedule* schedule, int64_t step, double base_lr) {
    double lr = -1;
    EXPECT_OK(tsr_lr_schedule_lr_at(schedule, step, base_lr, &lr));
    return lr;
}

double momentum_at(const tsr_lr_schedule* schedule, int64_t step) {
    double momentum = -1;
    EXPECT_OK(tsr_lr_schedule_momentum_at(schedule, step, &momentum));
    return momentum;
}

// Plain SGD over one parameter.
struct Local {
    api::Array<float> value{{3}, 1};
    api::Array<float> grad{{3}, 0};
    api::Owned<tsr_optimizer> optimizer;

    explicit Local(double lr, double momentum = 0) {
        const tsr_param param{"w", value.tensor()};
        const tsr_tensor gradient = grad.tensor();
        tsr_sgd_options options;
        EXPECT_OK(tsr_sgd_options_init(&options, sizeof options));
        options.lr = lr;
        options.momentum = momentum;
        EXPECT_OK(tsr_sgd_create(&param, &gradient, 1, &options, optimizer.out()));
    }
    [[nodiscard]] double lr() const {
        double lr = -1;
        EXPECT_OK(tsr_optimizer_lr(optimizer, &lr));
        return lr;
    }
};

TEST(LrScheduleApi, EveryKindHasItsValues) {
    Schedule s;
    ASSERT_OK(tsr_lr_constant(0.5, 4, s.out()));
    EXPECT_EQ(lr_at(s, 3, 1), 0.5);
    ASSERT_OK(tsr_lr_linear(0, 1, 4, s.out()));
    EXPECT_EQ(lr_at(s, 1, 1), 0.25);
    ASSERT_OK(tsr_lr_step_decay(2, 0.5, s.out()));
    EXPECT_EQ(lr_at(s, 5, 1), 0.25);
    const std::array<int64_t, 2> milestones{2, 4};
    ASSERT_OK(tsr_lr_multi_step_decay(milestones.data(), 2, 0.5, s.out()));
    EXPECT_EQ(lr_at(s, 4, 1), 0.25);
    ASSERT_OK(tsr_lr_exponential(0.5, s.out()));
    EXPECT_EQ(lr_at(s, 3, 1), 0.125);
    ASSERT_OK(tsr_lr_polynomial(4, 2, s.out()));
    EXPECT_EQ(lr_at(s, 2, 1), 0.25);
    ASSERT_OK(tsr_lr_cosine(4, 0.5, s.out()));
    EXPECT_DOUBLE_EQ(lr_at(s, 2, 1), 0.75);
    ASSERT_OK(tsr_lr_cosine_restarts(2, 2, 0.5, s.out()));
    EXPECT_DOUBLE_EQ(lr_at(s, 4, 1), 0.75);
    ASSERT_OK(tsr_lr_inverse_sqrt(4, s.out()));
    EXPECT_EQ(lr_at(s, 15, 1), 0.5);
    ASSERT_OK(tsr_lr_wsd(2, 2, 4, TSR_LR_DECAY_SQRT, 0.5, s.out()));
    EXPECT_EQ(lr_at(s, 5, 1), 0.75);
    ASSERT_OK(tsr_lr_range_test(0.5, 4, 2, 1, s.out()));
    EXPECT_EQ(lr_at(s, 7, 1), 1.5);
}

TEST(LrScheduleApi, OptionsHaveDeepSpeedsDefaults) {
    tsr_lr_warmup_options warmup;
    ASSERT_OK(tsr_lr_warmup_options_init(&warmup, sizeof warmup));
    EXPECT_EQ(warmup.warmup_num_steps, 1000);
    Schedule s;
    ASSERT_OK(tsr_lr_warmup(nullptr, s.out()));
    EXPECT_EQ(lr_at(s, 0, 0.5), 0);
    EXPECT_EQ(lr_at(s, 1001, 0.5), 0.5) << "the base rate";
    warmup.warmup_max_lr = 0.25;
    warmup.warmup_type = TSR_LR_WARMUP_LINEAR;
    warmup.total_num_steps = 2000;
    ASSERT_OK(tsr_lr_warmup(&warmup, s.out()));
    EXPECT_EQ(lr_at(s, 501, 0.5), 0.125);
    EXPECT_EQ(lr_at(s, 1501, 0.5), 0.125);

    tsr_lr_warmup_cosine_options cosine;
    ASSERT_OK(tsr_lr_warmup_cosine_options_init(&cosine, sizeof cosine));
    EXPECT_EQ(cosine.cos_min_ratio, 1e-4);
    cosine.total_num_steps = 2000;
    ASSERT_OK(tsr_lr_warmup_cosine(&cosine, s.out()));
    EXPECT_EQ(lr_at(s, 2000, 1), 1e-4);

    tsr_lr_one_cycle_options cycle;
    ASSERT_OK(tsr_lr_one_cycle_options_init(&cycle, sizeof cycle));
    EXPECT_EQ(cycle.cycle_first_step_size, 2000);
    cycle.cycle_min_lr = 0.125;
    cycle.cycle_max_lr = 0.5;
    ASSERT_OK(tsr_lr_one_cycle(&cycle, s.out()));
    EXPECT_EQ(lr_at(s, 2000, 1), 0.5);
    EXPECT_EQ(lr_at(s, 4000, 1), 0.125);
    EXPECT_EQ(momentum_at(s, 2000), 0.8);
    cycle.cycle_momentum = 0;
    ASSERT_OK(tsr_lr_one_cycle(&cycle, s.out()));
    EXPECT_TRUE(std::isnan(momentum_at(s, 2000)));
}

TEST(LrScheduleApi, CompositionsOutliveTheirParts) {
    Schedule warmup;
    Schedule decay;
    Schedule sequence;
    Schedule chain;
    ASSERT_OK(tsr_lr_linear(0, 1, 4, warmup.out()));
    ASSERT_OK(tsr_lr_exponential(0.5, decay.out()));
    ASSERT_OK(tsr_lr_schedule_set_steps(decay, 7)) << "which does not count";
    const std::array<const tsr_lr_schedule*, 2> parts{warmup, decay};
    const int64_t begin = 4;
    ASSERT_OK(tsr_lr_sequential(parts.data(), 2, &begin, 1, sequence.out()));
    ASSERT_OK(tsr_lr_chained(parts.data(), 2, chain.out()));
    warmup.reset();
    decay.reset();
    EXPECT_EQ(lr_at(sequence, 2, 1), 0.5);
    EXPECT_EQ(lr_at(sequence, 5, 1), 0.5);
    EXPECT_EQ(lr_at(chain, 2, 1), 0.125);
}

TEST(LrScheduleApi, SetsAnOptimizer) {
    Local local(0.5);
    Schedule s;
    ASSERT_OK(tsr_lr_exponential(0.5, s.out()));
    ASSERT_OK(tsr_lr_schedule_attach(s, local.optimizer));
    EXPECT_EQ(local.lr(), 0.5);
    ASSERT_OK(tsr_lr_schedule_step(s));
    EXPECT_EQ(local.lr(), 0.25);
    ASSERT_OK(tsr_lr_schedule_set_steps(s, 3));
    EXPECT_EQ(local.lr(), 0.0625);
    int64_t steps = -1;
    ASSERT_OK(tsr_lr_schedule_steps(s, &steps));
    EXPECT_EQ(steps, 3);
    local.optimizer.reset();
    EXPECT_OK(tsr_lr_schedule_step(s)) << "it does not keep the optimizer";
}

TEST(LrScheduleApi, IsSavedAndLoaded) {
    const tsr::testing::TemporaryDirectory directory;
    const auto comm = api::alone();
    api::Owned<tsr_saver> saver;
    ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
    const auto add = [](Schedule& schedule, Local& local, int64_t total) {
        EXPECT_OK(tsr_lr_cosine(total, 0, schedule.out()));
        EXPECT_OK(tsr_lr_schedule_attach(schedule, local.optimizer));
        api::Owned<tsr_state> state;
        EXPECT_OK(tsr_state_create(state.out()));
        EXPECT_OK(tsr_state_add_lr_schedule(state, "schedule", schedule));
        EXPECT_OK(tsr_state_add_optimizer(state, "optim", local.optimizer));
        return state;
    };
    Local local(0.5);
    Schedule schedule;
    const auto state = add(schedule, local, 10);
    for (int step = 0; step < 3; ++step) ASSERT_OK(tsr_lr_schedule_step(schedule));
    ASSERT_OK(tsr_saver_save(saver, 3, state));

    Local resumed(0.1);
    Schedule other;
    const auto loaded = add(other, resumed, 10);
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, loaded, &step));
    for (int more = 0; more < 8; ++more) {
        EXPECT_EQ(resumed.lr(), local.lr()) << "the same bits, " << more << " steps later";
        ASSERT_OK(tsr_lr_schedule_step(schedule));
        ASSERT_OK(tsr_lr_schedule_step(other));
    }

    Local wrong(0.1);
    Schedule longer;
    const auto refused = add(longer, wrong, 11);
    EXPECT_FAILS(tsr_saver_resume(saver, refused, &step), TSR_E_MISMATCH,
                 "belongs to the schedule cosine(total_steps=10, min_lr=0), but this one is cosine(total_steps=11");
    EXPECT_EQ(wrong.lr(), 0.1) << "nothing was loaded";

    api::Owned<tsr_state> values;
    ASSERT_OK(tsr_state_create(values.out()));
    ASSERT_OK(tsr_state_set_int64(values, "schedule.steps", 3));
    ASSERT_OK(tsr_state_set_value(values, "schedule.base_lrs", "[0.5]"));
    ASSERT_OK(tsr_state_set_value(values, "schedule.schedule", "7"));
    ASSERT_OK(tsr_saver_save(saver, 4, values));
    api::Owned<tsr_state> alone;
    ASSERT_OK(tsr_state_create(alone.out()));
    ASSERT_OK(tsr_state_add_lr_schedule(alone, "schedule", other));
    EXPECT_FAILS(tsr_saver_resume(saver, alone, &step), TSR_E_MISMATCH, "'schedule.schedule' is 7, not a string");
    ASSERT_OK(tsr_state_set_value(values, "schedule.schedule", "\"cosine(total_steps=10, min_lr=0)\""));
    ASSERT_OK(tsr_state_set_value(values, "schedule.base_lrs", "7"));
    ASSERT_OK(tsr_saver_save(saver, 5, values));
    EXPECT_FAILS(tsr_saver_resume(saver, alone, &step), TSR_E_MISMATCH, "schedule.base_lrs");
}

TEST(LrScheduleApi, BadArgumentsAreRefused) {
    Schedule s;
    const auto refused = [](tsr_status status, const char* said) {
        EXPECT_FAILS(status, TSR_E_INVALID_ARGUMENT, said);
    };
    refused(tsr_lr_constant(std::nan(""), 1, s.out()), "factor is nan");
    EXPECT_EQ(static_cast<tsr_lr_schedule*>(s), nullptr);
    refused(tsr_lr_constant(1, 1, nullptr), "out is NULL");
    refused(tsr_lr_multi_step_decay(nullptr, 2, 1, s.out()), "milestones is NULL");
    refused(tsr_lr_multi_step_decay(nullptr, 0, 1, s.out()), "the number of milestones is 0");
    const int64_t one = 1;
    refused(tsr_lr_multi_step_decay(&one, SIZE_MAX, 1, s.out()), "at most 1000");
    refused(tsr_lr_wsd(1, 1, 1, 3, 0, s.out()), "decay is 3; it must be from 0 to 2");
    refused(tsr_lr_range_test(1, 1, 1, 2, s.out()), "staircase is 2");
    tsr_lr_warmup_options warmup;
    ASSERT_OK(tsr_lr_warmup_options_init(&warmup, sizeof warmup));
    warmup.warmup_type = -1;
    refused(tsr_lr_warmup(&warmup, s.out()), "warmup_type is -1; it must be from 0 to 1");
    warmup.struct_size = 0;
    refused(tsr_lr_warmup(&warmup, s.out()), "struct_size");
    refused(tsr_lr_warmup_cosine(nullptr, s.out()), "total_num_steps is not given");
    refused(tsr_lr_one_cycle(nullptr, s.out()), "cycle_max_lr is not given");
    refused(tsr_lr_chained(nullptr, 0, s.out()), "the number of schedules is 0");
    refused(tsr_lr_chained(nullptr, 1, s.out()), "schedules is NULL");

    ASSERT_OK(tsr_lr_exponential(2, s.out()));
    const std::array<const tsr_lr_schedule*, 2> parts{s, nullptr};
    Schedule other;
    refused(tsr_lr_chained(parts.data(), 2, other.out()), "schedule 1 is NULL");
    refused(tsr_lr_chained(parts.data(), SIZE_MAX, other.out()), "at most 1000");
    refused(tsr_lr_sequential(parts.data(), 1, &one, 1, other.out()), "1 milestones do not separate 1");
    refused(tsr_lr_sequential(parts.data(), 1, nullptr, 1, other.out()), "milestones is NULL");
    double lr = 0;
    refused(tsr_lr_schedule_lr_at(s, 1, 1, nullptr), "lr is NULL");
    refused(tsr_lr_schedule_lr_at(s, 2000, 1, &lr), "would be inf");
    refused(tsr_lr_schedule_momentum_at(s, 1, nullptr), "momentum is NULL");
    refused(tsr_lr_schedule_steps(s, nullptr), "steps is NULL");
    refused(tsr_lr_schedule_set_steps(s, -1), "the step is -1");
    refused(tsr_lr_schedule_attach(s, nullptr), "optimizer is NULL");
    Local local(0.5);
    ASSERT_OK(tsr_lr_schedule_attach(s, local.optimizer));
    EXPECT_FAILS(tsr_lr_schedule_attach(s, local.optimizer), TSR_E_INVALID_STATE, "attached already");
}

}  // namespace
