#include "command_line.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <span>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/env.hpp"

namespace tsr::cli {

namespace {

// The names without those that have an underscore, which another name spells with a dash.
std::vector<std::string> listed_names(const std::string& names) {
    std::vector<std::string> listed;
    std::istringstream all(names);
    for (std::string name; std::getline(all, name, ',');) {
        if (name.find('_') == std::string::npos) listed.push_back(name);
    }
    return listed;
}

// Appends to the usage line that CLI11 generates, and leaves out spellings with underscores.
class LongerUsage : public CLI::Formatter {
   public:
    explicit LongerUsage(std::string end) : end_(std::move(end)) {}
    std::string make_option_name(const CLI::Option* option, bool is_positional) const override {
        const std::string names = CLI::Formatter::make_option_name(option, is_positional);
        return is_positional ? names : fmt::format("{}", fmt::join(listed_names(names), ","));
    }
    std::string make_usage(const CLI::App* app, std::string name) const override {
        std::string usage = CLI::Formatter::make_usage(app, std::move(name));
        while (usage.ends_with('\n')) usage.pop_back();
        return usage + end_ + "\n";
    }

   private:
    std::string end_;
};

// Reports a missing or unknown command; CLI11 would report an unexpected argument.
bool names_no_command(const CLI::App& app, const std::string& group, std::span<char*> words) {
    std::vector<std::string> known;
    std::vector<std::string> listed;
    for (const CLI::App* command : app.get_subcommands({})) {
        known.push_back(command->get_name());
        if (!command->get_group().empty()) listed.push_back(command->get_name());  // else hide()
    }
    if (known.empty() || (!words.empty() && words[0][0] == '-')) return false;
    if (!words.empty() && std::ranges::find(known, words[0]) != known.end()) {
        return names_no_command(*app.get_subcommand(words[0]), fmt::format("{} {}", group, words[0]), words.subspan(1));
    }
    const std::string what = words.empty() ? "missing command" : fmt::format("unknown command '{}'", words[0]);
    fmt::print(stderr, "{}: {}; available: {}. Run `{} --help` for details\n", group, what, fmt::join(listed, ", "),
               group);
    return true;
}

// CLI11 passes arguments after `--` to the outer command, which does not use them.
bool takes_program(const CLI::App& app, std::span<char*> words) {
    return std::ranges::any_of(app.get_subcommands({}), [&](const CLI::App* command) {
        return words.size() > 1 && command->get_name() == words[1] && command->get_prefix_command();
    });
}

// Prints the error and the command's usage.
void tell_usage(const CLI::App& app, const std::exception& error) {
    const CLI::App* command = &app;
    std::string name = app.get_name();
    for (auto named = app.get_subcommands(); !named.empty(); named = command->get_subcommands()) {
        command = named.front();
        name += " " + command->get_name();
    }
    const auto formatter = std::dynamic_pointer_cast<CLI::Formatter>(command->get_formatter());
    fmt::print(stderr, "{}: {}\n{}Run `{} --help` for details\n", name, error.what(),
               formatter ? formatter->make_usage(command, name) : "", name);
}

// Refuses text that is not a number in words that CLI11 lacks.
template <class T>
CLI::Option* add_number(CLI::App* app, const std::string& names, T& value, const std::string& what) {
    using Number = typename CLI::detail::wrapped_type<T, T>::type;
    const char* const kind = std::is_integral_v<Number>                         ? "a whole number"
                             : names.substr(0, names.find(',')).ends_with("-s") ? "a number of seconds"
                                                                                : "a number";
    return app->add_option(names, value, what)->check([kind](const std::string& text) {
        Number number{};
        return CLI::detail::lexical_cast(text, number) ? "" : fmt::format("expected {}, got '{}'", kind, text);
    });
}

// Gives the command's options that are not given their values from the environment. Throws UsageError.
void take_defaults(const CLI::App& command, const Option::Variables& variables) {
    const std::vector<const CLI::Option*> own = command.get_options();
    for (const auto& [option, variable] : variables) {
        if (std::ranges::find(own, option) == own.end()) continue;
        const auto value = env_text(variable.c_str());
        if (option->count() > 0 || !value || value->empty()) continue;
        try {
            option->add_result(*value);
            option->run_callback();
        } catch (const CLI::ParseError& error) {
            throw UsageError(fmt::format("{}={}: {}", variable, *value, error.what()));
        }
    }
}

}  // namespace

Option& Option::required() {
    option_->required();
    return *this;
}

Option& Option::one_value_each() {
    option_->allow_extra_args(false);
    return *this;
}

Option& Option::type_name(const std::string& name) {
    option_->type_name(name);
    return *this;
}

Option& Option::default_text(const std::string& text) {
    option_->default_str(text);
    return *this;
}

Option& Option::show_default() {
    option_->capture_default_str();
    return *this;
}

Option& Option::in_range(int least, int most) {
    option_->check(CLI::Range(least, most));
    return *this;
}

Option& Option::not_negative() {
    const auto refuse = [](const std::string& text) {  // CLI11's own message has the largest double in full
        double number = 0;
        const bool is_negative = CLI::detail::lexical_cast(text, number) && number < 0;
        return is_negative ? fmt::format("must not be negative, got '{}'", text) : "";
    };
    option_->check(refuse, "NONNEGATIVE");
    return *this;
}

Option& Option::one_of(const std::vector<std::string>& words) {
    option_->check(CLI::IsMember(words));
    return *this;
}

Option& Option::existing_directory() {
    option_->check(CLI::ExistingDirectory);
    return *this;
}

Option& Option::size_with_unit(Kilo kilo) {
    option_->transform(CLI::AsSizeValue(kilo == Kilo::is_1000));
    return *this;
}

Option& Option::environment_default(const std::string& variable) {
    variables_->emplace_back(option_, variable);
    return *this;
}

Command Command::add_command(const std::string& name, const std::string& what) {
    return {app_->add_subcommand(name, what), call_};
}

Command Command::group(const std::string& heading) const {
    Command same = *this;
    same.heading_ = heading;
    return same;
}

std::vector<std::string> Command::option_names() const {
    std::vector<std::string> names;
    for (const CLI::Option* option : app_->get_options()) {
        for (std::string& name : listed_names(option->get_name(false, true))) names.push_back(std::move(name));
    }
    return names;
}

std::string Command::spellings(const std::string& names) const {
    if (!underscores_) return names;
    std::string all = names;
    std::istringstream given(names);
    for (std::string name; std::getline(given, name, ',');) {
        std::ranges::replace(name.begin() + std::min<std::ptrdiff_t>(2, std::ssize(name)), name.end(), '-', '_');
        if (name.find('_') != std::string::npos) all += "," + name;
    }
    return all;
}

Option Command::added(CLI::Option* option) const {
    if (!heading_.empty()) option->group(heading_);
    return {option, &call_->variables};
}

void Command::hide() { app_->group(""); }

void Command::require_command() { app_->require_subcommand(1); }

Option Command::add_option(const std::string& names, std::string& value, const std::string& what) {
    return added(app_->add_option(spellings(names), value, what));
}

Option Command::add_option(const std::string& names, int& value, const std::string& what) {
    return added(add_number(app_, spellings(names), value, what));
}

Option Command::add_option(const std::string& names, uint64_t& value, const std::string& what) {
    return added(add_number(app_, spellings(names), value, what));
}

Option Command::add_option(const std::string& names, double& value, const std::string& what) {
    return added(add_number(app_, spellings(names), value, what));
}

Option Command::add_option(const std::string& names, std::optional<std::string>& value, const std::string& what) {
    return added(app_->add_option(spellings(names), value, what));
}

Option Command::add_option(const std::string& names, std::optional<double>& value, const std::string& what) {
    return added(add_number(app_, spellings(names), value, what));
}

Option Command::add_option(const std::string& names, std::vector<std::string>& values, const std::string& what) {
    return added(app_->add_option(spellings(names), values, what));
}

Option Command::add_flag(const std::string& names, bool& value, const std::string& what) {
    return added(app_->add_flag(spellings(names), value, what));
}

void Command::take_program() { app_->prefix_command(); }

std::vector<std::string> Command::rest() const {
    std::vector<std::string> words = app_->remaining();
    words.insert(words.end(), call_->behind_dashes.begin(), call_->behind_dashes.end());
    return words;
}

std::vector<std::string> Command::given() const {
    std::vector<std::string> words = call_->words;
    words.resize(words.size() - rest().size());
    return words;
}

void Command::end_usage_with(const std::string& text) { app_->formatter(std::make_shared<LongerUsage>(text)); }

void Command::footer(const std::string& text) { app_->footer(text); }

void Command::on_run(std::function<int()> run) {
    app_->callback([run = std::move(run), call = call_, app = app_] {
        take_defaults(*app, call->variables);
        call->exit_code = run();
    });
}

int run_command_line(const std::string& name, const std::string& what, const std::string& version, int argc,
                     char** argv, FunctionRef<void(Command&)> add_commands) {
    CLI::App app(what, name);
    app.set_version_flag("--version", version);
    Command::Call call;
    Command command(&app, &call);
    command.require_command();
    add_commands(command);
    std::span words(argv, static_cast<size_t>(argc));
    if (names_no_command(app, name, words.subspan(1))) return 2;
    if (takes_program(app, words)) {
        call.words.assign(words.begin() + 2, words.end());
        const auto dashes = std::ranges::find(words, std::string_view("--"));
        call.behind_dashes.assign(dashes, words.end());
        words = words.first(words.size() - call.behind_dashes.size());
    }
    try {
        app.parse(static_cast<int>(words.size()), words.data());
    } catch (const CLI::ExtrasError&) {
        const std::vector<std::string> extra = app.remaining(true);  // CLI11 tells them in reverse
        tell_usage(
            app, UsageError(fmt::format("The following {} not expected: {}",
                                        extra.size() == 1 ? "argument was" : "arguments were", fmt::join(extra, " "))));
        return 2;
    } catch (const CLI::ParseError& error) {
        if (error.get_exit_code() == 0) return app.exit(error);  // prints the help that was asked for
        tell_usage(app, error);
        return 2;
    } catch (const UsageError& error) {
        tell_usage(app, error);
        return 2;
    }
    return call.exit_code;
}

std::vector<std::string> take_options(std::vector<std::string> words, FunctionRef<void(Command&)> add_options) {
    CLI::App app;
    app.set_help_flag();
    Command::Call call;
    Command command(&app, &call);
    command.take_program();
    add_options(command);
    std::ranges::reverse(words);  // as CLI11 wants them
    try {
        app.parse(words);
    } catch (const CLI::ParseError& error) {
        throw UsageError(error.what());
    }
    return command.rest();
}

}  // namespace tsr::cli
