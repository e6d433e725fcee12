#include "launch/hosts/exported_environment.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/refuse.hpp"
#include "launch/hosts/text_file.hpp"

namespace tsr {

namespace {

constexpr size_t max_file_bytes = size_t{1} << 20;

bool is_variable_name(std::string_view name) {
    const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    return !name.empty() && !is_digit(name.front()) &&
           std::ranges::all_of(name, [&](char c) { return is_letter(c) || is_digit(c); });
}

}  // namespace

Assignments parse_environment_file(std::string_view text, const std::string& path) {
    std::map<std::string, std::string> values;
    size_t number = 0;
    for (const std::string_view line : trimmed_lines(text)) {
        ++number;
        if (line.empty() || line.front() == '#') continue;
        const size_t equals = line.find('=');
        if (equals == std::string_view::npos || !is_variable_name(line.substr(0, equals)) ||
            line.find('\0') != std::string_view::npos) {
            refuse("{}, line {}: '{}' is not NAME=VALUE", path, number, shown(line));
        }
        values[std::string(line.substr(0, equals))] = line.substr(equals + 1);
    }
    return {values.begin(), values.end()};
}

Assignments deepspeed_environment_files(const std::string& home, const std::string& directory) {
    const std::string name = env_text("DS_ENV_FILE").value_or(".deepspeed_env");
    std::vector<std::string> paths{home + "/" + name, directory + "/" + name};
    if (name.front() == '/') paths = {name};
    std::map<std::string, std::string> values;
    for (const std::string& path : paths) {
        try {
            for (auto& [key, value] : parse_environment_file(read_text_file(path, max_file_bytes, "file"), path)) {
                values[key] = std::move(value);
            }
        } catch (const Error& error) {
            if (error.code() != Code::not_found) throw;
        }
    }
    return {values.begin(), values.end()};
}

bool is_exported(std::string_view name) {
    constexpr std::string_view prefixes[] = {"MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"};
    return std::ranges::any_of(prefixes, [&](std::string_view prefix) { return name.starts_with(prefix); });
}

}  // namespace tsr
