// `tessera run` with torchrun's options: what they do to the ranks and to their output.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "run_fixture.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using testing::Child;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::lines_of;
using ::testing::Not;
using testing::read_file;
using testing::Result;
using testing::Run;
using ::testing::UnorderedElementsAre;

class LikeTorchrun : public Run {
   protected:
    LikeTorchrun() : logs_(directory_.path() / "logs") {}
    [[nodiscard]] std::vector<std::string> log(const std::string& name) const {
        return lines_of(read_file(logs_ / name));
    }
    void write_program(const std::string& name, const std::string& text) const {
        std::ofstream(scratch() + "/" + name) << text;
        ::chmod((scratch() + "/" + name).c_str(), 0755);
    }
    // Variables for the job to start, until the end of the test.
    void set(const std::map<std::string, std::string>& variables) {
        for (const auto& [name, value] : variables) {
            ::setenv(name.c_str(), value.c_str(), 1);
            set_.push_back(name);
        }
    }
    ~LikeTorchrun() override {
        for (const std::string& name : set_) ::unsetenv(name.c_str());
    }

    const std::filesystem::path logs_;

   private:
    std::vector<std::string> set_;
};

// Each option that changes what can be seen, in one job; once with dashes, once with underscores, once by PET_NAME.
enum class Way { dashes, underscores, environment };

class EachWay : public LikeTorchrun, public ::testing::WithParamInterface<Way> {
   protected:
    // Adds an option to the command line or to the environment.
    void give(std::string name, const std::string& value) {
        if (GetParam() == Way::environment) {
            for (char& letter : name) letter = letter == '-' ? '_' : static_cast<char>(std::toupper(letter));
            set({{"PET_" + name, value.empty() ? "1" : value}});
            return;
        }
        if (GetParam() == Way::underscores) std::ranges::replace(name, '-', '_');
        words_.push_back("--" + name);
        if (!value.empty()) words_.push_back(value);
    }
    std::vector<std::string> words_;
};

TEST_P(EachWay, OptionsHaveTorchrunsMeaning) {
    write_program("say.py",  // executed itself
                  "#!/bin/sh\necho $ROLE_NAME $LOCAL_RANK $CUDA_VISIBLE_DEVICES $TORCHELASTIC_MAX_RESTARTS "
                  "$TORCHELASTIC_SIGNALS_TO_HANDLE, an apple\necho pear >&2\n");
    for (const auto& [name, value] :
         std::map<std::string, std::string>{{"nproc-per-node", "2"},
                                            {"role", "trainer"},
                                            {"max-restarts", "3"},
                                            {"monitor-interval", "0.5"},
                                            {"start-method", "fork"},
                                            {"event-log-handler", "null"},
                                            {"no-python", ""},
                                            {"log-dir", logs_.string()},
                                            {"tee", "1"},
                                            {"redirects", "2"},
                                            {"local-ranks-filter", "1"},
                                            {"duplicate-stdout-filters", "plum,,s,apple"},
                                            {"duplicate-stderr-filters", "plum"},
                                            {"log-line-prefix-template", "${role_name}${rank}|"},
                                            {"signals-to-handle", "SIGUSR2,SIGTERM"},
                                            {"shutdown-timeout", "7"},
                                            {"virtual-local-rank", ""}}) {
        give(name, value);
    }
    words_.push_back(scratch() + "/say.py");
    const Result result = run(words_);
    ASSERT_EQ(result.code, 0) << result.err;
    const auto line = [](int rank) { return fmt::format("trainer 0 {} 3 SIGUSR2,SIGTERM, an apple", rank); };
    EXPECT_EQ(result.out, "trainer1|" + line(1) + "\n");
    EXPECT_EQ(result.err, "") << "standard error is redirected";
    for (const int rank : {0, 1}) {
        EXPECT_THAT(log(fmt::format("round-0/rank-{}.stdout.log", rank)), ElementsAre(line(rank)));
        EXPECT_THAT(log(fmt::format("round-0/rank-{}.stderr.log", rank)), ElementsAre("pear"));
        EXPECT_FALSE(std::filesystem::exists(logs_ / fmt::format("round-0/rank-{}.log", rank)));
    }
    EXPECT_THAT(log("round-0/filtered_stdout.log"), UnorderedElementsAre("trainer0|" + line(0), "trainer1|" + line(1)));
    EXPECT_TRUE(std::filesystem::exists(logs_ / "round-0/filtered_stderr.log"));
    EXPECT_THAT(log("round-0/filtered_stderr.log"), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Torchrun, EachWay, ::testing::Values(Way::dashes, Way::underscores, Way::environment));

TEST_F(LikeTorchrun, TheCommandLineWinsOverTheEnvironment) {
    set({{"PET_ROLE", "a"}, {"PET_NO_PYTHON", "0"}, {"PET_TEE", ""}, {"PET_MAX_RESTARTS", "2"}});
    EXPECT_EQ(run_shell({"--role", "b"}, "echo $ROLE_NAME $TORCHELASTIC_MAX_RESTARTS").out, "[rank 0 sh] b 2\n");
}

// The interpreter here prints the words it gets.
TEST_F(LikeTorchrun, PythonProgramsRunUnderPython) {
    write_program("interpreter", "#!/bin/sh\necho \"$RANK: $*\"\n");
    write_program("train.py", "");
    const std::string script = scratch() + "/train.py";
    set({{"PYTHON_EXEC", scratch() + "/interpreter"}});
    const Result result = run({script,
                               "a",
                               "-m",
                               ":",
                               "-m",
                               "pack.mod",
                               "b",
                               ":",
                               "--run-path",
                               "/tmp",
                               ":",
                               "--pass-local-rank",
                               "local_rank",
                               script,
                               "c",
                               ":",
                               "--pass_local_rank",
                               "local-rank",
                               "-m",
                               "m",
                               ":",
                               "--pass-local-rank",
                               "local-rank",
                               "/bin/echo",
                               "5:"});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(lines_of(result.out),
                UnorderedElementsAre(fmt::format("[rank 0 train.py] 0: -u {} a -m", script),
                                     "[rank 1 pack.mod] 1: -u -m pack.mod b", "[rank 2 tmp] 2: -u /tmp",
                                     fmt::format("[rank 3 train.py] 3: -u {} --local_rank=3 c", script),
                                     "[rank 4 m] 4: -u -m m --local-rank=4", "[rank 5 echo] --local-rank=5 5:"));
}

TEST_F(LikeTorchrun, PythonIsTheActiveEnvironments) {
    std::filesystem::create_directories(scratch() + "/venv/bin");
    write_program("venv/bin/python", "#!/bin/sh\necho of venv\n");
    write_program("train.py", "");
    set({{"VIRTUAL_ENV", scratch() + "/venv"}});
    EXPECT_EQ(run({scratch() + "/train.py"}).out, "[rank 0 train.py] of venv\n");
    set({{"VIRTUAL_ENV", "/nowhere"}});
    EXPECT_EQ(run({scratch() + "/train.py"}).code, 0) << "the path's";
}

TEST_F(LikeTorchrun, FilesAreForAnyRank) {
    const Result result = run_shell({"-n", "13", "--log-dir", logs_.string(), "--redirects", "12:3", "-t11:1"},
                                    "echo out $RANK; echo err $RANK >&2");
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(lines_of(result.out).size(), 12U);
    EXPECT_EQ(lines_of(result.err).size(), 12U);
    EXPECT_THAT(lines_of(result.out), AllOf(Contains("[rank 11 sh] out 11"), Not(Contains(HasSubstr("out 12")))));
    EXPECT_THAT(log("round-0/rank-12.stdout.log"), ElementsAre("out 12"));
    EXPECT_THAT(log("round-0/rank-12.stderr.log"), ElementsAre("err 12"));
    EXPECT_THAT(log("round-0/rank-11.stdout.log"), ElementsAre("out 11"));
    EXPECT_THAT(log("round-0/rank-11.log"), ElementsAre("err 11"));
    EXPECT_THAT(log("round-0/rank-10.log"), UnorderedElementsAre("out 10", "err 10"));
}

TEST_F(LikeTorchrun, FilesWithoutADirectoryGoToANewOneThatStays) {
    const Result result = run_shell({"-r", "2"}, "echo lost >&2; exit 3");
    EXPECT_EQ(result.code, 3);
    const std::string said = lines_of(result.err).at(0);
    const size_t begin = said.find(directory_.path().string() + "/tessera-logs.");
    ASSERT_NE(begin, std::string::npos) << said;
    const std::string file = said.substr(begin, said.find(' ', begin) - begin) + "/round-0/rank-0.stderr.log";
    EXPECT_EQ(read_file(file), "lost\n");
    EXPECT_THAT(result.err, AllOf(HasSubstr("last stderr line: lost"), HasSubstr("its output: " + file)));
}

TEST_F(LikeTorchrun, RestartCountCountsRestartsAndNotRoundsOfFewerRanks) {
    const Result result =
        run_shell({"-n", "1:2", "--on-loss", "shrink", "--max-restarts", "1"},
                  "echo $TESSERA_EPOCH $TORCHELASTIC_RESTART_COUNT >> $D/log$RANK;"
                  "case $TESSERA_EPOCH in 0) [ $RANK = 0 ] && sleep 600; kill -9 $$;; 1) exit 3;; esac");
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(file("log0"), "0 0\n1 0\n2 1\n");
}

TEST_F(LikeTorchrun, RoleRanksCountTheRanksOfARole) {
    const std::vector<std::string> show{"/bin/sh", "-c", "echo $RANK $ROLE_NAME $ROLE_RANK/$ROLE_WORLD_SIZE >> $D/log"};
    std::vector<std::string> words{"--role", "a"};
    for (const char* more : {"b", "a"}) {
        words.insert(words.end(), show.begin(), show.end());
        words.insert(words.end(), {":", "-n", "2", "--role", more});
    }
    words.insert(words.end(), show.begin(), show.end());
    ASSERT_EQ(run(words).code, 0);
    EXPECT_THAT(lines_of(file("log")), UnorderedElementsAre("0 a 0/3", "1 b 0/2", "2 b 1/2", "3 a 1/3", "4 a 2/3"));
}

TEST_F(LikeTorchrun, VirtualLocalRankTakesTheDevicesThatAreVisible) {
    set({{"CUDA_VISIBLE_DEVICES", "5, GPU-7"}});
    const std::string show = "echo $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES $TESSERA_LOCAL_RANK >> $D/log";
    ASSERT_EQ(run_shell({"-n", "2", "--virtual-local-rank"}, show).code, 0);
    EXPECT_THAT(lines_of(file("log")), UnorderedElementsAre("0 0 5 0", "1 0 GPU-7 1"));
    const Result result = run_shell({"-n", "3", "--virtual-local-rank"}, show);
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.err, HasSubstr("local rank 2 has no device, because CUDA_VISIBLE_DEVICES=5, GPU-7 lists 2"));
}

TEST_F(LikeTorchrun, TorchsDefaultsAreSet) {
    ::unsetenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
    const std::string show = "echo $TORCH_NCCL_ASYNC_ERROR_HANDLING $TORCHELASTIC_SIGNALS_TO_HANDLE";
    EXPECT_EQ(run_shell({}, show).out, "[rank 0 sh] 1 SIGTERM,SIGINT,SIGHUP,SIGQUIT\n");
    set({{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"}});
    EXPECT_THAT(run_shell({}, show).out, HasSubstr("] 3 "));
}

// Rank 0 has a handler, rank 1 polls; both save.
TEST_F(LikeTorchrun, ASignalOfASchedulerMeansSaveAndEnd) {
    Child job =
        start({"-n", "2", "--signals-to-handle", "SIGTERM,SIGUSR1", "--preempted-exit-code", "85", "/bin/sh", "-c",
               "if [ $RANK = 0 ]; then trap 'echo saved > $D/s0; exit 0' USR1; echo $$ > $D/r0;"
               "while :; do sleep 0.02; done; fi; : > $TESSERA_PREEMPT_ASKED_FILE; echo $$ > $D/r1;"
               "while ! od -An -tx1 -N1 $TESSERA_PREEMPT_FILE | grep -q 01; do :; done; echo saved > $D/s1"});
    (void)pid_in("r0");
    (void)pid_in("r1");
    ::kill(job.pid(), SIGUSR1);
    const Result result = finish(job);
    EXPECT_EQ(result.code, 85) << result.err;
    EXPECT_EQ(file("s0"), "saved\n");
    EXPECT_EQ(file("s1"), "saved\n");
    EXPECT_THAT(result.err,
                AllOf(HasSubstr("SIGUSR1: waiting up to 30 s for the ranks to save"), Not(HasSubstr("flight"))));
}

TEST_F(LikeTorchrun, AHandlerAloneIsWaitedFor) {
    Child job = start({"--signals-to-handle", "SIGUSR2", "/bin/sh", "-c",
                       "trap 'echo saved > $D/saved; exit 0' USR2; echo $$ > $D/r0; while :; do sleep 0.02; done"});
    (void)pid_in("r0");
    ::kill(job.pid(), SIGUSR2);
    const Result result = finish(job);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(file("saved"), "saved\n");
    EXPECT_THAT(result.err, HasSubstr("SIGUSR2: waiting up to 30 s"));
}

TEST_F(LikeTorchrun, ASignalThatIsNotHandledEndsTheJobImmediately) {
    Child job = start({"--signals-to-handle", "SIGTERM", "/bin/sh", "-c",
                       "trap '' INT TERM; echo $$ > $D/r0; while :; do sleep 0.05; done"});
    const pid_t rank = pid_in("r0");
    ::kill(job.pid(), SIGINT);
    EXPECT_EQ(finish(job).code, 128 + SIGINT);
    expect_dies(rank);
}

TEST_F(LikeTorchrun, APrefixOfPyTorchsStaysIfTheTemplateDoesNotNameTheRank) {
    EXPECT_EQ(run_shell({"--log-line-prefix-template", "${hostname}|"}, "echo '[rank0]: x'").out,
              fmt::format("{}|[rank0]: x\n", lines_of(read_file("/proc/sys/kernel/hostname")).at(0)));
    EXPECT_EQ(run_shell({"--log-line-prefix-template", "${rank}|"}, "echo '[rank0]: x'").out, "0|x\n");
}

}  // namespace
}  // namespace tsr
