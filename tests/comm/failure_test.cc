// What goes wrong between ranks: they disagree, one is late, leaves, is interrupted or aborts. Every rank gets an error
// that names who and what, in time; nothing hangs and no data moves on a disagreement.
#include <gmock/gmock.h>

#include <atomic>
#include <future>

#include "base/log.hpp"
#include "comm/communicator.hpp"
#include "patience.hpp"
#include "ranks.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Tensor over(std::vector<float>& values) { return tensor_of(std::span<float>(values), DType::f32); }

Request all_reduce(const Tensor& tensor) {
    return {Collective::all_reduce, {}, {&tensor, 1}, ReduceOp::sum, -1, 0, {}};
}

// --- disagreement

// Large enough that a wrong path would move data.
std::vector<float> values_of(int rank) { return std::vector<float>(100000, static_cast<float>(rank)); }

void expect_mismatch(int world_size,
                     const std::function<Request(std::vector<float>&, std::vector<Tensor>&, int rank)>& make,
                     const std::vector<std::string>& told) {
    const auto outcomes = run_ranks(world_size, test_options(), [&](Communicator& comm) {
        std::vector<float> values = values_of(comm.rank());
        std::vector<Tensor> tensors;
        const Request request = make(values, tensors, comm.rank());
        try {
            comm.run(request);
        } catch (...) {
            EXPECT_EQ(values, values_of(comm.rank())) << "data moved";
            EXPECT_TRUE(comm.error().has_value());
            throw;
        }
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
        EXPECT_GE(outcome->record()->peer, 0);
        for (const std::string& text : told) EXPECT_THAT(outcome->what(), HasSubstr(text));
    }
}

Tensor front(std::vector<float>& values, size_t count, size_t offset = 0) {
    return tensor_of(std::span(values).subspan(offset, count), DType::f32);
}

TEST(Mismatch, OfTheCollective) {
    expect_mismatch(
        3,
        [](auto& values, auto& tensors, int rank) -> Request {
            tensors = {front(values, 50000)};
            if (rank == 1) return {Collective::broadcast, {}, tensors, ReduceOp::none, 2, 0, {}};
            return {Collective::all_reduce, {}, tensors, ReduceOp::sum, -1, 0, {}};
        },
        {"ranks 0 and 2 called all_reduce of 50000 f32 (sum)", "rank 1 broadcast of 50000 f32 with root 2"});
}

// A finalize is no barrier: the rank that ends is told apart from those that go on.
TEST(Mismatch, OfAFinalizeAndABarrier) {
    const auto outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
        comm.run({});
        if (comm.rank() == 1) {
            comm.finalize();
        } else {
            comm.run({});
        }
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
        EXPECT_THAT(outcome->what(), HasSubstr("rank 1 has finished (finalize, as operation #2) while ranks 0 and 2 "
                                               "called barrier"));
    }
    EXPECT_EQ(outcomes[0]->record()->peer, 1);
    EXPECT_EQ(outcomes[1]->record()->peer, 0);
    EXPECT_EQ(outcomes[1]->record()->operation, "finalize");
}

TEST(Mismatch, OfTheCount) {
    for (const size_t size : {size_t{1}, size_t{2000}, size_t{50000}}) {
        expect_mismatch(2,
                        [&](auto& values, auto& tensors, int rank) -> Request {
                            tensors = {front(values, size + static_cast<size_t>(rank))};
                            return {Collective::all_reduce, {}, tensors, ReduceOp::sum, -1, 0, {}};
                        },
                        {"of " + std::to_string(size) + " f32", "of " + std::to_string(size + 1) + " f32"});
    }
}

TEST(Mismatch, OfTheDtype) {
    expect_mismatch(2,
                    [](auto& values, auto& tensors, int rank) -> Request {
                        Tensor tensor = front(values, 1000);
                        if (rank == 1) tensor.dtype = DType::i32;
                        tensors = {tensor};
                        return {Collective::all_reduce, {}, tensors, ReduceOp::sum, -1, 0, {}};
                    },
                    {"1000 f32", "1000 i32"});
}

TEST(Mismatch, OfTheOperation) {
    expect_mismatch(2,
                    [](auto& values, auto& tensors, int rank) -> Request {
                        tensors = {front(values, 1000)};
                        return {
                            Collective::all_reduce, {}, tensors, rank == 0 ? ReduceOp::sum : ReduceOp::max, -1, 0, {}};
                    },
                    {"(sum)", "(max)"});
}

TEST(Mismatch, OfTheRoot) {
    expect_mismatch(2,
                    [](auto& values, auto& tensors, int rank) -> Request {
                        tensors = {front(values, 1000)};
                        return {Collective::broadcast, {}, tensors, ReduceOp::none, rank, 0, {}};
                    },
                    {"root 0", "root 1"});
}

TEST(Mismatch, OfTheNumberOfTensors) {
    expect_mismatch(2,
                    [](auto& values, auto& tensors, int rank) -> Request {
                        if (rank == 0)
                            tensors = {front(values, 1000)};
                        else
                            tensors = {front(values, 400), front(values, 600, 400)};
                        return {Collective::all_reduce, {}, tensors, ReduceOp::sum, -1, 0, {}};
                    },
                    {"in 2 tensors"});
}

// Of the lists that are broadcast, gathered and reduced and scattered: rank 0 gives `one`, rank 1 `other` lengths, which together are
// the same. A tensor of a reduce_scatter or an all_gather has a part for each of the two ranks.
void expect_lists_named(const std::vector<size_t>& one, const std::vector<size_t>& other, const std::string& told) {
    for (const Collective collective : {Collective::broadcast, Collective::all_gather, Collective::reduce_scatter}) {
        SCOPED_TRACE(name_of(collective));
        expect_mismatch(2,
                        [&](auto& values, auto& tensors, int rank) -> Request {
                            const std::vector<size_t>& lengths = rank == 0 ? one : other;
                            size_t at = 0;
                            for (const size_t length : lengths)
                                tensors.push_back(front(values, length, at)), at += length;
                            if (collective == Collective::broadcast) {
                                return {.collective = collective, .outputs = tensors, .peer = 0};
                            }
                            for (const size_t length : lengths) {
                                tensors.push_back(front(values, 2 * length, at));
                                at += 2 * length;
                            }
                            const std::span<const Tensor> all(tensors);
                            const auto parts = all.first(lengths.size());
                            const auto wholes = all.last(lengths.size());
                            if (collective == Collective::all_gather) {
                                return {.collective = collective, .inputs = parts, .outputs = wholes};
                            }
                            return {.collective = collective, .inputs = wholes, .outputs = parts, .op = ReduceOp::sum};
                        },
                        {told});
    }
}

TEST(Mismatch, OfTheNumberOfTensorsOfOtherLists) {
    for (const size_t size : {size_t{100}, size_t{10000}}) {
        expect_lists_named({size, size}, {size / 2, size / 2, size}, "in 3 tensors");
    }
}

TEST(Mismatch, OfTheLengthOfOneTensorOfOtherLists) {
    for (const size_t size : {size_t{100}, size_t{10000}}) {
        expect_lists_named({size, size}, {size - 1, size + 1}, "lengths of single tensors differ");
    }
}

TEST(Mismatch, OfTheLengthOfOneTensorOfAList) {
    expect_mismatch(2,
                    [](auto& values, auto& tensors, int rank) -> Request {
                        const size_t first = rank == 0 ? 400 : 500;
                        tensors = {front(values, first), front(values, 1000 - first, first)};
                        return {Collective::all_reduce, {}, tensors, ReduceOp::sum, -1, 0, {}};
                    },
                    {"lengths of single tensors differ"});
}

TEST(Mismatch, OfGatheredLengths) {
    expect_mismatch(2,
                    [](auto& values, auto& tensors, int rank) -> Request {
                        static thread_local Tensor input;
                        input = front(values, 100);
                        tensors = {front(values, rank == 0 ? 100 : 200, 1000), front(values, 100, 5000)};
                        return {Collective::all_gather_v, {&input, 1}, tensors, ReduceOp::none, -1, 0, {}};
                    },
                    {"all_gather_v of 200 f32", "all_gather_v of 300 f32"});
}

TEST(Mismatch, OfABuffersSize) {
    const auto outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        static_cast<void>(comm.allocate(size_t{100} + static_cast<size_t>(comm.rank())));
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(),
                    AllOf(HasSubstr("allocate of 100 bytes"), HasSubstr("rank 1 allocate of 101 bytes")));
    }
}

TEST(Mismatch, PoisonsTheCommunicator) {
    const auto outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        std::vector<float> values(10);
        const Tensor tensor = front(values, comm.rank() == 0 ? 10 : 5);
        EXPECT_THROW(comm.run(all_reduce(tensor)), Error);
        comm.run({});
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::aborted);
        ASSERT_TRUE(outcome->record()->cause);
        EXPECT_EQ(outcome->record()->cause->code, Code::mismatch);
    }
}

// --- those who do not come

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
            if (text.find("waits for") != std::string::npos)
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
    EXPECT_THAT(line, HasSubstr("rank 0 waits for rank 1 to join the communicator of 3 ranks"));
}

TEST(Failure, DifferingWorldSizesAreNamed) {
    const auto store = make_memory_store(patience(milliseconds{20000}));
    const auto outcomes =
        run_threads(2, [&](int rank) { static_cast<void>(join_job(store, rank, rank == 0 ? 2 : 3, test_options())); });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("rank 1 joins a communicator of 3 ranks, rank 0 one of 2"));
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
    if (outcomes[1]) EXPECT_EQ(outcomes[1]->code(), Code::timeout) << outcomes[1]->what();
}

// Where all see what the others do.
CommOptions on_one_host() {
    CommOptions options = test_options("shm");
    options.host_id = "here";
    return options;
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

// --- abort, destruction, interruption

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
