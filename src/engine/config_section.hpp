// One object of a configuration: values are taken by key, with their kinds and ranges checked. What nobody took is
// unknown, and is reported with the nearest key that somebody asked for.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "engine/config_text.hpp"

namespace tsr {

enum class ReportKind : int32_t { unknown = 0, no_effect = 1, deprecated = 2 };

// What a configuration has that does not do what it seems to.
struct ConfigReport {
    std::string key;  // "zero_optimization.stage"
    ReportKind kind = ReportKind::unknown;
    std::string text;  // a sentence with the key and its place
};

class ConfigSection {
   public:
    enum class Auto { is_default, is_refused };  // "auto" as a value

    // `object` is of `text`; its keys begin with `path`, which is empty or ends with a dot. Both outlive the section.
    ConfigSection(const ConfigText& text, const Json& object, std::string path, Auto meaning_of_auto,
                  std::vector<ConfigReport>& reports);

    // The value of a key; none: it is absent, null, or "auto" that means the default. Throws INVALID_ARGUMENT for a value of
    // another kind or out of range.
    [[nodiscard]] const Json* value(std::string_view key);
    [[nodiscard]] std::optional<bool> flag(std::string_view key);
    [[nodiscard]] std::optional<double> number(std::string_view key,
                                               double least = -std::numeric_limits<double>::infinity());
    // Also a double without a fraction, such as 5e8.
    [[nodiscard]] std::optional<int64_t> integer(std::string_view key, int64_t least = INT64_MIN);
    [[nodiscard]] std::optional<std::string> text(std::string_view key);
    [[nodiscard]] std::optional<ConfigSection> section(std::string_view key, Auto meaning_of_auto = Auto::is_default);
    // Without keys if it is absent.
    [[nodiscard]] ConfigSection section_or_empty(std::string_view key, Auto meaning_of_auto);

    [[nodiscard]] const Json& object() const { return object_; }

    // As `Auto::is_refused` for one key, whose default would change what is trained.
    void refuse_auto(std::string_view key) const;

    // Reports the key, if it is there; the second one only if it is not a section or a flag that is off.
    void note_no_effect(std::string_view key, std::string_view why);
    void note_no_effect_if_on(std::string_view key, std::string_view why);
    void note_deprecated(std::string_view key, std::string_view why);
    // Throws UNSUPPORTED if the key is there, unless it is a section or a flag that is off.
    void refuse(std::string_view key, std::string_view why);

    // `why` says what is wrong and what to do; the key, its place and its value come before it.
    [[noreturn]] void fail(std::string_view key, Code code, std::string_view why) const;

    // Reports the keys that nobody asked for.
    void finish();

   private:
    [[nodiscard]] const Json* find(std::string_view key) const;
    [[nodiscard]] const Json* known_value(std::string_view key);
    [[nodiscard]] const Json* value_of_kind(std::string_view key, bool (*is_right)(const Json&), const char* kind);
    void report(std::string_view key, ReportKind kind, std::string_view text);

    const ConfigText& text_;
    const Json& object_;
    std::string path_;
    Auto auto_;
    std::vector<ConfigReport>& reports_;
    std::vector<std::string> asked_;
    std::vector<std::string> honoured_;  // of these, those that are not only noted or refused
};

}  // namespace tsr
