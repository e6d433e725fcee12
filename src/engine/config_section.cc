#include "engine/config_section.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "base/brief.hpp"

namespace tsr {

namespace {

constexpr size_t shown_bytes = 60;      // of a value in a message
constexpr size_t longest_guessed = 64;  // no longer key is compared with others
constexpr size_t shortest_part = 4;     // of a key that is a part of another

// The number of characters to insert, remove or replace.
size_t distance(std::string_view a, std::string_view b) {
    std::vector<size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 0; i < a.size(); ++i) {
        size_t diagonal = std::exchange(row[0], i + 1);
        for (size_t j = 0; j < b.size(); ++j) {
            const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
            diagonal = row[j + 1];
            row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
        }
    }
    return row.back();
}

bool is_number(const Json& value) {
    return value.is(Json::Kind::int64) || value.is(Json::Kind::uint64) || value.is(Json::Kind::number);
}

// A flag or a section that is there only to be switched off.
bool is_off(const Json& value) {
    if (value.is(Json::Kind::boolean)) return !value.as_bool();
    if (!value.is(Json::Kind::object)) return false;
    const Json* enabled = value.find("enabled");
    return value.as_object().empty() || (enabled != nullptr && is_off(*enabled));
}

bool is_auto(const Json& value) { return value.is(Json::Kind::string) && value.as_string() == "auto"; }

// The nearest by changes; otherwise one that has the name in it, or is in the name.
std::string_view nearest(std::string_view name, std::span<const std::string> known) {
    if (name.size() > longest_guessed) return {};
    std::string_view best;
    size_t least = std::max<size_t>(2, name.size() / 3) + 1;
    for (const std::string& one : known) {
        const size_t changes = distance(name, one);
        if (changes >= least) continue;
        least = changes;
        best = one;
    }
    if (!best.empty()) return best;
    const auto is_part = [](std::string_view part, std::string_view of) {
        return part.size() >= shortest_part && of.find(part) != std::string_view::npos;
    };
    const auto found =
        std::ranges::find_if(known, [&](const std::string& one) { return is_part(name, one) || is_part(one, name); });
    return found == known.end() ? std::string_view() : *found;
}

}  // namespace

ConfigSection::ConfigSection(const ConfigText& text, const Json& object, std::string path, Auto meaning_of_auto,
                             std::vector<ConfigReport>& reports)
    : text_(text), object_(object), path_(std::move(path)), auto_(meaning_of_auto), reports_(reports) {}

const Json* ConfigSection::find(std::string_view key) const { return object_.find(key); }

const Json* ConfigSection::value(std::string_view key) {
    honoured_.emplace_back(key);
    return known_value(key);
}

const Json* ConfigSection::known_value(std::string_view key) {
    asked_.emplace_back(key);
    const Json* found = find(key);
    if (found == nullptr || found->is(Json::Kind::null)) return nullptr;
    if (!is_auto(*found)) return found;
    if (auto_ == Auto::is_refused) refuse_auto(key);
    return nullptr;
}

void ConfigSection::refuse_auto(std::string_view key) const {
    const Json* found = find(key);
    if (found == nullptr || !is_auto(*found)) return;
    fail(key, Code::invalid_argument,
         "\"auto\" is for programs that fill it in before they create an engine; give a value");
}

const Json* ConfigSection::value_of_kind(std::string_view key, bool (*is_right)(const Json&), const char* kind) {
    const Json* found = value(key);
    if (found == nullptr || is_right(*found)) return found;
    fail(key, Code::invalid_argument, fmt::format("it must be {}", kind));
}

std::optional<bool> ConfigSection::flag(std::string_view key) {
    const Json* found =
        value_of_kind(key, [](const Json& value) { return value.is(Json::Kind::boolean); }, "true or false");
    if (found == nullptr) return std::nullopt;
    return found->as_bool();
}

std::optional<double> ConfigSection::number(std::string_view key, double least) {
    const Json* found = value_of_kind(key, is_number, "a number");
    if (found == nullptr) return std::nullopt;
    if (found->as_double() < least) fail(key, Code::invalid_argument, fmt::format("it must be at least {}", least));
    return found->as_double();
}

std::optional<int64_t> ConfigSection::integer(std::string_view key, int64_t least) {
    const auto is_integer = [](const Json& value) {
        if (value.is(Json::Kind::int64)) return true;
        if (!value.is(Json::Kind::number)) return false;
        const double number = value.as_double();
        return number >= -0x1p62 && number <= 0x1p62 && number == static_cast<double>(static_cast<int64_t>(number));
    };
    const Json* found = value_of_kind(key, is_integer, "a whole number below 2^63");
    if (found == nullptr) return std::nullopt;
    const int64_t number = found->is(Json::Kind::int64) ? found->as_int() : static_cast<int64_t>(found->as_double());
    if (number < least) fail(key, Code::invalid_argument, fmt::format("it must be at least {}", least));
    return number;
}

std::optional<std::string> ConfigSection::text(std::string_view key) {
    const Json* found = value_of_kind(key, [](const Json& value) { return value.is(Json::Kind::string); }, "a string");
    if (found == nullptr) return std::nullopt;
    return found->as_string();
}

std::optional<ConfigSection> ConfigSection::section(std::string_view key, Auto meaning_of_auto) {
    const Json* found =
        value_of_kind(key, [](const Json& value) { return value.is(Json::Kind::object); }, "an object: {...}");
    if (found == nullptr) return std::nullopt;
    return ConfigSection(text_, *found, fmt::format("{}{}.", path_, key), meaning_of_auto, reports_);
}

ConfigSection ConfigSection::section_or_empty(std::string_view key, Auto meaning_of_auto) {
    static const Json empty{Json::Object{}};
    if (const auto found = section(key, meaning_of_auto)) return *found;
    return {text_, empty, fmt::format("{}{}.", path_, key), meaning_of_auto, reports_};
}

void ConfigSection::report(std::string_view key, ReportKind kind, std::string_view text) {
    const std::string full = fmt::format("{}{}", path_, brief(key, shown_bytes));
    reports_.push_back({full, kind, fmt::format("config key \"{}\" ({}) {}", full, text_.place_of(*find(key)), text)});
}

void ConfigSection::note_no_effect(std::string_view key, std::string_view why) {
    if (known_value(key) != nullptr) report(key, ReportKind::no_effect, fmt::format("has no effect: {}", why));
}

void ConfigSection::note_no_effect_if_on(std::string_view key, std::string_view why) {
    const Json* found = known_value(key);
    if (found != nullptr && !is_off(*found)) note_no_effect(key, why);
}

void ConfigSection::note_deprecated(std::string_view key, std::string_view why) {
    if (known_value(key) != nullptr) report(key, ReportKind::deprecated, fmt::format("is deprecated: {}", why));
}

void ConfigSection::refuse(std::string_view key, std::string_view why) {
    const Json* found = known_value(key);
    if (found != nullptr && !is_off(*found)) fail(key, Code::unsupported, why);
}

void ConfigSection::fail(std::string_view key, Code code, std::string_view why) const {
    const Json* found = find(key);
    if (found == nullptr) throw Error(code, fmt::format("config key \"{}{}\" is missing; {}", path_, key, why));
    throw Error(code, fmt::format("config key \"{}{}\" ({}) is {}; {}", path_, key, text_.place_of(*found),
                                  brief(found->dump(), shown_bytes), why));
}

void ConfigSection::finish() {
    for (const Json::Member& member : object_.as_object()) {
        if (std::ranges::find(asked_, member.key) != asked_.end()) continue;
        std::string hint;
        if (const std::string_view guess = nearest(member.key, asked_); !guess.empty()) {
            hint = fmt::format("; did you mean \"{}{}\"?", path_, guess);
        } else if (auto_ == Auto::is_refused && !path_.empty()) {  // the parameters of an optimizer or a schedule
            hint = fmt::format("; known are {}", fmt::join(honoured_, ", "));
        }
        report(member.key, ReportKind::unknown, fmt::format("is unknown and ignored{}", hint));
    }
}

}  // namespace tsr
