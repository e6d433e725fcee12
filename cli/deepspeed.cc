// `tessera deepspeed`: DeepSpeed's command line, for the launcher of src/launch.
#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/dir_at.hpp"
#include "base/env.hpp"
#include "base/error.hpp"
#include "base/refuse.hpp"
#include "base/write_whole.hpp"
#include "commands.hpp"
#include "host_choice.hpp"
#include "launch/binding.hpp"
#include "launch/hosts/exported_environment.hpp"
#include "launch/hosts/host_name.hpp"
#include "launch/hosts/scheduler_command.hpp"
#include "launch/hosts/text_file.hpp"
#include "launch/job.hpp"
#include "launch/job_agent.hpp"
#include "launch/process.hpp"
#include "launch/variables.hpp"
#include "run_program.hpp"
#include "several_hosts.hpp"
#include "store/token.hpp"

namespace tsr::cli {

namespace {

constexpr const char* default_hostfile = "/job/hostfile";
constexpr int default_master_port = 29500;

struct Arguments {
    HostChoice hosts;
    int master_port = 0;  // not given
    std::string master_address;
    int node_rank = -1;
    std::string launcher = "pdsh";
    std::string launcher_arguments;
    bool module = false;
    bool no_python = false;
    bool no_local_rank = false;
    bool no_ssh = false;
    bool no_ssh_check = false;
    bool force_multi = false;
    bool save_pid = false;
    std::string rank_logs = "None";
    bool bind_cores = false;
    std::string core_list;
    int ssh_port = 0;  // ssh's own
    std::string venv_script;
    std::string log_level;
    bool quiet = false;
    bool plan = false;
    bool json = false;
    std::optional<std::string> autotuning;
    bool elastic_training = false;
    std::optional<std::string> min_elastic_nodes;
    std::optional<std::string> max_elastic_nodes;
};

void add_options(Command& command, Arguments& a) {
    command.add_option("-H,--hostfile", a.hosts.hostfile, "hosts and their slots, a line each: worker-1 slots=4")
        .default_text("/job/hostfile if it exists");
    command.add_option("-i,--include", a.hosts.filter.include,
                       "only these slots: NODE[:SLOT,...][@NODE...]; a SLOT can be a range 0-3");
    command.add_option("-e,--exclude", a.hosts.filter.exclude, "all slots except these");
    command.add_option("--num_nodes", a.hosts.filter.num_nodes, "only the first hosts").default_text("all");
    command.add_option("--num_gpus,--num_accelerators", a.hosts.filter.num_gpus, "only the first slots of each host")
        .default_text("all");
    command.add_option("--master_port", a.master_port, "MASTER_PORT of the ranks")
        .in_range(1, 65535)
        .default_text("a free port on one host, 29500 on several");
    command.add_option("--master_addr", a.master_address, "MASTER_ADDR of the ranks")
        .default_text("127.0.0.1 on one host, else the first host");
    command.add_option("--node_rank", a.node_rank, "with --no_ssh: which host of the hostfile this is");
    command.add_option("--launcher", a.launcher, "what starts the ranks of several hosts")
        .one_of({"pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi"})
        .default_text("pdsh, which means ssh");
    command.add_option("--launcher_args", a.launcher_arguments, "further arguments of mpirun or srun, between spaces");
    command.add_flag("--module", a.module, "run the script as python -m");
    command.add_flag("--no_python", a.no_python, "run the script itself, without python");
    command.add_flag("--no_local_rank", a.no_local_rank, "do not pass --local_rank=N to the script");
    command.add_flag("--no_ssh", a.no_ssh, "this command is run on every host, with its --node_rank");
    command.add_flag("--no_ssh_check", a.no_ssh_check, "accepted; hosts are not checked beforehand");
    command.add_flag("--force_multi", a.force_multi, "use --launcher for one host as well");
    command.add_flag("--save_pid", a.save_pid, "write the launcher's pid to /tmp/PID.deepspeed while the job runs");
    command
        .add_option("--enable_each_rank_log", a.rank_logs,
                    "write the ranks' output to DIR/TIME_rankN.log and not to the terminal")
        .type_name("DIR");
    command.add_flag("--bind_cores_to_rank", a.bind_cores, "give each rank an equal share of the cores");
    command.add_option("--bind_core_list", a.core_list, "the cores to share: 0-7,16-23").default_text("all");
    command.add_option("--ssh_port", a.ssh_port, "of the hosts' sshd; one host needs none")
        .in_range(1, 65535)
        .default_text("ssh's own");
    command.add_option("--venv_script", a.venv_script, "a shell script to source before each rank starts");
    command.add_option("--log_level", a.log_level, "TESSERA_LOG of the ranks")
        .one_of({"debug", "info", "warning", "error", "critical"});
    command.add_flag("-q,--quiet", a.quiet, "TESSERA_LOG=off for the ranks, unless it is set");
    command.add_option("--autotuning", a.autotuning, "not supported");
    command.add_flag("--elastic_training", a.elastic_training, "not supported");
    command.add_option("--min_elastic_nodes", a.min_elastic_nodes, "not supported");
    command.add_option("--max_elastic_nodes", a.max_elastic_nodes, "not supported");
    command.add_flag("--plan", a.plan, "print which ranks would run where, and start nothing");
    command.add_flag("--json", a.json, "with --plan: as JSON");
}

void refuse_what_is_not_supported(const Arguments& a) {
    if (a.autotuning) refuse("--autotuning is not supported: Tessera does not search for configurations");
    if (a.elastic_training || a.min_elastic_nodes || a.max_elastic_nodes) {
        refuse(
            "--elastic_training and its numbers of nodes, which DeepSpeed has removed, are not supported: use "
            "`tessera run -n MIN:MAX`");
    }
    if (a.json && !a.plan) refuse("--json needs --plan");
    if (a.no_python && a.module) refuse("--no_python and --module contradict each other");
    if (!a.master_address.empty()) {
        const std::string why = why_no_host_name(a.master_address);
        if (!why.empty() && a.master_address.find_first_not_of("0123456789abcdefABCDEF:.") != std::string::npos)
            refuse("--master_addr '{}' {}", shown(a.master_address), why);
    }
}

// What a rank runs: the words before the place of --local_rank, and those after it.
struct Script {
    std::vector<std::string> start;
    std::vector<std::string> arguments;
};

Script script_of(const Arguments& a, std::vector<std::string> words) {
    if (!words.empty() && words.front() == "--") words.erase(words.begin());
    if (words.empty()) refuse("no script; write `tessera deepspeed [OPTIONS] train.py ARGS...`");
    if (words.front().starts_with('-')) {
        refuse("unknown option '{}'; the script's own arguments come after the script", words.front());
    }
    Script script;
    if (!a.no_python) {
        script.start = {a.venv_script.empty() ? python() : "python", "-u"};
        if (a.module) script.start.emplace_back("-m");
    }
    script.start.push_back(words.front());
    script.arguments.assign(words.begin() + 1, words.end());
    return script;
}

// The path of a rank's log, but for its rank.
std::string log_file(const std::string& directory) {
    const std::time_t now = std::time(nullptr);
    std::tm local{};
    (void)::localtime_r(&now, &local);
    return fmt::format("{}/{:%Y%m%d%H%M%S}_rank${{rank}}.log", directory, local);
}

// An existing directory, or one that is made, as an absolute path.
std::string made_log_directory(const std::string& name) {
    DirAt directory;
    const int error = DirAt::open_or_make(name, directory);
    if (error == -ENOTDIR || error == -EEXIST) refuse("--enable_each_rank_log {}: it is not a directory", name);
    if (error != 0) throw os_error(fmt::format("--enable_each_rank_log {}: cannot create the directory", name), -error);
    return std::filesystem::absolute(name).string();
}

std::string checked_venv_script(const std::string& name) {
    if (name.empty()) return name;
    if (::access(name.c_str(), R_OK) != 0) throw os_error(fmt::format("--venv_script {}: cannot read it", name), errno);
    return std::filesystem::absolute(name).string();
}

// That the ranks share; empty: they are not bound.
std::vector<int> shared_processors(const Arguments& a) {
    if (!a.bind_cores && a.core_list.empty()) return {};
    if (env_text("KMP_AFFINITY")) {
        refuse("--bind_cores_to_rank: KMP_AFFINITY is set and would bind the threads otherwise; unset it");
    }
    const std::vector<int> allowed = allowed_processors();
    if (a.core_list.empty()) return first_of_cores(read_topology("", allowed));
    std::vector<int> listed = parse_processors(a.core_list);
    for (const int id : listed) {
        if (!std::ranges::binary_search(allowed, id)) {
            refuse("--bind_core_list {}: this process may not use core {}", a.core_list, id);
        }
    }
    return listed;
}

std::string text_of_log_level(const Arguments& a) {
    if (!a.log_level.empty()) return a.log_level == "critical" ? "error" : a.log_level;
    return a.quiet && !env_text("TESSERA_LOG") ? "off" : "";
}

Assignments environment_files() {
    return deepspeed_environment_files(env_text("HOME").value_or("."), std::filesystem::current_path().string());
}

RunOptions options_of(const Arguments& a, const LaunchPlan& plan, const Script& script) {
    const std::string venv_script = checked_venv_script(a.venv_script);
    const std::vector<std::string>& devices = plan.hosts.front().devices;
    RunOptions options;
    options.kill_grace = milliseconds{30000};  // DeepSpeed's
    options.shared_processors = shared_processors(a);
    if (a.rank_logs != "None") options.output.file_template = log_file(made_log_directory(a.rank_logs));
    Program program;
    program.ranks = plan.world_size();
    program.environment = environment_files();
    const auto set = [&](const char* name, std::string value) {
        program.environment.emplace_back(name, std::move(value));
    };
    set("CROSS_RANK", "0");
    set("CROSS_SIZE", "1");
    set("LOCAL_SIZE", std::to_string(program.ranks));
    if (!devices.empty()) set("CUDA_VISIBLE_DEVICES", fmt::format("{}", fmt::join(devices, ",")));
    if (!a.master_address.empty()) set("MASTER_ADDR", a.master_address);
    if (a.master_port != 0) set("MASTER_PORT", std::to_string(a.master_port));
    if (const std::string level = text_of_log_level(a); !level.empty()) set("TESSERA_LOG", level);
    if (!options.shared_processors.empty()) {
        const auto shares = equal_shares(options.shared_processors, program.ranks);
        set("OMP_NUM_THREADS", std::to_string(shares.front().size()));
    }
    program.title = script.start.back();
    if (!venv_script.empty()) {
        program.command = {"/bin/bash", "-c", R"(. "$0" && exec "$@")", venv_script};
    }
    program.command.insert(program.command.end(), script.start.begin(), script.start.end());
    program.own_arguments = program.command.size();
    program.command.insert(program.command.end(), script.arguments.begin(), script.arguments.end());
    if (!a.no_local_rank) program.local_rank_argument = "--local_rank";
    options.programs.push_back(std::move(program));
    options.check();
    if (venv_script.empty()) (void)find_executable(script.start.front());
    return options;
}

// /tmp/PID.deepspeed, as long as it lives.
class PidFile {
   public:
    explicit PidFile(bool wanted) {
        if (!wanted) return;
        const std::string path = fmt::format("/tmp/{}.deepspeed", ::getpid());
        int error = DirAt::open_parent(path, directory_, name_);
        int file = error;
        if (error == 0) file = directory_.replace_file(name_, O_WRONLY, 0644);
        if (file < 0) throw os_error(fmt::format("--save_pid: cannot create {}", path), -file);
        const Fd fd(file);
        if (!write_whole(fd.get(), std::to_string(::getpid())))
            throw os_error("--save_pid: cannot write " + path, errno);
    }
    ~PidFile() {
        if (!name_.empty()) (void)directory_.remove_file(name_);
    }
    PidFile(const PidFile&) = delete;
    PidFile& operator=(const PidFile&) = delete;

   private:
    DirAt directory_;
    std::string name_;
};

std::vector<std::string> words_of(const std::string& text) {
    std::vector<std::string> words;
    for (const std::string_view word : pieces_of(text, ' ')) {
        if (!word.empty()) words.emplace_back(word);
    }
    return words;
}

// Becomes mpirun or srun.
[[noreturn]] void run_under_scheduler(const Arguments& a, LaunchPlan plan, Scheduler scheduler, const Script& script) {
    if (a.bind_cores || !a.core_list.empty() || !a.venv_script.empty() || a.rank_logs != "None" || a.save_pid) {
        refuse(
            "--bind_cores_to_rank, --bind_core_list, --venv_script, --enable_each_rank_log and --save_pid are not "
            "supported with --launcher {}; use its own options with --launcher_args",
            a.launcher);
    }
    plan.programs.front() = script.start;
    plan.programs.front().insert(plan.programs.front().end(), script.arguments.begin(), script.arguments.end());
    Variables variables;
    SchedulerRun run;
    const auto set = [&](const std::string& name, std::string value) {
        variables.set(name, std::move(value));
        run.exported.push_back(name);
    };
    for (auto& [name, value] : environment_files()) set(name, std::move(value));
    set("MASTER_ADDR", a.master_address.empty() ? plan.hosts.front().host : a.master_address);
    set("MASTER_PORT", std::to_string(a.master_port == 0 ? default_master_port : a.master_port));
    if (const std::string level = text_of_log_level(a); !level.empty()) set("TESSERA_LOG", level);
    if (env_text("TESSERA_TOKEN_FILE")) {
        run.exported.emplace_back("TESSERA_TOKEN_FILE");
    } else {
        set("TESSERA_TOKEN", env_text("TESSERA_TOKEN").value_or(Token::random().hex()));
    }
    std::vector<std::string> entries = variables.entries();
    for (const std::string& entry : entries) {
        const std::string name = entry.substr(0, entry.find('='));
        if (is_exported(name) && std::ranges::find(run.exported, name) == run.exported.end())
            run.exported.push_back(name);
    }
    run.arguments = words_of(a.launcher_arguments);
    run.gpus = a.hosts.filter.num_gpus > 0;
    const std::vector<std::string> words = scheduler_command(scheduler, plan, run);
    execute(find_executable(words.front()), words, entries);
}

// Of `tessera run`, which starts the ranks of each of several hosts.
std::vector<std::string> options_of_run(const Arguments& a) {
    if (!a.core_list.empty() || !a.venv_script.empty()) {
        refuse("--bind_core_list and --venv_script are supported on one host only");
    }
    if (!a.launcher_arguments.empty()) refuse("--launcher_args: this job is started by ssh; name a --launcher");
    std::vector<std::string> words{"--kill-grace-s", "30"};  // DeepSpeed's
    words.emplace_back(a.no_python ? "--no-python" : a.module ? "--module" : "--run-path");
    if (!a.no_local_rank) words.insert(words.end(), {"--pass-local-rank", "local_rank"});
    if (a.bind_cores) words.insert(words.end(), {"--bind", "cores"});
    if (a.rank_logs != "None") words.insert(words.end(), {"--log-dir", a.rank_logs, "--redirects", "3"});
    return words;
}

Assignments environment_of_host(const Arguments& a, const LaunchPlan& plan, size_t host) {
    Assignments all = environment_files();
    all.emplace_back("CROSS_RANK", std::to_string(host));
    all.emplace_back("CROSS_SIZE", std::to_string(plan.hosts.size()));
    all.emplace_back("LOCAL_SIZE", std::to_string(plan.hosts[host].ranks.size()));
    if (std::string level = text_of_log_level(a); !level.empty()) all.emplace_back("TESSERA_LOG", std::move(level));
    return all;
}

SeveralHosts job_of(const Arguments& a, const LaunchPlan& plan, std::vector<std::string> program) {
    SeveralHosts job;
    job.plan = plan;
    job.options = options_of_run(a);
    job.program = std::move(program);
    job.environment = [&](size_t host) { return environment_of_host(a, plan, host); };
    job.master_address = a.master_address;
    job.master_port = a.master_port;
    if (a.ssh_port != 0) job.ssh_port = a.ssh_port;
    const RunOptions defaults;
    job.stop_signals = defaults.stop_signals;
    job.patience = defaults.grace + milliseconds{50000};
    return job;
}

// An agent on each host, through ssh.
int run_through_ssh(const Arguments& a, const LaunchPlan& plan, std::vector<std::string> program) {
    const SeveralHosts job = job_of(a, plan, std::move(program));
    const PidFile pid_file(a.save_pid);
    return run_on_hosts(job);
}

// The agent of this host; the same command is run on the others.
[[noreturn]] void run_agent_of(const Arguments& a, const LaunchPlan& plan, std::vector<std::string> program) {
    SeveralHosts job = job_of(a, plan, std::move(program));
    if (job.master_port == 0) job.master_port = default_master_port;
    become_agent(job, static_cast<size_t>(a.node_rank));
}

int run_here(const Arguments& a, const LaunchPlan& plan, const Script& script) {
    const RunOptions options = options_of(a, plan, script);
    const PidFile pid_file(a.save_pid);
    return run_guarded(
        [&](int guardian, const sigset_t& signal_mask) { return JobAgent(options, guardian, signal_mask).run(); });
}

int launch(Arguments& a, std::vector<std::string> words) {
    refuse_what_is_not_supported(a);
    const Script script = script_of(a, words);
    if (a.hosts.hostfile.empty() && ::access(default_hostfile, F_OK) == 0) a.hosts.hostfile = default_hostfile;
    std::vector<std::string> command = script.start;
    if (!a.no_local_rank) command.emplace_back("--local_rank=N");
    command.insert(command.end(), script.arguments.begin(), script.arguments.end());
    LaunchPlan plan = plan_of(a.hosts, std::move(command));
    if (a.no_ssh) {
        if (a.hosts.hostfile.empty()) refuse("--no_ssh needs a hostfile, which names the hosts; add --hostfile");
        if (a.node_rank < 0 || static_cast<size_t>(a.node_rank) >= plan.hosts.size()) {
            refuse("--no_ssh: --node_rank is {}; it must be from 0 to {}, the number of this host in the hostfile",
                   a.node_rank, plan.hosts.size() - 1);
        }
    }
    if (a.plan) {
        print_plan(plan, a.json);
        return 0;
    }
    if (plan.hosts.size() == 1 && !a.force_multi) {
        if (!a.launcher_arguments.empty()) refuse("--launcher_args: the ranks of one host are started directly");
        return run_here(a, plan, script);
    }
    if (!a.no_ssh && a.launcher != "pdsh") {
        run_under_scheduler(a, std::move(plan), scheduler_named(a.launcher), script);
    }
    if (a.no_ssh) run_agent_of(a, plan, std::move(words));
    return run_through_ssh(a, plan, std::move(words));
}

}  // namespace

void add_deepspeed(Command& tessera) {
    auto arguments = std::make_shared<Arguments>();
    Command deepspeed = tessera.add_command("deepspeed", "Start a job with the command line of DeepSpeed's launcher");
    deepspeed.take_program();
    deepspeed.end_usage_with(" script [ARGS...]");
    deepspeed.footer(
        "\n  tessera deepspeed --include localhost:0,1 train.py --deepspeed_config ds_config.json\n"
        "  tessera deepspeed --hostfile hosts --launcher slurm train.py\n"
        "  tessera deepspeed --hostfile hosts --exclude worker-2:0 --plan train.py      who would run where");
    add_options(deepspeed, *arguments);
    deepspeed.on_run([deepspeed, arguments] {
        try {
            return launch(*arguments, deepspeed.rest());
        } catch (const Error& error) {
            if (error.code() == Code::invalid_argument) throw UsageError(error.what());
            throw;
        }
    });
}

}  // namespace tsr::cli
