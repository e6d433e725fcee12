#include "base/wildcard.hpp"

#include <optional>

namespace tsr {

namespace {

// Removes the first character. UTF-8 characters compare like their bytes.
std::string_view take(std::string_view& text) {
    const auto lead = static_cast<unsigned char>(text.front());
    const size_t size = lead < 0xc0 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    const std::string_view character = text.substr(0, size);
    text.remove_prefix(character.size());
    return character;
}

// Likewise from a pattern, where '\' escapes a character.
std::string_view take_literal(std::string_view& pattern) {
    if (pattern.size() > 1 && pattern.front() == '\\') pattern.remove_prefix(1);
    return take(pattern);
}

// Removes the set after a '[' and returns whether the character is in it; nullopt if the set is never closed.
std::optional<bool> take_set(std::string_view& pattern, std::string_view character) {
    std::string_view rest = pattern;
    const bool negated = rest.starts_with('!') || rest.starts_with('^');
    if (negated) rest.remove_prefix(1);
    bool found = false;
    for (bool is_first = true; !rest.empty(); is_first = false) {
        if (rest.front() == ']' && !is_first) {
            pattern = rest.substr(1);
            return found != negated;
        }
        const std::string_view low = take_literal(rest);
        std::string_view high = low;
        if (rest.size() > 1 && rest[0] == '-' && rest[1] != ']') {
            rest.remove_prefix(1);
            high = take_literal(rest);
        }
        found = found || (low <= character && character <= high);
    }
    return std::nullopt;
}

// Removes the pattern of one character, and returns whether it matches; `pattern` must not be empty.
bool fits_one(std::string_view& pattern, std::string_view character) {
    std::string_view rest = pattern.substr(1);
    if (pattern.front() == '?') {
        pattern = rest;
        return true;
    }
    if (pattern.front() == '[') {
        if (const auto found = take_set(rest, character)) {
            pattern = rest;
            return *found;
        }
    }
    return take_literal(pattern) == character;
}

}  // namespace

bool fits(std::string_view pattern, std::string_view name) {
    // Only the last '*' needs to be extended: whatever earlier ones could match, it could match as well.
    struct Retry {
        std::string_view pattern;
        std::string_view name;
    };
    std::optional<Retry> retry;
    while (true) {
        if (pattern.starts_with('*')) {
            pattern.remove_prefix(1);
            retry = {pattern, name};
            continue;
        }
        if (name.empty()) return pattern.empty();
        if (!pattern.empty() && fits_one(pattern, take(name))) continue;
        if (!retry) return false;
        (void)take(retry->name);
        pattern = retry->pattern;
        name = retry->name;
    }
}

bool is_pattern(std::string_view text) { return text.find_first_of("*?[\\") != std::string_view::npos; }

}  // namespace tsr
