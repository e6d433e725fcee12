#include "base/env.hpp"

#include <fmt/core.h>

#include <charconv>
#include <cstdlib>

#include "base/error.hpp"

namespace tsr {

std::optional<std::string> env_text(const char* name) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return std::string(value);
}

std::optional<int64_t> env_number(const char* name, int64_t least, int64_t most) {
    const std::optional<std::string> text = env_text(name);
    if (!text) return std::nullopt;
    int64_t number = 0;
    const char* end = text->data() + text->size();
    const auto [rest, failure] = std::from_chars(text->data(), end, number);
    if (failure != std::errc{} || rest != end || number < least || number > most) {
        throw Error(
            Code::invalid_argument,
            fmt::format("the environment variable {}='{}' must be a number from {} to {}", name, *text, least, most));
    }
    return number;
}

bool env_flag(const char* name) {
    const std::optional<std::string> text = env_text(name);
    if (!text || *text == "0" || *text == "false" || *text == "no" || *text == "off") return false;
    if (*text == "1" || *text == "true" || *text == "yes" || *text == "on") return true;
    throw Error(Code::invalid_argument, fmt::format("the environment variable {}='{}' must be 0 or 1", name, *text));
}

}  // namespace tsr
