#include "torchrun_options.hpp"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace tsr::cli {

namespace {

std::vector<int> signals_of(const std::string& text) {
    constexpr std::pair<const char*, int> known[] = {{"SIGTERM", SIGTERM}, {"SIGINT", SIGINT},   {"SIGHUP", SIGHUP},
                                                     {"SIGQUIT", SIGQUIT}, {"SIGUSR1", SIGUSR1}, {"SIGUSR2", SIGUSR2},
                                                     {"SIGXCPU", SIGXCPU}};
    std::vector<int> signals;
    for (const std::string& name : comma_separated(text)) {
        const auto* const found = std::ranges::find_if(known, [&](const auto& entry) { return entry.first == name; });
        if (found == std::end(known)) {
            throw UsageError(
                fmt::format("--signals-to-handle {}: '{}' is not SIGTERM, SIGINT, SIGHUP, SIGQUIT, "
                            "SIGUSR1, SIGUSR2 or SIGXCPU",
                            text, name));
        }
        if (std::ranges::find(signals, found->second) == signals.end()) signals.push_back(found->second);
    }
    if (signals.empty()) throw UsageError("--signals-to-handle names no signal");
    return signals;
}

Bind bind_of(const std::string& text) {
    if (text == "node" || text == "numa") return Bind::node;
    if (text == "socket") return Bind::socket;
    if (text == "exclusive" || text == "cores") return Bind::exclusive;
    return text == "core-complex" ? Bind::core_complex : Bind::none;
}

std::vector<int> ranks_of(const std::string& text) {
    std::vector<int> ranks;
    for (const std::string& item : comma_separated(text)) {
        int rank = 0;
        const char* const last = item.data() + item.size();
        const auto [end, failure] = std::from_chars(item.data(), last, rank);
        if (failure != std::errc{} || end != last || rank < 0) {
            throw UsageError(
                fmt::format("--local-ranks-filter {}: '{}' is not a rank; expected a list such as 0,12", text, item));
        }
        ranks.push_back(rank);
    }
    return ranks;
}

StreamChoice choice_of(const char* option, const std::string& text) {
    try {
        return StreamChoice::parse(text);
    } catch (const Error& error) {
        throw UsageError(fmt::format("{} {}", option, error.what()));
    }
}

}  // namespace

void add_torchrun_output(Command& group, TorchrunArguments& arguments) {
    group
        .add_option("-t,--tee", arguments.tee,
                    "streams that also go to DIR/round-R/rank-N.stdout.log and rank-N.stderr.log: 1 standard output, 2 "
                    "standard error, 3 both; or by local rank, as in 0:3,12:1")
        .type_name("STREAMS")
        .show_default()
        .environment_default("PET_TEE");
    group.add_option("-r,--redirects", arguments.redirects, "the same, but these streams are not printed")
        .type_name("STREAMS")
        .show_default()
        .environment_default("PET_REDIRECTS");
    group.add_option("--local-ranks-filter", arguments.shown_ranks, "print only the output of these local ranks")
        .type_name("RANKS")
        .default_text("all")
        .environment_default("PET_LOCAL_RANKS_FILTER");
    group
        .add_option(
            "--duplicate-stdout-filters", arguments.out_filters,
            "copy lines of standard output that contain one of these texts to DIR/round-R/filtered_stdout.log; a "
            "double comma stands for a comma in a text")
        .type_name("TEXT,...")
        .environment_default("PET_DUPLICATE_STDOUT_FILTERS");
    group
        .add_option("--duplicate-stderr-filters", arguments.err_filters,
                    "the same for standard error, to filtered_stderr.log")
        .type_name("TEXT,...")
        .environment_default("PET_DUPLICATE_STDERR_FILTERS");
    group
        .add_option("--log-line-prefix-template", arguments.prefix_template,
                    "what to print before each line; replaces ${rank}, ${local_rank}, ${role_name} and ${hostname}")
        .type_name("TEXT")
        .default_text("[rank N program] ")
        .environment_default("PET_LOG_LINE_PREFIX_TEMPLATE")
        .environment_default("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE");
}

void add_signals(Command& group, TorchrunArguments& arguments) {
    group
        .add_option(
            "--signals-to-handle", arguments.signals,
            "signals that ask the ranks to save and exit; also SIGUSR1 (which then requests no flight records), "
            "SIGUSR2 and SIGXCPU")
        .type_name("NAMES")
        .show_default()
        .environment_default("PET_SIGNALS_TO_HANDLE");
}

void add_placement(Command& group, TorchrunArguments& arguments) {
    group
        .add_option("--bind,--numa-binding", arguments.bind,
                    "processors of each rank: cores or exclusive (an equal share of the cores), numa or node (those of "
                    "a NUMA node, its device's if it has one), socket, or core-complex (a last-level cache)")
        .type_name("HOW")
        .one_of({"cores", "numa", "node", "socket", "exclusive", "core-complex"});
    group
        .add_flag("--virtual-local-rank", arguments.virtual_local_rank,
                  "set LOCAL_RANK=0 for every rank, and CUDA_VISIBLE_DEVICES to one device each")
        .environment_default("PET_VIRTUAL_LOCAL_RANK");
}

void add_without_effect(Command& group, TorchrunArguments& arguments) {
    group.add_option("--monitor-interval", arguments.monitor_interval, "the kernel reports a rank's end immediately")
        .environment_default("PET_MONITOR_INTERVAL");
    group.add_option("--start-method", arguments.start_method, "ranks are programs, not functions")
        .one_of({"spawn", "fork", "forkserver"})
        .environment_default("PET_START_METHOD");
    group.add_option("--event-log-handler", arguments.event_log_handler, "only null; see --events")
        .environment_default("PET_EVENT_LOG_HANDLER");
    group.add_option("--logs-specs", arguments.logs_specs, "only default; see --tee");
}

void take(const TorchrunArguments& arguments, RunOptions& options) {
    if (arguments.event_log_handler != "null") {
        throw UsageError(
            fmt::format("--event-log-handler {}: PyTorch's handlers of events are not available; "
                        "--events FILE writes the job's events as JSON lines",
                        arguments.event_log_handler));
    }
    if (arguments.logs_specs != "default") {
        throw UsageError(
            fmt::format("--logs-specs {}: Python classes for logs are not available; choose files with "
                        "--log-dir, --redirects and --tee",
                        arguments.logs_specs));
    }
    if (!arguments.prefix_template.empty() && !options.output.prefix) {
        throw UsageError("--no-prefix and --log-line-prefix-template contradict each other");
    }
    options.output.redirects = choice_of("--redirects", arguments.redirects);
    options.output.tee = choice_of("--tee", arguments.tee);
    options.output.shown = ranks_of(arguments.shown_ranks);
    options.output.out_filters = comma_separated(arguments.out_filters);
    options.output.err_filters = comma_separated(arguments.err_filters);
    options.output.prefix_template = arguments.prefix_template;
    options.stop_signals = signals_of(arguments.signals);
    options.virtual_local_rank = arguments.virtual_local_rank;
    options.bind = bind_of(arguments.bind);
}

std::string completion_script(const std::string& shell, const std::vector<std::string>& option_names) {
    if (shell == "tcsh") {
        std::string words;
        for (const std::string& name : option_names) {
            if (name.starts_with("--")) words += (words.empty() ? "" : " ") + name.substr(2);
        }
        return fmt::format("complete tessera 'c/--/({})/'\n", words);
    }
    return fmt::format(
        "{}_tessera_run() {{\n"
        "    COMPREPLY=()\n"
        "    [ \"${{COMP_WORDS[1]}}\" = run ] || return 0\n"
        "    case \"${{COMP_WORDS[COMP_CWORD]}}\" in\n"
        "        -*) COMPREPLY=($(compgen -W '{}' -- \"${{COMP_WORDS[COMP_CWORD]}}\")) ;;\n"
        "    esac\n"
        "}}\n"
        "complete -o default -F _tessera_run tessera\n",
        shell == "zsh" ? "autoload -U +X bashcompinit && bashcompinit\n" : "", fmt::join(option_names, " "));
}

}  // namespace tsr::cli
