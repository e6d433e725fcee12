// Turns of one rank: the others wait with a deadline of their own, hear of progress and failures, and notice deaths.
#include "comm/turn.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <string>

#include "base/attempt.hpp"
#include "patience.hpp"
#include "ranks.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<Communicator> unowned(Communicator& comm) {
    return {&comm, [](Communicator*) {}};
}

// The others' deadline is the turn's while they wait, and again their own afterwards.
TEST(Turn, HasADeadlineOfItsOwn) {
    std::array<std::atomic<Communicator*>, 3> all{};
    const CommOptions options = test_options();
    const milliseconds longer = options.timeout + milliseconds{1};
    expect_all_well(run_ranks(3, options, [&](Communicator& comm) {
        all[static_cast<size_t>(comm.rank())] = &comm;
        comm.run({});
        Turn turn(unowned(comm), 1, longer);
        ASSERT_EQ(turn.is_own(), comm.rank() == 1);
        if (turn.is_own()) {
            for (const int waiting : {0, 2}) {
                wait_until([&] { return all[static_cast<size_t>(waiting)].load()->options().timeout == longer; },
                           soon(), "a waiting rank");
            }
        }
        turn.end(std::nullopt);
        EXPECT_EQ(comm.options().timeout, options.timeout);
        comm.run({});  // nobody leaves before
    }));
}

TEST(Turn, ReportsAsMuchProgressAsItLikes) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        for (int round = 0; round < 2; ++round) {
            Turn turn(unowned(comm), 0, patience(milliseconds{20000}));
            for (int64_t i = 0; turn.is_own() && i <= 2000; ++i) turn.progress(i, 2000);
            turn.end(std::nullopt);
        }
        comm.run({});
    }));
}

TEST(Turn, ThatTakesTooLongIsATimeoutWithItsLastReport) {
    std::atomic<int> failed{0};
    const Outcomes outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
        comm.run({});
        Turn turn(unowned(comm), 0, patience(milliseconds{300}));
        if (turn.is_own()) {
            turn.progress(3, 10);
            wait_until([&] { return failed == 2; }, soon(), "the others");
        }
        try {
            turn.end(std::nullopt);
        } catch (...) {
            ++failed;
            throw;
        }
    });
    ASSERT_TRUE(outcomes[0]);
    bool is_told = false;  // the second to time out may hear of the first instead
    for (const size_t rank : {1, 2}) {
        ASSERT_TRUE(outcomes[rank]);
        const std::string text = outcomes[rank]->what();
        if (outcomes[rank]->code() != Code::timeout) continue;
        is_told = is_told || (text.find("rank 0 did not end its turn within") != std::string::npos &&
                              text.find("last reported 3 of 10") != std::string::npos);
    }
    EXPECT_TRUE(is_told) << outcomes[1]->what() << '\n' << outcomes[2]->what();
}

TEST(Turn, ThatWaitsElsewhereForAWaitingRankIsNamed) {
    expect_all_well(run_ranks(2, testing::on_one_host(), [](Communicator& comm) {
        const auto other = comm.split(0, comm.rank(), comm.options());
        Turn turn(unowned(comm), 0, patience(milliseconds{300}));
        if (turn.is_own()) {
            EXPECT_TRUE(attempt([&] { other->run({}); }));
            return;
        }
        wait_until([&] { return !comm.doing_elsewhere(0).empty(); }, soon(), "rank 0's barrier");
        const auto error = attempt([&] { turn.end(std::nullopt); });
        other->abort("the test has seen it");
        ASSERT_TRUE(error);
        EXPECT_EQ(error->code(), Code::timeout);
        EXPECT_THAT(error->what(), HasSubstr("has not reported anything; it waits in barrier #"));
        EXPECT_THAT(error->what(), HasSubstr("end the turn before what needs waiting ranks"));
    }));
}

TEST(Turn, ThatFailsSaysWhyOnTheOthersAndTheCommunicatorGoesOn) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Turn turn(unowned(comm), 2, patience(milliseconds{20000}));
        if (turn.is_own()) {
            turn.progress(1, 0);
            turn.end(std::string(1000, 'x') + "no data");
        } else {
            const auto error = attempt([&] { turn.end(std::nullopt); });
            ASSERT_TRUE(error);
            EXPECT_EQ(error->code(), Code::user);
            EXPECT_EQ(error->record()->peer, 2);
            EXPECT_EQ(error->what(), "rank 2 failed in its turn: " + std::string(487, 'x'));
        }
        comm.run({});
    }));
}

TEST(Turn, OfARankThatLeavesIsNoticed) {
    const Outcomes outcomes = run_ranks(3, test_options(), [](Communicator& comm) {
        comm.run({});
        Turn turn(unowned(comm), 1, patience(milliseconds{100000}));
        if (turn.is_own()) throw Error(Code::io, "out of data");
        turn.end(std::nullopt);
    });
    for (const size_t rank : {0, 2}) {
        ASSERT_TRUE(outcomes[rank]);
        EXPECT_EQ(outcomes[rank]->code(), Code::peer_lost) << outcomes[rank]->what();
    }
}

TEST(Turn, IsUsedAsItIsMeantTo) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        const auto refused = [](Code code, const char* text, const std::function<void()>& call) {
            const auto error = attempt(call);
            ASSERT_TRUE(error) << text;
            EXPECT_EQ(error->code(), code);
            EXPECT_THAT(error->what(), HasSubstr(text));
        };
        for (const int rank : {-1, 2}) {
            refused(Code::invalid_argument, "ranks are 0 to 1", [&] { Turn(unowned(comm), rank, milliseconds{1}); });
        }
        refused(Code::invalid_argument, "must be positive", [&] { Turn(unowned(comm), 0, milliseconds{0}); });
        Turn turn(unowned(comm), 0, patience(milliseconds{20000}));
        if (turn.is_own()) {
            refused(Code::invalid_argument, "-1 of 3", [&] { turn.progress(-1, 3); });
            refused(Code::invalid_argument, "4 of 3", [&] { turn.progress(4, 3); });
        } else {
            refused(Code::invalid_state, "rank 1 reports progress in the turn of rank 0", [&] { turn.progress(1, 1); });
        }
        const std::string inside =
            std::to_string(comm.rank()) + ": a turn of rank 1 begins inside the turn of rank 0 of communicator";
        refused(Code::invalid_state, inside.c_str(), [&] { Turn(unowned(comm), 1, milliseconds{1}); });
        const char* used = "is used inside the turn of rank 0";
        refused(Code::invalid_state, used, [&] { comm.run({}); });
        refused(Code::invalid_state, used, [&] { (void)comm.submit({}); });
        refused(Code::invalid_state, used, [&] { (void)comm.submit_job([] {}); });
        refused(Code::invalid_state, used, [&] { (void)comm.split(0, 0, comm.options()); });
        refused(Code::invalid_state, used, [&] { (void)comm.allocate(64); });
        refused(Code::invalid_state, used, [&] { comm.finalize(); });
        refused(Code::invalid_state, used, [&] { comm.in_one_call([] {}); });
        turn.end(std::nullopt);
        refused(Code::invalid_state, "has ended", [&] { turn.end(std::nullopt); });
        if (turn.is_own()) refused(Code::invalid_state, "has ended", [&] { turn.progress(1, 1); });
        comm.run({});
    }));
}

TEST(Turn, ThatFailsOrIsDroppedFreesTheCommunicator) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        for (const int rank : {0, 1}) {
            const Turn dropped(unowned(comm), rank, milliseconds{1000});
        }
        Turn failing(unowned(comm), 0, patience(milliseconds{20000}));
        const auto error = attempt([&] { failing.end("no data"); });
        EXPECT_EQ(error.has_value(), !failing.is_own());
        const Turn next(unowned(comm), 1, milliseconds{1000});
    }));
}

// A job that was queued before the turn goes on in it.
TEST(Turn, WaitsForWhatWasQueuedBefore) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        std::atomic<bool> begun{false};
        const WorkPtr job = comm.submit_job([&] {
            wait_until([&] { return begun.load(); }, soon(), "the turn");
            comm.run({});
        });
        Turn turn(unowned(comm), 0, patience(milliseconds{20000}));
        begun = true;
        turn.end(std::nullopt);
        EXPECT_TRUE(job->done());
        job->wait(soon());
    }));
}

}  // namespace
}  // namespace tsr::testing
