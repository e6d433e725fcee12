#include "checkpoint/load/load_names.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/wildcard.hpp"
#include "checkpoint/model/state.hpp"

namespace tsr {

namespace {

bool is_begin(std::string_view name) { return name.empty() || name.ends_with('.'); }

void check_rule(const NameRule& rule) {
    for (const std::string& name : {rule.saved, rule.here}) {
        if (!name.empty()) check_name(name, "a name in a rule");
    }
    if (is_begin(rule.saved) == is_begin(rule.here)) return;
    throw Error(
        Code::invalid_argument,
        fmt::format("the rule '{}' -> '{}' mixes a name and a prefix (which ends with '.' or is empty); use two names "
                    "or two prefixes",
                    rule.saved, rule.here));
}

}  // namespace

LoadNames::LoadNames(const Manifest& manifest, const std::vector<std::string>& only, const std::vector<NameRule>& rules)
    : manifest_(manifest), takes_all_(only.empty()) {
    for (const std::string& name : only) {
        check_name(name, "a name pattern");
        names_.insert(name);
        if (is_pattern(name)) patterns_.emplace_back(name);
    }
    for (const NameRule& rule : rules) {
        check_rule(rule);
        rules_.emplace(rule.saved, &rule);
    }
    if (rules.empty()) return;
    manifest.for_each([&](const std::string& name, const SavedTensor&, const std::string*) { add(name); });
    for (const auto& [name, value] : manifest.values) add(name);
    for (const auto& [name, why] : manifest.unreadable) add(name);
}

void LoadNames::add(const std::string& saved) {
    std::string name = here(saved);
    if (!takes(name)) return;
    const auto [found, is_new] = names_here_.emplace(std::move(name), &saved);
    if (is_new) return;
    throw Error(
        Code::invalid_argument,
        fmt::format("'{}' and '{}' of the checkpoint would both be named '{}'; put a rule that renames one of them "
                    "before the others",
                    *found->second, saved, found->first));
}

bool LoadNames::takes(const std::string& here) const {
    return takes_all_ || names_.contains(here) ||
           std::ranges::any_of(patterns_, [&](std::string_view pattern) { return fits(pattern, here); });
}

std::string LoadNames::here(const std::string& saved) const {
    std::string_view name = saved;
    std::string result;
    if (private_rank(saved)) {
        result = saved.substr(0, saved.find('/', saved.find('/') + 1) + 1);
        name.remove_prefix(result.size());
    }
    const NameRule* rule = nullptr;
    const auto look_for = [&](std::string_view text) {
        const auto found = rules_.find(text);
        if (found != rules_.end() && (rule == nullptr || found->second < rule)) rule = found->second;  // of one vector
    };
    if (!rules_.empty()) {
        look_for("");
        look_for(name);
        for (size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.', dot + 1)) {
            look_for(name.substr(0, dot + 1));
        }
    }
    if (rule != nullptr) {
        result += rule->here;
        name.remove_prefix(rule->saved.size());
    }
    return result.append(name);
}

const std::string* LoadNames::saved(const std::string& here) const {
    if (!takes(here)) return nullptr;
    if (rules_.empty()) return &here;
    const auto found = names_here_.find(here);
    return found != names_here_.end() ? found->second : nullptr;
}

void LoadNames::for_each_tensor(
    FunctionRef<void(const std::string& here, const SavedTensor& tensor, const std::string& saved)> visit) const {
    if (rules_.empty()) {
        manifest_.for_each([&](const std::string& name, const SavedTensor& tensor, const std::string* target) {
            if (takes(name)) visit(name, tensor, target != nullptr ? *target : name);
        });
        return;
    }
    for (const auto& [here, saved] : names_here_) {
        const SavedTensor* tensor = manifest_.find(*saved);
        if (tensor != nullptr) visit(here, *tensor, manifest_.saved_name(*saved));
    }
}

}  // namespace tsr
