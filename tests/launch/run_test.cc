// `tessera run`: what ranks are told, restarts, and wrong command lines.
#include <algorithm>

#include "run_fixture.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using testing::Child;
using ::testing::Contains;
using ::testing::HasSubstr;
using testing::lines_of;
using testing::Result;
using testing::Run;
using testing::tessera;

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

TEST_F(Run, TwoDashesEndTheOptionsOfTheCommand) {
    EXPECT_EQ(run({"-n", "1", "--", "/bin/echo", "-n", "a", "--", "b"}).out, "[rank 0 echo] a -- b\n");
    const Result two = run({"--", "/bin/echo", "a", ":", "-n", "1", "--", "/bin/echo", "b"});
    EXPECT_EQ(two.code, 0) << two.err;
    EXPECT_THAT(lines_of(two.out), ::testing::UnorderedElementsAre("[rank 0 echo] a", "[rank 1 echo] b"));
}

TEST_F(Run, ColonsThatAProgramGetsAreWrittenWithOneMore) {
    EXPECT_EQ(run({"/bin/echo", "::", ":::", "a:b", "::1"}).out, "[rank 0 echo] : :: a:b ::1\n");
}

TEST_F(Run, RankZeroReadsStandardInputAndOthersFindItEmpty) {
    const std::string command =
        "echo input | " + tessera + " run -n 2 /bin/sh -c 'cat > " + scratch() + "/$RANK' < /dev/stdin";
    ASSERT_EQ(std::system(command.c_str()), 0);
    EXPECT_EQ(file("0"), "input\n");
    EXPECT_EQ(file("1"), "");
}

TEST_F(Run, RestartsAllRanksWhileRestartsLast) {
    // Rank 1 fails when rank 0 has written its line: what follows on the failure may end rank 0 at once.
    const Result result = run_shell({"-n", "2", "--max-restarts", "2", "--events", events_path()},
                                    "echo $RANK $WORLD_SIZE $TESSERA_EPOCH >> $D/log; "
                                    "[ $RANK = 0 ] || [ $TESSERA_EPOCH = 2 ] && exit 0; "
                                    "until grep -q \"^0 2 $TESSERA_EPOCH\" $D/log; do sleep 0.01; done; exit 5");
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
    EXPECT_THAT(result.err, HasSubstr("\n  1 of 1 restarts used (--max-restarts)\n"));
}

TEST_F(Run, TooFewRanksLeftAreTold) {
    const Result result = run_shell({"-n", "2:2"}, "if [ $RANK = 1 ]; then exit 9; fi; sleep 600");
    EXPECT_EQ(result.code, 9);
    EXPECT_THAT(result.err, HasSubstr("\n  1 of 2 ranks left (rank 0), fewer than --min-ranks 2\n"));
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

TEST_F(Run, EncryptedJobsTellTheirRanks) {
    const char* const show = "echo x$TESSERA_TLS";
    ::unsetenv("TESSERA_TLS");
    EXPECT_EQ(run_shell({}, show).out, "[rank 0 sh] x\n");
    EXPECT_EQ(run_shell({"--encrypt"}, show).out, "[rank 0 sh] xpsk\n");
    ::setenv("TESSERA_TLS", "1", 1);  // holds for the launcher as well
    EXPECT_EQ(run_shell({}, show).out, "[rank 0 sh] x1\n");
    const Result insecure = run_shell({"--insecure"}, show);
    EXPECT_EQ(insecure.code, 2) << insecure.err;
    EXPECT_THAT(insecure.err, HasSubstr("TESSERA_TLS and an insecure store contradict each other"));
    ::unsetenv("TESSERA_TLS");
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
        EXPECT_EQ(result.err.find("\nUsage: tessera run [OPTIONS] CMD [ARGS...]") != std::string::npos, code == 2);
        EXPECT_EQ(result.out, "");
    };
    told({}, 2, "no command");
    told({"-n", "2"}, 2, "no command");
    told({"-n", "0", "true"}, 2, "0 ranks");
    told({"-n", "1000000000", "true"}, 2,
         "1000000000 ranks of 'true' are requested; the number must be between 1 and 4096");
    told({"-n", "2", "true", ":", "-n", "1000000000", "true"}, 2, "1000000000 ranks");
    told({"-n", "x", "true"}, 2, "'x' is not a number");
    told({"-n", "4:3", "true"}, 2, "MIN:MAX");
    told({"-n", "2:3", "true", ":", "true"}, 2, "--min-ranks");
    told({"--min-ranks", "3", "-n", "2", "true"}, 2,
         "--min-ranks 3 (or -n MIN:MAX) needs at least as many ranks, but the job has 2");
    told({"--on-loss", "shrink", "-n", "2", "true"}, 2, "--min-ranks");
    told({"--on-loss", "replace", "-n", "2", "true"}, 2, "--max-restarts");
    told({"--on-loss", "panic", "true"}, 2, "--on-loss panic");
    told({"--max-restarts", "-1", "true"}, 2, "the number of restarts is -1");
    for (const char* timeout : {"0", "-1", "nan", "1e9"}) told({"--timeout-s", timeout, "true"}, 2, "--timeout-s");
    told({"--insecure", "--encrypt", "true"}, 2, "--insecure and --encrypt contradict each other");
    told({"--env", "NAME", "true"}, 2, "NAME=VALUE");
    told({"--frobnicate", "true"}, 2, "--frobnicate");
    told({"--nnodes", "2", "true"}, 2, "--rdzv-endpoint HOST:PORT");
    told({"true", ":"}, 2, "no command");
    told({"tessera-no-such-program"}, 127, "program 'tessera-no-such-program' is not in PATH");
    told({"/no/such/program"}, 127, "program '/no/such/program' does not exist");
    told({"true", ":", "/etc/passwd"}, 126, "/etc/passwd");
}

class RunInADirectory : public Run {
   protected:
    ~RunInADirectory() override { std::filesystem::current_path(former_); }
    const std::filesystem::path former_ = std::filesystem::current_path();
};

TEST_F(RunInADirectory, ProgramOfItIsNamed) {
    std::filesystem::current_path(scratch());
    std::ofstream("first.py") << "print(1)\n";
    const auto told = [&](const std::string& program) { return run({"--no-python", program}).err; };
    EXPECT_THAT(told("./first.py"), HasSubstr("run `python ./first.py`")) << "it may not be executed";
    EXPECT_THAT(told("first.py"),
                HasSubstr("a file with this name is in the current directory: run `python first.py`"));
    std::filesystem::permissions("first.py", std::filesystem::perms::owner_all);
    EXPECT_THAT(told("first.py"), HasSubstr("it is in the current directory: run ./first.py"));
    EXPECT_THAT(told("./first.py"), HasSubstr("run `python ./first.py`")) << "it does not say by what";
}

TEST_F(RunInADirectory, ItMayBeGone) {
    std::filesystem::create_directory(scratch() + "/gone");
    std::filesystem::current_path(scratch() + "/gone");
    std::filesystem::remove(scratch() + "/gone");
    EXPECT_EQ(run({"true"}).err, "");
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
