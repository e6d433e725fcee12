// `tessera trace`: records that real communicators wrote, and what the command says of them.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <latch>
#include <set>
#include <thread>
#include <tuple>

#include "cli/command.hpp"
#include "patience.hpp"
#include "ranks.hpp"
#include "soon.hpp"
#include "temporary_directory.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

Result trace(const std::string& arguments) { return tessera(arguments, "2>&1", "trace"); }

class Trace : public ::testing::Test {
   protected:
    [[nodiscard]] std::string directory() const { return directory_.path().string(); }

    // Runs `body` on each rank; those that return true leave a record.
    void ranks(int world_size, const std::function<bool(Communicator&)>& body) {
        const CommOptions options = test_options();
        const auto store = make_memory_store(patience(milliseconds{30000}));
        // Before a rank goes, all have written: a rank that leaves is no longer waited for.
        std::atomic<int> done{0};
        const auto outcomes = run_threads(world_size, [&](int rank) {
            const auto comm = Communicator::create(store, rank, world_size, options);
            comm->set_timeout(milliseconds{300});
            const bool writes = body(*comm);
            if (writes) comm->write_trace(directory() + "/" + std::to_string(rank) + ".jsonl");
            done.fetch_add(1);
            while (done.load() < world_size) std::this_thread::yield();
        });
        for (const auto& outcome : outcomes) EXPECT_FALSE(outcome) << outcome->what();
    }

    // Reduces 1,000 floats; whether that went well.
    static bool reduce(Communicator& comm, ReduceOp op = ReduceOp::sum) {
        std::vector<float> values(1000, 1.0F);
        const Tensor tensor = tensor_of(std::span(values), DType::f32);
        Request request;
        request.collective = Collective::all_reduce;
        request.outputs = std::span(&tensor, 1);
        request.op = op;
        request.label = "bucket 5";
        return runs(comm, request);
    }
    static bool runs(Communicator& comm, const Request& request) {
        try {
            comm.run(request);
            return true;
        } catch (const Error&) {
            return false;
        }
    }

    TemporaryDirectory directory_;
};

TEST_F(Trace, ARankThatNeverCameIsNamedWithWhatItDidLast) {
    ranks(3, [](Communicator& comm) {
        EXPECT_TRUE(reduce(comm));
        if (comm.rank() != 1) {
            EXPECT_FALSE(reduce(comm));
        }
        return true;
    });
    const Result result = trace("why-hung " + directory());
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.output,
                AllOf(StartsWith("world: rank 1 never entered all_reduce #2 (bucket 5, 3.9 KiB); ranks 0, 2 waited 0."),
                      HasSubstr("Its last operation was all_reduce #1 (bucket 5, 3.9 KiB), finished ")));
    const Json json = Json::parse(trace("why-hung --json " + directory()).output, "json");
    const Json& hang = json.at("hangs").as_array().at(0);
    EXPECT_EQ(hang.at("absent").as_array(), Json::Array{Json(1)});
    EXPECT_EQ(hang.at("waiting").as_array(), (Json::Array{Json(0), Json(2)}));
}

TEST_F(Trace, ARankWithoutARecordIsSaidToHaveNone) {
    ranks(2, [](Communicator& comm) {
        EXPECT_TRUE(reduce(comm));
        if (comm.rank() == 0) {
            EXPECT_FALSE(reduce(comm));
        }
        return comm.rank() == 0;
    });
    EXPECT_THAT(trace("why-hung " + directory()).output,
                AllOf(HasSubstr("rank 1 never entered all_reduce #2"), HasSubstr("It left no record")));
}

TEST_F(Trace, DifferentCallsAreADisagreement) {
    ranks(2, [](Communicator& comm) {
        EXPECT_FALSE(reduce(comm, comm.rank() == 0 ? ReduceOp::sum : ReduceOp::max));
        return true;
    });
    EXPECT_THAT(
        trace("why-hung " + directory()).output,
        HasSubstr("the ranks disagree: rank 0 called all_reduce of 1000 f32 (sum), rank 1 all_reduce of 1000 f32 "
                  "(max)"));
}

TEST_F(Trace, AMessageThatNobodySentIsNamed) {
    ranks(2, [](Communicator& comm) {
        EXPECT_TRUE(reduce(comm));
        if (comm.rank() == 1) return true;
        std::vector<float> values(4);
        const Tensor tensor = tensor_of(std::span(values), DType::f32);
        Request request;
        request.collective = Collective::recv;
        request.outputs = std::span(&tensor, 1);
        request.peer = 1;
        request.tag = 9;
        EXPECT_FALSE(runs(comm, request));
        return true;
    });
    EXPECT_THAT(trace("why-hung " + directory()).output,
                AllOf(HasSubstr("in recv #1 (from rank 1, tag 9, 16 B); rank 1 never sent it"),
                      HasSubstr("its last operation was all_reduce #1")));
}

// As where a hanging job is asked: nothing ended since.
TEST_F(Trace, AWaitThatGoesOnLastsUntilTheRecordWasWritten) {
    for (const int rank : {0, 1}) {
        std::ofstream file(fmt::format("{}/world-a.rank-{}.jsonl", directory(), rank));
        file << fmt::format(
            R"({{"tessera_flight":1,"name":"world","id":"a","rank":{},"world_size":2,"transport":"shm",)"
            R"("host":"h","pid":1,"entries":1,"written_us":{}}})"
            "\n",
            rank, 9000000 + rank);
        if (rank == 1) continue;
        file << R"({"number":0,"operation":"barrier","state":"started","sequence":1,"peer":-1,"tag":0,"tensors":0,)"
                R"("count":0,"bytes":0,"issued_us":1199000,"started_us":1200000,"ended_us":null})"
                "\n";
    }
    EXPECT_THAT(trace("why-hung " + directory()).output,
                HasSubstr("rank 1 never entered barrier #1; rank 0 waited 7.8 s. It never started an operation"));
}

// A communicator of two ranks, of which rank 1 never came to `operation`: the records of a job whose processes are `pid`
// and the next one, written at `written`.
struct Written {
    std::string id;
    int pid = 1;
    double written = 9e6;
    std::string operation = "barrier";
    std::string job;
    int process_started = 5;
};

void write_hang(const std::string& directory, const Written& what) {
    std::filesystem::create_directories(directory);
    for (const int rank : {0, 1}) {
        std::ofstream file(fmt::format("{}/world-{}.rank-{}.jsonl", directory, what.id, rank));
        file << fmt::format(
            R"({{"tessera_flight":1,"name":"world","id":"{}","rank":{},"world_size":2,"transport":"shm",)"
            R"("host":"h","pid":{},"process_started":{},"entries":1,"written_us":{}{}}})"
            "\n",
            what.id, rank, what.pid + rank, what.process_started, what.written,
            what.job.empty() ? "" : fmt::format(R"(,"job":"{}")", what.job));
        if (rank == 1) continue;
        file << fmt::format(
            R"({{"number":0,"operation":"{}","state":"started","sequence":1,"peer":-1,"tag":0,"tensors":0,)"
            R"("count":0,"bytes":0,"issued_us":{},"started_us":{},"ended_us":null}})"
            "\n",
            what.operation, what.written - 2e6, what.written - 1e6);
    }
}

TEST_F(Trace, RoundsAreLookedIntoAndTheNewestIsTaken) {
    write_hang(directory() + "/round-0", {.id = "aaaa", .pid = 1, .written = 9e6});
    EXPECT_THAT(trace("why-hung " + directory()).output,
                AllOf(HasSubstr("tessera trace: job aaaa in " + directory() +
                                "/round-0 (2 ranks, written 1970-01-01 00:00:09 UTC)\n"),
                      HasSubstr("world: rank 1 never entered barrier #1")));
    // Another job of the same --trace-dir ended in its round 1, before; this one has written its round 0 anew.
    write_hang(directory() + "/round-1", {.id = "bbbb", .pid = 3, .written = 8e6, .operation = "broadcast"});
    const Result result = tessera("why-hung " + directory(), "2>/dev/null", "trace");
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.output,
                AllOf(StartsWith("world: rank 1 never entered barrier #1"), Not(HasSubstr("broadcast"))));
    EXPECT_THAT(trace("why-hung " + directory()).output,
                AllOf(HasSubstr("the newest job aaaa in " + directory() + "/round-0 ("),
                      HasSubstr("ignored job bbbb in " + directory() +
                                "/round-1 (2 ranks, written 1970-01-01 "
                                "00:00:08 UTC); select it with --job bbbb")));
    const Json json = Json::parse(tessera("why-hung --json " + directory(), "2>/dev/null", "trace").output, "json");
    EXPECT_EQ(json.at("job").at("id").as_string(), "aaaa");
    EXPECT_EQ(json.at("job").at("directory").as_string(), directory() + "/round-0");
    EXPECT_EQ(json.at("others").as_array().at(0).at("id").as_string(), "bbbb");
    EXPECT_EQ(json.at("hangs").as_array().size(), 1U);
}

TEST_F(Trace, JobsThatWroteIntoOneDirectoryAreToldApart) {
    // The second one's processes have the pids of the first one's, as they do in a container that is started again.
    write_hang(directory(), {.id = "aaaa", .pid = 1, .written = 9e6, .process_started = 5});
    write_hang(directory(), {.id = "bbbb", .pid = 1, .written = 8e6, .operation = "broadcast", .process_started = 6});
    EXPECT_THAT(tessera("why-hung " + directory(), "2>/dev/null", "trace").output,
                AllOf(StartsWith("world: rank 1 never entered barrier #1"), Not(HasSubstr("broadcast"))));
    EXPECT_THAT(trace("why-hung --job bb " + directory()).output,
                StartsWith("world: rank 1 never entered broadcast #1"));
    const std::string file = directory() + "/trace.json";
    ASSERT_EQ(trace("merge --job bbbb " + directory() + " -o " + file).code, 0);
    std::ifstream stream(file);
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    EXPECT_THAT(text, AllOf(HasSubstr("broadcast"), Not(HasSubstr("barrier"))));
    const Result none = trace("why-hung --job cc " + directory());
    EXPECT_EQ(none.code, 2);
    EXPECT_THAT(none.output, AllOf(HasSubstr("--job cc: no job in the directory matches; available: aaaa in "),
                                   HasSubstr("bbbb in ")));
}

TEST_F(Trace, CommunicatorsOfOneJobStayTogether) {
    const auto both = [&] { return tessera("why-hung " + directory(), "2>/dev/null", "trace").output; };
    write_hang(directory(), {.id = "aaaa", .pid = 1, .written = 9e6});
    write_hang(directory(), {.id = "bbbb", .pid = 2, .written = 8e6, .operation = "broadcast"});  // pid 2 is in both
    EXPECT_THAT(both(), AllOf(HasSubstr("barrier"), HasSubstr("broadcast")));
    // Those of other ranks, which have no process in common: the launcher's name of the job joins them.
    write_hang(directory(), {.id = "aaaa", .pid = 1, .written = 9e6, .job = "x/0"});
    write_hang(directory(), {.id = "bbbb", .pid = 5, .written = 8e6, .operation = "broadcast", .job = "x/0"});
    EXPECT_THAT(both(), AllOf(HasSubstr("barrier"), HasSubstr("broadcast")));
    write_hang(directory(), {.id = "bbbb", .pid = 5, .written = 8e6, .operation = "broadcast", .job = "x/1"});
    EXPECT_THAT(both(), Not(HasSubstr("broadcast")));
}

TEST_F(Trace, NothingHangsWhenAllIsDone) {
    ranks(2, [](Communicator& comm) { return reduce(comm); });
    const Result result = trace("why-hung " + directory());
    EXPECT_EQ(result.code, 1);
    EXPECT_EQ(result.output, "nothing hangs: every started operation has finished\n");
}

TEST_F(Trace, MergeDrawsALaneForEachOperationInFlight) {
    ranks(2, [](Communicator& comm) {
        std::vector<float> values(1000, 1.0F);
        const Tensor tensor = tensor_of(std::span(values), DType::f32);
        std::vector<WorkPtr> works;
        for (int tag = 0; tag < 3; ++tag) {
            Request request;
            request.collective = comm.rank() == 0 ? Collective::send : Collective::recv;
            (comm.rank() == 0 ? request.inputs : request.outputs) = std::span(&tensor, 1);
            request.peer = 1 - comm.rank();
            request.tag = tag;
            works.push_back(comm.submit(request));
        }
        for (const WorkPtr& work : works) work->wait(soon());
        return reduce(comm);
    });
    const std::string file = directory() + "/trace.json";
    ASSERT_EQ(trace("merge " + directory() + " -o " + file).code, 0);
    std::ifstream stream(file);
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    const Json json = Json::parse(text, file);
    std::map<std::pair<int64_t, int64_t>, std::vector<std::pair<double, double>>> lanes;
    size_t operations = 0;
    for (const Json& event : json.at("traceEvents").as_array()) {
        if (event.at("ph").as_string() != "X") continue;
        ++operations;
        const double begin = event.at("ts").as_double();
        EXPECT_GE(begin, 0);
        lanes[{event.at("pid").as_int(), event.at("tid").as_int()}].emplace_back(begin,
                                                                                 begin + event.at("dur").as_double());
    }
    EXPECT_EQ(operations, 8u);
    for (auto& [lane, spans] : lanes) {
        std::sort(spans.begin(), spans.end());
        for (size_t i = 1; i < spans.size(); ++i) EXPECT_LE(spans[i - 1].second, spans[i].first + 0.2);
    }
}

TEST_F(Trace, AComputationHasALaneOfItsOwnAndIsNoCollective) {
    ranks(2, [](Communicator& comm) {
        comm.record("forward 3, stage 1", [] {});
        EXPECT_THROW(comm.record("backward 3, stage 1", [] { throw Error(Code::user, "no"); }), Error);
        return reduce(comm);
    });
    EXPECT_EQ(trace("why-hung " + directory()).code, 1);
    const std::string file = directory() + "/trace.json";
    ASSERT_EQ(trace("merge " + directory() + " -o " + file).code, 0);
    std::ifstream stream(file);
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    std::set<std::pair<int64_t, int64_t>> computing;
    std::set<std::pair<int64_t, int64_t>> communicating;
    std::set<std::pair<int64_t, int64_t>> named;
    const Json json = Json::parse(text, file);
    for (const Json& event : json.at("traceEvents").as_array()) {
        const std::pair lane(event.at("pid").as_int(), event.at("tid").as_int());
        const std::string& name = event.at("name").as_string();
        if (name == "forward 3, stage 1" || name == "backward 3, stage 1") computing.insert(lane);
        if (name == "all_reduce #1 (bucket 5, 3.9 KiB)") communicating.insert(lane);
        if (name == "thread_name" && event.at("args").at("name").as_string().ends_with(": stages")) named.insert(lane);
    }
    EXPECT_EQ(computing.size(), 2U);
    EXPECT_EQ(computing, named);
    EXPECT_EQ(communicating.size(), 2U);
    for (const auto& lane : communicating) EXPECT_FALSE(computing.contains(lane));
    EXPECT_THAT(text, HasSubstr(R"("state":"failed")"));
}

TEST_F(Trace, ARankThatIsAwaitedIsInAComputation) {
    std::latch posted_ahead(1);
    ranks(2, [&](Communicator& comm) {
        std::vector<float> values(10);
        const Tensor tensor = tensor_of(std::span(values), DType::f32);
        if (comm.rank() == 0) {
            posted_ahead.wait();  // the receive that waits longest is not the one that hangs
            return !runs(comm, {.collective = Collective::recv, .outputs = {&tensor, 1}, .peer = 1, .tag = 1});
        }
        comm.record("forward 3, stage 1", [&] {
            const WorkPtr meanwhile =
                comm.submit({.collective = Collective::recv, .outputs = {&tensor, 1}, .peer = 0, .tag = 2});
            const Deadline deadline = soon();
            std::string written;
            while (written.find(R"("operation":"recv","state":"started")") == std::string::npos &&
                   !deadline.expired()) {
                comm.write_trace(directory() + "/computing.jsonl");
                std::ifstream stream(directory() + "/computing.jsonl");
                written.assign(std::istreambuf_iterator<char>(stream), {});
            }
            posted_ahead.count_down();
            while (!comm.error() && !deadline.expired()) std::this_thread::yield();
            comm.write_trace(directory() + "/computing.jsonl");
            EXPECT_THROW(meanwhile->wait(soon()), Error);
        });
        return false;
    });
    EXPECT_THAT(trace("why-hung " + directory()).output,
                HasSubstr("rank 1 never sent it: it has been in forward 3, stage 1 for "));
}

TEST_F(Trace, WhatIsNoRecordIsRefused) {
    const auto refused = [&](const std::string& text, const std::string& why) {
        std::ofstream(directory() + "/x.jsonl") << text;
        const Result result = trace("why-hung " + directory());
        EXPECT_EQ(result.code, 2) << text;
        EXPECT_THAT(result.output, HasSubstr(why)) << text;
    };
    const std::string header =
        R"({"tessera_flight":1,"name":"w","id":"a","rank":0,"world_size":1,"transport":"self","host":"h","pid":1})"
        "\n";
    const std::string good =
        R"({"number":1,"operation":"barrier","state":"finished","sequence":1,"tensors":0,"count":0,"issued_us":1.0,)"
        R"("started_us":2.0,"ended_us":3.0})"
        "\n";
    EXPECT_EQ(trace("why-hung " + directory()).code, 2);
    refused("", "is empty");
    refused("{}\n", "line 1: this is not a flight record");
    refused("{\"tessera_flight\":2}\n", "version 2");
    refused(header + "[]\n", "line 2");
    refused(header + good + "{\"number\":-1}\n", "line 3");
    refused(header + R"({"number":1,"operation":"dance","state":"finished","sequence":1})"
                     "\n",
            "'dance'");
    refused(R"({"tessera_flight":1,"name":"w","id":"a","rank":3,"world_size":1,"transport":"","host":"","pid":1})"
            "\n",
            "rank 3 of 1");
    const auto with_times = [&](const std::string& state, const std::string& started, const std::string& ended) {
        return header +
               fmt::format(R"({{"number":1,"operation":"barrier","state":"{}","sequence":1,"tensors":0,"count":0,)"
                           R"("issued_us":1.0,"started_us":{},"ended_us":{}}})"
                           "\n",
                           state, started, ended);
    };
    for (const auto& [state, started, ended] :
         {std::tuple("started", "null", "null"), std::tuple("finished", "null", "3.0"),
          std::tuple("finished", "2.0", "null"), std::tuple("started", "2.0", "3.0")}) {
        refused(with_times(state, started, ended), fmt::format("line 2: the operation is {}, but its times", state));
    }
    refused(with_times("started", "-1e300", "null"), "started_us is -1e+300");
    refused(
        R"({"tessera_flight":1,"name":"w","id":"a","rank":3,"world_size":2147483647,"transport":"","host":"","pid":1})"
        "\n",
        "rank 3 of 2147483647");
    std::ofstream(directory() + "/x.jsonl") << header + good;
    EXPECT_EQ(trace("why-hung " + directory()).code, 1);
    EXPECT_EQ(trace("why-hung " + directory() + "/none").code, 2);
    EXPECT_EQ(trace("merge " + directory() + " -o " + directory() + "/none/x").code, 2);
}

// Whoever can write into the directory can put there what never ends, or commands for a terminal.
TEST_F(Trace, OnlyRegularFilesOfARecordsSizeAreRead) {
    const std::string path = directory() + "/x.jsonl";
    ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
    EXPECT_THAT(trace("why-hung " + directory()).output, HasSubstr("x.jsonl is not a regular file"));
    std::filesystem::remove(path);
    std::filesystem::create_symlink("/dev/zero", path);
    EXPECT_THAT(trace("why-hung " + directory()).output, HasSubstr("x.jsonl is not a regular file"));
    std::filesystem::remove(path);
    std::ofstream(path) << "{}";
    std::filesystem::resize_file(path, size_t{1} << 40);
    const Result large = trace("why-hung " + directory());
    EXPECT_EQ(large.code, 2);
    EXPECT_THAT(large.output, HasSubstr("has 1099511627776 bytes"));
}

TEST_F(Trace, TextOfARecordDoesNotCommandTheTerminal) {
    const std::string escape = R"(\u001b[31m\u0007\u0000)";
    std::ofstream(directory() + "/x.jsonl") << fmt::format(
        R"({{"tessera_flight":1,"name":"w{0}","id":"a{0}","rank":0,"world_size":2,"transport":"shm","host":"h{0}",)"
        R"("pid":1,"job":"j{0}","error":{{"message":"e{0}"}}}})"
        "\n"
        R"({{"number":1,"operation":"barrier","state":"started","sequence":1,"tensors":0,"count":0,"label":"l{0}",)"
        R"("issued_us":1.0,"started_us":2.0,"ended_us":null}})"
        "\n",
        escape);
    for (const char* command : {"why-hung ", "why-hung --json ", "merge "}) {
        const std::string output = trace(command + directory()).output;
        EXPECT_THAT(output, AllOf(HasSubstr("w"), Not(HasSubstr("\x1b")), Not(HasSubstr("\x07")))) << command;
        EXPECT_EQ(output.find('\0'), std::string::npos) << command;
    }
}

}  // namespace
}  // namespace tsr::testing
