// The command line: each command declares its name, options, help and the function to run. Only command_line.cc
// includes CLI11, whose headers are longer than all others of cli/ together. The variables that options fill must
// outlive the run.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/function_ref.hpp"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace tsr::cli {

// An error in the command line. run_command_line() prints it with the usage.
class UsageError : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

// An option or a positional argument of a command. Copies refer to the same one.
class Option {
   public:
    // Defaults from environment variables, of the options of all commands.
    using Variables = std::vector<std::pair<CLI::Option*, std::string>>;
    Option(CLI::Option* option, Variables* variables) : option_(option), variables_(variables) {}
    Option& required();
    Option& one_value_each();  // a vector that gets one value each time the option is given

    // For the help: a name for the value; its default, as text or as the variable's current value.
    Option& type_name(const std::string& name);
    Option& default_text(const std::string& text);
    Option& show_default();

    // The accepted values, also shown in the help.
    Option& in_range(int least, int most);
    Option& not_negative();
    Option& one_of(const std::vector<std::string>& words);
    Option& existing_directory();
    enum class Kilo { is_1000, is_1024 };
    Option& size_with_unit(Kilo kilo);  // "64M"; 1KiB is always 1024

    // If the command line does not give the option, the environment variable does; the first that is set and not empty.
    Option& environment_default(const std::string& variable);

   private:
    CLI::Option* option_;
    Variables* variables_;
};

// A command with sub-commands or with a function to run. Copies refer to the same one.
class Command {
   public:
    // The result of parsing a call, and its exit code.
    struct Call {
        int exit_code = 0;
        std::vector<std::string> words;          // after the command's name
        std::vector<std::string> behind_dashes;  // including the `--`; empty if there is none
        Option::Variables variables;
    };
    Command(CLI::App* app, Call* call) : app_(app), call_(call) {}

    Command add_command(const std::string& name, const std::string& what);
    void hide();             // the help does not list it
    void require_command();  // a call must name a sub-command

    // The same command; the help lists the options that are added through it under this heading.
    [[nodiscard]] Command group(const std::string& heading) const;
    // Options added from now on can also be spelled with underscores: --log_dir. The help does not list that spelling.
    void also_with_underscores() { underscores_ = true; }
    [[nodiscard]] std::vector<std::string> option_names() const;  // as the help lists them: "-n", "--log-dir"

    // `names`: "-n,--ranks", or "path" for a positional argument.
    Option add_option(const std::string& names, std::string& value, const std::string& what);
    Option add_option(const std::string& names, int& value, const std::string& what);
    Option add_option(const std::string& names, uint64_t& value, const std::string& what);
    Option add_option(const std::string& names, double& value, const std::string& what);
    Option add_option(const std::string& names, std::optional<std::string>& value, const std::string& what);
    Option add_option(const std::string& names, std::optional<double>& value, const std::string& what);
    Option add_option(const std::string& names, std::vector<std::string>& values, const std::string& what);
    Option add_flag(const std::string& names, bool& value, const std::string& what);

    // The first word that is not an option, or `--`, begins a program's command line, which rest() returns (including a
    // `--`).
    void take_program();
    [[nodiscard]] std::vector<std::string> rest() const;
    // The words before the program: the options, as they were given.
    [[nodiscard]] std::vector<std::string> given() const;

    void end_usage_with(const std::string& text);
    void footer(const std::string& text);
    void on_run(std::function<int()> run);  // returns the exit code

   private:
    [[nodiscard]] std::string spellings(const std::string& names) const;
    Option added(CLI::Option* option) const;

    CLI::App* app_;
    Call* call_;
    std::string heading_;
    bool underscores_ = false;
};

// Runs the command that the arguments name and returns its exit code. Prints usage errors and returns 2.
// `add_commands` adds commands to the top-level command.
int run_command_line(const std::string& name, const std::string& what, const std::string& version, int argc,
                     char** argv, FunctionRef<void(Command&)> add_commands);

// Parses options at the beginning of `words` and returns the remaining words. Throws UsageError.
std::vector<std::string> take_options(std::vector<std::string> words, FunctionRef<void(Command&)> add_options);

}  // namespace tsr::cli
