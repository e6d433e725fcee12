#include "launch/binding.hpp"

#include <fmt/core.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <tuple>

#include "base/error.hpp"
#include "base/proc.hpp"
#include "base/refuse.hpp"
#include "launch/hosts/text_file.hpp"

namespace tsr {

namespace {

std::optional<int> number(std::string_view text) {
    int value = 0;
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    return failure == std::errc{} && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

// "3" or "0-2"; nullopt for anything else.
std::optional<std::pair<int, int>> range(std::string_view text) {
    const size_t dash = text.find('-', 1);
    const auto first = number(text.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : number(text.substr(dash + 1));
    return first && last ? std::optional(std::pair(*first, *last)) : std::nullopt;
}

// A list such as "0-2,8": its smallest number; nullopt if it is none.
std::optional<int> smallest(std::string_view list) {
    std::optional<int> least;
    for (const std::string_view part : pieces_of(list, ',')) {
        const auto numbers = range(part);
        if (numbers && (!least || numbers->first < *least)) least = numbers->first;
    }
    return least;
}

bool contains(std::string_view list, int id) {
    return std::ranges::any_of(pieces_of(list, ','), [&](std::string_view part) {
        const auto numbers = range(part);
        return numbers && numbers->first <= id && id <= numbers->second;
    });
}

// The numbers N of the entries PREFIXN of a directory.
std::vector<int> numbered_entries(const std::string& directory, std::string_view prefix) {
    std::vector<int> found;
    std::error_code failure;
    for (const auto& entry : std::filesystem::directory_iterator(directory, failure)) {
        const std::string name = entry.path().filename().string();
        if (!name.starts_with(prefix)) continue;
        if (const auto index = number(std::string_view(name).substr(prefix.size()))) found.push_back(*index);
    }
    std::ranges::sort(found);
    return found;
}

// The smallest processor with the same cache of the highest level; nullopt if the directory describes no cache.
std::optional<int> last_level_cache(const std::string& processor) {
    std::optional<int> best;
    int best_level = 0;
    for (const int index : numbered_entries(processor + "/cache", "index")) {
        const std::string cache = fmt::format("{}/cache/index{}", processor, index);
        const auto level = number(first_line(cache + "/level"));
        if (!level || *level <= best_level || first_line(cache + "/type") == "Instruction") continue;
        const auto shared = smallest(first_line(cache + "/shared_cpu_list"));
        if (!shared) continue;
        best_level = *level;
        best = shared;
    }
    return best;
}

// Share `index` of `shares` of the cores of these processors, which are in order of their cores.
std::vector<int> share_of_cores(const std::vector<Processor>& processors, size_t index, size_t shares,
                                const std::string& where) {
    std::vector<int> cores;
    for (const Processor& processor : processors) {
        if (cores.empty() || cores.back() != processor.core) cores.push_back(processor.core);
    }
    if (cores.size() < shares) {
        throw Error(Code::invalid_argument, fmt::format("--bind: {} ranks need a core each, but {} has {} usable "
                                                        "cores; start fewer ranks, or use --bind node",
                                                        shares, where, cores.size()));
    }
    const size_t each = cores.size() / shares;
    const size_t longer = cores.size() % shares;  // the first shares have one core more
    const size_t first = index * each + std::min(index, longer);
    const size_t end = first + each + (index < longer ? 1 : 0);
    std::vector<int> chosen;
    for (const Processor& processor : processors) {
        const auto at = static_cast<size_t>(std::ranges::find(cores, processor.core) - cores.begin());
        if (at >= first && at < end) chosen.push_back(processor.id);
    }
    return chosen;
}

// The complexes with the most processors come first; if there are fewer complexes than ranks, ranks share them.
std::vector<int> complex_of(const std::vector<Processor>& processors, size_t index) {
    std::map<int, std::vector<int>> complexes;
    for (const Processor& processor : processors) complexes[processor.complex].push_back(processor.id);
    std::vector<std::vector<int>> ordered;
    for (auto& [smallest, ids] : complexes) ordered.push_back(std::move(ids));
    std::ranges::stable_sort(ordered, [](const auto& a, const auto& b) { return a.size() > b.size(); });
    return ordered[index % ordered.size()];
}

std::vector<int> ids_where(const std::vector<Processor>& processors, int Processor::* field, int value) {
    std::vector<int> ids;
    for (const Processor& processor : processors) {
        if (processor.*field == value) ids.push_back(processor.id);
    }
    return ids;
}

}  // namespace

std::vector<int> allowed_processors() {
    // The kernel refuses a mask that is too short for its processors.
    for (int size = 1024; size <= 1 << 20; size *= 2) {
        cpu_set_t* const set = CPU_ALLOC(size);
        if (set == nullptr) throw Error(Code::no_memory, "cannot allocate an affinity mask");
        const size_t bytes = CPU_ALLOC_SIZE(size);
        std::vector<int> ids;
        const int result = ::sched_getaffinity(0, bytes, set);
        const int failure = errno;
        for (int id = 0; result == 0 && id < size; ++id) {
            if (CPU_ISSET_S(id, bytes, set)) ids.push_back(id);
        }
        CPU_FREE(set);
        if (result == 0) return ids;
        if (failure != EINVAL) throw os_error("sched_getaffinity", failure);
    }
    throw Error(Code::unsupported, "sched_getaffinity: this machine has more than a million processors");
}

std::vector<int> parse_processors(const std::string& text) {
    constexpr int most = 65536;
    std::vector<int> processors;
    for (const std::string_view piece : pieces_of(text, ',')) {
        const auto numbers = range(piece);
        if (!numbers || numbers->first < 0 || numbers->second >= most) {
            refuse("core list '{}': '{}' is neither a core (0 to {}) nor a range such as 0-3", shown(text),
                   shown(piece), most - 1);
        }
        const auto [first, last] = *numbers;
        if (first > last) refuse("core list '{}': range '{}' goes down", shown(text), shown(piece));
        if (!processors.empty() && first <= processors.back()) {
            refuse("core list '{}': '{}' is not above core {}; cores must ascend without overlap", shown(text),
                   shown(piece), processors.back());
        }
        for (int id = first; id <= last; ++id) processors.push_back(id);
    }
    return processors;
}

std::vector<int> first_of_cores(const std::vector<Processor>& processors) {
    std::set<int> cores;
    std::vector<int> first;
    for (const Processor& processor : processors) {
        if (cores.insert(processor.core).second) first.push_back(processor.id);
    }
    return first;
}

std::vector<std::vector<int>> equal_shares(const std::vector<int>& processors, int ranks) {
    const size_t share = processors.size() / static_cast<size_t>(ranks);
    if (share == 0) refuse("{} cores for {} ranks; each rank needs one", processors.size(), ranks);
    std::vector<std::vector<int>> shares;
    auto next = processors.begin();
    for (int rank = 0; rank < ranks; ++rank, next += static_cast<std::ptrdiff_t>(share)) {
        shares.emplace_back(next, next + static_cast<std::ptrdiff_t>(share));
    }
    return shares;
}

std::vector<Processor> read_topology(const std::string& root, const std::vector<int>& allowed) {
    std::map<int, std::string> nodes;  // the processors of each
    const std::string node_directory = root + "/sys/devices/system/node";
    for (const int node : numbered_entries(node_directory, "node")) {
        nodes[node] = first_line(fmt::format("{}/node{}/cpulist", node_directory, node));
    }
    std::vector<Processor> processors;
    for (const int id : allowed) {
        const std::string directory = fmt::format("{}/sys/devices/system/cpu/cpu{}", root, id);
        Processor processor;
        processor.id = id;
        processor.core = smallest(first_line(directory + "/topology/thread_siblings_list")).value_or(id);
        processor.complex = last_level_cache(directory).value_or(processor.core);
        processor.socket = std::max(0, number(first_line(directory + "/topology/physical_package_id")).value_or(0));
        for (const auto& [node, list] : nodes) {
            if (contains(list, id)) processor.node = node;
        }
        processors.push_back(processor);
    }
    return processors;
}

std::vector<int> nodes_of_devices(const std::string& root, const std::optional<std::string>& visible) {
    std::set<std::string> addresses;
    std::error_code failure;
    for (const auto& entry : std::filesystem::directory_iterator(root + "/proc/driver/nvidia/gpus", failure)) {
        addresses.insert(entry.path().filename().string());
    }
    std::vector<int> nodes;
    for (const std::string& address : addresses) {
        // -1 if the machine has a single node.
        const auto node = number(first_line(fmt::format("{}/sys/bus/pci/devices/{}/numa_node", root, address)));
        nodes.push_back(std::max(0, node.value_or(0)));
    }
    if (!visible) return nodes;
    std::vector<int> chosen;
    for (const std::string_view part : pieces_of(*visible, ',')) {
        const auto device = number(part);
        if (!device || *device < 0 || static_cast<size_t>(*device) >= nodes.size()) return {};
        chosen.push_back(nodes[static_cast<size_t>(*device)]);
    }
    return chosen;
}

std::vector<std::vector<int>> processors_of_ranks(Bind bind, const std::vector<Processor>& processors, int ranks,
                                                  const std::vector<int>& device_nodes) {
    const auto count = static_cast<size_t>(ranks);
    std::vector<Processor> ordered = processors;
    std::ranges::sort(ordered, {}, [](const Processor& p) { return std::tuple(p.node, p.core, p.id); });
    std::set<int> known;
    for (const Processor& processor : ordered) known.insert(processor.node);
    const std::vector<int> nodes(known.begin(), known.end());
    const bool by_device = device_nodes.size() >= count;
    std::vector<int> node_of(count);
    for (size_t rank = 0; rank < count; ++rank) {
        node_of[rank] = by_device ? device_nodes[rank] : nodes[rank * nodes.size() / count];
        if (!known.contains(node_of[rank])) {
            throw Error(Code::invalid_argument,
                        fmt::format("--bind: the device of local rank {} is on NUMA node {}, of which this process may "
                                    "use no processor; widen the affinity mask, or leave out --bind",
                                    rank, node_of[rank]));
        }
    }
    std::vector<std::vector<int>> chosen;
    for (size_t rank = 0; rank < count; ++rank) {
        const int node = node_of[rank];
        std::vector<Processor> of_node;
        std::ranges::copy_if(ordered, std::back_inserter(of_node), [&](const Processor& p) { return p.node == node; });
        const auto on_node = static_cast<size_t>(std::ranges::count(node_of, node));
        const auto index =
            static_cast<size_t>(std::count(node_of.begin(), node_of.begin() + static_cast<long>(rank), node));
        switch (bind) {
            case Bind::none: chosen.emplace_back(); break;
            case Bind::node: chosen.push_back(ids_where(ordered, &Processor::node, node)); break;
            case Bind::socket: chosen.push_back(ids_where(ordered, &Processor::socket, of_node.front().socket)); break;
            case Bind::exclusive:
                chosen.push_back(by_device ? share_of_cores(of_node, index, on_node, fmt::format("NUMA node {}", node))
                                           : share_of_cores(ordered, rank, count, "this process"));
                break;
            case Bind::core_complex: chosen.push_back(complex_of(of_node, index)); break;
        }
        std::ranges::sort(chosen.back());
    }
    return chosen;
}

}  // namespace tsr
