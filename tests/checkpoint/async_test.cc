// Saves in the background: what happens while one is in flight, how failures are told, what ranks agree on, and the
// step at which all of them stop.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <string>

#include "async_fixture.hpp"
#include "base/clock.hpp"
#include "base/log.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "patience.hpp"

namespace tsr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Holds every save at its commit until it is opened.
class Gate {
   public:
    FaultyFiles files;
    Gate() {
        files.on_call = [this](int64_t, const std::string& name) {
            if (!name.starts_with("rename") || !name.ends_with("manifest.json")) return;
            if (!reached_.exchange(true)) reached_once_.set_value();
            if (opened_.wait_for(patience(std::chrono::seconds(60))) != std::future_status::ready) {
                throw Error(Code::timeout, "the test never opened the gate");
            }
        };
    }
    void wait_until_reached() { reached_future_.wait(); }
    void open() { open_.set_value(); }

   private:
    std::promise<void> open_;
    std::shared_future<void> opened_ = open_.get_future().share();
    std::promise<void> reached_once_;
    std::future<void> reached_future_ = reached_once_.get_future();
    std::atomic<bool> reached_{false};
};

// --- while another save is in flight ---

TEST_F(AsyncTest, ASecondSaveIsRefusedByOptionAndTheNextOneIsNot) {
    Gate gate;
    SaverOptions options = saver_options();
    options.files = &gate.files;
    options.when_busy = WhenBusy::refuse;
    Saver saver(nullptr, dir_.path(), options);
    const WorkPtr first = saver.save_async(1, owned_.state);
    const Error refused = error_of([&] { (void)saver.save_async(2, owned_.state); });
    EXPECT_EQ(refused.code(), Code::not_ready);
    EXPECT_THAT(refused.what(), HasSubstr("in flight"));
    gate.open();
    EXPECT_EQ(code_of(first), Code::ok);
    saver.wait();
    (void)saver.save_async(3, owned_.state);
    saver.wait();
    EXPECT_THAT(steps(), ElementsAre(1, 3));
}

TEST_F(AsyncTest, ANewerSaveReplacesTheQueuedOne) {
    Gate gate;
    SaverOptions options = saver_options();
    options.files = &gate.files;
    options.when_busy = WhenBusy::replace;
    Saver saver(nullptr, dir_.path(), options);
    const auto save = [&](int64_t step) {
        owned_.fill(static_cast<uint64_t>(step));
        const WorkPtr work = saver.save_async(step, owned_.state);
        owned_.poison();
        return work;
    };
    const WorkPtr first = save(1);
    gate.wait_until_reached();
    const WorkPtr second = save(2);
    const WorkPtr third = save(3);
    EXPECT_EQ(code_of(second), Code::aborted);
    EXPECT_FALSE(first->done());
    gate.open();
    saver.wait();  // being replaced is no failure
    EXPECT_EQ(code_of(first), Code::ok);
    EXPECT_EQ(code_of(third), Code::ok);
    EXPECT_THAT(steps(), ElementsAre(1, 3));
    EXPECT_EQ(saver.resume(owned_.state), 3);
    EXPECT_EQ(owned_.differences(3), 0);
}

// The gate opens only when the second call waits: one that does not copies its state while the first save is held.
TEST_F(AsyncTest, ASecondSaveWaitsForTheFirstUnlessToldOtherwise) {
    Gate gate;
    WorkPtr first;
    int staged_meanwhile = 0;
    SaverOptions options = saver_options();
    options.files = &gate.files;
    options.progress = [&](Phase phase, int64_t, int64_t) {
        if (phase == Phase::stage && first != nullptr && !first->done()) ++staged_meanwhile;
    };
    struct Waiting {
        Gate* gate;
        int asked = 0;
    } waiting{&gate};
    Saver saver(nullptr, dir_.path(), options);
    first = saver.save_async(1, owned_.state);
    gate.wait_until_reached();
    set_interrupt(
        [](void* data) {
            auto* const one = static_cast<Waiting*>(data);
            if (one->asked++ == 0) one->gate->open();
            return int32_t{0};
        },
        &waiting);
    const WorkPtr second = saver.save_async(2, owned_.state);
    set_interrupt(nullptr, nullptr);
    EXPECT_EQ(staged_meanwhile, 0);
    if (waiting.asked == 0) gate.open();
    EXPECT_GT(waiting.asked, 0);
    EXPECT_EQ(code_of(second), Code::ok);
    EXPECT_EQ(code_of(first), Code::ok);
    EXPECT_THAT(steps(), ElementsAre(1, 2));
}

// Ranks are at different places when they call; what happens to each save is the same on all of them.
TEST_F(AsyncTest, RanksAgreeWhichSavesAreRefusedOrReplaced) {
    for (const WhenBusy when : {WhenBusy::refuse, WhenBusy::replace, WhenBusy::wait}) {
        const TempDir dir;
        constexpr int rounds = 40;
        std::array<std::array<Code, rounds>, 3> ends{};
        expect_all_well(run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            owned.add_whole({"w", DType::f32, {30000}});
            SaverOptions options = saver_options();
            options.when_busy = when;
            options.retention.latest = 1;
            Saver saver(comm, dir.path(), options);
            std::array<WorkPtr, rounds> works;
            auto& end = ends[static_cast<size_t>(comm->rank())];
            for (int round = 0; round < rounds; ++round) {
                owned.fill(static_cast<uint64_t>(round));
                try {
                    works[static_cast<size_t>(round)] = saver.save_async(round, owned.state);
                } catch (const Error& error) {
                    end[static_cast<size_t>(round)] = error.code();
                }
                owned.poison();
            }
            saver.wait();
            int64_t last = 0;
            for (int round = 0; round < rounds; ++round) {
                const auto i = static_cast<size_t>(round);
                if (works[i]) end[i] = code_of(works[i]);
                if (end[i] == Code::ok) last = round;
            }
            EXPECT_EQ(saver.resume(owned.state), last);
            EXPECT_EQ(owned.differences(static_cast<uint64_t>(last)), 0);
        }));
        EXPECT_EQ(ends[0], ends[1]);
        EXPECT_EQ(ends[0], ends[2]);
        const Code other = when == WhenBusy::refuse ? Code::not_ready : Code::aborted;
        for (const Code code : ends[0]) EXPECT_TRUE(code == Code::ok || (code == other && when != WhenBusy::wait));
        EXPECT_EQ(ends[0][0], Code::ok);
        if (when != WhenBusy::refuse) {
            EXPECT_EQ(ends[0][rounds - 1], Code::ok);
        }
    }
}

TEST_F(AsyncTest, AFailureIsToldByTheFutureAndOnceByTheNextCall) {
    for (const WhenBusy when : {WhenBusy::refuse, WhenBusy::replace, WhenBusy::wait}) {
        const TempDir dir;
        std::atomic<bool> full{false};
        expect_all_well(run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            owned.add_whole({"w", DType::f32, {10}});
            FaultyFiles files;
            files.on_call = [&](int64_t, const std::string& name) {
                if (full && name.starts_with("mkdir")) throw os_error("cannot create it", ENOSPC);
            };
            SaverOptions options = saver_options();
            options.files = &files;
            options.when_busy = when;
            Saver saver(comm, dir.path(), options);
            saver.save(1, owned.state);
            full = true;
            const WorkPtr failing = saver.save_async(2, owned.state);
            EXPECT_EQ(code_of(failing), Code::io);
            EXPECT_THAT(error_of([&] { failing->wait(Deadline::in(milliseconds{60000})); }).what(),
                        ::testing::StartsWith("rank 0: the save of step 2 failed: cannot create it"));
            Request barrier;
            comm->run(barrier);
            full = false;
            EXPECT_EQ(error_of([&] { (void)saver.save_async(3, owned.state); }).code(), Code::io);
            EXPECT_EQ(code_of(saver.save_async(4, owned.state)), Code::ok);
            saver.wait();
            EXPECT_EQ(saver.resume(owned.state), 4);
        }));
    }
}

TEST_F(AsyncTest, AFailureThatNobodyAskedForIsInTheLogAndTheFormerCheckpointStands) {
    struct Log {
        std::mutex mutex;
        std::string text;
    } log;
    FaultyFiles files;
    SaverOptions options = saver_options();
    options.files = &files;
    log::set_level(log::Level::warning);
    log::set_sink(
        [](int32_t, const char* line, void* user_data) {
            auto& to = *static_cast<Log*>(user_data);
            const std::lock_guard lock(to.mutex);
            to.text.append(line).append("\n");
        },
        &log, nullptr);
    {
        Saver saver(nullptr, dir_.path(), options);
        saver.save(1, owned_.state);
        files.on_call = [&](int64_t, const std::string& name) {
            if (name.starts_with("fsync") && name.ends_with(".safetensors")) throw os_error("cannot sync it", EIO);
        };
        (void)saver.save_async(2, owned_.state);
    }
    log::set_sink(nullptr, nullptr, nullptr);
    log::set_level(log::Level::error);
    EXPECT_THAT(log.text, HasSubstr("the save of step 2 failed: cannot sync it"));
    EXPECT_THAT(log.text, HasSubstr("was never waited for"));
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 1);
}

TEST_F(AsyncTest, RanksAgreeOnTheFormat) {
    const Outcomes outcomes = run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        SaverOptions options = saver_options();
        if (comm->rank() == 1) options.format = SaveFormat::torch_dcp;
        EXPECT_THAT(error_of([&] { const Saver saver(comm, dir_.path(), options); }).what(),
                    HasSubstr("rank 1's format differs from rank 0's"));
    });
    expect_all_well(outcomes);
}

// --- the step at which all stop ---

TEST_F(AsyncTest, AllRanksStopAtTheSameStepWhenOneIsTold) {
    std::array<std::atomic<int64_t>, 3> stopped{};
    expect_all_well(run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"w", DType::f32, {1000}});
        Saver saver(comm, dir_.path(), saver_options());
        for (int64_t step = 1;; ++step) {
            const bool stop = saver.should_stop(step, comm->rank() == 1 && step == 7);
            if (stop || step % 3 == 0) (void)saver.save_async(step, owned.state);
            if (!stop) continue;
            EXPECT_TRUE(saver.should_stop(step + 1, false));
            stopped[static_cast<size_t>(comm->rank())] = step;
            break;
        }
        saver.wait();
    }));
    for (const auto& step : stopped) EXPECT_EQ(step, 7);
    EXPECT_THAT(steps(), ElementsAre(3, 6, 7));
}

TEST_F(AsyncTest, RanksThatAskAtDifferentStepsAreTold) {
    const Outcomes outcomes = run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        Saver saver(comm, dir_.path(), saver_options());
        (void)saver.should_stop(comm->rank() == 0 ? 5 : 6, false);
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("5 to 6"));
    }
    // Of all numbers this one alone has no negative.
    const Outcomes least = run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        Saver saver(comm, dir_.path(), saver_options());
        (void)saver.should_stop(comm->rank() == 0 ? INT64_MIN : 5, false);
    });
    for (const auto& outcome : least) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
    }
}

}  // namespace
}  // namespace tsr::testing
