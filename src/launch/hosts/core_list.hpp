// DeepSpeed's binding of ranks to cores: --bind_cores_to_rank and --bind_core_list.
#pragma once

#include <string>
#include <vector>

namespace tsr {

// "0,4-7": ascending, without overlap. Throws INVALID_ARGUMENT.
[[nodiscard]] std::vector<int> parse_core_list(const std::string& text);

// One processor of each physical core that this process may use, ascending.
[[nodiscard]] std::vector<int> physical_cores();

// An equal share of the cores for each of `ranks`, in order; what is left over is not used. Throws INVALID_ARGUMENT if
// there are fewer cores than ranks.
[[nodiscard]] std::vector<std::vector<int>> shares_of(const std::vector<int>& cores, int ranks);

}  // namespace tsr
