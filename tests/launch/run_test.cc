// `tessera run` as a user meets it: the built command, small shell programs as ranks.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "base/fd.hpp"
#include "base/json.hpp"
#include "checkpoint/checkpoint.hpp"
#include "processes.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using testing::Child;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string tessera = TESSERA_BINARY_DIR "/tessera";

struct Result {
    int code = -1;
    std::string out;
    std::string err;
};

std::string read_file(const std::filesystem::path& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

bool alive(pid_t pid) {
    if (::kill(pid, 0) != 0) return false;
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string line;
    std::getline(stat, line);
    const size_t end = line.rfind(')');
    return end != std::string::npos && line[end + 2] != 'Z' && line[end + 2] != 'X';
}

class Run : public ::testing::Test {
   protected:
    Run() { std::filesystem::create_directory(scratch()); }

    // Every rank leaves evidence here: $D.
    [[nodiscard]] std::string scratch() const { return (directory_.path() / "d").string(); }

    // Starts `tessera run ARGUMENTS`; its output goes to files.
    Child start(std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), {tessera, "run"});
        std::fflush(nullptr);
        const pid_t pid = ::fork();
        if (pid < 0) throw std::runtime_error("fork failed");
        if (pid > 0) return Child(pid);
        ::setenv("D", scratch().c_str(), 1);
        ::setenv("TMPDIR", directory_.path().c_str(), 1);
        for (const auto& [name, fd] : {std::pair{"out", 1}, {"err", 2}}) {
            const int file = ::open((directory_.path() / name).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
            if (file < 0 || ::dup2(file, fd) < 0) ::_exit(127);
            ::close(file);
        }
        std::vector<char*> argv;
        for (std::string& argument : arguments) argv.push_back(argument.data());
        argv.push_back(nullptr);
        ::execv(argv[0], argv.data());
        ::_exit(126);
    }
    Result finish(Child& child) {
        Result result;
        result.code = child.wait();
        result.out = read_file(directory_.path() / "out");
        result.err = read_file(directory_.path() / "err");
        return result;
    }
    Result run(const std::vector<std::string>& arguments) {
        Child child = start(arguments);
        Result result = finish(child);
        EXPECT_EQ(leftover_directories(), 0) << "a temporary directory was left";
        return result;
    }
    // A shell program for all ranks.
    Result run_shell(std::vector<std::string> options, const std::string& script) {
        options.insert(options.end(), {"/bin/sh", "-c", script});
        return run(options);
    }

    [[nodiscard]] int leftover_directories() const {
        int count = 0;
        for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) {
            if (entry.path().filename().string().starts_with("tessera-run")) ++count;
        }
        return count;
    }
    [[nodiscard]] std::string file(const std::string& name) const { return read_file(scratch() + "/" + name); }
    [[nodiscard]] pid_t pid_in(const std::string& name) const {
        const std::string path = scratch() + "/" + name;
        wait_until([&] { return !read_file(path).empty() && read_file(path).back() == '\n'; },
                   Deadline::in(milliseconds{20000}), path.c_str());
        return static_cast<pid_t>(std::stol(read_file(path)));
    }
    static void expect_dies(pid_t pid) {
        EXPECT_NO_THROW(wait_until([&] { return !alive(pid); }, Deadline::in(milliseconds{10000}), "death")) << pid;
    }
    // The events as parsed lines.
    std::vector<Json> events() const {
        std::vector<Json> parsed;
        for (const std::string& line : lines_of(read_file(directory_.path() / "events"))) {
            parsed.push_back(Json::parse(line, "event"));
        }
        return parsed;
    }
    [[nodiscard]] std::string events_path() const { return (directory_.path() / "events").string(); }

    testing::TemporaryDirectory directory_;
};

TEST_F(Run, EachRankKnowsItsPlace) {
    const Result result = run_shell({"-n", "3"},
                                    "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR "
                                    "$TESSERA_RANK $GROUP_RANK $TORCHELASTIC_RESTART_COUNT > $D/$RANK");
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    for (int rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(file(std::to_string(rank)), fmt::format("{0} {0} 3 3 127.0.0.1 {0} 0 0\n", rank));
    }
}

TEST_F(Run, SeveralProgramsAreOneJob) {
    const Result result =
        run({"-n", "1", "--env", "WHO=a b", "/bin/sh", "-c", "echo $WHO $RANK/$WORLD_SIZE", ":", "-n", "2", "--env",
             "WHO=c", "/bin/sh", "-c", "echo $WHO $RANK/$WORLD_SIZE", ":", "/bin/echo", "-n", "x"});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(lines_of(result.out), ::testing::UnorderedElementsAre("[rank 0 sh] a b 0/4", "[rank 1 sh] c 1/4",
                                                                      "[rank 2 sh] c 2/4", "[rank 3 echo] x"));
}

TEST_F(Run, CommandsOwnOptionsAreItsOwn) {
    const Result result = run({"-n", "1", "/bin/echo", "-n", "--min-ranks", "--help", "--", "-x"});
    EXPECT_EQ(result.code, 0);
    EXPECT_EQ(result.out, "[rank 0 echo] --min-ranks --help -- -x\n");
}

TEST_F(Run, RankZeroReadsStandardInputAndOthersFindItEmpty) {
    const std::string command =
        "echo input | " + tessera + " run -n 2 /bin/sh -c 'cat > " + scratch() + "/$RANK' < /dev/stdin";
    ASSERT_EQ(std::system(command.c_str()), 0);
    EXPECT_EQ(file("0"), "input\n");
    EXPECT_EQ(file("1"), "");
}

TEST_F(Run, FailingRankEndsTheOthersAndGivesTheExitCode) {
    const Result result = run_shell({"-n", "3"},
                                    "echo $$ > $D/$RANK; if [ $RANK = 1 ]; then "
                                    "while [ ! -s $D/0 ] || [ ! -s $D/2 ]; do :; done; exit 7; fi; sleep 600");
    EXPECT_EQ(result.code, 7);
    EXPECT_THAT(result.err, AllOf(HasSubstr("rank 1 ended with exit code 7"), HasSubstr("root cause")));
    for (const char* name : {"0", "1", "2"}) EXPECT_FALSE(alive(pid_in(name)));
}

TEST_F(Run, SignalGivesTheShellsExitCodeAndItsName) {
    const Result result = run_shell({"-n", "2"}, "if [ $RANK = 0 ]; then kill -SEGV $$; fi; sleep 600");
    EXPECT_EQ(result.code, 128 + SIGSEGV);
    EXPECT_THAT(result.err, HasSubstr("SIGSEGV"));
}

// A rank that is dying already when the agent ends the others: its own signal is told.
TEST_F(Run, SignalThatIsNotTheAgentsIsTheRanksOwn) {
    const Result result = run_shell({"-n", "2"},
                                    "if [ $RANK = 1 ]; then trap 'kill -SEGV $$' TERM; echo $$ > $D/1; "
                                    "while :; do sleep 0.01; done; fi; "
                                    "while [ ! -s $D/1 ]; do :; done; exit 3");
    EXPECT_EQ(result.code, 3);
    EXPECT_THAT(result.err, HasSubstr("SIGSEGV"));
    EXPECT_THAT(result.err, Not(HasSubstr("(ended)")));
}

TEST_F(Run, RankThatIgnoresSigtermIsKilled) {
    const Result result =
        run_shell({"-n", "2", "--kill-grace-s", "0.2"},
                  "if [ $RANK = 1 ]; then trap '' TERM; echo $$ > $D/1; while :; do sleep 600; done; fi; "
                  "while [ ! -s $D/1 ]; do :; done; exit 3");
    EXPECT_EQ(result.code, 3);
    EXPECT_FALSE(alive(pid_in("1")));
}

TEST_F(Run, StoppedRankIsKilledToo) {
    const Result result =
        run_shell({"-n", "2", "--kill-grace-s", "0.2"},
                  "if [ $RANK = 1 ]; then trap '' TERM; echo $$ > $D/1; kill -STOP $$; sleep 600; fi; "
                  "while [ ! -s $D/1 ]; do :; done; exit 3");
    EXPECT_EQ(result.code, 3);
    EXPECT_FALSE(alive(pid_in("1")));
}

TEST_F(Run, NoDescendantIsLeftWhateverItDoes) {
    // A background child, one in a session of its own that ignores signals, and one that lost its parent.
    const Result result =
        run_shell({"-n", "2", "--kill-grace-s", "0.2"},
                  "sleep 600 & echo $! > $D/a$RANK;"
                  "setsid /bin/sh -c 'trap \"\" TERM HUP INT; echo $$ > $D/b'$RANK'; while :; do sleep 600; done' &"
                  "/bin/sh -c 'sleep 600 & echo $! > $D/c'$RANK;"
                  "for f in b0 b1 c0 c1; do while [ ! -s $D/$f ]; do :; done; done; exit $RANK");
    EXPECT_EQ(result.code, 1);
    for (const char* name : {"a0", "a1", "b0", "b1", "c0", "c1"}) EXPECT_FALSE(alive(pid_in(name))) << name;
}

TEST_F(Run, SuccessLeavesNoBackgroundProcessEither) {
    const Result result = run_shell({"-n", "2"}, "setsid sleep 600 & echo $! > $D/$RANK; exit 0");
    EXPECT_EQ(result.code, 0);
    for (const char* name : {"0", "1"}) EXPECT_FALSE(alive(pid_in(name)));
}

// The scripts of the next tests: every rank and a grandchild that ignores SIGTERM tell their pids, then wait.
const std::string stubborn =
    "trap '' TERM; echo $$ > $D/r$RANK;"
    "setsid /bin/sh -c 'trap \"\" TERM; echo $$ > $D/g'$RANK'; while :; do sleep 600; done' & while :; do sleep 600; "
    "done";

TEST_F(Run, KilledGuardianLeavesNoRankAndNoGrandchild) {
    Child job = start({"-n", "2", "/bin/sh", "-c", stubborn});
    std::vector<pid_t> pids;
    for (const char* name : {"r0", "r1", "g0", "g1"}) pids.push_back(pid_in(name));
    ASSERT_EQ(::kill(job.pid(), SIGKILL), 0);
    EXPECT_EQ(job.wait(), 128 + SIGKILL);
    for (const pid_t pid : pids) expect_dies(pid);
}

TEST_F(Run, KilledAgentLeavesNoRankAndNoGrandchild) {
    Child job = start({"-n", "2", "/bin/sh", "-c", "echo $PPID > $D/agent;" + stubborn});
    std::vector<pid_t> pids;
    for (const char* name : {"r0", "r1", "g0", "g1"}) pids.push_back(pid_in(name));
    const pid_t agent = pid_in("agent");
    ASSERT_NE(agent, job.pid());
    ASSERT_EQ(::kill(agent, SIGKILL), 0);
    const Result result = finish(job);
    EXPECT_EQ(result.code, 128 + SIGKILL);
    EXPECT_THAT(result.err, HasSubstr("agent was killed by SIGKILL"));
    for (const pid_t pid : pids) EXPECT_FALSE(alive(pid));
}

TEST_F(Run, RestartsAllRanksWhileRestartsLast) {
    const Result result = run_shell({"-n", "2", "--max-restarts", "2", "--events", events_path()},
                                    "echo $RANK $WORLD_SIZE $TESSERA_EPOCH >> $D/log; "
                                    "[ $RANK = 0 ] || [ $TESSERA_EPOCH = 2 ] && exit 0; exit 5");
    EXPECT_EQ(result.code, 0) << result.err;
    std::vector<std::string> log = lines_of(file("log"));
    std::sort(log.begin(), log.end());
    EXPECT_THAT(log, ::testing::ElementsAre("0 2 0", "0 2 1", "0 2 2", "1 2 0", "1 2 1", "1 2 2"));
    EXPECT_THAT(result.err, AllOf(HasSubstr("restart 1 of 2"), HasSubstr("restart 2 of 2")));
}

TEST_F(Run, FailsWhenRestartsAreUsedUp) {
    const Result result = run_shell({"-n", "2", "--max-restarts", "1"},
                                    "echo x >> $D/log$RANK; if [ $RANK = 1 ]; then exit 9; fi; sleep 600");
    EXPECT_EQ(result.code, 9);
    EXPECT_EQ(lines_of(file("log1")).size(), 2U);
}

TEST_F(Run, NewRoundBeginsOnlyWhenEveryProcessOfTheFormerIsDead) {
    // The grandchild holds a lock as long as it lives; a rank of the next round must find it free at once.
    const Result result = run_shell(
        {"-n", "2", "--max-restarts", "1", "--kill-grace-s", "0.2"},
        "if [ $TESSERA_EPOCH = 1 ]; then flock -n $D/lock$RANK true || echo overlap > $D/overlap; exit 0; fi;"
        "setsid flock $D/lock$RANK /bin/sh -c 'trap \"\" TERM; echo $$ > $D/held'$RANK'; while :; do sleep 600; done' &"
        "while [ ! -s $D/held0 ] || [ ! -s $D/held1 ]; do :; done; exit $RANK");
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(file("overlap"), "");
}

TEST_F(Run, ShrinkGoesOnWithThoseLeftRenumbered) {
    const Result result = run_shell({"-n", "3:4", "--on-loss", "shrink"},
                                    "echo $RANK of $WORLD_SIZE in $TESSERA_EPOCH >> $D/log;"
                                    "[ $WORLD_SIZE = 3 ] && exit 0; if [ $RANK = 1 ]; then "
                                    "while [ $(wc -l < $D/log) -lt 4 ]; do :; done; kill -9 $$; fi; sleep 600");
    EXPECT_EQ(result.code, 0) << result.err;
    const std::vector<std::string> log = lines_of(file("log"));
    ASSERT_EQ(log.size(), 7U);
    for (int rank = 0; rank < 3; ++rank) EXPECT_THAT(log, Contains(fmt::format("{} of 3 in 1", rank)));
    EXPECT_THAT(result.err, HasSubstr("rank 1"));
    EXPECT_THAT(result.err, HasSubstr("SIGKILL"));
}

TEST_F(Run, ShrinkLeavesTheLostRanksProgramOut) {
    const std::string script =
        "[ $WORLD_SIZE = 2 ] && { echo $NAME is $RANK >> $D/log; exit 0; };"
        "if [ $NAME = b ]; then kill -9 $$; fi; sleep 600";
    const Result result =
        run({"--min-ranks", "2",    "--on-loss", "shrink", "-n",    "1",      "--env",   "NAME=a",  "/bin/sh",
             "-c",          script, ":",         "-n",     "1",     "--env",  "NAME=b",  "/bin/sh", "-c",
             script,        ":",    "-n",        "1",      "--env", "NAME=c", "/bin/sh", "-c",      script});
    EXPECT_EQ(result.code, 0) << result.err;
    std::vector<std::string> log = lines_of(file("log"));
    std::sort(log.begin(), log.end());
    EXPECT_THAT(log, ::testing::ElementsAre("a is 0", "c is 1"));
}

TEST_F(Run, ShrinkStopsAtTheLeastSize) {
    const Result result = run_shell({"-n", "2:3", "--on-loss", "shrink"}, "kill -9 $$");
    EXPECT_EQ(result.code, 128 + SIGKILL);
    EXPECT_THAT(result.err, HasSubstr("root cause"));
}

TEST_F(Run, SigtermSetsThePreemptionFlagAndWaitsForTheRanks) {
    // od reads the shared page as tsr_preempt_requested does.
    Child job =
        start({"-n", "2", "/bin/sh", "-c",
               "trap 'echo signalled > $D/signalled' TERM; : > $TESSERA_PREEMPT_ASKED_FILE; echo $$ > $D/r$RANK;"
               "while ! od -An -tx1 -N1 $TESSERA_PREEMPT_FILE | grep -q 01; do :; done; echo saved > $D/s$RANK"});
    (void)pid_in("r0");
    (void)pid_in("r1");
    ::kill(job.pid(), SIGTERM);
    const Result result = finish(job);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(file("s0"), "saved\n");
    EXPECT_EQ(file("s1"), "saved\n");
    EXPECT_EQ(file("signalled"), "") << "ranks that end in time hear no signal";
}

TEST_F(Run, AllRanksSaveAtOneStepWhenTheJobIsToldToStop) {
    const std::string root = scratch() + "/checkpoints";
    Child job = start({"-n", "3", TESSERA_BINARY_DIR "/tests/preempted", root});
    for (const char* name : {"r0", "r1", "r2"}) (void)pid_in(name);  // well on their way
    ::kill(job.pid(), SIGTERM);
    const Result result = finish(job);
    EXPECT_EQ(result.code, 0) << result.err;
    const std::string step = file("stopped0");
    EXPECT_NE(step, "");
    EXPECT_EQ(file("stopped1"), step);
    EXPECT_EQ(file("stopped2"), step);
    EXPECT_EQ(std::to_string(Checkpoint::open(root)->manifest().step) + "\n", step);
}

TEST_F(Run, RanksThatNeverAskAreNotWaitedFor) {
    Child job =
        start({"-n", "2", "--grace-s", "10000", "/bin/sh", "-c",
               "trap 'echo bye > $D/bye$RANK; exit 0' TERM; echo $$ > $D/r$RANK; while :; do sleep 0.05; done"});
    (void)pid_in("r0");
    (void)pid_in("r1");
    ::kill(job.pid(), SIGINT);
    const Result result = finish(job);
    EXPECT_EQ(result.code, 128 + SIGINT);
    EXPECT_THAT(result.err, HasSubstr("no rank asks whether the job is to stop, so none would save"));
    for (const char* name : {"bye0", "bye1"}) EXPECT_EQ(file(name), "bye\n") << "they hear SIGTERM";
}

TEST_F(Run, ARankThatBeginsToAskMeanwhileIsWaitedFor) {
    Child job =
        start({"-n", "1", "/bin/sh", "-c",
               "echo $$ > $D/r0; while ! od -An -tx1 -N1 $TESSERA_PREEMPT_FILE | grep -q 01; do :; done;"
               ": > $TESSERA_PREEMPT_ASKED_FILE; while [ ! -e $D/go ]; do sleep 0.02; done; echo saved > $D/saved"});
    (void)pid_in("r0");
    ::kill(job.pid(), SIGTERM);
    wait_until([&] { return read_file(directory_.path() / "err").find("asked meanwhile") != std::string::npos; },
               Deadline::in(milliseconds{20000}), "the agent to notice");
    std::ofstream(scratch() + "/go") << "\n";
    const Result result = finish(job);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(file("saved"), "saved\n");
}

TEST_F(Run, RanksThatDoNotEndInTimeAreEnded) {
    Child job = start({"-n", "2", "--grace-s", "0.2", "/bin/sh", "-c",
                       ": > $TESSERA_PREEMPT_ASKED_FILE; echo $$ > $D/r$RANK; sleep 600"});
    const pid_t rank = pid_in("r0");
    (void)pid_in("r1");
    ::kill(job.pid(), SIGTERM);
    const Result result = finish(job);
    EXPECT_EQ(result.code, 128 + SIGTERM);
    EXPECT_THAT(result.err, AllOf(HasSubstr("waiting up to 0.2 s for the ranks to save"), HasSubstr("Ctrl-C")));
    EXPECT_FALSE(alive(rank));
}

TEST_F(Run, SecondInterruptKillsAtOnce) {
    Child job =
        start({"-n", "2", "/bin/sh", "-c", "trap '' TERM INT; echo $$ > $D/r$RANK; while :; do sleep 600; done"});
    (void)pid_in("r0");
    (void)pid_in("r1");
    ::kill(job.pid(), SIGINT);
    wait_until([&] { return read_file(directory_.path() / "err").find("SIGINT") != std::string::npos; },
               Deadline::in(milliseconds{20000}), "the first signal to be taken");
    ::kill(job.pid(), SIGINT);
    EXPECT_EQ(finish(job).code, 128 + SIGINT);
}

TEST_F(Run, NohupIsRespected) {
    const std::string command = "trap '' HUP; exec " + tessera + " run --grace-s 0.1 /bin/sh -c 'echo $$ > " +
                                scratch() + "/r0; sleep 600' 2> " + scratch() + "/err";
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid == 0) {
        ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
        ::_exit(126);
    }
    Child job(pid);
    (void)pid_in("r0");
    ::kill(job.pid(), SIGHUP);
    ::kill(job.pid(), SIGTERM);
    EXPECT_EQ(job.wait(), 128 + SIGTERM);
    EXPECT_THAT(file("err"), AllOf(HasSubstr("SIGTERM"), Not(HasSubstr("SIGHUP"))));
}

TEST_F(Run, RankThatFailsWhileOthersSaveDoesNotEndThem) {
    Child job = start({"-n", "2", "--max-restarts", "3", "/bin/sh", "-c",
                       ": > $TESSERA_PREEMPT_ASKED_FILE; echo $$ > $D/r$RANK; while ! od -An -tx1 -N1 "
                       "$TESSERA_PREEMPT_FILE | grep -q 01; do :; done;"
                       "if [ $RANK = 0 ]; then echo gone > $D/gone; exit 4; fi;"
                       "while kill -0 $(cat $D/r0) 2>/dev/null; do :; done; echo saved > $D/saved"});
    (void)pid_in("r0");
    (void)pid_in("r1");
    ::kill(job.pid(), SIGTERM);
    const Result result = finish(job);
    EXPECT_EQ(result.code, 4) << "a job that was asked to stop is not restarted";
    EXPECT_EQ(file("saved"), "saved\n");
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

TEST_F(Run, NobodyReadingTheOutputDoesNotStopTheJob) {
    const std::string command = tessera +
                                " run -n 1 /bin/sh -c 'i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); "
                                "done; echo done > " +
                                scratch() + "/done' | head -1 > /dev/null";
    ASSERT_EQ(std::system(command.c_str()), 0);
    wait_until([&] { return file("done") == "done\n"; }, Deadline::in(milliseconds{20000}), "the rank's end");
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
    EXPECT_FALSE(std::filesystem::exists(logs + "/round-0/rank-1.listens"));
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

TEST_F(Run, StackedJobsHavePortsStoresAndTokensOfTheirOwn) {
    const std::string script =
        "echo $MASTER_PORT $TESSERA_STORE $TESSERA_JOB_ID $(cat $TESSERA_TOKEN_FILE) > $D/$JOB-$RANK;"
        "while [ ! -s $D/a-0 ] || [ ! -s $D/b-0 ]; do :; done";
    Child a = start({"-n", "2", "--env", "JOB=a", "/bin/sh", "-c", script});
    Child b = start({"-n", "2", "--env", "JOB=b", "/bin/sh", "-c", script});
    EXPECT_EQ(a.wait(), 0);
    EXPECT_EQ(b.wait(), 0);
    std::istringstream first(file("a-0"));
    std::istringstream second(file("b-0"));
    for (std::string x, y; first >> x && second >> y;) EXPECT_NE(x, y);
    EXPECT_EQ(file("a-0"), file("a-1"));
    EXPECT_THAT(file("a-0"), ::testing::MatchesRegex("[0-9]+ tcp://127.0.0.1:[0-9]+ [0-9a-f]+ [0-9a-f]{64}\n"));
}

TEST_F(Run, TokenIsReadableByTheRankAloneAndInNoVariable) {
    const Result result = run_shell({"-n", "1"},
                                    "stat -L -c %a $TESSERA_TOKEN_FILE; t=$(cat /dev/fd/$TESSERA_TOKEN_FD);"
                                    "env | grep -c $t; tr '\\0' ' ' < /proc/$PPID/cmdline | grep -c $t");
    EXPECT_EQ(lines_of(result.out), (std::vector<std::string>{"[rank 0 sh] 600", "[rank 0 sh] 0", "[rank 0 sh] 0"}));
}

TEST_F(Run, InsecureJobsHaveNoToken) {
    const Result result = run_shell({"--insecure"}, "echo x$TESSERA_TOKEN_FILE$TESSERA_TOKEN_FD $TESSERA_INSECURE");
    EXPECT_EQ(result.out, "[rank 0 sh] x 1\n");
}

TEST_F(Run, ThreadsAreLimitedOnlyWhenRanksShareTheMachine) {
    ::unsetenv("OMP_NUM_THREADS");
    EXPECT_EQ(run_shell({"-n", "1"}, "echo x$OMP_NUM_THREADS").out, "[rank 0 sh] x\n");
    EXPECT_THAT(run_shell({"-n", "2"}, "echo x$OMP_NUM_THREADS").out, HasSubstr("x1"));
    EXPECT_THAT(run_shell({"-n", "2", "--env", "OMP_NUM_THREADS=3"}, "echo x$OMP_NUM_THREADS").out, HasSubstr("x3"));
}

TEST_F(Run, MistakesAreNamedBeforeAnythingStarts) {
    const auto told = [&](const std::vector<std::string>& arguments, int code, const std::string& part) {
        const Result result = run(arguments);
        EXPECT_EQ(result.code, code) << part;
        EXPECT_THAT(result.err, HasSubstr(part));
        EXPECT_EQ(result.out, "");
    };
    told({}, 2, "no command");
    told({"-n", "2"}, 2, "no command");
    told({"-n", "0", "true"}, 2, "0 ranks");
    told({"-n", "x", "true"}, 2, "'x' is no number");
    told({"-n", "4:3", "true"}, 2, "MIN:MAX");
    told({"-n", "2:3", "true", ":", "true"}, 2, "--min-ranks");
    told({"--min-ranks", "3", "-n", "2", "true"}, 2, "at least 3 ranks");
    told({"--on-loss", "shrink", "-n", "2", "true"}, 2, "--min-ranks");
    told({"--on-loss", "panic", "true"}, 2, "--on-loss panic");
    told({"--max-restarts", "-1", "true"}, 2, "-1 restarts");
    told({"--env", "NAME", "true"}, 2, "NAME=VALUE");
    told({"--frobnicate", "true"}, 2, "--frobnicate");
    told({"--nnodes", "2", "true"}, 2, "one host");
    told({"true", ":"}, 2, "no command");
    told({"tessera-no-such-program"}, 127, "no program 'tessera-no-such-program' in PATH");
    told({"/no/such/program"}, 127, "no program '/no/such/program'");
    told({"true", ":", "/etc/passwd"}, 126, "/etc/passwd");
}

TEST_F(Run, ProgramOfTheCurrentDirectoryIsNamed) {
    ASSERT_EQ(::chdir(scratch().c_str()), 0);
    std::ofstream("first.py") << "print(1)\n";
    EXPECT_THAT(run({"first.py"}).err, HasSubstr("a file is here: write `python first.py`"));
    std::filesystem::permissions("first.py", std::filesystem::perms::owner_all);
    EXPECT_THAT(run({"first.py"}).err, HasSubstr("one is here: write ./first.py"));
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

TEST_F(Run, ProgramThatCannotBeExecutedEndsTheJobWithItsReason) {
    const std::string path = (directory_.path() / "script").string();
    std::ofstream(path) << "echo no interpreter line\n";
    ::chmod(path.c_str(), 0755);
    const Result result = run({"-n", "2", path});
    EXPECT_EQ(result.code, 126);
    EXPECT_THAT(result.err, HasSubstr("#!"));
}

}  // namespace
}  // namespace tsr
