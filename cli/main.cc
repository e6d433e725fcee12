// The `tessera` command: one sub-command a file.
#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "commands.hpp"
#include "launch/process.hpp"

namespace {

// A closed standard descriptor would be taken by the next file that is opened, and be written to as if it were it.
void open_standard_descriptors() {
    for (int fd = 0; fd <= 2; ++fd) {
        if (::fcntl(fd, F_GETFD) < 0) (void)!::open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY);  // takes the lowest
    }
}

// CLI11 would call it an argument that was not expected.
bool names_no_command(const CLI::App& app, const std::string& group, std::span<char*> words) {
    std::vector<std::string> known;
    for (const CLI::App* command : app.get_subcommands({})) known.push_back(command->get_name());
    if (known.empty() || (!words.empty() && words[0][0] == '-')) return false;
    if (!words.empty() && std::ranges::find(known, words[0]) != known.end()) {
        return names_no_command(*app.get_subcommand(words[0]), fmt::format("{} {}", group, words[0]), words.subspan(1));
    }
    const std::string what = words.empty() ? "a command is missing" : fmt::format("no command '{}'", words[0]);
    fmt::print(stderr, "{}: {}; known: {}. `{} --help` says what they do\n", group, what, fmt::join(known, ", "),
               group);
    return true;
}

// Says what is wrong and how the command is called.
void tell_usage(const CLI::App& app, const CLI::ParseError& error) {
    const CLI::App* command = &app;
    std::string name = app.get_name();
    for (auto named = app.get_subcommands(); !named.empty(); named = command->get_subcommands()) {
        command = named.front();
        name += " " + command->get_name();
    }
    const auto formatter = std::dynamic_pointer_cast<CLI::Formatter>(command->get_formatter());
    fmt::print(stderr, "{}: {}\n{}`{} --help` tells more\n", name, error.what(),
               formatter ? formatter->make_usage(command, name) : "", name);
}

int run_command(int argc, char** argv) {
    open_standard_descriptors();
    CLI::App app("Tessera: distributed training for C, Python, Java and Rust in one job", "tessera");
    app.require_subcommand(1);
    app.set_version_flag("--version", TESSERA_VERSION);
    int exit_code = 0;
    tsr::cli::add_run(app, exit_code);
    tsr::cli::add_env(app, exit_code);
    tsr::cli::add_ckpt(app, exit_code);
    tsr::cli::add_trace(app, exit_code);
    tsr::cli::add_bench(app, exit_code);
    if (names_no_command(app, "tessera", std::span(argv, static_cast<size_t>(argc)).subspan(1))) return 2;
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        if (error.get_exit_code() == 0) return app.exit(error);  // prints the help that was asked for
        tell_usage(app, error);
        return 2;
    }
    return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run_command(argc, argv);
    } catch (...) {
        const tsr::Error error = tsr::current_error();
        (void)std::fprintf(stderr, "tessera: %s\n", error.what());
        return tsr::exit_code_of(error);
    }
}
