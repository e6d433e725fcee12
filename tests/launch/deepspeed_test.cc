// `tessera deepspeed` and the hosts of `tessera run` as a user meets them: a shell program prints what a rank is given.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "launch/binding.hpp"
#include "run_fixture.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using testing::Child;
using ::testing::HasSubstr;
using testing::lines_of;
using ::testing::Not;
using testing::read_file;
using testing::Result;
using ::testing::StartsWith;
using testing::tessera;
using ::testing::UnorderedElementsAre;

class Deepspeed : public testing::Run {
   protected:
    Deepspeed() {
        std::ofstream(path("rank")) << "#!/bin/sh\necho \"$LOCAL_RANK/$RANK/$WORLD_SIZE $CUDA_VISIBLE_DEVICES|$*\"\n";
        std::ofstream(path("hosts")) << "worker-1 slots=4\nworker-2 slots=2\n";
        for (const char* name : {"rank"}) std::filesystem::permissions(path(name), std::filesystem::perms::owner_all);
    }
    [[nodiscard]] std::string path(const std::string& name) const { return (directory_.path() / name).string(); }

    // `words`: a shell command line; `variables`: "NAME=value ". Both streams; HOME and the directory are the test's own.
    Result tessera(const std::string& words, const std::string& variables = "") {
        const std::string command =
            fmt::format("cd {0} && HOME={0} TMPDIR={0} {1} {2} {3} > {0}/out 2> {0}/err < /dev/null",
                        directory_.path().string(), variables, testing::tessera, words);
        Result result;
        result.code = WEXITSTATUS(std::system(command.c_str()));
        result.out = read_file(path("out"));
        result.err = read_file(path("err"));
        return result;
    }
    Result deepspeed(const std::string& words, const std::string& variables = "CUDA_VISIBLE_DEVICES=6,4,7") {
        return tessera("deepspeed " + words, variables);
    }
};

// Without the prefixes of the ranks.
std::vector<std::string> plain(const std::string& out) {
    std::vector<std::string> lines = lines_of(out);
    for (std::string& line : lines) line.erase(0, line.find("] ") == std::string::npos ? 0 : line.find("] ") + 2);
    return lines;
}

TEST_F(Deepspeed, RanksOfOneHostGetTheirSlotsAndLocalRanks) {
    Result result = deepspeed("--no_python --include localhost:0,2 ./rank --deepspeed 'a b'");
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(plain(result.out), UnorderedElementsAre("0/0/2 6,7|--local_rank=0 --deepspeed a b",
                                                        "1/1/2 6,7|--local_rank=1 --deepspeed a b"));
    result = deepspeed("--no_python --no_local_rank --num_gpus=1 ./rank x");
    EXPECT_THAT(plain(result.out), UnorderedElementsAre("0/0/1 6|x"));
    result = deepspeed("--no_python --exclude localhost:1-2 ./rank");
    EXPECT_THAT(plain(result.out), UnorderedElementsAre("0/0/1 6|--local_rank=0"));
}

TEST_F(Deepspeed, ScriptsRunUnderPython) {
    std::ofstream(path("s.py"))
        << "import os, sys\nprint(sys.argv[1:], os.environ['CROSS_SIZE'], os.environ['LOCAL_SIZE'],"
           " os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], os.environ['GIVEN'])\n";
    std::ofstream(path(".deepspeed_env")) << "# for all ranks\n\nGIVEN=$(touch pwned); `touch pwned`\n";
    Result result = deepspeed("--num_gpus 1 --master_port 31234 s.py --x");
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("['--local_rank=0', '--x'] 1 1 127.0.0.1 31234 $(touch pwned); `touch pwned`\n"));
    result = deepspeed("--num_gpus 1 --module --no_local_rank s", "CUDA_VISIBLE_DEVICES=0 MASTER_PORT=");
    EXPECT_THAT(result.out, HasSubstr("[] 1 1 127.0.0.1 "));
    EXPECT_FALSE(std::filesystem::exists(path("pwned")));
}

TEST_F(Deepspeed, WithoutGpusSlotsAreCores) {
    const Result result = deepspeed("--plan x.py", "CUDA_VISIBLE_DEVICES=");
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, AllOf(HasSubstr("on 1 host\nnode 0: localhost\n"), Not(HasSubstr("CUDA"))));
    EXPECT_THAT(deepspeed("--include localhost:5000 x.py", "CUDA_VISIBLE_DEVICES=").err,
                HasSubstr("this machine, which has no visible GPU: a slot per usable core"));
}

TEST_F(Deepspeed, AHostfileIsPlanned) {
    const Result plan = deepspeed("--hostfile hosts --exclude worker-1:0-2 --plan --json --no_python ./rank");
    ASSERT_EQ(plan.code, 0) << plan.err;
    const Json json = Json::parse(plan.out, "plan");
    EXPECT_EQ(json.at("world_size").as_int(), 3);
    EXPECT_EQ(json.at("hosts").as_array()[0].at("devices").as_array()[0].as_string(), "3");
    EXPECT_EQ(json.at("hosts").as_array()[1].at("ranks").as_array()[1].at("rank").as_int(), 2);
    // One host of it runs here, with the devices that are visible here.
    const Result result = deepspeed("-H hosts -i worker-2 --no_python ./rank");
    EXPECT_THAT(plain(result.out), UnorderedElementsAre("0/0/2 6,4|--local_rank=0", "1/1/2 6,4|--local_rank=1"));
}

TEST_F(Deepspeed, Messages) {
    const std::pair<const char*, const char*> table[] = {
        {"--hostfile none x.py", "cannot read hostfile none: it does not exist"},
        {"--include localhost:0 --exclude localhost:1 x.py", "--include and --exclude are mutually exclusive"},
        {"--include localhost:3 x.py", "no slot 3 on host 'localhost', which has 3"},
        {"--include '-oProxyCommand=touch pwned' x.py", "not found in this machine"},
        {"--num_gpus 9 x.py", "--num_gpus 9: host 'localhost' has 3 slots"},
        {"--num_nodes 2 x.py", "--num_nodes 2: no hostfile names the hosts"},
        {"--no_ssh x.py", "--no_ssh needs a hostfile"},
        {"--no_ssh -H hosts x.py", "--node_rank is -1; it must be from 0 to 1"},
        {"--no_ssh -H hosts --node_rank 2 x.py", "--node_rank is 2; it must be from 0 to 1"},
        {"--no_python --module x", "--no_python and --module contradict each other"},
        {"--launcher ring x.py", "ring"},
        {"-H hosts --launcher mvapich x.py", "--launcher mvapich is not supported"},
        {"--autotuning tune x.py", "--autotuning is not supported"},
        {"--elastic_training x.py", "--elastic_training"},
        {"--max_elastic_nodes 4 x.py", "use `tessera run -n MIN:MAX`"},
        {"--enable_each_rank_log hosts x.py", "--enable_each_rank_log hosts: it is not a directory"},
        {"--bind_core_list 3,1 x.py", "cores must ascend"},
        {"--bind_core_list 60000 x.py", "this process may not use core 60000"},
        {"--bind_core_list 1000000 x.py", "'1000000' is neither a core (0 to 65535)"},
        {"--master_addr '$(touch pwned)' x.py", "is not a host name"},
        {"--launcher_args -v x.py", "--launcher_args"},
        {"--json x.py", "--json needs --plan"},
        {"--log_level loud x.py", "loud"},
        {"--no_such_option x.py", "unknown option '--no_such_option'"},
        {"", "no script"},
    };
    for (const auto& [words, message] : table) {
        const Result result = deepspeed(words);
        EXPECT_EQ(result.code, 2) << words;
        EXPECT_THAT(result.err, AllOf(StartsWith("tessera deepspeed: "), HasSubstr(message))) << words;
    }
    EXPECT_THAT(deepspeed("--bind_cores_to_rank x.py", "KMP_AFFINITY=1").err, HasSubstr("KMP_AFFINITY is set"));
    EXPECT_FALSE(std::filesystem::exists(path("pwned")));
}

TEST_F(Deepspeed, ExitCodeIsTheRanks) {
    EXPECT_EQ(
        deepspeed("--no_python --no_local_rank /bin/sh -c 'exit $((LOCAL_RANK * 7))'", "CUDA_VISIBLE_DEVICES=0,1").code,
        7);
    EXPECT_EQ(deepspeed("--no_python --no_local_rank /bin/sh -c 'kill -9 $$'").code, 128 + SIGKILL);
    EXPECT_EQ(deepspeed("--no_python ./none").code, 127);
}

TEST_F(Deepspeed, RankLogsAreFilesAndTheTerminalIsSilent) {
    const std::string logs = "--enable_each_rank_log 'lo gs;$x' --num_gpus 2";
    const Result result = deepspeed(logs + " --no_python --no_local_rank /bin/sh -c 'echo out $RANK; echo err >&2'");
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(result.out + result.err, "");
    int found = 0;
    for (const auto& file : std::filesystem::directory_iterator(path("lo gs;$x"))) {
        const std::string name = file.path().filename().string();
        const std::string rank = name.substr(name.size() - 5, 1);
        EXPECT_TRUE(name.size() == 14 + std::string("_rank0.log").size() && name.ends_with("_rank" + rank + ".log"))
            << name;
        EXPECT_EQ(read_file(file.path()), "out " + rank + "\nerr\n");
        ++found;
    }
    EXPECT_EQ(found, 2);
}

TEST_F(Deepspeed, VenvScriptIsSourcedFirst) {
    std::ofstream(path("my venv;$(touch pwned).sh")) << "export SOURCED=yes\n";
    Result result = deepspeed(
        "--num_gpus 1 --venv_script 'my venv;$(touch pwned).sh' --no_python --no_local_rank /bin/sh -c 'echo "
        "$SOURCED'");
    EXPECT_THAT(plain(result.out), UnorderedElementsAre("yes")) << result.err;
    EXPECT_FALSE(std::filesystem::exists(path("pwned")));
    result = deepspeed("--venv_script none x.py");
    EXPECT_NE(result.code, 0);
    EXPECT_THAT(result.err, HasSubstr("--venv_script none: cannot read it: No such file"));
}

TEST_F(Deepspeed, CoresAreShared) {
    const Result result = deepspeed(
        "--num_gpus 1 --bind_core_list 0 --no_python --no_local_rank /bin/sh -c "
        "'echo $OMP_NUM_THREADS $(taskset -cp $$ | sed s/.*:.//)'");
    EXPECT_THAT(plain(result.out), UnorderedElementsAre("1 0")) << result.err;
    const Result bound = deepspeed(
        "--num_gpus 1 --bind_cores_to_rank --no_python --no_local_rank /bin/sh -c "
        "'echo $OMP_NUM_THREADS; grep Cpus_allowed_list /proc/self/status'");
    const std::vector<int> cores = first_of_cores(read_topology("", allowed_processors()));
    const std::vector<std::string> lines = plain(bound.out);
    ASSERT_EQ(lines.size(), 2U) << bound.err;
    EXPECT_EQ(lines[0], std::to_string(cores.size()));
    std::vector<int> allowed = parse_processors(lines[1].substr(lines[1].find('\t') + 1));
    EXPECT_EQ(allowed, cores);
    EXPECT_THAT(deepspeed("--bind_core_list 0 x.py").err, HasSubstr("1 cores for 3 ranks"));
}

TEST_F(Deepspeed, PidFileLivesAsLongAsTheJob) {
    const Result result = deepspeed(
        "--save_pid --num_gpus 1 --no_python --no_local_rank /bin/sh -c "
        "'for f in /tmp/*.deepspeed; do echo $f $(cat $f); done'");
    EXPECT_EQ(result.code, 0) << result.err;
    bool found = false;
    for (const std::string& line : plain(result.out)) {
        const std::string pid = line.substr(line.find(' ') + 1);
        if (line != "/tmp/" + pid + ".deepspeed " + pid) continue;
        found = true;
        EXPECT_FALSE(std::filesystem::exists("/tmp/" + pid + ".deepspeed"));
    }
    EXPECT_TRUE(found) << result.out;
}

// A stand-in for mpirun and srun: it shows how it was called.
TEST_F(Deepspeed, SchedulersAreGivenNamesOfVariablesAlone) {
    for (const char* name : {"mpirun", "srun"}) {
        std::ofstream(path(name))
            << "#!/bin/sh\necho \"$*\"\necho \"$MASTER_ADDR $MASTER_PORT ${#TESSERA_TOKEN} $SECRET\"\n";
        std::filesystem::permissions(path(name), std::filesystem::perms::owner_all);
    }
    std::ofstream(path(".deepspeed_env")) << "SECRET=x;$(touch pwned)\n";
    const std::string here = fmt::format("PATH={}:$PATH NCCL_DEBUG=INFO PYTHONPATH= ", directory_.path().string());
    Result result = deepspeed("-H hosts --launcher openmpi --launcher_args '--tag x' --no_python ./rank a", here);
    EXPECT_EQ(result.code, 0) << result.err;
    const std::vector<std::string> lines = lines_of(result.out);
    ASSERT_EQ(lines.size(), 2U) << result.out;
    EXPECT_THAT(lines[0], AllOf(StartsWith("-n 6 --host worker-1:4,worker-2:2 -x SECRET -x MASTER_ADDR -x MASTER_PORT "
                                           "-x TESSERA_TOKEN "),
                                HasSubstr(" -x NCCL_DEBUG "), ::testing::EndsWith(" --tag x ./rank a")));
    EXPECT_EQ(lines[1], "worker-1 29500 64 x;$(touch pwned)");
    result = deepspeed("-H hosts --num_gpus 2 --launcher slurm --master_addr 10.0.0.1 --no_python ./rank", here);
    EXPECT_THAT(result.out, StartsWith("-n 4 --nodes 2 --ntasks-per-node 2 --nodelist worker-1,worker-2 --export=ALL "
                                       "--gpus-per-node 2 ./rank\n10.0.0.1 29500 64 "));
    result =
        deepspeed("--force_multi --num_gpus 1 --launcher mpich --no_python ./rank", here + "CUDA_VISIBLE_DEVICES=0");
    EXPECT_THAT(result.out, StartsWith("-n 1 -ppn 1 -hosts localhost -genvlist SECRET,MASTER_ADDR,MASTER_PORT,"));
    EXPECT_THAT(deepspeed("-H hosts --launcher slurm x.py", here).err, HasSubstr("equally many slots"));
    EXPECT_THAT(deepspeed("-H hosts --launcher openmpi --save_pid x.py", here).err, HasSubstr("not supported with"));
    EXPECT_FALSE(std::filesystem::exists(path("pwned")));
}

TEST_F(Deepspeed, RunTakesHostfilesToo) {
    const std::string devices = "CUDA_VISIBLE_DEVICES=5,3";
    Result result = tessera("run --hostfile hosts --include worker-2 ./rank", devices);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(plain(result.out), UnorderedElementsAre("0/0/2 5,3|", "1/1/2 5,3|"));
    result = tessera("run --include localhost:1 ./rank", devices);
    EXPECT_THAT(plain(result.out), UnorderedElementsAre("0/0/1 3|"));
    result = tessera("run --hostfile hosts --plan ./rank", devices);
    EXPECT_THAT(result.out, StartsWith("6 ranks on 2 hosts\nnode 0: worker-1  CUDA_VISIBLE_DEVICES=0,1,2,3\n"));
    result = tessera("run --plan -n 2@b ./rank : -n 1@a ./rank x");
    EXPECT_EQ(
        result.out,
        "3 ranks on 2 hosts\nnode 0: b\n  ranks 0-1 (local 0-1)  ./rank\nnode 1: a\n  rank 2 (local 0)  ./rank x\n");
    result = tessera("run --plan -n 2 ./rank");
    EXPECT_EQ(result.out, "2 ranks on 1 host\nnode 0: localhost\n  ranks 0-1 (local 0-1)  ./rank\n");
    EXPECT_EQ(tessera("run -n 1@localhost true").code, 0);
    const std::pair<const char*, const char*> table[] = {
        {"run -n 1@a true : -n 1 true", "name a host for every program, or for none"},
        {"run -n '1@-a' true", "host '-a' begins with '-'"},
        {"run --hostfile hosts -n 2 true", "write no -n and no other program"},
        {"run --json true", "--json needs --plan"},
    };
    for (const auto& [words, message] : table) {
        const Result refused = tessera(words);
        EXPECT_EQ(refused.code, 2) << words;
        EXPECT_THAT(refused.err, AllOf(StartsWith("tessera run: "), HasSubstr(message))) << words;
    }
}

// A signal goes to one launcher: another job of the same programs on the same host goes on.
TEST_F(Deepspeed, ASignalEndsThisJobAlone) {
    const auto start_one = [&](const std::string& name) {
        std::vector<std::string> words{"env",
                                       "CUDA_VISIBLE_DEVICES=0",
                                       testing::tessera,
                                       "deepspeed",
                                       "--no_python",
                                       "--no_local_rank",
                                       "/bin/sh",
                                       "-c",
                                       "echo $$ > " + path(name) + "; exec sleep 600"};
        std::fflush(nullptr);
        const pid_t pid = ::fork();
        if (pid > 0) return Child(pid);
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        argv.push_back(nullptr);
        ::execvp(argv[0], argv.data());
        ::_exit(126);
    };
    Child first = start_one("d/first");
    Child second = start_one("d/second");
    const pid_t ranks[] = {pid_in("first"), pid_in("second")};
    ::kill(first.pid(), SIGQUIT);
    EXPECT_EQ(first.wait(), 128 + SIGQUIT);
    expect_dies(ranks[0]);
    EXPECT_TRUE(testing::alive(ranks[1]));
    ::kill(second.pid(), SIGQUIT);
    EXPECT_EQ(second.wait(), 128 + SIGQUIT);
    expect_dies(ranks[1]);
}

}  // namespace
}  // namespace tsr
