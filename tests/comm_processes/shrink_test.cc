// Ranks that die, and the rest of them, who go on in the same processes. The store is a directory, which nobody's death
// takes away.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "patience.hpp"
#include "processes.hpp"
#include "ranks.hpp"
#include "store/server.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

float sum(Communicator& comm, float own) {
    const Tensor tensor = tensor_of(std::span<float>(&own, 1), DType::f32);
    comm.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
    return own;
}

CommOptions short_options(milliseconds timeout = milliseconds{20000}) {
    CommOptions options = test_options(test_backend());
    options.timeout = patience(timeout);
    return options;
}

// The number under which this rank goes on, and how many do.
std::string place(const Communicator& comm) { return fmt::format("{} of {}", comm.rank(), comm.world_size()); }

// Works until something fails, then goes on with those that are left, who sum their old numbers.
void fail_and_go_on(int rank, int world, const std::shared_ptr<Store>& store, const Processes::Say& say,
                    const CommOptions& options) {
    auto comm = join_job(store, rank, world, options);
    sum(*comm, 1);
    say("works");
    try {
        while (true) sum(*comm, 1);
    } catch (const Error&) {
        // Whoever died, or was late, is not among those that come now.
    }
    const auto rest = comm->shrink(comm->options());
    comm.reset();
    const float numbers = sum(*rest, static_cast<float>(rank));
    say(fmt::format("{}: {}", place(*rest), numbers));
    rest->finalize();
}

class Shrink : public ::testing::Test {
   protected:
    void job(int world, const CommOptions& options) {
        processes_.emplace(world, [world, options](int rank, const auto& store, const auto& say) {
            fail_and_go_on(rank, world, store, say, options);
        });
        for (int rank = 0; rank < world; ++rank) processes_->await(rank, "works");
    }
    void expect_goes_on(int rank, const std::string& how) {
        const Outcome& outcome = processes_->join(rank, patience(milliseconds{60000}));
        EXPECT_TRUE(outcome.well()) << "rank " << rank << ": " << outcome.text;
        EXPECT_THAT(outcome.text, HasSubstr(how)) << "rank " << rank;
    }

    std::optional<Processes> processes_;
};

TEST_F(Shrink, OneOfThreeIsKilled) {
    job(3, short_options());
    processes_->signal(1, SIGKILL);
    expect_goes_on(0, "0 of 2: 2");
    expect_goes_on(2, "1 of 2: 2");
}

TEST_F(Shrink, RankZeroIsKilled) {
    job(3, short_options());
    processes_->signal(0, SIGKILL);
    expect_goes_on(1, "0 of 2: 3");
    expect_goes_on(2, "1 of 2: 3");
}

TEST_F(Shrink, TwoAreKilledAtOnce) {
    job(4, short_options());
    processes_->signal(3, SIGKILL);
    processes_->signal(0, SIGKILL);
    expect_goes_on(1, "0 of 2: 3");
    expect_goes_on(2, "1 of 2: 3");
}

TEST_F(Shrink, TheLastOneGoesOnAlone) {
    job(2, short_options());
    processes_->signal(0, SIGKILL);
    expect_goes_on(1, "0 of 1: 1");
}

// It is late, not dead: the others wait for it until the deadline, then go on; when it wakes up it may not come back.
TEST_F(Shrink, OneThatIsStoppedIsLeftBehindAndHarmsNobody) {
    constexpr int world = 3;
    const CommOptions options = short_options(milliseconds{4000});
    Processes processes(world, [&](int rank, const auto& store, const auto& say) {
        auto comm = join_job(store, rank, world, options);
        const auto buffer = comm->allocate(size_t{1} << 20);
        const Tensor tensor{buffer->data(), Dims{1 << 18}, DType::f32, {}};
        const Request reduction{.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum};
        comm->run(reduction);
        say("works");
        try {
            while (true) comm->run(reduction);
        } catch (const Error&) {
            if (rank == 1) say("woke up");
        }
        const auto rest = comm->shrink(options);
        const auto fresh = rest->allocate(size_t{1} << 20);
        const Tensor anew{fresh->data(), Dims{1 << 18}, DType::f32, {}};
        say("goes on");
        store->wait("awake", Deadline::in(patience(milliseconds{60000})));
        for (int step = 0; step < 200; ++step) {
            for (float& value : anew.as<float>()) value = 1;
            rest->run({.collective = Collective::all_reduce, .outputs = {&anew, 1}, .op = ReduceOp::sum});
            for (const float value : anew.as<float>()) ASSERT_EQ(value, 2.0F);
        }
        say(place(*rest));
    });
    processes.await_all("works");
    processes.signal(1, SIGSTOP);
    processes.await(0, "goes on");
    processes.await(2, "goes on");
    processes.signal(1, SIGCONT);
    processes.store().set("awake", "1", Deadline::in(patience(milliseconds{30000})));
    EXPECT_TRUE(processes.join(0, patience(milliseconds{60000})).well()) << processes.join(0).text;
    EXPECT_TRUE(processes.join(2, patience(milliseconds{60000})).well()) << processes.join(2).text;
    EXPECT_THAT(processes.join(1, patience(milliseconds{60000})).text, HasSubstr("have continued without this rank"));
}

// As where rank 0 serves the store, and is the one that dies.
TEST_F(Shrink, WithoutItsStoreItIsAnErrorAtOnce) {
    Processes processes(3, [](int rank, const auto& files, const auto& say) {
        StoreOptions insecure;
        insecure.insecure = true;
        std::shared_ptr<StoreServer> server;
        if (rank == 0) {
            server = StoreServer::start("127.0.0.1", 0, insecure);
            files->set("uri", server->uri(), files->default_deadline());
        }
        const auto store = Store::open(files->wait("uri", files->default_deadline()), insecure);
        const auto comm = join_job(store, rank, 3, short_options());
        sum(*comm, 1);
        say("works");
        try {
            while (true) sum(*comm, 1);
        } catch (const Error&) {
            // Rank 0's death.
        }
        const auto begun = Clock::now();
        try {
            (void)comm->shrink(comm->options());
            say("went on");
        } catch (const Error& error) {
            EXPECT_EQ(error.record()->rank, rank);
            EXPECT_EQ(error.record()->operation, "shrink");
            EXPECT_LT(Clock::now() - begun, patience(std::chrono::seconds(10)));
            throw;
        }
    });
    processes.await_all("works");
    processes.signal(0, SIGKILL);
    for (const int rank : {1, 2}) {
        EXPECT_THAT(processes.join(rank, patience(milliseconds{60000})).text,
                    AllOf(HasSubstr("IO peer"), HasSubstr("communicator 'world' cannot be shrunk without the store"),
                          HasSubstr("the process that serves it")));
    }
}

// The second dies once it has announced itself, so that the first attempt of the rest cannot succeed. Rank 3 sees that
// first, however the ranks are placed: it gives up an attempt that rank 0 has time to wait for, and rank 0 must follow.
TEST_F(Shrink, ASecondDeathMeanwhileIsSurvivedToo) {
    constexpr int world = 4;
    const CommOptions options = short_options(milliseconds{8000});
    Processes processes(world, [&](int rank, const auto& store, const auto& say) {
        auto comm = join_job(store, rank, world, options);
        sum(*comm, 1);
        say("works");
        try {
            while (true) sum(*comm, 1);
        } catch (const Error&) {
            // The first death.
        }
        if (rank == 2) {
            say("shrinks");
        } else {
            store->wait("second", Deadline::in(patience(milliseconds{60000})));
        }
        const auto rest = comm->shrink(rank == 0 ? short_options(milliseconds{50000}) : options);
        say(fmt::format("{}: {}", place(*rest), sum(*rest, static_cast<float>(rank))));
        rest->finalize();
    });
    processes.await_all("works");
    processes.signal(1, SIGKILL);
    processes.await(2, "shrinks");
    // Its announcement: the only key of that kind.
    wait_until(
        [&] {
            for (const auto& entry : std::filesystem::recursive_directory_iterator(processes.directory())) {
                if (entry.path().string().find("shrink") != std::string::npos) return true;
            }
            return false;
        },
        Deadline::in(patience(milliseconds{30000})), "an announcement");
    processes.signal(2, SIGKILL);
    (void)processes.join(2);
    processes.store().set("second", "1", Deadline::in(patience(milliseconds{30000})));
    for (const auto& [rank, how] : {std::pair{0, "0 of 2: 3"}, std::pair{3, "1 of 2: 3"}}) {
        const Outcome& outcome = processes.join(rank, patience(milliseconds{60000}));
        EXPECT_TRUE(outcome.well()) << outcome.text;
        EXPECT_THAT(outcome.text, HasSubstr(how));
    }
}

TEST_F(Shrink, ACommunicatorThatIsWellIsAbortedFirst) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    expect_all_well(run_threads(3, [&](int rank) {
        const auto comm = join_job(store, rank, 3, short_options());
        if (rank == 1) {
            comm->leave();
            return;
        }
        const auto rest = comm->shrink(comm->options());
        EXPECT_EQ(rest->world_size(), 2);
        EXPECT_EQ(sum(*rest, 1), 2.0F);
        EXPECT_THROW(comm->run({.collective = Collective::barrier}), Error);
        // And once more, of those that are left.
        const auto same = rest->shrink(rest->options());
        EXPECT_EQ(place(*same), place(*rest));
        EXPECT_EQ(sum(*same, 1), 2.0F);
    }));
}

}  // namespace
}  // namespace tsr::testing
