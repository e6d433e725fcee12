#include "launch/hosts/host_name.hpp"

#include <algorithm>

namespace tsr {

namespace {

constexpr size_t longest_name = 253;  // of DNS

bool is_letter_or_digit(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'); }

bool is_of_a_name(char c) { return is_letter_or_digit(c) || c == '.' || c == '_' || c == '-'; }

}  // namespace

std::string why_no_host_name(std::string_view name) {
    if (name.empty()) return "has no name";
    if (name.front() == '-') return "begins with '-', so ssh would take it for an option";
    if (name.size() > longest_name) return "has more than 253 characters";
    if (name.find('@') != std::string_view::npos) return "has a user; set User for that host in ~/.ssh/config";
    if (!std::ranges::all_of(name, is_of_a_name) || name.front() == '.') {
        return "is not a host name: letters, digits, '.', '_' and '-' are accepted; for another address, set HostName "
               "in ~/.ssh/config and use its alias";
    }
    return "";
}

}  // namespace tsr
