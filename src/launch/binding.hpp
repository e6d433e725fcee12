// Which processors each rank of a host runs on (`tessera run --bind`), by the topology that /sys describes. The agent
// sets a rank's affinity mask before the rank's program starts, so the mask holds for all of its threads.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tsr {

enum class Bind {
    none,
    node,          // all processors of the rank's NUMA node
    socket,        // all processors of the socket of that node
    exclusive,     // an equal share of the cores, which no other rank gets
    core_complex,  // cores with a last-level cache in common
};

// A processor that this process may use. Core and complex are named by their smallest processor.
struct Processor {
    int id = 0;
    int core = 0;     // hardware threads of the same core
    int complex = 0;  // with the same last-level cache
    int node = 0;     // NUMA
    int socket = 0;
    friend bool operator==(const Processor&, const Processor&) = default;
};

// The processors of this thread's affinity mask.
[[nodiscard]] std::vector<int> allowed_processors();
// "0,4-7": ascending, without overlap. Throws INVALID_ARGUMENT.
[[nodiscard]] std::vector<int> parse_processors(const std::string& text);
// What `root`/sys says about these processors; without an entry, a processor is its own core, on node 0 and socket 0.
[[nodiscard]] std::vector<Processor> read_topology(const std::string& root, const std::vector<int>& allowed);
// The NUMA nodes of the NVIDIA devices in the order of their PCI addresses, or in the order of `visible`
// (CUDA_VISIBLE_DEVICES); empty if there is no device, or if `visible` has something other than numbers of devices.
[[nodiscard]] std::vector<int> nodes_of_devices(const std::string& root, const std::optional<std::string>& visible);

// An equal share of `processors` for each of `ranks`, in order; what is left over is not used. Throws INVALID_ARGUMENT if
// there are fewer processors than ranks.
[[nodiscard]] std::vector<std::vector<int>> equal_shares(const std::vector<int>& processors, int ranks);

// One processor of each core.
[[nodiscard]] std::vector<int> first_of_cores(const std::vector<Processor>& processors);

// The processors of each local rank. A rank is on the node of its device (`device_nodes`, by local rank); without a
// device for each rank, the ranks are spread evenly in blocks. Throws INVALID_ARGUMENT if there are too few cores.
[[nodiscard]] std::vector<std::vector<int>> processors_of_ranks(Bind bind, const std::vector<Processor>& processors,
                                                                int ranks, const std::vector<int>& device_nodes);

}  // namespace tsr
