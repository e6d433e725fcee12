#include "launch/hosts/selection.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <numeric>
#include <set>
#include <string_view>

#include "base/refuse.hpp"
#include "launch/hosts/host_name.hpp"
#include "launch/hosts/text_file.hpp"

namespace tsr {

namespace {

constexpr size_t max_ranks = 4096;  // of a job

// The slots that a filter names, by host.
using Named = std::map<std::string, std::set<int>, std::less<>>;

class FilterText {
   public:
    FilterText(std::string option, const std::vector<HostSlots>& hosts, std::string source)
        : option_(std::move(option)), hosts_(hosts), source_(std::move(source)) {}

    [[nodiscard]] Named parse(std::string_view text) const {
        Named named;
        for (const std::string_view node : pieces_of(text, '@')) {
            const std::vector<std::string_view> parts = pieces_of(node, ':');
            if (parts.size() > 2) {
                refuse("{} '{}': more than one ':' in '{}'; expected NODE:SLOT,SLOT with '@' between nodes", option_,
                       shown(text), shown(node));
            }
            const HostSlots& host = find(trimmed(parts.front()));
            std::set<int>& slots = named[host.host];
            if (parts.size() == 1) {
                for (int slot = 0; slot < host.slots; ++slot) slots.insert(slot);
                continue;
            }
            for (const std::string_view piece : pieces_of(parts[1], ',')) add_slots(host, trimmed(piece), slots);
        }
        return named;
    }

   private:
    const HostSlots& find(std::string_view name) const {
        const auto found = std::ranges::find(hosts_, name, &HostSlots::host);
        if (found != hosts_.end()) return *found;
        std::string known;
        for (size_t i = 0; i < std::min<size_t>(hosts_.size(), 8); ++i) known += (i > 0 ? ", " : "") + hosts_[i].host;
        if (hosts_.size() > 8) known += ", ...";
        refuse("{}: host '{}' not found in {}, which has {}", option_, shown(name), source_, known);
    }

    // "3" or "0-3".
    void add_slots(const HostSlots& host, std::string_view text, std::set<int>& slots) const {
        const size_t dash = text.find('-', 1);
        const int first = slot(host, text.substr(0, dash), text);
        const int last = dash == std::string_view::npos ? first : slot(host, text.substr(dash + 1), text);
        if (first > last) refuse("{}: range '{}' of host '{}' goes down", option_, shown(text), host.host);
        for (int i = first; i <= last; ++i) slots.insert(i);
    }

    int slot(const HostSlots& host, std::string_view digits, std::string_view text) const {
        int number = 0;
        const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
        if (failure == std::errc::invalid_argument || end != digits.data() + digits.size()) {
            refuse("{}: '{}' of host '{}' is not a slot; expected a number or a range such as 0-3", option_,
                   shown(text), host.host);
        }
        if (failure != std::errc{} || number < 0 || number >= host.slots) {
            refuse(
                "{}: no slot {} on host '{}', which has {} ({} says slots={}; slots are the machine's devices, "
                "numbered from 0)",
                option_, shown(digits), host.host, host.slots, source_, host.slots);
        }
        return number;
    }

    const std::string option_;
    const std::vector<HostSlots>& hosts_;
    const std::string source_;
};

std::vector<int> first_slots(int count) {
    std::vector<int> slots(static_cast<size_t>(count));
    std::iota(slots.begin(), slots.end(), 0);
    return slots;
}

bool is_device_id(std::string_view text) {
    if (text.starts_with("GPU-") || text.starts_with("MIG-")) return true;
    return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

}  // namespace

std::vector<HostSelection> select_hosts(const std::vector<HostSlots>& hosts, const Filter& filter,
                                        const std::string& source) {
    const bool filtered = !filter.include.empty() || !filter.exclude.empty();
    if (!filter.include.empty() && !filter.exclude.empty()) {
        refuse("--include and --exclude are mutually exclusive; use one of them");
    }
    if (filtered && (filter.num_nodes >= 0 || filter.num_gpus >= 0)) {
        refuse("--num_nodes and --num_gpus cannot be used with --include or --exclude, which already say which slots");
    }
    const size_t nodes = filter.num_nodes > 0 ? static_cast<size_t>(filter.num_nodes) : hosts.size();
    if (nodes > hosts.size()) refuse("--num_nodes {}: {} has {} hosts", filter.num_nodes, source, hosts.size());
    Named named;
    if (filtered) {
        const bool includes = !filter.include.empty();
        named = FilterText(includes ? "--include" : "--exclude", hosts, source)
                    .parse(includes ? filter.include : filter.exclude);
    }
    std::vector<HostSelection> selected;
    size_t ranks = 0;
    for (size_t i = 0; i < nodes; ++i) {
        const HostSlots& host = hosts[i];
        HostSelection selection{host.host, first_slots(host.slots)};
        if (filter.num_gpus > host.slots) {
            refuse("--num_gpus {}: host '{}' has {} slots ({})", filter.num_gpus, host.host, host.slots, source);
        }
        if (filter.num_gpus > 0) selection.slots.resize(static_cast<size_t>(filter.num_gpus));
        if (filtered) {
            const auto found = named.find(host.host);
            std::erase_if(selection.slots, [&](int slot) {
                const bool is_named = found != named.end() && found->second.contains(slot);
                return is_named == filter.include.empty();
            });
        }
        ranks += selection.slots.size();
        if (ranks > max_ranks)
            refuse("more than {} slots are chosen, of {}; a job can have at most that many ranks", max_ranks, source);
        if (!selection.slots.empty()) selected.push_back(std::move(selection));
    }
    if (selected.empty()) {
        refuse("no slot is left{}: {}",
               filtered ? fmt::format(" by {}", filter.include.empty() ? "--exclude" : "--include") : "", source);
    }
    return selected;
}

std::vector<std::string> visible_devices(int gpus, const char* visible) {
    std::vector<std::string> devices;
    if (visible == nullptr) {
        for (int i = 0; i < gpus; ++i) devices.push_back(std::to_string(i));
        return devices;
    }
    for (const std::string_view piece : pieces_of(visible, ',')) {
        const std::string id(trimmed(piece));
        if (!is_device_id(id)) break;
        if (std::ranges::find(devices, id) != devices.end()) {
            refuse("CUDA_VISIBLE_DEVICES={}: device {} is there twice", shown(visible), shown(id));
        }
        devices.push_back(id);
    }
    return devices;
}

std::vector<std::string> devices_of(const HostSelection& selection, const std::vector<std::string>& visible) {
    std::vector<std::string> devices;
    for (const int slot : selection.slots) {
        if (static_cast<size_t>(slot) >= visible.size()) {
            refuse("host '{}' has no device for slot {}: {} visible (CUDA_VISIBLE_DEVICES)", selection.host, slot,
                   visible.size() == 1 ? "1 is" : fmt::format("{} are", visible.size()));
        }
        devices.push_back(visible[static_cast<size_t>(slot)]);
    }
    return devices;
}

RanksAt parse_ranks_at(const std::string& text) {
    const size_t at = text.find('@');
    if (at == std::string::npos) return {text, ""};
    RanksAt ranks{text.substr(0, at), text.substr(at + 1)};
    const std::string why = why_no_host_name(ranks.host);
    if (!why.empty()) refuse("-n {}: host '{}' {}", shown(text), shown(ranks.host), why);
    return ranks;
}

}  // namespace tsr
