// Saves in the background through the C ABI: progress, priority, what a busy saver does, copies on demand, failures,
// and a saver that is destroyed meanwhile.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <mutex>

#include "api.hpp"
#include "patience.hpp"

namespace {

using ::testing::Each;

struct Told {
    std::mutex mutex;  // where a part is written before the call returns, two threads tell at once
    std::map<int32_t, int64_t> done;
    std::map<int32_t, int64_t> total;
};

void tell(int32_t phase, int64_t done, int64_t total, void* user_data) {
    auto* told = static_cast<Told*>(user_data);
    const std::lock_guard lock(told->mutex);
    told->done[phase] = done;
    told->total[phase] = total;
}

TEST(SaverApi, TellsItsProgressKeepsToItsOptionsAndGivesMemoryBack) {
    const api::TemporaryDirectory dir;
    api::Array<float> a({3 << 20}, 2.0F);
    const auto bytes = static_cast<int64_t>(a.values.size() * sizeof(float));
    const auto state = api::state_of("a", a);
    Told told;
    tsr_saver_options options;
    ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
    options.progress = tell;
    options.progress_data = &told;
    options.low_priority = 1;
    options.write_bytes_per_s = 1 << 30;
    options.staging_bytes = 8 << 20;
    options.when_busy = 3;
    api::Owned<tsr_saver> saver;
    EXPECT_FAILS(tsr_saver_create(nullptr, dir.path().c_str(), &options, saver.out()), TSR_E_INVALID_ARGUMENT,
                 "when_busy is 3");
    options.when_busy = TSR_BUSY_REPLACE;
    ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), &options, saver.out()));
    ASSERT_OK(tsr_saver_save_async(saver, 1, state, nullptr));
    a.values.assign(a.values.size(), 3.0F);
    ASSERT_OK(tsr_saver_wait(saver));
    for (const int32_t phase : {TSR_PHASE_STAGE, TSR_PHASE_WRITE}) {
        EXPECT_EQ(told.done[phase], bytes) << phase;
        EXPECT_EQ(told.total[phase], bytes) << phase;
    }
    EXPECT_TRUE(told.done.contains(TSR_PHASE_COMMIT));
    ASSERT_OK(tsr_saver_trim(saver));
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 1);
    EXPECT_THAT(a.values, Each(2.0F));
    EXPECT_EQ(told.done[TSR_PHASE_READ], bytes);

    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(tsr_checkpoint_open(dir.path().c_str(), checkpoint.out()));
    told.done.clear();
    tsr_load_options load;
    ASSERT_OK(tsr_load_options_init(&load, sizeof load));
    load.progress = tell;
    load.progress_data = &told;
    ASSERT_OK(tsr_checkpoint_load(checkpoint, state, &load));
    EXPECT_EQ(told.done[TSR_PHASE_READ], bytes);
    ASSERT_OK(tsr_checkpoint_verify_progress(checkpoint, 1, tell, &told));
    EXPECT_GE(told.done[TSR_PHASE_VERIFY], bytes);
    EXPECT_FAILS(tsr_checkpoint_verify_progress(checkpoint, 2, tell, &told), TSR_E_INVALID_ARGUMENT, "full is 2");
}

TEST(SaverApi, LowPriorityIsThatOfTheThreadsThatWrite) {
    const api::TemporaryDirectory dir;
    api::Array<float> a({1000}, 2.0F);
    const auto state = api::state_of("a", a);
    std::atomic<int> told{-100};  // the nice value of the thread that tells that it writes
    tsr_saver_options options;
    ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
    options.progress = [](int32_t phase, int64_t, int64_t, void* user_data) {
        if (phase != TSR_PHASE_WRITE) return;
        *static_cast<std::atomic<int>*>(user_data) = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()));
    };
    options.progress_data = &told;
    const int own = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()));
    for (const int32_t low : {0, 1}) {
        options.low_priority = low;
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), &options, saver.out()));
        ASSERT_OK(tsr_saver_save_async(saver, 1 + low, state, nullptr));
        ASSERT_OK(tsr_saver_wait(saver));
        EXPECT_EQ(told, low == 1 ? std::max(own, 10) : own);
    }
}

// Destroys the saver whose save tells it of its progress.
struct Destroyer {
    tsr_saver* saver = nullptr;
    std::atomic<int> told_after{-1};  // calls since the destroy; -1 before it
    static void tell(int32_t phase, int64_t, int64_t, void* user_data) {
        auto* own = static_cast<Destroyer*>(user_data);
        if (own->told_after >= 0) {
            ++own->told_after;
        } else if (phase == TSR_PHASE_WRITE) {
            own->told_after = 0;
            tsr_saver_destroy(own->saver);
        }
    }
};

TEST(SaverApi, DestroyedWhileItsSaveTellsOfItsProgressItEndsAfterThatSave) {
    const api::TemporaryDirectory dir;
    api::Array<float> a({3 << 20}, 2.0F);
    const auto state = api::state_of("a", a);
    Destroyer destroyer;
    tsr_saver_options options;
    ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
    options.progress = Destroyer::tell;
    options.progress_data = &destroyer;
    ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), &options, &destroyer.saver));
    api::Owned<tsr_work> work;
    ASSERT_OK(tsr_saver_save_async(destroyer.saver, 1, state, work.out()));
    ASSERT_OK(tsr_work_wait(work, -1));
    EXPECT_EQ(destroyer.told_after, 0);
    EXPECT_FAILS(tsr_saver_wait(destroyer.saver), TSR_E_INVALID_STATE, "destroyed");
    // The root is given back a moment after the save.
    tsr_saver* next = nullptr;
    ASSERT_TRUE(api::becomes_true([&] {
        return tsr_saver_create(nullptr, dir.path().c_str(), nullptr, &next) == TSR_OK;
    })) << api::message();
    int64_t step = 0;
    EXPECT_OK(tsr_saver_resume(next, state, &step));
    EXPECT_EQ(step, 1);
    tsr_saver_destroy(next);
    // So it is where the caller's own thread saves.
    ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), &options, &destroyer.saver));
    destroyer.told_after = -1;
    EXPECT_OK(tsr_saver_save(destroyer.saver, 2, state));
    EXPECT_EQ(destroyer.told_after, 0);
}

// Holds the first save in the background until it is opened.
struct Gate {
    std::promise<void> reached;
    std::promise<void> opened;
    std::shared_future<void> open = opened.get_future().share();
    std::atomic<bool> was_reached{false};
    static void hold(int32_t phase, int64_t, int64_t, void* user_data) {
        auto* gate = static_cast<Gate*>(user_data);
        if (phase != TSR_PHASE_WRITE || gate->was_reached.exchange(true)) return;
        gate->reached.set_value();
        EXPECT_EQ(gate->open.wait_for(tsr::testing::patience(std::chrono::seconds(60))), std::future_status::ready);
    }
};

// A saver whose first save in the background is held at its gate.
struct GatedSaver {
    api::TemporaryDirectory dir;
    Gate gate;
    tsr_saver_options options{};
    api::Owned<tsr_saver> saver;  // ends before its gate

    explicit GatedSaver(int32_t when_busy) {
        EXPECT_OK(tsr_saver_options_init(&options, sizeof options));
        EXPECT_EQ(options.copy_on_demand, 0);
        options.when_busy = when_busy;
        options.progress = Gate::hold;
        options.progress_data = &gate;
    }
    tsr_status create() { return tsr_saver_create(nullptr, dir.path().c_str(), &options, saver.out()); }
    // Returns when it is held.
    void save_and_hold(int64_t step, tsr_state* state, tsr_work** work = nullptr) {
        ASSERT_OK(tsr_saver_save_async(saver, step, state, work));
        ASSERT_EQ(gate.reached.get_future().wait_for(tsr::testing::patience(std::chrono::seconds(60))),
                  std::future_status::ready);
    }
};

// Makes the optimizer of one parameter, "w", and adds it to the state.
void add_adamw(tsr_state* state, api::Array<float>& weight, api::Array<float>& gradient,
               api::Owned<tsr_optimizer>& optimizer) {
    const tsr_param param{"w", weight.tensor()};
    const tsr_tensor grad = gradient.tensor();
    ASSERT_OK(tsr_adamw_create(&param, &grad, 1, nullptr, optimizer.out()));
    ASSERT_OK(tsr_state_add_optimizer(state, "optim", optimizer));
}

TEST(SaverApi, WhatAnOptimizerOwnsIsCopiedBeforeItsNextStepChangesIt) {
    api::Array<float> weight({3 << 20}, 1.0F);
    api::Array<float> gradient({3 << 20}, 0.5F);
    api::Owned<tsr_optimizer> optimizer;
    const auto state = api::state_of("w", weight);
    add_adamw(state, weight, gradient, optimizer);
    GatedSaver gated(TSR_BUSY_REPLACE);
    const auto& saver = gated.saver;
    gated.options.copy_on_demand = 2;
    EXPECT_FAILS(gated.create(), TSR_E_INVALID_ARGUMENT, "copy_on_demand");
    gated.options.copy_on_demand = 1;
    ASSERT_OK(gated.create());
    ASSERT_NO_FATAL_FAILURE(gated.save_and_hold(1, state));
    ASSERT_OK(tsr_optimizer_step(optimizer));
    const std::vector<float> expected = weight.values;
    ASSERT_OK(tsr_saver_save_async(saver, 2, state, nullptr));  // behind the first: nothing of it is copied by itself
    ASSERT_OK(tsr_optimizer_step(optimizer));
    EXPECT_NE(weight.values, expected);
    gated.gate.opened.set_value();
    ASSERT_OK(tsr_saver_wait(saver));
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 2);
    EXPECT_EQ(weight.values, expected);
    ASSERT_OK(tsr_optimizer_steps(optimizer, &step));
    EXPECT_EQ(step, 1);
}

// Its state holds the optimizer on; the memory is the caller's.
TEST(SaverApi, WhatAnOptimizerOwnsIsCopiedBeforeItIsDestroyed) {
    api::Array<float> weight({3 << 20}, 1.0F);
    api::Array<float> gradient({3 << 20}, 0.5F);
    api::Owned<tsr_optimizer> optimizer;
    const auto state = api::state_of("w", weight);
    add_adamw(state, weight, gradient, optimizer);
    GatedSaver gated(TSR_BUSY_REPLACE);
    const auto& saver = gated.saver;
    gated.options.copy_on_demand = 1;
    ASSERT_OK(gated.create());
    ASSERT_NO_FATAL_FAILURE(gated.save_and_hold(1, state));
    ASSERT_OK(tsr_saver_save_async(saver, 2, state, nullptr));  // behind the first: nothing of it is copied by itself
    optimizer.reset();
    weight.values.assign(weight.values.size(), -1.0F);
    gated.gate.opened.set_value();
    ASSERT_OK(tsr_saver_wait(saver));
    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(tsr_checkpoint_open(gated.dir.path().c_str(), checkpoint.out()));
    const tsr_tensor into = weight.tensor();
    ASSERT_OK(tsr_checkpoint_read(checkpoint, "w", &into));
    EXPECT_THAT(weight.values, Each(1.0F));
}

TEST(SaverApi, WhatIsWrittenAfterTheFirstFenceIsNotSaved) {
    const api::TemporaryDirectory dir;
    api::Array<float> weight({3 << 20}, 1.0F);
    api::Array<float> gradient({3 << 20}, 0.5F);
    api::Owned<tsr_optimizer> optimizer;
    const auto state = api::state_of("w", weight);
    add_adamw(state, weight, gradient, optimizer);
    Gate gate;  // holds the save before its first byte
    tsr_saver_options options;
    ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
    options.progress = Gate::hold;
    options.progress_data = &gate;
    options.copy_on_demand = 1;
    api::Owned<tsr_saver> saver;
    ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), &options, saver.out()));
    api::Owned<tsr_work> save;
    ASSERT_OK(tsr_saver_save_async(saver, 1, state, save.out()));
    api::Owned<tsr_work> staged;
    ASSERT_OK(tsr_work_staged(save, staged.out()));
    ASSERT_OK(tsr_work_wait(staged, tsr::testing::patience_ms(60000)));
    int32_t done = -1;
    EXPECT_OK(tsr_work_test(save, &done));
    EXPECT_EQ(done, 0);
    weight.values.assign(weight.values.size(), -1.0F);
    gate.opened.set_value();
    ASSERT_OK(tsr_work_wait(save, -1));
    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(tsr_checkpoint_open(dir.path().c_str(), checkpoint.out()));
    const tsr_tensor into = weight.tensor();
    ASSERT_OK(tsr_checkpoint_read(checkpoint, "w", &into));
    EXPECT_THAT(weight.values, Each(1.0F));

    api::Owned<tsr_work> none;
    EXPECT_FAILS(tsr_work_staged(staged, none.out()), TSR_E_INVALID_ARGUMENT, "not from tsr_saver_save_async");
    EXPECT_EQ(static_cast<tsr_work*>(none), nullptr);
}

TEST(SaverApi, ABusySaverCanRefuse) {
    api::Array<float> a({4}, 2.0F);
    const auto state = api::state_of("a", a);
    GatedSaver gated(TSR_BUSY_REFUSE);
    const auto& saver = gated.saver;
    ASSERT_OK(gated.create());
    ASSERT_NO_FATAL_FAILURE(gated.save_and_hold(1, state));
    api::Owned<tsr_work> refused;
    EXPECT_FAILS(tsr_saver_save_async(saver, 2, state, refused.out()), TSR_E_NOT_READY, "when_busy is set to refuse");
    EXPECT_EQ(static_cast<tsr_work*>(refused), nullptr);
    gated.gate.opened.set_value();
    ASSERT_OK(tsr_saver_wait(saver));
    ASSERT_OK(tsr_saver_save_async(saver, 3, state, nullptr));
    ASSERT_OK(tsr_saver_wait(saver));
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 3);
}

TEST(SaverApi, ABusySaverReplacesWhatWaits) {
    api::Array<float> a({4}, 2.0F);
    const auto state = api::state_of("a", a);
    GatedSaver gated(TSR_BUSY_REPLACE);
    const auto& saver = gated.saver;
    ASSERT_OK(gated.create());
    std::array<api::Owned<tsr_work>, 3> works;
    ASSERT_NO_FATAL_FAILURE(gated.save_and_hold(1, state, works[0].out()));
    ASSERT_OK(tsr_saver_save_async(saver, 2, state, works[1].out()));
    a.values.assign(4, 3.0F);
    ASSERT_OK(tsr_saver_save_async(saver, 3, state, works[2].out()));
    EXPECT_FAILS(tsr_work_wait(works[1], 0), TSR_E_ABORTED, "the save of step 2 was replaced");
    gated.gate.opened.set_value();
    EXPECT_OK(tsr_work_wait(works[0], tsr::testing::patience_ms(60000)));
    EXPECT_OK(tsr_work_wait(works[2], tsr::testing::patience_ms(60000)));
    ASSERT_OK(tsr_saver_wait(saver));
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 3);
    EXPECT_THAT(a.values, testing::Each(3.0F));
    for (const auto& entry : std::filesystem::directory_iterator(gated.dir.path())) {
        EXPECT_FALSE(entry.path().filename().string().starts_with("step-00000002")) << entry.path();
    }
}

TEST(SaverApi, ABackgroundSaveThatFailsIsToldByItsWorkAndOnceByTheNextCall) {
    const api::TemporaryDirectory dir;
    const std::filesystem::path root = dir.path() / "root";
    const std::filesystem::path away = dir.path() / "away";
    api::Array<float> a({4}, 2.0F);
    const auto state = api::state_of("a", a);
    api::Owned<tsr_saver> saver;
    ASSERT_OK(tsr_saver_create(nullptr, root.c_str(), nullptr, saver.out()));
    ASSERT_OK(tsr_saver_save(saver, 1, state));
    std::filesystem::rename(root, away);
    std::ofstream(root) << "no directory";
    {
        api::Owned<tsr_work> work;
        ASSERT_OK(tsr_saver_save_async(saver, 2, state, work.out()));
        EXPECT_FAILS(tsr_work_wait(work, tsr::testing::patience_ms(60000)), TSR_E_IO, "root");
    }
    EXPECT_FAILS(tsr_saver_save_async(saver, 3, state, nullptr), TSR_E_IO, "root");
    std::filesystem::remove(root);
    std::filesystem::rename(away, root);
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 1);
    ASSERT_OK(tsr_saver_save_async(saver, 4, state, nullptr));
    ASSERT_OK(tsr_saver_wait(saver));
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 4);
}

}  // namespace
