#include "launch/departures.hpp"

#include <fmt/core.h>
#include <sys/wait.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <string_view>

#include "launch/process.hpp"

namespace tsr {

namespace {

// One line per rank: "2 exited with status 0".
constexpr const char* departures_key = "launcher/departures";

}  // namespace

Departure departure_of(int rank, int wait_status) {
    if (WIFSIGNALED(wait_status)) return {rank, describe_status(wait_status)};
    return {rank, fmt::format("exited with status {}", WEXITSTATUS(wait_status))};
}

void tell_departures(Store& store, const std::vector<Departure>& departures, Deadline deadline) {
    std::string text;
    for (const Departure& departure : departures) text += fmt::format("{} {}\n", departure.rank, departure.how);
    store.set(departures_key, text, deadline);
}

std::vector<Departure> read_departures(Store& store, Deadline deadline) {
    const std::optional<std::string> text = store.get(departures_key, deadline);
    std::vector<Departure> departures;
    for (std::string_view rest = text ? *text : std::string_view(); !rest.empty();) {
        const std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(rest.size(), line.size() + 1));
        int rank = 0;
        const auto [end, failure] = std::from_chars(line.data(), line.data() + line.size(), rank);
        if (failure != std::errc{} || end == line.data() + line.size()) continue;
        departures.push_back({rank, std::string(end + 1, line.data() + line.size())});
    }
    return departures;
}

}  // namespace tsr
