// `tessera ckpt rename-keys`: copies a checkpoint with other names; its files and layouts stay the same.
#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <regex>
#include <vector>

#include "checkpoint/export/rewrite.hpp"
#include "ckpt/command.hpp"
#include "ckpt/interrupt.hpp"
#include "ckpt/print.hpp"
#include "ckpt/progress.hpp"

namespace tsr::cli {

namespace {

struct Arguments {
    std::string out;
    std::vector<std::string> maps;
    std::vector<std::string> regexes;
    std::string prefix;
};

[[noreturn]] void refuse(const std::string& why) { throw Error(Code::invalid_argument, why); }

// One rule, and whether it has changed any name.
struct Rule {
    std::string text;
    std::function<std::string(const std::string&)> apply;
    bool used = false;
    std::string prefix = {};  // names that begin with it ...
    std::string advice = {};  // ... are what this rule would match
};

// "old=new": a name, or, where both end with '.', a prefix of names.
Rule map_rule(const std::string& text) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0) refuse(fmt::format("--map \"{}\": expected OLD=NEW", text));
    const std::string from = text.substr(0, equals);
    const std::string to = text.substr(equals + 1);
    const bool is_beginning = from.back() == '.' && (to.empty() || to.back() == '.');
    const auto with_dot = [](const std::string& name) {
        return name.empty() || name.back() == '.' ? name : name + '.';
    };
    Rule rule{"--map " + text, [from, to, is_beginning](const std::string& name) {
                  if (name == from) return to;
                  return is_beginning && name.starts_with(from) ? to + name.substr(from.size()) : name;
              }};
    rule.prefix = with_dot(from);
    rule.advice = fmt::format("--map {}={}", rule.prefix, with_dot(to));
    return rule;
}

// "s/pattern/replacement/" as in sed, with any separator, and "g" for all occurrences.
Rule regex_rule(const std::string& text) {
    const char separator = text.size() > 1 ? text[1] : '/';
    std::vector<std::string> parts(1);
    for (size_t i = 2; i < text.size(); ++i) {
        if (text[i] == '\\' && i + 1 < text.size() && text[i + 1] == separator) {
            parts.back() += text[++i];
        } else if (text[i] == separator) {
            parts.emplace_back();
        } else {
            parts.back() += text[i];
        }
    }
    if (text.size() < 4 || text[0] != 's' || parts.size() != 3 || (!parts[2].empty() && parts[2] != "g")) {
        refuse(fmt::format("--regex \"{}\": expected s/pattern/replacement/ or s/pattern/replacement/g", text));
    }
    // sed's \1 and & are $1 and $& here; a literal $ is escaped.
    std::string replacement;
    for (size_t i = 0; i < parts[1].size(); ++i) {
        const char c = parts[1][i];
        if (c == '\\' && i + 1 < parts[1].size()) {
            const char next = parts[1][++i];
            if (next == '0') {
                replacement += "$&";
            } else {
                replacement += next > '0' && next <= '9' ? std::string("$0") + next : std::string(1, next);
            }
        } else if (c == '$') {
            replacement += "$$";
        } else {
            replacement += c == '&' ? std::string("$&") : std::string(1, c);
        }
    }
    try {
        const std::regex pattern(parts[0]);
        const auto flags =
            parts[2] == "g" ? std::regex_constants::format_default : std::regex_constants::format_first_only;
        return {"--regex " + text, [pattern, replacement, flags](const std::string& name) {
                    return std::regex_replace(name, pattern, replacement, flags);
                }};
    } catch (const std::regex_error& error) {
        refuse(fmt::format("--regex \"{}\": {}", text, error.what()));
    }
}

int rename_keys(const std::string& path, const Arguments& arguments, Output output) {
    const Interruptible interruptible;
    std::vector<Rule> rules;
    for (const std::string& text : arguments.maps) rules.push_back(map_rule(text));
    for (const std::string& text : arguments.regexes) rules.push_back(regex_rule(text));
    if (rules.empty() && arguments.prefix.empty()) refuse("nothing to rename; use --map, --regex or --prefix");
    const auto source = Checkpoint::open(path);

    Json::Object changed;
    const auto apply = [&](const std::string& name) {
        std::string to = name;
        for (Rule& rule : rules) {
            const std::string next = rule.apply(to);
            rule.used = rule.used || next != to;
            to = next;
        }
        return to;
    };
    // Checked before anything is written: a rule that matches nothing is a mistake.
    for (const std::string& name : source->names()) {
        const std::string to = arguments.prefix + apply(name);
        if (to != name) changed.push_back({name, Json(to)});
    }
    for (const auto& [name, value] : source->manifest().values) {
        const std::string to = apply(name);
        if (to != name) changed.push_back({name, Json(to)});
    }
    for (const Rule& rule : rules) {
        if (rule.used) continue;
        const auto begins = [&](const std::string& name) { return name.starts_with(rule.prefix); };
        const bool is_prefix = !rule.prefix.empty() &&
                               (std::ranges::any_of(source->names(), begins) ||
                                std::ranges::any_of(source->manifest().values, begins, &Values::value_type::first));
        refuse(is_prefix
                   ? fmt::format("{} matches no name in {}; did you mean \"{}\"?", rule.text, path, rule.advice)
                   : fmt::format("{} matches no name in {}; run `tessera ckpt tree` to list all", rule.text, path));
    }
    RewriteOptions options;
    options.rename_tensor = [&](const std::string& name) { return arguments.prefix + apply(name); };
    options.rename_value = apply;
    std::string written;
    {
        Progress progress("rename-keys", source->manifest().size_bytes());
        options.progress = [&](int64_t bytes) { progress.add(bytes); };
        written = rewrite_checkpoint(*source, arguments.out, options);
    }
    if (output == Output::json) {
        Json json;
        json.set("path", written);
        json.set("renamed", Json(std::move(changed)));
        print_json(json);
    } else {
        fmt::print("{}: {} renamed\n", written, count_text(changed.size(), "name"));
    }
    return exit_sound;
}

}  // namespace

void add_rename_keys(Command& ckpt) {
    const auto arguments = std::make_shared<Arguments>();
    Command command = add_command(
        ckpt, "rename-keys", "Copy a checkpoint with other names; files and layouts stay the same",
        checkpoint_path_what,
        [arguments](const std::string& path, Output output) { return rename_keys(path, *arguments, output); });
    command.add_option("out", arguments->out, "The root to save the new checkpoint into").required();
    command
        .add_option("--map", arguments->maps,
                    "OLD=NEW: rename a name; if both end with '.' ('model.=net.'), a prefix of names")
        .one_value_each();
    command.add_option("--regex", arguments->regexes, "s/PATTERN/REPLACEMENT/ for each name, after --map")
        .one_value_each();
    command.add_option("--prefix", arguments->prefix, "Prepend this to the names of tensors, after --map and --regex");
}

}  // namespace tsr::cli
