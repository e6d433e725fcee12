// Ranks that never join, come late or leave. The others get an error in time that names who and what; nothing hangs.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "comm/communicator.hpp"
#include "patience.hpp"
#include "ranks.hpp"
#include "requests.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

TEST(Failure, RankThatNeverJoinsIsNamed) {
    CommOptions options = test_options();
    options.timeout = patience(milliseconds{300});
    const auto store = make_memory_store(patience(milliseconds{20000}));
    const auto outcomes = run_threads(4, [&](int rank) {
        if (rank == 2) return;
        static_cast<void>(join_job(store, rank, 4, options));
    });
    for (const int rank : {0, 1, 3}) {
        ASSERT_TRUE(outcomes[static_cast<size_t>(rank)]);
        const Error& error = *outcomes[static_cast<size_t>(rank)];
        EXPECT_EQ(error.code(), Code::timeout);
        EXPECT_EQ(error.record()->rank, rank);
        EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(rank) + ": rank 2 did not join"));
    }
    // After that the ranks can meet again.
    options.timeout = patience(milliseconds{20000});
    expect_all_well(run_threads(4, [&](int rank) {
        if (rank == 2) {
            EXPECT_THROW(static_cast<void>(join_job(store, rank, 4, options)), Error);
        }
        join_job(store, rank, 4, options)->run({});
    }));
}

TEST(Failure, RankThatHasEndedWithoutJoiningIsNotWaitedFor) {
    CommOptions options = test_options();
    options.timeout = patience(milliseconds{100000});  // longer than a test may take
    for (const int absent : {0, 2}) {
        const auto store = make_memory_store(patience(milliseconds{20000}));
        const Departures departures = [&] { return std::vector<Departure>{{absent, "exited with status 0"}}; };
        const auto outcomes = run_threads(4, [&](int rank) {
            if (rank != absent) static_cast<void>(join_job(store, rank, 4, options, departures));
        });
        for (const int rank : {1, 3}) {
            ASSERT_TRUE(outcomes[static_cast<size_t>(rank)]);
            const Error& error = *outcomes[static_cast<size_t>(rank)];
            EXPECT_EQ(error.code(), Code::peer_lost);
            EXPECT_EQ(error.record()->peer, absent);
            EXPECT_THAT(error.what(),
                        HasSubstr(fmt::format("rank {}: rank {} exited with status 0 before it joined the "
                                              "communicator of 4 ranks",
                                              rank, absent)));
        }
    }
}

TEST(Failure, RankThatHasJoinedAndEndedIsNotMissed) {
    const auto store = make_memory_store(patience(milliseconds{20000}));
    std::atomic<bool> joined{false};
    std::promise<void> looked;
    int looks = 0;
    const auto outcomes = run_threads(3, [&](int rank) {
        Departures departures;
        if (rank == 1) {
            departures = [&] {  // is asked once it has joined, while it waits for rank 2
                joined = true;
                return std::vector<Departure>{};
            };
        }
        if (rank == 0) {
            departures = [&] {
                if (!joined) return std::vector<Departure>{};
                if (++looks == 2) looked.set_value();  // the first look has not made it give up
                return std::vector<Departure>{{1, "exited with status 0"}};
            };
        }
        if (rank == 2) looked.get_future().wait();
        join_job(store, rank, 3, test_options(), departures)->run({});
    });
    expect_all_well(outcomes);
}

TEST(Failure, WhoeverIsWaitedForLongIsTold) {
    std::promise<std::string> told;
    log::set_sink(
        [](int32_t, const char* line, void* data) {
            const std::string text(line);
            if (text.find("is waiting for") != std::string::npos)
                static_cast<std::promise<std::string>*>(data)->set_value(text);
        },
        &told, nullptr);
    const auto store = make_memory_store(patience(milliseconds{20000}));
    std::string line;
    expect_all_well(run_threads(3, [&](int rank) {
        if (rank == 1) line = told.get_future().get();  // comes only when it has been missed
        join_job(store, rank, 3, test_options())->run({});
    }));
    log::set_sink(nullptr, nullptr, nullptr);
    EXPECT_THAT(line, HasSubstr("rank 0 is waiting for rank 1 to join the communicator of 3 ranks"));
}

TEST(Failure, DifferingWorldSizesAreNamed) {
    const auto store = make_memory_store(patience(milliseconds{20000}));
    const auto outcomes =
        run_threads(2, [&](int rank) { static_cast<void>(join_job(store, rank, rank == 0 ? 2 : 3, test_options())); });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("rank 1 joins a communicator of 3 ranks, but rank 0 one of 2"));
    }
}

TEST(Failure, DifferingBackendsAreNamed) {
    const auto store = make_memory_store(patience(milliseconds{20000}));
    const auto outcomes = run_threads(
        2, [&](int rank) { static_cast<void>(join_job(store, rank, 2, test_options(rank == 0 ? "shm" : "auto"))); });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("'shm'"));
    }
}

// Of each rank, for what it issues from then on.
TEST(Failure, ATimeoutThatIsSetLaterCountsForLaterOperations) {
    CommOptions options = test_options();
    options.timeout = patience(milliseconds{100000});
    std::atomic<bool> told{false};
    const auto outcomes = run_ranks(2, options, [&](Communicator& comm) {
        std::vector<float> values(4, 1);
        const Tensor tensor = tensor_of(std::span(values), DType::f32);
        const Request sum{Collective::all_reduce, {}, {&tensor, 1}, ReduceOp::sum, -1, 0, {}};
        EXPECT_EQ(comm.options().timeout, options.timeout);
        EXPECT_THROW(comm.set_timeout(milliseconds{0}), Error);
        EXPECT_THROW(comm.set_timeout(milliseconds{-1}), Error);
        comm.run(sum);
        if (comm.rank() == 1) {
            wait_until([&] { return told.load(); }, soon(), "the other's timeout");
            return;
        }
        comm.set_timeout(milliseconds{300});
        EXPECT_EQ(comm.options().timeout, milliseconds{300});
        const auto begin = Clock::now();
        const WorkPtr work = comm.submit(sum);
        comm.set_timeout(options.timeout);  // too late for that one
        try {
            work->wait(soon());
            ADD_FAILURE() << "rank 1 did not come, and nobody noticed";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::timeout);
            EXPECT_EQ(error.record()->peer, 1);
            EXPECT_THAT(error.what(), HasSubstr("timed out after 0.3 s"));
        }
        EXPECT_LT(Clock::now() - begin, patience(std::chrono::seconds(20)));
        told.store(true);
    });
    EXPECT_FALSE(outcomes[0]);
    EXPECT_FALSE(outcomes[1]);
}

TEST(Failure, LateRankIsNamedWithItsLastOperation) {
    std::atomic<int> failed{0};
    const auto outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
        std::vector<float> values(64, 1);
        const Tensor tensor = over(values);
        comm.run({Collective::broadcast, {}, {&tensor, 1}, ReduceOp::none, 0, 0, {}});
        comm.set_timeout(milliseconds{300});
        if (comm.rank() == 1) {
            wait_until([&] { return failed.load() == 2; }, soon(), "the others' timeouts");
        }
        try {
            comm.run({Collective::all_reduce, {}, {&tensor, 1}, ReduceOp::sum, -1, 0, "bucket 5"});
        } catch (...) {
            ++failed;
            throw;
        }
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::timeout) << outcome->what();
        EXPECT_THAT(outcome->what(), HasSubstr("all_reduce #2 (bucket 5, 256 B)"));
        EXPECT_THAT(outcome->what(), HasSubstr("never entered it; its last operation was broadcast #1 (256 B)"));
        EXPECT_EQ(outcome->record()->sequence, 2);
        EXPECT_EQ(outcome->record()->operation, "all_reduce");
        EXPECT_EQ(outcome->record()->peer, 1);
    }
    EXPECT_THAT(outcomes[0]->what(), HasSubstr("rank 0: "));
}

TEST(Failure, ALateRankIsNamedInTimeByOneThatSpins) {
    CommOptions options = test_options();
    options.spin_count = INT32_MAX;
    std::atomic<bool> failed{false};
    const auto outcomes = run_ranks(2, options, [&](Communicator& comm) {
        if (comm.rank() == 1) {
            wait_until([&] { return failed.load(); }, Deadline::in(patience(milliseconds{5000})), "rank 0's timeout");
        }
        comm.set_timeout(milliseconds{300});
        try {
            comm.run({});
        } catch (...) {
            failed = true;
            throw;
        }
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_EQ(outcomes[0]->code(), Code::timeout) << outcomes[0]->what();
    // Rank 0 had entered: across hosts the late one may be through before it hears that rank 0 has given up.
    if (outcomes[1]) {
        EXPECT_EQ(outcomes[1]->code(), Code::timeout) << outcomes[1]->what();
    }
}

// What a late rank does meanwhile, if it is in a call: it never came, but who looks at it should know for what it waits.
struct Elsewhere {
    std::string told;                                                          // of the late rank
    std::function<std::shared_ptr<Communicator>(Communicator& comm)> prepare;  // by all ranks
    std::function<void(Communicator& comm, Communicator& other)> wait;         // by the late one
};

void expect_whereabouts_told(const Elsewhere& elsewhere, const CommOptions& options) {
    SCOPED_TRACE(elsewhere.told);
    constexpr int late = 1;
    CommOptions patient = options;
    patient.timeout = patience(milliseconds{20000});
    std::atomic<bool> failed{false};
    const auto outcomes = run_ranks(3, patient, [&](Communicator& comm) {
        const auto other = elsewhere.prepare(comm);
        if (comm.rank() == late) {
            elsewhere.wait(comm, *other);
            return;
        }
        if (comm.rank() == 2) {
            wait_until([&] { return failed.load(); }, soon(), "rank 0's timeout");
            return;
        }
        comm.set_timeout(milliseconds{700});
        try {
            comm.run({});
        } catch (...) {
            failed = true;
            throw;
        }
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_EQ(outcomes[0]->code(), Code::timeout) << outcomes[0]->what();
    EXPECT_EQ(outcomes[0]->record()->peer, late);
    EXPECT_THAT(outcomes[0]->what(), HasSubstr(elsewhere.told));
    EXPECT_THAT(outcomes[0]->what(), HasSubstr("rank 2 (pid"));
    EXPECT_THAT(outcomes[0]->what(), HasSubstr("never entered it; its last operation was")) << "of rank 2";
}

TEST(Failure, ALateRankThatWaitsInAnotherCallIsToldWithThatCall) {
    const auto split = [](int (*color)(int)) {
        return [color](Communicator& comm) {
            CommOptions options = comm.options();
            options.name = "pairs";
            return comm.split(color(comm.rank()), -comm.rank(), options);
        };
    };
    const std::vector<Elsewhere> cases{
        {"is not in it: it waits in barrier #1 of communicator 'pairs'", split([](int) { return 0; }),
         [](Communicator&, Communicator& other) { other.run({}); }},
        {"is not in it: it waits in barrier #2 of communicator 'pairs'",
         [](Communicator& comm) {
             CommOptions options = comm.options();
             options.name = "all";
             const auto all = comm.split(0, -comm.rank(), options);
             options.name = "pairs";
             auto pairs = all->split(all->rank() == 0 ? -1 : 0, 0, options);  // without rank 2
             if (pairs) pairs->run({});
             return pairs;
         },
         [](Communicator&, Communicator& other) { other.run({}); }},
        {"is not in it: it waits in recv #1 (from rank 2, tag 7, 40 B)", split([](int) { return 0; }),
         [](Communicator& comm, Communicator&) {
             std::vector<float> values(10);
             const Tensor tensor = over(values);
             comm.run({.collective = Collective::recv, .outputs = {&tensor, 1}, .peer = 2, .tag = 7});
         }},
    };
    for (const Elsewhere& elsewhere : cases) expect_whereabouts_told(elsewhere, on_one_host());
}

// It may be anywhere: nothing else is said of it.
TEST(Failure, OfAMessageThatHasArrivedNobodyIsSaidToWait) {
    std::atomic<bool> failed{false};
    const auto outcomes = run_ranks(2, on_one_host(), [&](Communicator& comm) {
        std::vector<float> values(10);
        const Tensor tensor = over(values);
        if (comm.rank() == 1) {
            comm.run({.collective = Collective::recv, .outputs = {&tensor, 1}, .peer = 0});
            wait_until([&] { return failed.load(); }, soon(), "rank 0's timeout");
            return;
        }
        const Deadline late = Deadline::in(milliseconds{300});  // the receiver sleeps by then
        while (!late.expired()) std::this_thread::yield();
        comm.run({.collective = Collective::send, .inputs = {&tensor, 1}, .peer = 1});
        comm.set_timeout(milliseconds{500});
        try {
            comm.run({});
        } catch (...) {
            failed = true;
            throw;
        }
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_THAT(outcomes[0]->what(), HasSubstr("rank 1 (pid"));
    EXPECT_THAT(outcomes[0]->what(), HasSubstr("never entered it; its last operation was recv #1"));
    EXPECT_THAT(outcomes[0]->what(), ::testing::Not(HasSubstr("waits in")));
}

TEST(Failure, RankThatLeavesIsNotedBeforeTheDeadline) {
    const auto begin = Clock::now();
    const auto outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
        comm.run({});
        if (comm.rank() != 2) comm.run({});
    });
    EXPECT_LT(Clock::now() - begin, patience(std::chrono::seconds(5)));
    EXPECT_FALSE(outcomes[2]);
    for (const int rank : {0, 1}) {
        ASSERT_TRUE(outcomes[static_cast<size_t>(rank)]);
        const Error& error = *outcomes[static_cast<size_t>(rank)];
        EXPECT_EQ(error.code(), Code::peer_lost) << error.what();
        EXPECT_EQ(error.record()->peer, 2);
        EXPECT_THAT(error.what(), HasSubstr("left the communicator; its last operation was barrier #1"));
    }
}

TEST(Failure, LeavingAfterTheLastCollectiveDisturbsNobody) {
    for (int repeat = 0; repeat < 50; ++repeat) {
        expect_all_well(run_ranks(4, test_options(), [](Communicator& comm) {
            std::vector<float> values(100, 1);
            const Tensor tensor = over(values);
            comm.run(all_reduce(tensor));
        }));
    }
}

}  // namespace
}  // namespace tsr::testing
