#include "launch/hosts/hostfile.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "base/refuse.hpp"
#include "launch/hosts/host_name.hpp"
#include "launch/hosts/text_file.hpp"

namespace tsr {

namespace {

// "NAME slots=N..."; `where` begins the messages.
HostSlots parse_entry(std::string_view line, const std::string& where) {
    const auto bad_entry = [&]() {
        refuse("{}: bad entry '{}'; expected HOST slots=N, where N is the number of the host's devices", where,
               shown(line));
    };
    const size_t name_end = line.find_first_of(" \t");
    if (name_end == std::string_view::npos) bad_entry();
    HostSlots entry{std::string(line.substr(0, name_end)), 0};
    std::string_view rest = trimmed(line.substr(name_end));
    constexpr std::string_view key = "slots=";
    if (!rest.starts_with(key)) bad_entry();
    rest.remove_prefix(key.size());
    const size_t digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
    if (digits == 0) bad_entry();
    const std::string why = why_no_host_name(entry.host);
    if (!why.empty()) refuse("{}: host '{}' {}", where, shown(entry.host), why);
    const auto [end, failure] = std::from_chars(rest.data(), rest.data() + digits, entry.slots);
    if (failure != std::errc{} || entry.slots > max_slots) {
        refuse("{}: host '{}' has {} slots; a host can have at most {}", where, entry.host,
               shown(rest.substr(0, digits)), max_slots);
    }
    return entry;
}

}  // namespace

std::vector<HostSlots> parse_hostfile(std::string_view text, const std::string& path) {
    if (text.size() > max_hostfile_bytes) refuse("hostfile {} is larger than {} bytes", path, max_hostfile_bytes);
    std::vector<HostSlots> hosts;
    std::vector<std::string> names;  // sorted
    size_t number = 0;
    for (const std::string_view line : trimmed_lines(text)) {
        ++number;
        if (line.empty() || line.front() == '#') continue;
        const std::string where = fmt::format("hostfile {}, line {}", path, number);
        HostSlots entry = parse_entry(line, where);
        const auto place = std::ranges::lower_bound(names, entry.host);
        if (place != names.end() && *place == entry.host) {
            refuse("{}: host '{}' has multiple entries; write one line per host", where, entry.host);
        }
        if (hosts.size() == max_hosts) refuse("{}: a job can have at most {} hosts", where, max_hosts);
        names.insert(place, entry.host);
        hosts.push_back(std::move(entry));
    }
    if (hosts.empty()) refuse("hostfile {} is empty: it has no line HOST slots=N", path);
    return hosts;
}

std::vector<HostSlots> read_hostfile(const std::string& path) {
    return parse_hostfile(read_text_file(path, max_hostfile_bytes, "hostfile"), path);
}

}  // namespace tsr
