// `tessera run`: reads the command line into RunOptions; src/launch does the rest.
#include <fmt/core.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "comm/host.hpp"
#include "commands.hpp"
#include "launch/agent.hpp"
#include "launch/job.hpp"
#include "launch/process.hpp"
#include "store/tls.hpp"

namespace tsr::cli {

namespace {

int gpus() {
    std::error_code failure;
    const std::filesystem::directory_iterator list("/proc/driver/nvidia/gpus", failure);
    return failure ? 0 : static_cast<int>(std::distance(list, {}));
}

int number(std::string_view text, std::string_view option) {
    int value = 0;
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failure != std::errc{} || end != text.data() + text.size()) {
        throw UsageError(fmt::format("{} '{}' is not a number", option, text));
    }
    return value;
}

// "4", "3:4", "auto", "cpu", "gpu".
struct Count {
    int least = 0;  // 0: not given
    int ranks = 1;
};

Count count_of(const std::string& text) {
    if (text == "auto" || text == "cpu") return {0, usable_cores()};
    if (text == "gpu") {
        if (gpus() == 0) throw UsageError("-n gpu: this machine has no NVIDIA GPU");
        return {0, gpus()};
    }
    const size_t colon = text.find(':');
    if (colon == std::string::npos) return {0, number(text, "-n")};
    const Count count{number(std::string_view(text).substr(0, colon), "-n"),
                      number(std::string_view(text).substr(colon + 1), "-n")};
    if (count.least < 1 || count.least > count.ranks) {
        throw UsageError(fmt::format("-n {}: expected MIN:MAX with 1 <= MIN <= MAX", text));
    }
    return count;
}

std::pair<std::string, std::string> variable(const std::string& text) {
    const size_t equals = text.find('=');
    if (equals == 0 || equals == std::string::npos)
        throw UsageError(fmt::format("--env '{}': expected NAME=VALUE", text));
    return {text.substr(0, equals), text.substr(equals + 1)};
}

OnLoss on_loss_of(const std::string& text) {
    if (text == "restart") return OnLoss::restart;
    if (text == "shrink") return OnLoss::shrink;
    if (text == "continue") return OnLoss::go_on;
    throw UsageError(fmt::format("--on-loss {}: expected restart, shrink or continue", text));
}

milliseconds span(double seconds, const char* option) {
    if (!(seconds >= 0) || seconds > 1e6)
        throw UsageError(fmt::format("{} {}: expected 0 to 1000000 seconds", option, seconds));
    return milliseconds{static_cast<int64_t>(seconds * 1000)};
}

struct Arguments {
    std::string count = "1";
    std::vector<std::string> environment;
    int min_ranks = 0;
    int max_restarts = 0;
    std::string on_loss = "restart";
    std::string log_directory;
    std::string events_file;
    std::string trace_directory;
    bool no_prefix = false;
    bool insecure = false;
    bool encrypt = false;
    bool standalone = false;
    std::string nodes = "1";
    double grace = 30;
    double kill_grace = 5;
    std::optional<double> timeout;
};

void add_program_options(Command& command, Arguments& arguments) {
    command
        .add_option("-n,--nproc-per-node,--nproc_per_node", arguments.count,
                    "ranks: a number, MIN:MAX (elastic), auto or cpu (usable cores), gpu")
        .type_name("N")
        .show_default();
    command.add_option("--env", arguments.environment, "set a variable for these ranks (repeatable)")
        .type_name("NAME=VALUE")
        .one_value_each();
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

Program program_of(const Arguments& arguments, std::vector<std::string> command) {
    if (!command.empty() && command.front() == "--") command.erase(command.begin());
    if (command.empty())
        throw UsageError("no command; write `tessera run -n 4 CMD ARGS...`, with ` : ` between programs");
    if (command.front().starts_with('-')) {
        throw UsageError(
            fmt::format("unknown option '{}'; options of `tessera run` come before the command", command.front()));
    }
    Program program;
    program.command = std::move(command);
    program.ranks = count_of(arguments.count).ranks;
    for (const std::string& text : arguments.environment) program.environment.push_back(variable(text));
    return program;
}

// A program after a colon: "-n 2 --env K=V CMD ARGS".
Program parse_program(const std::vector<std::string>& words) {
    Arguments arguments;
    std::vector<std::string> command =
        take_options(words, [&](Command& options) { add_program_options(options, arguments); });
    if (arguments.count.find(':') != std::string::npos) {
        throw UsageError(fmt::format("-n {}: with several programs, set the minimum number of ranks with --min-ranks",
                                     arguments.count));
    }
    return program_of(arguments, std::move(command));
}

RunOptions options_of(const Arguments& arguments, const std::vector<std::string>& words) {
    if (arguments.nodes != "1" && arguments.nodes != "1:1") {
        throw UsageError(fmt::format("--nnodes {}: this version runs jobs on one host", arguments.nodes));
    }
    RunOptions options;
    std::vector<std::vector<std::string>> parts = split(words);
    const Count count = count_of(arguments.count);
    options.programs.push_back(program_of(arguments, parts.front()));
    for (size_t i = 1; i < parts.size(); ++i) options.programs.push_back(parse_program(parts[i]));
    if (count.least > 0 && options.programs.size() > 1) {
        throw UsageError(fmt::format("-n {}: with several programs, set the minimum number of ranks with --min-ranks",
                                     arguments.count));
    }
    if (count.least > 0 && arguments.min_ranks > 0 && count.least != arguments.min_ranks) {
        throw UsageError(
            fmt::format("-n {} and --min-ranks {} contradict each other", arguments.count, arguments.min_ranks));
    }
    options.min_ranks = count.least > 0 ? count.least : arguments.min_ranks;
    options.max_restarts = arguments.max_restarts;
    options.on_loss = on_loss_of(arguments.on_loss);
    if (options.on_loss != OnLoss::restart && options.min_ranks == 0) {
        throw UsageError(fmt::format("--on-loss {} requires a minimum number of ranks; add -n MIN:MAX or --min-ranks",
                                     arguments.on_loss));
    }
    options.prefix = !arguments.no_prefix;
    options.insecure = arguments.insecure;
    if (arguments.insecure && arguments.encrypt) {
        throw UsageError("--insecure and --encrypt contradict each other: TLS needs the job's token");
    }
    options.log_directory = arguments.log_directory;
    options.events_file = arguments.events_file;
    options.trace_directory = arguments.trace_directory;
    options.grace = span(arguments.grace, "--grace-s");
    options.kill_grace = span(arguments.kill_grace, "--kill-grace-s");
    if (arguments.timeout) {
        options.timeout = span(*arguments.timeout, "--timeout-s");
        if (options.timeout->count() == 0) throw UsageError("--timeout-s must be at least 0.001");
    }
    try {
        options.check();
    } catch (const Error& error) {
        throw UsageError(error.what());
    }
    return options;
}

}  // namespace

void add_run(Command& tessera) {
    auto arguments = std::make_shared<Arguments>();
    Command run = tessera.add_command("run", "Start the ranks of a job on this machine and watch them");
    run.take_program();
    run.end_usage_with(" CMD [ARGS...] [: [-n N] [--env K=V] CMD [ARGS...]]...");
    run.footer(
        "\n  tessera run -n 4 python train.py\n"
        "  tessera run -n 1 ./a : -n 1 python b.py : -n 2 ./c      several programs, one job; write :: to pass a "
        "colon\n"
        "  tessera run -n 3:4 --on-loss shrink python train.py     continues with 3 ranks when one is lost");
    add_program_options(run, *arguments);
    run.add_option("--min-ranks", arguments->min_ranks, "minimum number of ranks with which the job may continue")
        .default_text("all");
    run.add_option("--max-restarts", arguments->max_restarts, "how often to restart all ranks after a failure")
        .show_default();
    run.add_option(
           "--on-loss", arguments->on_loss,
           "what to try first: restart (all ranks, while restarts are left), shrink (restart the remaining ranks) or "
           "continue (the remaining ranks continue in the same processes)")
        .show_default();
    run.add_option("--log-dir", arguments->log_directory, "keep each rank's output in DIR/round-R/rank-N.log");
    run.add_option("--events", arguments->events_file, "write the job's events as JSON lines");
    run.add_option("--trace-dir", arguments->trace_directory,
                   "communicators write their last operations to DIR/round-R, for `tessera trace`");
    run.add_flag("--no-prefix", arguments->no_prefix, "print the ranks' lines without [rank N program]");
    run.add_flag("--insecure", arguments->insecure,
                 "no job token: every user of this machine can reach the job's store");
    run.add_flag(
        "--encrypt", arguments->encrypt,
        "TLS 1.3 between the ranks and the job's store, with a key made of the job's token; ranks on several hosts "
        "are refused, because Gloo and NCCL do not encrypt");
    run.add_option("--grace-s", arguments->grace,
                   "seconds to save after SIGTERM or Ctrl-C, for ranks that poll tsr_preempt_requested()")
        .show_default();
    run.add_option("--kill-grace-s", arguments->kill_grace, "seconds from SIGTERM to SIGKILL for a rank")
        .show_default();
    run.add_option("--timeout-s", arguments->timeout,
                   "timeout of the ranks' collectives in seconds; sets TESSERA_TIMEOUT_MS")
        .default_text("600");
    run.add_flag("--standalone", arguments->standalone,
                 "accepted for compatibility with torchrun; jobs run on one host");
    run.add_option("--nnodes", arguments->nodes, "jobs run on one host").show_default();
    run.on_run([run, arguments] {
        const RunOptions options = options_of(*arguments, run.rest());
        // Of the launcher's own store, and inherited by the ranks.
        if (arguments->encrypt && TlsOptions::from_environment().kind == TlsOptions::Kind::off) {
            ::setenv("TESSERA_TLS", "psk", 1);
        }
        for (const Program& program : options.programs) (void)find_executable(program.command.front());
        return run_guarded(
            [&](int guardian, const sigset_t& signal_mask) { return Agent(options, guardian, signal_mask).run(); });
    });
}

}  // namespace tsr::cli
