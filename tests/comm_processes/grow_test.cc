// Ranks that die and are replaced: the others stay in their processes, and all make a communicator of the old size again.
// Processes beyond the job's ranks wait until the test gives one of them the place of a rank, as a launcher does.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "comm/seats.hpp"
#include "patience.hpp"
#include "processes.hpp"
#include "ranks.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

float sum(Communicator& comm, float own) {
    const Tensor tensor = tensor_of(std::span<float>(&own, 1), DType::f32);
    comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
    return own;
}

CommOptions options_of(int rank, int world, milliseconds timeout) {
    CommOptions options = test_options(test_backend());
    options.timeout = patience(timeout);
    options.host_id = pretended_host(test_placement(), rank, world);
    return options;
}

Deadline soon() { return Deadline::in(patience(milliseconds{60000})); }

// A rank's life, in the place that `replacement` others had before it.
void live(int rank, int world, int replacement, const std::shared_ptr<Store>& store, const Processes::Say& say,
          const Departures& departures = {}, milliseconds timeout = milliseconds{30000}) {
    std::shared_ptr<Communicator> comm =
        create_replaceable(store, rank, world, replacement, options_of(rank, world, timeout), departures);
    for (int time = 1;; ++time) {
        EXPECT_EQ(comm->rank(), rank);
        EXPECT_EQ(comm->world_size(), world);
        try {
            say(fmt::format("sum {} of communicator {}", sum(*comm, static_cast<float>(rank)), time));
            while (sum(*comm, store->get("stop", soon()) ? 1 : 0) == 0) continue;
            return comm->finalize();
        } catch (const Error& error) {
            say("failed");
            if (const auto wait = store->get(fmt::format("delay/{}", rank), soon())) (void)store->wait(*wait, soon());
        }
        const auto grown = grow(*comm, comm->options());
        comm = grown;
    }
}

class Grow : public ::testing::Test {
   protected:
    // `timeout`: of the ranks that begin.
    void job(int world, int spares, milliseconds timeout = milliseconds{30000}) {
        world_ = world;
        processes_.emplace(world + spares, [world, timeout](int process, const auto& store, const auto& say) {
            if (process < world) return live(process, world, 0, store, say, {}, timeout);
            say("spare");
            const std::string place = store->wait(fmt::format("place/{}", process), soon());
            live(std::stoi(place), world, std::stoi(place.substr(place.find(' '))), store, say);
        });
        for (int rank = 0; rank < world; ++rank) await(rank, 1);
    }
    // The process works in its communicator number `time`.
    void await(int process, int time) {
        processes_->await(process, fmt::format("sum {} of communicator {}", world_ * (world_ - 1) / 2, time));
    }
    void set(const std::string& key, const std::string& value) { processes_->store().set(key, value, soon()); }
    // The spare `process` gets the place of `rank`.
    void replace(int rank, int process, int replacement = 1) {
        set(fmt::format("place/{}", process), fmt::format("{} {}", rank, replacement));
    }
    void kill(int process) {
        processes_->signal(process, SIGKILL);
        (void)processes_->join(process);
    }
    void expect_end_well(const std::vector<int>& processes) {
        set("stop", "1");
        for (const int process : processes) {
            const Outcome& outcome = processes_->join(process, patience(milliseconds{60000}));
            EXPECT_TRUE(outcome.well()) << "process " << process << ": " << outcome.text;
        }
    }

    int world_ = 0;
    std::optional<Processes> processes_;
};

TEST_F(Grow, OneThatIsKilledInACollectiveIsReplaced) {
    job(3, 1);
    kill(1);
    replace(1, 3);
    for (const int process : {0, 2}) await(process, 2);
    await(3, 1);
    expect_end_well({0, 2, 3});
}

TEST_F(Grow, RankZeroIsReplacedAndItsReplacementToo) {
    job(3, 2);
    kill(0);
    replace(0, 3);
    for (const int process : {1, 2}) await(process, 2);
    kill(3);
    replace(0, 4, 2);
    for (const int process : {1, 2}) await(process, 3);
    expect_end_well({1, 2, 4});
}

TEST_F(Grow, AllButOneAreReplaced) {
    job(3, 2);
    kill(0);
    kill(2);
    replace(2, 3);
    replace(0, 4);
    await(1, 2);
    expect_end_well({1, 3, 4});
}

// Rank 2 dies once it has announced itself to the others: the attempt in which they wait cannot succeed any more.
TEST_F(Grow, OneThatDiesWhileTheOthersWaitForItIsReplacedToo) {
    job(4, 2);
    set("delay/0", "second");
    set("delay/3", "second");
    kill(1);
    processes_->await(0, "failed");
    processes_->await(3, "failed");
    wait_until([&] { return processes_->store().get("seats/world/1/2/here", soon()).has_value(); }, soon(), "rank 2");
    kill(2);
    set("second", "1");
    replace(1, 4);
    replace(2, 5);
    for (const int process : {0, 3}) await(process, 2);
    expect_end_well({0, 3, 4, 5});
}

// It comes before the others know of the death.
TEST_F(Grow, AReplacementWaitsForTheOthers) {
    job(2, 1);
    set("delay/0", "arrived");
    kill(1);
    replace(1, 2);
    wait_until([&] { return processes_->store().get("seats/world/1/latest/1", soon()).has_value(); }, soon(), "it");
    set("arrived", "1");
    await(0, 2);
    expect_end_well({0, 2});
}

// It is only stopped, but the launcher has given its place to another one.
TEST_F(Grow, AProcessThatWasReplacedCannotComeBack) {
    job(3, 1, milliseconds{2500});
    processes_->signal(1, SIGSTOP);
    replace(1, 3);
    for (const int process : {0, 2}) await(process, 2);
    processes_->signal(1, SIGCONT);
    EXPECT_THAT(processes_->join(1, patience(milliseconds{60000})).text,
                AllOf(HasSubstr("ABORTED"), HasSubstr("another process has replaced rank 1")));
    expect_end_well({0, 2, 3});
}

TEST_F(Grow, ThoseThatDoNotComeAreNamed) {
    job(3, 0, milliseconds{1500});
    kill(1);
    for (const int process : {0, 2}) {
        EXPECT_THAT(
            processes_->join(process, patience(milliseconds{60000})).text,
            AllOf(HasSubstr("TIMEOUT"), HasSubstr("communicator 'world' cannot be grown: rank 1 did not join the"),
                  HasSubstr("a rank that is alive must call grow, too")));
    }
}

TEST_F(Grow, OneThatHasEndedIsNotWaitedFor) {
    constexpr int world = 2;
    const auto gone = [] { return std::vector<Departure>{{1, "exited with status 0"}}; };
    Processes processes(world, [&](int rank, const auto& store, const auto& say) {
        if (rank == 0) return live(rank, world, 0, store, say, gone);
        (void)create_replaceable(store, rank, world, 0, options_of(rank, world, milliseconds{30000}));
    });
    EXPECT_THAT(processes.join(0, patience(milliseconds{60000})).text,
                AllOf(HasSubstr("PEER_LOST"), HasSubstr("rank 1 exited with status 0 before it joined")));
}

TEST(GrowThreads, OnlyTheJobsCommunicatorCanGrow) {
    expect_all_well(run_ranks(2, test_options(test_backend()), [](Communicator& comm) {
        try {
            (void)grow(comm, comm.options());
            FAIL();
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::invalid_state);
            EXPECT_THAT(error.what(), HasSubstr("tessera run --on-loss replace"));
        }
        EXPECT_EQ(sum(comm, 1), 2.0F) << "nothing has happened";
    }));
}

}  // namespace
}  // namespace tsr::testing
