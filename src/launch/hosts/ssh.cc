#include "launch/hosts/ssh.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "base/json.hpp"
#include "base/refuse.hpp"
#include "launch/hosts/host_name.hpp"
#include "launch/hosts/text_file.hpp"

namespace tsr {

namespace {

constexpr std::string_view magic = "tessera-order-1 ";

Json checked(const std::string& text, const char* what) {
    if (text.find('\0') != std::string::npos) refuse("{} '{}' has a NUL byte", what, shown(text));
    if (!is_utf8(text)) refuse("{} '{}' is not UTF-8", what, shown(text));
    return text;
}

bool is_plain(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("/._+-").find(c) != std::string_view::npos;
}

}  // namespace

std::string encode(const AgentOrder& order) {
    Json::Array variables;
    for (const auto& [name, value] : order.environment) {
        variables.emplace_back(Json::Array{checked(name, "the variable"), checked(value, "the value of a variable")});
    }
    Json::Array arguments;
    for (const std::string& argument : order.arguments) arguments.push_back(checked(argument, "the argument"));
    const std::string json = Json(Json::Object{{"directory", checked(order.directory, "the directory")},
                                               {"environment", std::move(variables)},
                                               {"arguments", std::move(arguments)}})
                                 .dump();
    if (json.size() > max_order_bytes) refuse("a job's command and environment exceed {} bytes", max_order_bytes);
    return fmt::format("{}{}\n{}", magic, json.size(), json);
}

size_t order_length(std::string_view line) {
    size_t length = 0;
    if (line.starts_with(magic)) {
        const std::string_view digits = line.substr(magic.size());
        const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), length);
        if (failure == std::errc{} && end == digits.data() + digits.size() && length <= max_order_bytes) return length;
    }
    throw Error(Code::corrupt,
                fmt::format("'{}' does not begin an order for an agent: both hosts need the same version "
                            "of Tessera, and the login shell must not read its standard input",
                            shown(line)));
}

AgentOrder decode_order(std::string_view json) {
    const Json document = Json::parse(json, "the order for an agent");
    AgentOrder order;
    order.directory = document.at("directory").as_string();
    for (const Json& variable : document.at("environment").as_array()) {
        const Json::Array& pair = variable.as_array();
        if (pair.size() != 2) throw Error(Code::corrupt, "the order for an agent has a variable without a value");
        order.environment.emplace_back(pair[0].as_string(), pair[1].as_string());
    }
    for (const Json& argument : document.at("arguments").as_array()) order.arguments.push_back(argument.as_string());
    return order;
}

SshStart ssh_start(const std::string& host, std::optional<int> port, const std::string& tessera,
                   const AgentOrder& order) {
    const std::string why = why_no_host_name(host);
    if (!why.empty()) refuse("host '{}' {}", shown(host), why);
    if (port && (*port < 1 || *port > 65535)) refuse("--ssh_port {}: expected 1 to 65535", *port);
    if (!tessera.starts_with('/') || !std::ranges::all_of(tessera, is_plain)) {
        refuse(
            "the command '{}' cannot be started through ssh: its path must be absolute, of letters, digits and "
            "/._+-; install Tessera elsewhere",
            shown(tessera));
    }
    SshStart start;
    start.command = {"ssh", "-T", "-o", "BatchMode=yes"};
    if (port) start.command.insert(start.command.end(), {"-p", std::to_string(*port)});
    start.command.insert(start.command.end(), {"--", host, tessera + " agent-from-stdin"});
    start.input = encode(order);
    return start;
}

}  // namespace tsr
