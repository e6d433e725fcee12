#include "launch/hosts/core_list.hpp"

#include <fmt/core.h>
#include <sched.h>

#include <cerrno>
#include <charconv>
#include <fstream>
#include <string_view>

#include "base/refuse.hpp"
#include "launch/hosts/text_file.hpp"

namespace tsr {

namespace {

constexpr int max_cores = 65536;

}  // namespace

std::vector<int> parse_core_list(const std::string& text) {
    std::vector<int> cores;
    for (const std::string_view piece : pieces_of(text, ',')) {
        const auto number = [&](std::string_view digits) {
            int core = -1;
            const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), core);
            if (failure != std::errc{} || end != digits.data() + digits.size() || core < 0 || core >= max_cores) {
                refuse("core list '{}': '{}' is neither a core nor a range such as 0-3", shown(text), shown(piece));
            }
            return core;
        };
        const size_t dash = piece.find('-', 1);
        const int first = number(piece.substr(0, dash));
        const int last = dash == std::string_view::npos ? first : number(piece.substr(dash + 1));
        if (first > last) refuse("core list '{}': range '{}' goes down", shown(text), shown(piece));
        if (!cores.empty() && first <= cores.back()) {
            refuse("core list '{}': '{}' is not above core {}; cores must ascend without overlap", shown(text),
                   shown(piece), cores.back());
        }
        for (int core = first; core <= last; ++core) cores.push_back(core);
    }
    return cores;
}

std::vector<int> physical_cores() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) throw os_error("cannot read the processors", errno);
    std::vector<int> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed)) continue;
        std::ifstream file(fmt::format("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", cpu));
        std::string siblings;
        bool is_first = true;
        if (std::getline(file, siblings)) {
            for (const int sibling : parse_core_list(siblings)) {
                if (sibling < cpu && CPU_ISSET(sibling, &allowed)) is_first = false;
            }
        }
        if (is_first) cores.push_back(cpu);
    }
    return cores;
}

std::vector<std::vector<int>> shares_of(const std::vector<int>& cores, int ranks) {
    const size_t share = cores.size() / static_cast<size_t>(ranks);
    if (share == 0) refuse("{} cores for {} ranks; each rank needs one", cores.size(), ranks);
    std::vector<std::vector<int>> shares;
    auto next = cores.begin();
    for (int rank = 0; rank < ranks; ++rank, next += static_cast<std::ptrdiff_t>(share)) {
        shares.emplace_back(next, next + static_cast<std::ptrdiff_t>(share));
    }
    return shares;
}

}  // namespace tsr
