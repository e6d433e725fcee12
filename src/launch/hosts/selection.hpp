// Which slots of which hosts a job uses: DeepSpeed's --include, --exclude, --num_nodes and --num_gpus.
#pragma once

#include <string>
#include <vector>

#include "launch/hosts/hostfile.hpp"

namespace tsr {

struct HostSelection {
    std::string host;
    std::vector<int> slots;  // ascending, not empty
    friend bool operator==(const HostSelection&, const HostSelection&) = default;
};

struct Filter {
    // "NODE[:SLOT[,SLOT...]]@NODE...": SLOT is a number or a range 0-3. A node alone means all its slots; a node that is
    // there twice has the slots of both. Empty: not given.
    std::string include;
    std::string exclude;
    int num_nodes = -1;  // the first hosts; 0 or less: all
    int num_gpus = -1;   // the first slots of each host; 0 or less: all
};

// In the order of `hosts`, without those that have no slot left. Throws INVALID_ARGUMENT: include and exclude, or one of
// them and a number (even 0); a host that is not in `hosts`, a slot that its host lacks; more hosts or slots than there
// are; or if nothing is left. `source` is where the hosts come from, for messages: "hostfile F", "this machine".
[[nodiscard]] std::vector<HostSelection> select_hosts(const std::vector<HostSlots>& hosts, const Filter& filter,
                                                      const std::string& source);

// The devices that this process may use, by the ids that CUDA_VISIBLE_DEVICES takes: those listed in `visible`, the
// variable's value, as far as CUDA reads it (up to the first that is no id); nullptr: 0 to `gpus` - 1. Throws
// INVALID_ARGUMENT if one is there twice.
[[nodiscard]] std::vector<std::string> visible_devices(int gpus, const char* visible);

// The ids of a host's slots: slot i is its i-th visible device. Throws INVALID_ARGUMENT for one that there is not.
[[nodiscard]] std::vector<std::string> devices_of(const HostSelection& selection,
                                                  const std::vector<std::string>& visible);

// "4@host-a": how many ranks, as text, and on which host; the host is empty if there is no '@'. Throws INVALID_ARGUMENT
// for a name that is refused.
struct RanksAt {
    std::string count;
    std::string host;
};
[[nodiscard]] RanksAt parse_ranks_at(const std::string& text);

}  // namespace tsr
