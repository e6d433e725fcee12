#include "run_program.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string_view>
#include <utility>

#include "base/env.hpp"
#include "base/error.hpp"
#include "comm/host.hpp"
#include "host_choice.hpp"
#include "launch/process.hpp"
#include "several_hosts.hpp"

namespace tsr::cli {

namespace {

// The NVIDIA devices that CUDA_VISIBLE_DEVICES leaves.
int usable_gpus() {
    try {
        const auto visible = visible_devices(gpus(), std::getenv("CUDA_VISIBLE_DEVICES"));
        return std::min(gpus(), static_cast<int>(visible.size()));
    } catch (const Error& error) {
        throw UsageError(error.what());
    }
}

int number(std::string_view text) {
    int value = 0;
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failure != std::errc{} || end != text.data() + text.size()) {
        throw UsageError(fmt::format("-n: '{}' is not a number; expected a number, MIN:MAX, auto, cpu or gpu", text));
    }
    return value;
}

std::pair<std::string, std::string> variable(const std::string& text) {
    const size_t equals = text.find('=');
    if (equals == 0 || equals == std::string::npos)
        throw UsageError(fmt::format("--env '{}': expected NAME=VALUE", text));
    return {text.substr(0, equals), text.substr(equals + 1)};
}

bool is_script(const std::string& word) {
    std::error_code failure;
    return word.ends_with(".py") && std::filesystem::is_regular_file(word, failure);
}

std::string file_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

}  // namespace

std::string python() {
    if (auto named = env_text("PYTHON_EXEC"); named && !named->empty()) return *named;
    if (const auto environment = env_text("VIRTUAL_ENV"); environment && !environment->empty()) {
        std::string path = *environment + "/bin/python";
        if (std::error_code failure; std::filesystem::exists(path, failure)) return path;
    }
    try {
        (void)find_executable("python3");
        return "python3";
    } catch (const Error&) {
        return "python";
    }
}

void add_program_options(Command& command, ProgramArguments& arguments) {
    Command group = command.group("Programs (also after a colon)");
    group
        .add_option(
            "-n,--nproc-per-node", arguments.count,
            "ranks: a number, MIN:MAX (elastic), cpu (usable cores), gpu (NVIDIA devices), or auto (gpu if there "
            "is one, else cpu); with @HOST on that host")
        .type_name("N")
        .show_default()
        .environment_default("PET_NPROC_PER_NODE");
    group.add_option("--env", arguments.environment, "set a variable for these ranks (repeatable)")
        .type_name("NAME=VALUE")
        .one_value_each();
    group.add_flag("-m,--module", arguments.module, "CMD is a Python module, as for `python -m`")
        .environment_default("PET_MODULE");
    group.add_flag("--no-python", arguments.no_python, "execute CMD itself, even if it is a .py file")
        .environment_default("PET_NO_PYTHON");
    group
        .add_flag("--run-path", arguments.run_path,
                  "run CMD under Python whatever its name: a script, a directory or a zip file")
        .environment_default("PET_RUN_PATH");
    group
        .add_option("--pass-local-rank", arguments.local_rank_name,
                    "each rank gets --NAME=LOCAL_RANK as its first argument")
        .type_name("NAME")
        .one_of({"local-rank", "local_rank"});
    group.add_option("--role", arguments.role, "the value of ROLE_NAME").show_default().environment_default("PET_ROLE");
}

Count count_of(const std::string& text) {
    if (text == "cpu" || (text == "auto" && usable_gpus() == 0)) return {0, usable_cores()};
    if (text == "gpu" || text == "auto") {
        if (usable_gpus() == 0)
            throw UsageError("-n gpu: this machine has no NVIDIA GPU that CUDA_VISIBLE_DEVICES allows");
        return {0, usable_gpus()};
    }
    const size_t colon = text.find(':');
    if (colon == std::string::npos) return {0, number(text)};
    const Count count{number(std::string_view(text).substr(0, colon)),
                      number(std::string_view(text).substr(colon + 1))};
    if (count.least < 1 || count.least > count.ranks) {
        throw UsageError(fmt::format("-n {}: expected MIN:MAX with 1 <= MIN <= MAX", text));
    }
    return count;
}

RanksAt ranks_at(const std::string& text) {
    try {
        return parse_ranks_at(text);
    } catch (const Error& error) {
        throw UsageError(error.what());
    }
}

Program program_of(const ProgramArguments& arguments, std::vector<std::string> words) {
    if (!words.empty() && words.front() == "--") words.erase(words.begin());
    if (words.empty())
        throw UsageError("no command; write `tessera run -n 4 CMD ARGS...`, with ` : ` between programs");
    if (words.front().starts_with('-')) {
        throw UsageError(
            fmt::format("unknown option '{}'; options of `tessera run` come before the command", words.front()));
    }
    if (arguments.module && (arguments.no_python || arguments.run_path)) {
        throw UsageError(fmt::format("--module runs a Python module; it excludes {}",
                                     arguments.no_python ? "--no-python" : "--run-path"));
    }
    Program program;
    RanksAt ranks = ranks_at(arguments.count);
    const bool is_count = ranks.count.find_first_not_of("0123456789:") == std::string::npos;
    if (!is_count && !ranks.host.empty() && !is_this_host(ranks.host)) {
        throw UsageError(
            fmt::format("-n {}: another host's cores and devices are not known here; write a number", arguments.count));
    }
    program.ranks = count_of(ranks.count).ranks;
    program.host = std::move(ranks.host);
    for (const std::string& text : arguments.environment) program.environment.push_back(variable(text));
    program.role = arguments.role;
    if (!arguments.local_rank_name.empty()) program.local_rank_argument = "--" + arguments.local_rank_name;
    // --run-path takes precedence over --no-python, as with torchrun.
    if (arguments.module || arguments.run_path || (!arguments.no_python && is_script(words.front()))) {
        program.title = arguments.module ? words.front() : file_name(words.front());
        program.command = {python(), "-u"};
        if (arguments.module) program.command.emplace_back("-m");
        program.own_arguments = program.command.size() + 1;
    }
    std::ranges::move(words, std::back_inserter(program.command));
    return program;
}

}  // namespace tsr::cli
