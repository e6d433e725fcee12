// What `tessera run` prints and writes: lines, logs, events, the report, and what it does where it may not.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "base/fd.hpp"
#include "run_fixture.hpp"
#include "soon.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using testing::Child;
using ::testing::HasSubstr;
using testing::lines_of;
using ::testing::Not;
using testing::read_file;
using testing::Result;
using testing::Run;
using testing::tessera;

// The limit counts for shared memory and for what the agent writes as well.
TEST_F(Run, LimitOfFileSizesEndsNeitherTheAgentNorTheJob) {
    const std::string logs = (directory_.path() / "logs").string();
    const std::string command = fmt::format(
        "ulimit -f 16; exec {} run --log-dir {} /bin/sh -c 'i=0; while [ $i -lt 4000 ]; do echo line $i; "
        "i=$((i+1)); done; echo done > {}/done' > /dev/null 2> {}/err",
        tessera, logs, scratch(), scratch());
    EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 1) << "the log's end is lost";
    EXPECT_EQ(file("done"), "done\n");
    EXPECT_THAT(file("err"), AllOf(HasSubstr("cannot write a rank's log file: File too large (the file size limit, "
                                             "RLIMIT_FSIZE, is 8192 bytes"),
                                   HasSubstr("the log ends here")));
    EXPECT_EQ(std::filesystem::file_size(logs + "/round-0/rank-0.log"), 8192U);
}

TEST_F(Run, LimitOfFileSizesThatIsTooLowForTheAgentIsNamed) {
    const std::string command = "ulimit -f 1; exec " + tessera + " run true 2> " + scratch() + "/err";
    EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 1);
    EXPECT_THAT(file("err"), HasSubstr("RLIMIT_FSIZE, is 512 bytes"));
}

TEST_F(Run, RanksMeetTheLimitOfFileSizesAsEver) {
    const std::string command = "ulimit -f 16; exec " + tessera + " run dd if=/dev/zero of=" + scratch() +
                                "/big bs=1024 count=100 2> " + scratch() + "/err";
    EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 128 + SIGXFSZ);
    EXPECT_THAT(file("err"), HasSubstr("rank 0 was killed by SIGXFSZ (a file or shared memory exceeded"));
}

TEST_F(Run, LinesStayWholeAndCarryTheirRank) {
    // Each line in two writes, from four ranks at once, on both outputs; and one line without an end.
    const Result result = run_shell({"-n", "4"},
                                    "i=0; while [ $i -lt 200 ]; do printf 'begin'; printf -- '-%s-end\\n' $i; "
                                    "printf 'err%s\\n' $i >&2; i=$((i+1)); done; printf last");
    ASSERT_EQ(result.code, 0);
    std::vector<std::string> expected_out;
    std::vector<std::string> expected_err;
    for (int rank = 0; rank < 4; ++rank) {
        for (int i = 0; i < 200; ++i) {
            expected_out.push_back(fmt::format("[rank {} sh] begin-{}-end", rank, i));
            expected_err.push_back(fmt::format("[rank {} sh] err{}", rank, i));
        }
        expected_out.push_back(fmt::format("[rank {} sh] last", rank));
    }
    EXPECT_THAT(lines_of(result.out), ::testing::UnorderedElementsAreArray(expected_out));
    EXPECT_THAT(lines_of(result.err), ::testing::UnorderedElementsAreArray(expected_err));
}

TEST_F(Run, WithoutPrefixLinesAreAsTheyWere) {
    const Result result = run_shell({"-n", "1", "--no-prefix"}, "echo '  indented'; echo; echo x");
    EXPECT_EQ(result.out, "  indented\n\nx\n");
}

TEST_F(Run, EachRankHasALogFileOfItsOwn) {
    const std::string logs = (directory_.path() / "logs").string();
    const Result result = run_shell({"-n", "2", "--log-dir", logs, "--max-restarts", "1"},
                                    "echo out $RANK; echo err $RANK >&2; exit $((1 - TESSERA_EPOCH))");
    EXPECT_EQ(result.code, 0);
    for (int round = 0; round < 2; ++round) {
        EXPECT_THAT(lines_of(read_file(fmt::format("{}/round-{}/rank-1.log", logs, round))),
                    ::testing::IsSubsetOf({"out 1", "err 1"}));
    }
    EXPECT_THAT(lines_of(read_file(logs + "/round-1/rank-1.log")), ::testing::SizeIs(2));
}

// Whoever may write in the directory of the logs may have put links there.
TEST_F(Run, ALogIsWrittenIntoItsDirectoryAndThroughNoLink) {
    namespace fs = std::filesystem;
    const fs::path logs = directory_.path() / "logs";
    fs::create_directories(logs / "round-0");
    fs::create_directory(directory_.path() / "other");
    const std::string kept = (directory_.path() / "other/rank-0.log").string();
    std::ofstream(kept) << "kept";
    fs::create_symlink(kept, logs / "round-0/rank-0.log");
    EXPECT_EQ(run_shell({"-n", "1", "--log-dir", logs.string()}, "echo ours").code, 0);
    EXPECT_EQ(read_file((logs / "round-0/rank-0.log").string()), "ours\n");
    EXPECT_EQ(read_file(kept), "kept");
    fs::remove_all(logs / "round-0");
    fs::create_directory_symlink(directory_.path() / "other", logs / "round-0");
    const Result refused = run_shell({"-n", "1", "--log-dir", logs.string()}, "echo ours");
    EXPECT_NE(refused.code, 0);
    EXPECT_THAT(refused.err, HasSubstr("round-0"));
    EXPECT_EQ(read_file(kept), "kept");
}

TEST_F(Run, NobodyReadingTheOutputDoesNotStopTheJob) {
    const std::string command = tessera +
                                " run -n 1 /bin/sh -c 'i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); "
                                "done; echo done > " +
                                scratch() + "/done' | head -1 > /dev/null";
    ASSERT_EQ(std::system(command.c_str()), 0);
    wait_until([&] { return file("done") == "done\n"; }, testing::soon(), "the rank's end");
}

TEST_F(Run, ErrorFileOfTheRootCauseIsToldFirst) {
    const Result result = run_shell(
        {"-n", "3"},
        "if [ $RANK = 2 ]; then echo '{\"message\": {\"message\": \"ValueError: loss is nan\", \"extraInfo\": "
        "{\"py_callstack\": \"  File train.py, line 3\", \"timestamp\": \"1700000000\"}}}' > $TESSERA_ERROR_FILE; exit "
        "1; fi;"
        "sleep 600");
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.err, AllOf(HasSubstr("rank 2 ended with exit code 1: ValueError: loss is nan"),
                                  HasSubstr("File train.py, line 3")));
}

TEST_F(Run, SummaryHasTheLastWordsOfARankThatRecordsNothing) {
    const std::string logs = (directory_.path() / "logs").string();
    const Result result = run_shell({"-n", "2", "--log-dir", logs},
                                    "if [ $RANK = 1 ]; then echo chatter; echo reading >&2; echo 'ValueError: nan' >&2;"
                                    "echo >&2; exit 9; fi; sleep 600");
    EXPECT_EQ(result.code, 9);
    EXPECT_THAT(result.err, AllOf(HasSubstr("rank 1 ended with exit code 9: last stderr line: ValueError: nan"),
                                  HasSubstr("    reading\n    ValueError: nan\n"), Not(HasSubstr("    chatter")),
                                  HasSubstr("its output: " + logs + "/round-0/rank-1.log")));
}

TEST_F(Run, ASignalEndsTheWaitForWhoReadsTheEvents) {
    ASSERT_EQ(::mkfifo(events_path().c_str(), 0600), 0);
    Child job = start({"--events", events_path(), "true"});
    wait_until(
        [&] { return read_file(directory_.path() / "err").find("waiting for a reader of") != std::string::npos; },
        testing::soon(), "the agent to wait");
    ::kill(job.pid(), SIGTERM);
    EXPECT_EQ(finish(job).code, 128 + SIGTERM);
}

TEST_F(Run, WhoReadsTheEventsFromAFifoGetsThemAll) {
    ASSERT_EQ(::mkfifo(events_path().c_str(), 0600), 0);
    Child job = start({"--events", events_path(), "true"});
    const std::string read = read_file(events_path());  // until the job's end
    EXPECT_EQ(finish(job).code, 0);
    EXPECT_THAT(read, AllOf(HasSubstr("\"event\":\"start\""), HasSubstr("\"exit_code\":0")));
}

TEST_F(Run, ASocketForTheEventsIsRefusedAndNotWaitedFor) {
    sockaddr_un address{AF_UNIX, {}};
    ASSERT_LT(events_path().size(), sizeof address.sun_path);
    events_path().copy(address.sun_path, sizeof address.sun_path - 1);
    const Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    Child job = start({"--events", events_path(), "true"});
    const Result result = finish(job);
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.err, HasSubstr("cannot open events file " + events_path() + ": No such device or address"));
}

TEST_F(Run, OutputThatIsLostIsAnErrorAtTheEnd) {
    const auto run_into = [&](const std::string& options, const std::string& redirection) {
        const std::string err = directory_.path() / "err";
        const std::string command = tessera + " run " + options + " /bin/echo x " + redirection + " 2> " + err;
        const int status = std::system(command.c_str());  // NOLINT(concurrency-mt-unsafe): one thread
        return std::pair(WEXITSTATUS(status), read_file(err));
    };
    EXPECT_EQ(run_into("-n 1", "> /dev/null").first, 0);
    const auto [code, said] = run_into("-n 1", "> /dev/full");
    EXPECT_EQ(code, 1);
    EXPECT_THAT(said, HasSubstr("cannot write standard output: No space left on device"));
    const auto [events_code, events_said] = run_into("--events /dev/full", "> /dev/null");
    EXPECT_EQ(events_code, 1);
    EXPECT_THAT(events_said, HasSubstr("cannot write events file /dev/full: No space left on device"));
}

TEST_F(Run, APrefixOfPyTorchsIsNotPrintedTwice) {
    const Result result =
        run_shell({"-n", "2"}, "echo \"[rank$RANK]: ValueError: [rank$RANK]: nan\"; echo '[rank7]: x'");
    EXPECT_THAT(lines_of(result.out),
                ::testing::UnorderedElementsAre("[rank 0 sh] ValueError: [rank0]: nan", "[rank 0 sh] [rank7]: x",
                                                "[rank 1 sh] ValueError: [rank1]: nan", "[rank 1 sh] [rank7]: x"));
}

TEST_F(Run, AnErrorInAnotherEncodingDoesNotEndTheJobWithItsEvents) {
    const Result result = run_shell({"-n", "1", "--max-restarts", "1", "--events", events_path()},
                                    "[ $TESSERA_EPOCH = 1 ] && exit 0; printf 'caf\\351 is shut\\n' >&2; exit 3");
    EXPECT_EQ(result.code, 0) << result.err;
    std::vector<std::string> reasons;
    for (const Json& event : events()) {
        if (event.at("event").as_string() == "restart") reasons.push_back(event.at("reason").as_string());
    }
    EXPECT_THAT(reasons, ::testing::ElementsAre(HasSubstr("caf? is shut")));
}

TEST_F(Run, EventsTellStartsExitsAndRestarts) {
    const Result result =
        run_shell({"-n", "1:2", "--on-loss", "shrink", "--events", events_path()},
                  "echo x >> $D/log; [ $WORLD_SIZE = 1 ] && exit 0;"
                  "if [ $RANK = 1 ]; then while [ $(wc -l < $D/log) -lt 2 ]; do :; done; kill -9 $$; fi;"
                  "sleep 600");
    ASSERT_EQ(result.code, 0) << result.err;
    std::vector<std::string> kinds;
    for (const Json& event : events()) {
        kinds.push_back(event.at("event").as_string());
        EXPECT_GT(event.at("time").as_double(), 1.7e9);
        if (kinds.back() == "start") {
            EXPECT_GT(event.at("pid").as_int(), 0);
            EXPECT_EQ(event.at("program").as_string(), "sh");
        }
        if (kinds.back() == "exit" && event.at("rank").as_int() == 1) {
            EXPECT_EQ(event.at("signal").as_string(), "SIGKILL");
            EXPECT_FALSE(event.at("ended_by_agent").as_bool());
        }
        if (kinds.back() == "restart") {
            EXPECT_EQ(event.at("world_size").as_int(), 1);
            EXPECT_EQ(event.at("lost").as_array().at(0).as_int(), 1);
        }
    }
    EXPECT_THAT(kinds, ::testing::ElementsAre("start", "start", "exit", "exit", "restart", "start", "exit", "end"));
}

TEST_F(Run, StandardDescriptorsMayBeClosed) {
    for (const char* closed : {"<&-", ">&-", "2>&-", "<&- >&- 2>&-"}) {
        // What a rank writes must not land in a file that took the number, such as its log or the events.
        std::filesystem::remove(scratch() + "/0");
        const std::string command = tessera + " run -n 2 --events " + events_path() +
                                    " /bin/sh -c 'cat; echo out; echo err >&2; echo done > " + scratch() +
                                    "/$RANK' < /dev/null > /dev/null 2> /dev/null " + closed;
        EXPECT_EQ(std::system(command.c_str()), 0) << closed;
        EXPECT_EQ(file("0"), "done\n") << closed;
        EXPECT_EQ(file("1"), "done\n") << closed;
        for (const std::string& line : lines_of(read_file(events_path()))) EXPECT_EQ(line.front(), '{') << closed;
        const std::string failing = tessera + " run -n 1 /bin/sh -c 'exit 5' < /dev/null > /dev/null 2> /dev/null ";
        EXPECT_EQ(WEXITSTATUS(std::system((failing + closed).c_str())), 5) << closed;
    }
}

}  // namespace
}  // namespace tsr
