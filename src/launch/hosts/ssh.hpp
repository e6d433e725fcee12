// How the agent of another host is started: the command line of ssh, and the order that the process there reads from its
// standard input. Everything that is secret or has a user's text is in the order; no argument of ssh but the host's name,
// which host_name.hpp has checked, and nothing that the remote shell reads is anything but fixed words.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/hosts/exported_environment.hpp"

namespace tsr {

// What the process on the other host becomes: `tessera ARGUMENTS` in `directory`, with these variables besides its own.
struct AgentOrder {
    std::string directory;
    Assignments environment;
    std::vector<std::string> arguments;
    friend bool operator==(const AgentOrder&, const AgentOrder&) = default;
};

inline constexpr size_t max_order_bytes = size_t{16} << 20;

// A line with the length, then JSON. Throws INVALID_ARGUMENT for text that
// is not UTF-8, a NUL byte, or an order beyond the limit.
[[nodiscard]] std::string encode(const AgentOrder& order);

// The length that the first line, without its newline, announces. Throws CORRUPT.
[[nodiscard]] size_t order_length(std::string_view line);
// Throws CORRUPT.
[[nodiscard]] AgentOrder decode_order(std::string_view json);

struct SshStart {
    std::vector<std::string> command;
    std::string input;
};

// `tessera`: the absolute path of the command on the other host. Throws INVALID_ARGUMENT for a refused host name, a path
// that is not absolute or has characters other than letters, digits and "/._+-", or a port outside 1 to 65535.
[[nodiscard]] SshStart ssh_start(const std::string& host, std::optional<int> port, const std::string& tessera,
                                 const AgentOrder& order);

}  // namespace tsr
