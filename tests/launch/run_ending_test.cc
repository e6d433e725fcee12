// `tessera run` ends: for a rank that fails, a signal, its own death; and no process is left.
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "checkpoint/load/checkpoint.hpp"
#include "patience.hpp"
#include "places.hpp"
#include "run_fixture.hpp"
#include "soon.hpp"

namespace tsr {
namespace {

using testing::alive;
using ::testing::AllOf;
using testing::Child;
using ::testing::HasSubstr;
using testing::lines_of;
using ::testing::Not;
using testing::read_file;
using testing::Result;
using testing::Run;
using testing::tessera;

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

// Two ranks, each with a grandchild; all of them ignore SIGTERM.
class KilledRun : public Run {
   protected:
    void start_job() {
        job_.emplace(start({"-n", "2", "/bin/sh", "-c",
                            "echo $PPID > $D/agent; trap '' TERM; echo $$ > $D/r$RANK;"
                            "setsid /bin/sh -c 'trap \"\" TERM; echo $$ > $D/g'$RANK'; while :; do sleep 600; done' & "
                            "while :; do sleep 600; done"}));
        for (const char* name : {"r0", "r1", "g0", "g1"}) pids_.push_back(pid_in(name));
        agent_ = pid_in("agent");
        ASSERT_NE(agent_, job_->pid());
    }
    [[nodiscard]] pid_t guardian() const { return job_->pid(); }

    std::optional<Child> job_;
    pid_t agent_ = 0;
    std::vector<pid_t> pids_;
};

TEST_F(KilledRun, KilledGuardianLeavesNoRankAndNoGrandchild) {
    start_job();
    ASSERT_EQ(::kill(guardian(), SIGKILL), 0);
    EXPECT_EQ(job_->wait(), 128 + SIGKILL);
    for (const pid_t pid : pids_) expect_dies(pid);
}

TEST_F(KilledRun, KilledAgentLeavesNoRankAndNoGrandchild) {
    start_job();
    ASSERT_EQ(::kill(agent_, SIGKILL), 0);
    const Result result = finish(*job_);
    EXPECT_EQ(result.code, 128 + SIGKILL);
    EXPECT_THAT(result.err, HasSubstr("tessera: the launcher was killed by SIGKILL"));
    for (const pid_t pid : pids_) EXPECT_FALSE(alive(pid));
}

// As killall and pkill do.
TEST_F(KilledRun, KillingByNameLeavesNoRankAndNoGrandchild) {
    start_job();
    for (const pid_t pid : {guardian(), agent_}) {
        if (read_file(fmt::format("/proc/{}/comm", pid)).find("tessera") != std::string::npos) ::kill(pid, SIGKILL);
    }
    EXPECT_EQ(job_->wait(), 128 + SIGKILL);
    for (const pid_t pid : pids_) expect_dies(pid);
    expect_dies(agent_);
}

// Nobody is left who could remove the job's directory. (Nor who could end grandchildren, so the ranks have none.)
TEST_F(Run, NextJobRemovesWhatAKilledOneLeftAndNothingElse) {
    Child killed = start({"-n", "2", "/bin/sh", "-c",
                          "if [ $RANK = 0 ]; then echo $PPID > $D/agent; fi; echo $$ > $D/r$RANK; exec sleep 600"});
    const std::vector<pid_t> ranks{pid_in("r0"), pid_in("r1")};
    const pid_t agent = pid_in("agent");
    ASSERT_NE(agent, killed.pid());
    ASSERT_EQ(::kill(killed.pid(), SIGSTOP), 0);  // the guardian, which would end the job in order
    ASSERT_EQ(::kill(agent, SIGKILL), 0);
    ASSERT_EQ(::kill(killed.pid(), SIGKILL), 0);
    EXPECT_EQ(killed.wait(), 128 + SIGKILL);
    for (const pid_t pid : {ranks[0], ranks[1], agent}) expect_dies(pid);
    ASSERT_EQ(leftover_directories(), 1);

    Child living = start({"/bin/sh", "-c", "echo $$ > $D/living; sleep 600"});
    (void)pid_in("living");
    ASSERT_EQ(leftover_directories(), 1) << "the killed job's, or not the living one's";
    const std::filesystem::path other = directory_.path() / "tessera-run.nobody";
    std::filesystem::create_directory(other);  // who made it is not known
    const std::filesystem::path kept = directory_.path() / "kept";
    std::filesystem::create_directory(kept);
    std::ofstream(kept / "owner") << "";
    std::filesystem::create_directory_symlink(kept, directory_.path() / "tessera-run.linked");
    Child next = start({"/bin/sh", "-c", "ls $TMPDIR > $D/seen"});
    EXPECT_EQ(finish(next).code, 0);
    EXPECT_EQ(leftover_directories(), 3) << "the living job's, one without an owner and a link stay";
    EXPECT_TRUE(std::filesystem::exists(kept / "owner"));
    ::kill(living.pid(), SIGQUIT);
    (void)finish(living);
    EXPECT_EQ(leftover_directories(), 2);
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

TEST_F(Run, RanksThatAreLeftTrainOnInTheSameProcesses) {
    const std::string root = scratch() + "/checkpoints";
    Child job = start({"-n", "2:3", "--on-loss", "continue", "--events", events_path(),
                       tsr::testing::binary_dir() + "/tests/survivor", root});
    for (const char* name : {"r0", "r2"}) (void)pid_in(name);
    ::kill(pid_in("r1"), SIGKILL);
    const Result result = finish(job);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("rank 1 was killed by SIGKILL; 2 ranks may continue (--on-loss continue)"));
    EXPECT_EQ(file("resumed0"), "10\n");
    EXPECT_EQ(file("resumed1"), "10\n") << "rank 2 of the first three";
    const double expected = 1 - std::pow(0.9, 30);  // as if nothing had happened
    for (const char* name : {"w0", "w1"}) EXPECT_NEAR(std::stod(file(name)), expected, 1e-5);
    EXPECT_EQ(file("w2"), "");
    for (const Json& event : events()) EXPECT_NE(event.at("event").as_string(), "restart");
}

TEST_F(Run, TooFewRanksLeftDoNotGoOn) {
    Child job =
        start({"-n", "2", "--min-ranks", "2", "--on-loss", "continue", tsr::testing::binary_dir() + "/tests/hung"});
    for (const char* name : {"r0", "r1"}) (void)pid_in(name);
    ::kill(pid_in("r1"), SIGKILL);
    const Result result = finish(job);
    EXPECT_EQ(result.code, 128 + SIGKILL);
    EXPECT_THAT(result.err, Not(HasSubstr("may continue")));
}

// Of `path` and all below it.
std::vector<std::string> records_below(const std::filesystem::path& path) {
    std::vector<std::string> files;
    std::error_code none_yet;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path, none_yet)) {
        if (entry.path().extension() == ".jsonl") files.push_back(entry.path().string());
    }
    return files;
}

// Ranks in a collective answer, and one that is in its own code; one that is stopped does not.
TEST_F(Run, ASignalMakesRanksThatHangTellWhoIsWaitedFor) {
    Child job = start({"-n", "4", "--events", events_path(), tsr::testing::binary_dir() + "/tests/hung"});
    for (const char* name : {"r0", "r1", "r2", "r3"}) (void)pid_in(name);
    ::kill(pid_in("r1"), SIGSTOP);
    ::kill(job.pid(), SIGUSR1);
    wait_until([&] { return records_below(directory_.path()).size() == 3; }, testing::soon(), "three records");
    const std::string directory =
        std::filesystem::path(records_below(directory_.path()).front()).parent_path().string();
    EXPECT_EQ(std::filesystem::path(directory).filename(), "round-0");
    const std::string asked = tessera + " trace why-hung " + directory + " > " + scratch() + "/why";
    EXPECT_EQ(std::system(asked.c_str()), 0);  // NOLINT(concurrency-mt-unsafe): one thread
    EXPECT_THAT(file("why"), HasSubstr("ranks 1, 3 never entered barrier #4; ranks 0, 2 waited"));
    EXPECT_THAT(file("why"), HasSubstr("Rank 1: it left no record"));
    EXPECT_THAT(file("why"), HasSubstr("Rank 3: its last operation was all_reduce #3"));

    // A second time: the records are new ones.
    std::filesystem::remove_all(directory);
    ::kill(pid_in("r1"), SIGCONT);
    ::kill(job.pid(), SIGUSR1);
    wait_until([&] { return records_below(directory_.path()).size() == 4; }, testing::soon(), "four records");
    ::kill(job.pid(), SIGQUIT);
    const Result result = finish(job);
    EXPECT_THAT(result.err, HasSubstr("SIGUSR1: the ranks write their flight records to " + directory));
    EXPECT_THAT(result.err, HasSubstr("tessera trace why-hung " + directory));
    int told = 0;
    for (const Json& event : events()) {
        if (event.at("event").as_string() != "trace") continue;
        ++told;
        EXPECT_EQ(event.at("directory").as_string(), directory);
    }
    EXPECT_EQ(told, 2);
}

TEST_F(Run, RequestedRecordsLieInTheTraceDirectory) {
    const std::string traces = scratch() + "/traces";
    Child job = start({"-n", "2", "--trace-dir", traces, tsr::testing::binary_dir() + "/tests/hung"});
    for (const char* name : {"r0", "r1"}) (void)pid_in(name);
    ::kill(job.pid(), SIGUSR1);
    wait_until([&] { return records_below(traces + "/round-0").size() == 2; }, testing::soon(), "two records");
    ::kill(job.pid(), SIGQUIT);
    (void)finish(job);
}

// It hangs in the program's own code before it joins.
TEST_F(Run, RanksThatNeverJoinAreTheCause) {
    const std::string seconds = fmt::format("{:.1f}", 0.001 * testing::patience_ms(1000));
    const auto fails = [&](const std::string& absent, const std::string& what) {
        const Result result = run_shell(
            {"-n", "4", "--timeout-s", seconds, "--kill-grace-s", "0.2"},
            "case $RANK in " + absent + ") exec sleep 600;; esac; exec " + tsr::testing::binary_dir() + "/tests/hung");
        EXPECT_EQ(result.code, 3);
        EXPECT_THAT(result.err, HasSubstr(what + " of 4 ranks in time"));
        return result.err;
    };
    const std::string one = fails("2", "rank 2 did not join the communicator");
    EXPECT_THAT(one, AllOf(HasSubstr("the job failed: rank 2 was late and other ranks timed out waiting for it: "),
                           HasSubstr("TIMEOUT because rank 2 was late")));
    EXPECT_THAT(fails("1|3", "ranks 1 and 3 did not join the communicator"),
                AllOf(HasSubstr("the job failed: rank 1 was late and other ranks timed out waiting for it: "),
                      HasSubstr("TIMEOUT because rank 1 was late")));
}

TEST_F(Run, RanksThatTimeOutLeaveRecordsThatTellWhoDidNotCome) {
    const std::string traces = scratch() + "/traces";
    const Result result = run({"-n", "3", "--trace-dir", traces, "--timeout-s", "1", "--kill-grace-s", "0.2",
                               tsr::testing::binary_dir() + "/tests/hung"});
    EXPECT_NE(result.code, 0);
    EXPECT_THAT(result.err,
                AllOf(HasSubstr("the job failed: rank 2 was late and other ranks timed out waiting for it: "),
                      HasSubstr("root cause: rank 2"), HasSubstr("TIMEOUT because rank 2 was late")));
    const std::vector<std::string> files = records_below(traces + "/round-0");
    EXPECT_EQ(files.size(), 2U) << "of the two that waited; the third was in its own code when it was ended";
    for (const std::string& path : files) EXPECT_THAT(read_file(path), HasSubstr("TIMEOUT")) << path;
    const std::string asked = tessera + " trace why-hung " + traces + "/round-0 > " + scratch() + "/why";
    EXPECT_EQ(std::system(asked.c_str()), 0);  // NOLINT(concurrency-mt-unsafe): one thread
    EXPECT_THAT(file("why"), HasSubstr("rank 2 never entered barrier #4; ranks 0-1 waited"));
}

// Each rank of each communicator, the saver's own ones too, leaves one record.
TEST_F(Run, AllRanksSaveAtOneStepWhenTheJobIsToldToStop) {
    const std::string root = scratch() + "/checkpoints";
    const std::string traces = scratch() + "/traces";
    Child job = start({"-n", "3", "--trace-dir", traces, tsr::testing::binary_dir() + "/tests/preempted", root});
    for (const char* name : {"r0", "r1", "r2"}) (void)pid_in(name);  // well on their way
    ::kill(job.pid(), SIGTERM);
    const Result result = finish(job);
    EXPECT_EQ(result.code, 0) << result.err;
    const std::string step = file("stopped0");
    EXPECT_NE(step, "");
    EXPECT_EQ(file("stopped1"), step);
    EXPECT_EQ(file("stopped2"), step);
    EXPECT_EQ(std::to_string(Checkpoint::open(root)->manifest().step) + "\n", step);
    std::map<std::string, std::multiset<int64_t>> ranks;  // by communicator
    for (const std::string& path : records_below(traces + "/round-0")) {
        const Json first = Json::parse(lines_of(read_file(path)).at(0), path);
        ranks[first.at("id").as_string()].insert(first.at("rank").as_int());
    }
    EXPECT_GE(ranks.size(), 2U);
    for (const auto& [id, of] : ranks) EXPECT_EQ(of, (std::multiset<int64_t>{0, 1, 2})) << id;
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
    EXPECT_THAT(result.err, HasSubstr("no rank polls for preemption; stopping in"));
    for (const char* name : {"bye0", "bye1"}) EXPECT_EQ(file(name), "bye\n") << "they hear SIGTERM";
}

TEST_F(Run, ARankThatBeginsToAskMeanwhileIsWaitedFor) {
    Child job =
        start({"-n", "1", "/bin/sh", "-c",
               "echo $$ > $D/r0; while ! od -An -tx1 -N1 $TESSERA_PREEMPT_FILE | grep -q 01; do :; done;"
               ": > $TESSERA_PREEMPT_ASKED_FILE; while [ ! -e $D/go ]; do sleep 0.02; done; echo saved > $D/saved"});
    (void)pid_in("r0");
    ::kill(job.pid(), SIGTERM);
    wait_until(
        [&] { return read_file(directory_.path() / "err").find("now polls for preemption") != std::string::npos; },
        testing::soon(), "the agent to notice");
    std::ofstream(scratch() + "/go") << "\n";
    const Result result = finish(job);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(file("saved"), "saved\n");
}

// Cleaners of TMPDIR take files by their age, 10 days with systemd.
TEST_F(Run, RanksSaveThoughEveryFileOfTheJobInTmpdirIsGone) {
    Child job = start({"-n", "2", "/bin/sh", "-c",
                       ": > $TESSERA_PREEMPT_ASKED_FILE; echo $$ > $D/r$RANK; while ! od -An -tx1 -N1 "
                       "$TESSERA_PREEMPT_FILE | grep -q 01; do :; done; echo saved > $D/s$RANK; [ $RANK = 0 ] || "
                       "{ echo '{\"message\": \"so it ends\"}' > $TESSERA_ERROR_FILE; exit 3; }"});
    (void)pid_in("r0");
    (void)pid_in("r1");
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_.path())) {
        if (entry.path().string().find("/tessera-run.") == std::string::npos || !entry.is_regular_file()) continue;
        std::filesystem::remove(entry.path());
    }
    ::kill(job.pid(), SIGTERM);
    const Result result = finish(job);
    EXPECT_THAT(result.err, AllOf(HasSubstr("for the ranks to save"), HasSubstr("so it ends")));
    EXPECT_EQ(file("s0"), "saved\n");
    EXPECT_EQ(file("s1"), "saved\n");
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
               testing::soon(), "the first signal to be taken");
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

}  // namespace
}  // namespace tsr
