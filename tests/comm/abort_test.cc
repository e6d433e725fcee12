// Waits that end before their operation does: by an abort here or at a peer, by an interrupt, by a deadline, or with
// the communicator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "comm/communicator.hpp"
#include "patience.hpp"
#include "ranks.hpp"
#include "requests.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

TEST(Failure, AbortEndsWaitsHereAndAtThePeers) {
    const auto begin = Clock::now();
    const auto outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
        if (comm.rank() == 2) {
            comm.abort("loss is not a number");
            comm.abort("again");
            comm.run({});
            return;
        }
        std::thread other;
        if (comm.rank() == 0) other = std::thread([&] { EXPECT_NO_THROW(static_cast<void>(comm.error())); });
        try {
            comm.run({});
        } catch (...) {
            if (other.joinable()) other.join();
            throw;
        }
    });
    EXPECT_LT(Clock::now() - begin, patience(std::chrono::seconds(5)));
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::aborted);
        EXPECT_THAT(outcome->what(), HasSubstr("loss is not a number"));
    }
}

// A rank that meets the abort as it begins a transfer, and goes with another in flight, tells no cause of its own.
TEST(Failure, TheFirstCauseIsToldByARankThatGoesWithWork) {
    std::atomic<bool> gone{false};
    const auto outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
        std::vector<float> values(4);
        std::vector<float> more(4);
        const Tensor tensor = over(values);
        const Tensor second = over(more);
        if (comm.rank() == 0) {
            comm.run({Collective::recv, {}, {&tensor, 1}, ReduceOp::none, 1, 0, {}});
            return;
        }
        if (comm.rank() == 2) {
            comm.abort("enough");
            wait_until([&] { return gone.load(); }, soon(), "rank 1");
            return;
        }
        wait_until([&] { return comm.error().has_value(); }, soon(), "the abort");
        const WorkPtr near = comm.submit({Collective::recv, {}, {&tensor, 1}, ReduceOp::none, 2, 0, {}});
        WorkPtr far;
        try {
            far = comm.submit({Collective::recv, {}, {&second, 1}, ReduceOp::none, 0, 0, {}});
        } catch (const Error& e) {
            EXPECT_THAT(e.what(), HasSubstr("enough"));  // the first had failed
        }
        EXPECT_THROW(near->wait(soon()), Error);
        comm.leave();
        gone = true;
        if (far) far->wait(soon());
    });
    for (const int rank : {0, 1}) {
        const auto& outcome = outcomes[static_cast<size_t>(rank)];
        if (rank == 1 && !outcome) continue;
        ASSERT_TRUE(outcome);
        EXPECT_THAT(outcome->what(), HasSubstr("enough"));
    }
}

TEST(Failure, AbortFromAnotherThreadEndsThisRanksOwnWait) {
    const auto outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
        if (comm.rank() == 1) {
            wait_until([&] { return comm.error().has_value(); }, soon(), "the abort");
            EXPECT_EQ(comm.error()->code(), Code::aborted);
            return;
        }
        std::vector<float> values(10);
        const Tensor tensor = over(values);
        const WorkPtr work = comm.submit(all_reduce(tensor));
        const WorkPtr behind = comm.submit(all_reduce(tensor));
        comm.abort("enough");
        EXPECT_THROW(behind->wait(soon()), Error);
        EXPECT_EQ(behind->error()->code(), Code::aborted);
        work->wait(soon());
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_EQ(outcomes[0]->code(), Code::aborted);
    EXPECT_THAT(outcomes[0]->what(), HasSubstr("enough"));
    EXPECT_FALSE(outcomes[1]) << outcomes[1]->what();
}

TEST(Failure, WorkOutlivesItsCommunicator) {
    const auto store = make_memory_store(patience(milliseconds{20000}));
    std::atomic<bool> submitted{false};
    expect_all_well(run_threads(2, [&](int rank) {
        auto comm = join_job(store, rank, 2, test_options());
        std::vector<float> values(10);
        const Tensor tensor = over(values);
        std::vector<WorkPtr> works;
        // Rank 1 never takes part; rank 0 destroys its communicator with work in it.
        if (rank == 0) {
            works = {comm->submit(all_reduce(tensor)), comm->submit(all_reduce(tensor))};
            submitted = true;
        } else {
            wait_until([&] { return submitted.load(); }, soon(), "rank 0");
        }
        comm.reset();
        for (const WorkPtr& work : works) {
            ASSERT_TRUE(work->done());
            ASSERT_TRUE(work->error());
            EXPECT_TRUE(work->error()->code() == Code::aborted || work->error()->code() == Code::peer_lost);
        }
    }));
}

TEST(Failure, InterruptEndsASynchronousWaitAndTellsThePeers) {
    std::atomic<bool> pressed{false};
    const auto begin = Clock::now();
    const auto outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
        if (comm.rank() == 1) {
            pressed = true;
            wait_until([&] { return comm.error().has_value(); }, soon(), "the interruption");
            comm.run({});
            return;
        }
        set_interrupt([](void* flag) { return static_cast<std::atomic<bool>*>(flag)->load() ? 1 : 0; }, &pressed);
        comm.run({});
    });
    EXPECT_LT(Clock::now() - begin, patience(std::chrono::seconds(5)));
    ASSERT_TRUE(outcomes[0]);
    EXPECT_EQ(outcomes[0]->code(), Code::interrupted);
    ASSERT_TRUE(outcomes[1]);
    EXPECT_EQ(outcomes[1]->code(), Code::aborted) << outcomes[1]->what();
    EXPECT_THAT(outcomes[1]->what(), HasSubstr("interrupted"));
}

TEST(Failure, InterruptedCallBehindAsynchronousWorkLetsGoOfItsMemory) {
    std::atomic<bool> pressed{false};
    const auto outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
        if (comm.rank() == 1) {
            wait_until([&] { return comm.error().has_value(); }, soon(), "the interruption");
            return;
        }
        set_interrupt([](void* flag) { return static_cast<std::atomic<bool>*>(flag)->load() ? 1 : 0; }, &pressed);
        std::vector<float> first(100000);
        const Tensor tensor = over(first);
        const WorkPtr work = comm.submit(all_reduce(tensor));
        {
            std::vector<float> second(100000);
            const Tensor other = over(second);
            pressed = true;
            EXPECT_THROW(comm.run(all_reduce(other)), Error);
        }
        pressed = false;
        work->wait(soon());
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_TRUE(outcomes[0]->code() == Code::interrupted || outcomes[0]->code() == Code::aborted)
        << outcomes[0]->what();
    EXPECT_FALSE(outcomes[1]) << outcomes[1]->what();
}

TEST(Failure, ACallInTheInterruptCallbackOfAnotherIsRefusedAndTheOtherGoesOn) {
    for (const bool submits : {false, true}) {
        std::atomic<bool> made{false};
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            std::vector<float> values(10, 1);
            const Tensor tensor = over(values);
            if (comm.rank() == 1) {
                await_call(made);
                comm.run(all_reduce(tensor));
                return;
            }
            const auto inside = [&] { submits ? static_cast<void>(comm.submit({})) : comm.run({}); };
            const CallInInterrupt callback(inside, made);
            comm.run(all_reduce(tensor));
            EXPECT_EQ(values, std::vector<float>(10, 2));
            ASSERT_TRUE(callback.error());
            EXPECT_EQ(callback.error()->code(), Code::invalid_state);
            EXPECT_THAT(callback.error()->what(), HasSubstr("interrupt callback"));
        }));
    }
}

TEST(Failure, WaitingWithADeadlineLeavesTheWorkAlive) {
    std::atomic<bool> go{false};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        std::vector<float> values(10, 1);
        const Tensor tensor = over(values);
        if (comm.rank() == 1) {
            wait_until([&] { return go.load(); }, soon(), "rank 0");
            comm.run(all_reduce(tensor));
            return;
        }
        const WorkPtr work = comm.submit(all_reduce(tensor));
        try {
            work->wait(Deadline::in(milliseconds{20}));
            ADD_FAILURE() << "done without rank 1";
        } catch (const Error& e) {
            EXPECT_EQ(e.code(), Code::not_ready);
        }
        go = true;
        work->wait(soon());
        EXPECT_EQ(values[0], 2);
    }));
}

}  // namespace
}  // namespace tsr::testing
