// `tessera run`: reads the command line into RunOptions; src/launch does the rest.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "comm/host.hpp"
#include "commands.hpp"
#include "host_choice.hpp"
#include "launch/job.hpp"
#include "launch/job_agent.hpp"
#include "launch/job_directory.hpp"
#include "launch/process.hpp"
#include "launch/rendezvous_options.hpp"
#include "run_program.hpp"
#include "several_hosts.hpp"
#include "store/store.hpp"
#include "store/tls.hpp"
#include "torchrun_options.hpp"

namespace tsr::cli {

namespace {

OnLoss on_loss_of(const std::string& text) {
    if (text == "restart") return OnLoss::restart;
    if (text == "shrink") return OnLoss::shrink;
    if (text == "continue") return OnLoss::go_on;
    if (text == "replace") return OnLoss::replace;
    throw UsageError(fmt::format("--on-loss {}: expected restart, shrink, continue or replace", text));
}

milliseconds span(double seconds, const char* option) {
    if (!(seconds >= 0) || seconds > 1e6)
        throw UsageError(fmt::format("{} {}: expected 0 to 1000000 seconds", option, seconds));
    return milliseconds{static_cast<int64_t>(seconds * 1000)};
}

struct Arguments {
    ProgramArguments program;
    TorchrunArguments torchrun;
    int min_ranks = 0;
    int max_restarts = 0;
    std::string on_loss = "restart";
    std::string log_directory;
    std::string events_file;
    std::string trace_directory;
    std::string report_file;
    std::string metrics;
    bool no_prefix = false;
    bool insecure = false;
    bool encrypt = false;
    HostWords hosts;
    HostChoice choice;
    bool plan = false;
    bool json = false;
    double grace = 30;
    double kill_grace = 5;
    int preempted_exit_code = 0;
    std::optional<double> timeout;
    std::string shell;  // whose completion to print
};

void add_host_options(Command& group, HostWords& hosts) {
    group.add_option("--nnodes", hosts.nodes, "hosts: a number or MIN:MAX (elastic); start the same command on each")
        .type_name("N")
        .show_default()
        .environment_default("PET_NNODES");
    group
        .add_option("--rdzv-endpoint", hosts.endpoint,
                    "where the agents of several hosts meet: HOST[:PORT], an address of one of them; under srun it is "
                    "found automatically")
        .environment_default("PET_RDZV_ENDPOINT");
    group.add_option("--rdzv-id", hosts.run_id, "a name that distinguishes jobs at one endpoint")
        .environment_default("PET_RDZV_ID");
    group
        .add_option("--rdzv-conf", hosts.conf,
                    "join_timeout=600,last_call_timeout=30,keep_alive_interval=2,keep_alive_max_attempt=3 (seconds), "
                    "is_host=true|false")
        .environment_default("PET_RDZV_CONF");
    group.add_option(
        "--store-hosts", hosts.store_hosts,
        "spares for the host of --rdzv-endpoint: HOST[:PORT],..., at least two; the job continues while more "
        "than half of these store hosts live");
    group.add_option("--rdzv-backend", hosts.backend, "static or c10d; both mean the same here")
        .environment_default("PET_RDZV_BACKEND");
    group.add_option("--node-rank", hosts.node_rank, "this host's place among the hosts")
        .default_text("the order of joining")
        .environment_default("PET_NODE_RANK");
    group.add_option("--master-addr", hosts.master_address, "torchrun's static form of --rdzv-endpoint")
        .environment_default("PET_MASTER_ADDR");
    group.add_option("--master-port", hosts.master_port, "its port")
        .default_text("29500")
        .environment_default("PET_MASTER_PORT");
    group.add_flag("--standalone", hosts.standalone, "one host; accepted for compatibility with torchrun")
        .environment_default("PET_STANDALONE");
}

// "PORT", "ADDRESS:PORT", "[::1]:PORT"
void take_metrics(const std::string& text, RunOptions& options) {
    if (text.empty()) return;
    const size_t colon = text.rfind(':');
    std::string host = colon == std::string::npos ? "127.0.0.1" : text.substr(0, colon);
    if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
    const std::string digits = text.substr(colon == std::string::npos ? 0 : colon + 1);
    const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), options.metrics_port);
    if (host.empty() || digits.empty() || failure != std::errc{} || end != digits.data() + digits.size()) {
        throw UsageError(fmt::format("--metrics-port {}: expected a port from 0 to 65535, or ADDRESS:PORT", text));
    }
    options.metrics_host = host;
}

// Splits "A … : -n 2 B …" at words that are a single colon. A word of several colons loses one and goes to the program.
std::vector<std::vector<std::string>> split(const std::vector<std::string>& words) {
    std::vector<std::vector<std::string>> parts(1);
    for (const std::string& word : words) {
        if (word == ":") {
            parts.emplace_back();
        } else {
            const bool escaped = word.size() > 1 && word.find_first_not_of(':') == std::string::npos;
            parts.back().push_back(escaped ? word.substr(1) : word);
        }
    }
    return parts;
}

// A program after a colon: "-n 2 --env K=V CMD ARGS".
Program parse_program(const std::vector<std::string>& words) {
    ProgramArguments arguments;
    std::vector<std::string> command = take_options(words, [&](Command& options) {
        options.also_with_underscores();
        add_program_options(options, arguments);
    });
    if (arguments.count.find(':') != std::string::npos) {
        throw UsageError(fmt::format("-n {}: with several programs, set the minimum number of ranks with --min-ranks",
                                     arguments.count));
    }
    return program_of(arguments, std::move(command));
}

RunOptions options_of(const Arguments& arguments, const std::vector<std::string>& words) {
    RunOptions options;
    std::vector<std::vector<std::string>> parts = split(words);
    const std::string& given = arguments.program.count;
    options.programs.push_back(program_of(arguments.program, parts.front()));
    const Count count = count_of(ranks_at(given).count);
    for (size_t i = 1; i < parts.size(); ++i) options.programs.push_back(parse_program(parts[i]));
    if (count.least > 0 && options.programs.size() > 1) {
        throw UsageError(
            fmt::format("-n {}: with several programs, set the minimum number of ranks with --min-ranks", given));
    }
    if (count.least > 0 && arguments.min_ranks > 0 && count.least != arguments.min_ranks) {
        throw UsageError(fmt::format("-n {} and --min-ranks {} contradict each other", given, arguments.min_ranks));
    }
    options.min_ranks = count.least > 0 ? count.least : arguments.min_ranks;
    options.max_restarts = arguments.max_restarts;
    options.on_loss = on_loss_of(arguments.on_loss);
    if (options.on_loss == OnLoss::replace && options.max_restarts == 0) {
        throw UsageError("--on-loss replace uses a restart for each process that it replaces; add --max-restarts");
    }
    if ((options.on_loss == OnLoss::shrink || options.on_loss == OnLoss::go_on) && options.min_ranks == 0) {
        throw UsageError(fmt::format("--on-loss {} requires a minimum number of ranks; add -n MIN:MAX or --min-ranks",
                                     arguments.on_loss));
    }
    options.output.prefix = !arguments.no_prefix;
    take(arguments.torchrun, options);
    options.insecure = arguments.insecure;
    if (arguments.insecure && arguments.encrypt) {
        throw UsageError("--insecure and --encrypt contradict each other: TLS needs the job's token");
    }
    options.log_directory = arguments.log_directory;
    options.events_file = arguments.events_file;
    options.trace_directory = arguments.trace_directory;
    options.report_file = arguments.report_file;
    take_metrics(arguments.metrics, options);
    options.grace = span(arguments.grace, "--grace-s");
    options.kill_grace = span(arguments.kill_grace, "--kill-grace-s");
    options.preempted_exit_code = arguments.preempted_exit_code;
    if (arguments.timeout) {
        options.timeout = span(*arguments.timeout, "--timeout-s");
        if (options.timeout->count() == 0) throw UsageError("--timeout-s must be at least 0.001");
    }
    try {
        options.hosts = hosts_of(arguments.hosts);
    } catch (const Error& error) {
        throw UsageError(error.what());
    }
    if (!options.hosts && !arguments.hosts.store_hosts.empty()) {
        throw UsageError(
            "--store-hosts needs --nnodes MIN:MAX and an agent that is started on each host: a job that this command "
            "starts through ssh ends when one of its hosts is lost");
    }
    if (options.hosts) {
        options.hosts->version = TESSERA_VERSION;
        options.insecure = options.insecure || StoreOptions::from_environment().insecure;
        if (count.least > 0) {
            throw UsageError(fmt::format("-n {}: on several hosts, use --nnodes MIN:MAX or --min-ranks", given));
        }
    }
    return options;
}

void check(const RunOptions& options) {
    try {
        options.check();
    } catch (const Error& error) {
        throw UsageError(error.what());
    }
}

// Who runs where. The slots that --hostfile, --include and --exclude choose become the ranks of the only program.
LaunchPlan plan_of_run(const Arguments& arguments, RunOptions& options) {
    if (arguments.json && !arguments.plan) throw UsageError("--json needs --plan");
    const HostChoice& choice = arguments.choice;
    const bool chosen = !choice.hostfile.empty() || !choice.filter.include.empty() || !choice.filter.exclude.empty();
    if (options.hosts && (chosen || arguments.plan)) {
        throw UsageError(
            "--nnodes starts the agent of this host only, which does not know the others; --plan, --hostfile, "
            "--include and --exclude need no --nnodes");
    }
    if (chosen) {
        Program& program = options.programs.front();
        if (options.programs.size() > 1 || arguments.program.count != "1") {
            throw UsageError(
                "--hostfile, --include and --exclude start one program with a rank per slot; write no -n and no other "
                "program, or place several programs with -n N@HOST");
        }
        LaunchPlan plan = plan_of(choice, program.command);
        program.ranks = plan.world_size();
        const std::vector<std::string>& devices = plan.hosts.front().devices;
        if (!devices.empty()) {
            program.environment.insert(program.environment.begin(),
                                       {"CUDA_VISIBLE_DEVICES", fmt::format("{}", fmt::join(devices, ","))});
        }
        return plan;
    }
    std::vector<PlacedProgram> programs;
    for (const Program& program : options.programs) {
        if (program.host.empty() != options.programs.front().host.empty()) {
            throw UsageError("-n N@HOST: name a host for every program, or for none");
        }
        programs.push_back({program.command, program.ranks, program.host.empty() ? "localhost" : program.host});
    }
    check(options);  // a plan has an entry for each rank
    return plan_of_programs(programs);
}

// The options that this command leaves to the agents of the hosts.
std::vector<std::string> options_of_agents(const std::vector<std::string>& given) {
    constexpr std::array<std::string_view, 7> own{"--hostfile",    "--include",     "--exclude",    "--master-addr",
                                                  "--master_addr", "--master-port", "--master_port"};
    std::vector<std::string> words;
    for (size_t i = 0; i < given.size(); ++i) {
        const std::string_view name = std::string_view(given[i]).substr(0, given[i].find('='));
        if (std::ranges::find(own, name) == own.end()) {
            words.push_back(given[i]);
        } else if (name.size() == given[i].size()) {
            ++i;  // its value
        }
    }
    return words;
}

int run_on_hosts_of(const Command& run, const Arguments& arguments, const RunOptions& options, LaunchPlan plan) {
    const HostWords& words = arguments.hosts;
    if (!words.endpoint.empty() || !words.run_id.empty() || words.node_rank) {
        throw UsageError(
            "this command starts the hosts of the job, numbers them and chooses where their agents meet; leave out "
            "--rdzv-endpoint, --rdzv-id and --node-rank, or give --master-addr and --master-port");
    }
    SeveralHosts job;
    job.plan = std::move(plan);
    job.is_placed = !options.programs.front().host.empty();
    job.options = options_of_agents(run.given());
    job.program = run.rest();
    job.master_address = words.master_address;
    if (!words.master_port.empty()) {
        HostWords meeting;
        meeting.nodes = "2";
        meeting.master_address = "localhost";
        meeting.master_port = words.master_port;
        job.master_port = hosts_of(meeting)->endpoint_port;
    }
    job.stop_signals = options.stop_signals;
    job.patience = options.grace + options.kill_grace + milliseconds{20000};
    job.insecure = options.insecure;
    try {
        return run_on_hosts(job);
    } catch (const Error& error) {
        if (error.code() == Code::invalid_argument) throw UsageError(error.what());
        throw;
    }
}

// This command is the agent of one of the hosts that -n N@HOST names: the one with the number --node-rank, else the one
// with this host's name. Only the programs of that host have ranks here.
void take_place(const Arguments& arguments, RunOptions& options, const LaunchPlan& plan) {
    const std::vector<PlannedHost>& hosts = plan.hosts;
    const auto names = [&] {
        std::vector<std::string> list;
        for (const PlannedHost& host : hosts) list.push_back(host.host);
        return fmt::format("{}", fmt::join(list, ", "));
    };
    if (options.hosts && static_cast<size_t>(options.hosts->max_nodes) != hosts.size()) {
        throw UsageError(fmt::format("--nnodes {}: -n N@HOST names {} hosts ({}); the most hosts must be that number",
                                     arguments.hosts.nodes, hosts.size(), names()));
    }
    size_t place = 0;
    if (!arguments.hosts.node_rank) {
        const auto own = std::ranges::find(hosts, host_name(), &PlannedHost::host);
        if (own == hosts.end()) {
            throw UsageError(fmt::format(
                "this host is {}, but -n N@HOST names {}; write its name, or say by --node-rank which of them it is",
                host_name(), names()));
        }
        place = static_cast<size_t>(own - hosts.begin());
    } else if (options.hosts) {
        place = static_cast<size_t>(options.hosts->node_rank);
    }
    if (options.hosts) options.hosts->node_rank = static_cast<int>(place);
    for (Program& program : options.programs) {
        if (program.host != hosts[place].host) program.ranks = 0;
    }
}

}  // namespace

void add_run(Command& tessera) {
    auto arguments = std::make_shared<Arguments>();
    Command run = tessera.add_command("run", "Start the ranks of a job and watch them");
    run.take_program();
    run.end_usage_with(" CMD [ARGS...] [: [-n N] [--env K=V] CMD [ARGS...]]...");
    run.footer(
        "\n  tessera run -n 4 train.py\n"
        "  tessera run -n 1 ./a : -n 1 python b.py : -n 2 ./c      several programs, one job; write :: to pass a "
        "colon\n"
        "  tessera run -n 4@host-a ./a : -n 4@host-b python b.py   each on its host, through ssh\n"
        "  tessera run -n 3:4 --on-loss shrink train.py            continues with 3 ranks when one is lost\n\n"
        "CMD is any program; a .py file runs under Python. torchrun's options have its defaults from the environment: "
        "PET_TEE for --tee.");
    run.also_with_underscores();
    add_program_options(run, arguments->program);
    Command loss = run.group("When a rank is lost");
    loss.add_option("--max-restarts", arguments->max_restarts, "how often to restart all ranks after a failure")
        .show_default()
        .environment_default("PET_MAX_RESTARTS");
    loss.add_option("--min-ranks", arguments->min_ranks, "minimum number of ranks with which the job may continue")
        .default_text("all");
    loss.add_option(
            "--on-loss", arguments->on_loss,
            "what to try first: restart (all ranks, while restarts are left), shrink (restart the remaining ranks), "
            "continue (the remaining ranks continue in the same processes) or replace (start the lost rank again, "
            "while restarts are left, and continue with it in the same processes)")
        .show_default();
    Command output = run.group("Output");
    output.add_option("--log-dir", arguments->log_directory, "keep each rank's output in DIR/round-R/rank-N.log")
        .environment_default("PET_LOG_DIR");
    add_torchrun_output(output, arguments->torchrun);
    output.add_flag("--no-prefix", arguments->no_prefix, "print the ranks' lines without [rank N program]");
    output.add_option("--events", arguments->events_file, "write the job's events as JSON lines");
    output.add_option("--trace-dir", arguments->trace_directory,
                      "communicators write their last operations to DIR/round-R, for `tessera trace`");
    output.add_option("--report", arguments->report_file, "write the report of the job's end as JSON")
        .type_name("FILE");
    output
        .add_option("--metrics-port", arguments->metrics,
                    "answer Prometheus at http://127.0.0.1:PORT/metrics, or at ADDRESS:PORT; 0: a free port")
        .type_name("PORT");
    Command time = run.group("Time and signals");
    time.add_option("--timeout-s", arguments->timeout,
                    "timeout of the ranks' collectives in seconds; sets TESSERA_TIMEOUT_MS")
        .default_text("600");
    time.add_option("--grace-s", arguments->grace,
                    "seconds to save after SIGTERM or Ctrl-C, for ranks that poll tsr_preempt_requested()")
        .show_default();
    time.add_option("--kill-grace-s,--shutdown-timeout", arguments->kill_grace,
                    "seconds from SIGTERM to SIGKILL for a rank, at a restart and at the end")
        .show_default()
        .environment_default("PET_SHUTDOWN_TIMEOUT")
        .environment_default("TORCH_ELASTIC_SHUTDOWN_TIMEOUT");
    add_signals(time, arguments->torchrun);
    time.add_option("--preempted-exit-code", arguments->preempted_exit_code,
                    "exit code of a job that was asked to end and whose ranks all exited with 0")
        .show_default()
        .in_range(0, 255);
    Command placement = run.group("Placement");
    add_placement(placement, arguments->torchrun);
    Command hosts = run.group("Several hosts");
    add_host_options(hosts, arguments->hosts);
    hosts.add_option("--hostfile", arguments->choice.hostfile,
                     "hosts and their slots, a line each: worker-1 slots=4; a rank for each slot");
    hosts.add_option("--include", arguments->choice.filter.include,
                     "only these slots: NODE[:SLOT,...][@NODE...]; without a hostfile, NODE is localhost");
    hosts.add_option("--exclude", arguments->choice.filter.exclude, "all slots except these");
    hosts.add_flag("--plan", arguments->plan, "print which ranks would run where, and start nothing");
    hosts.add_flag("--json", arguments->json, "with --plan: as JSON");
    Command other = run.group("Other");
    other.add_flag("--insecure", arguments->insecure,
                   "no job token: every user of this machine can reach the job's store");
    other.add_flag(
        "--encrypt", arguments->encrypt,
        "TLS 1.3 between the ranks, the agents and the job's store, with a key made of the job's token; ranks "
        "on several hosts are refused, because Gloo and NCCL do not encrypt");
    other.add_option("--print-completion", arguments->shell, "print a script that completes these options in a shell")
        .type_name("SHELL")
        .one_of({"bash", "zsh", "tcsh"});
    Command without_effect = run.group("Accepted from torchrun's command lines, without effect");
    add_without_effect(without_effect, arguments->torchrun);
    run.on_run([run, arguments] {
        if (!arguments->shell.empty()) {
            fmt::print("{}", completion_script(arguments->shell, run.option_names()));
            return 0;
        }
        RunOptions options = options_of(*arguments, run.rest());
        const LaunchPlan plan = plan_of_run(*arguments, options);
        const bool is_placed = !options.programs.front().host.empty();
        const bool is_agent = is_placed && (options.hosts || (arguments->hosts.node_rank && plan.hosts.size() == 1));
        if (is_agent) take_place(*arguments, options, plan);
        check(options);
        if (arguments->plan) {
            print_plan(plan, arguments->json);
            return 0;
        }
        const bool is_elsewhere = plan.hosts.size() > 1 || (is_placed && !is_this_host(plan.hosts.front().host));
        if (is_elsewhere && !is_agent) return run_on_hosts_of(run, *arguments, options, plan);
        // Of the launcher's own store, and inherited by the ranks.
        if (arguments->encrypt && TlsOptions::from_environment().kind == TlsOptions::Kind::off) {
            ::setenv("TESSERA_TLS", "psk", 1);
        }
        for (const Program& program : options.programs) {
            if (program.ranks > 0) (void)find_executable(program.command.front());
        }
        if (options.output.writes_files() && options.log_directory.empty()) {
            options.log_directory = temporary_directory("logs");
            fmt::print(stderr, "tessera: the ranks' logs are in {} (--log-dir)\n", options.log_directory);
        }
        return run_guarded(
            [&](int guardian, const sigset_t& signal_mask) { return JobAgent(options, guardian, signal_mask).run(); },
            options.stop_signals);
    });
}

}  // namespace tsr::cli
