#include "tensor/overlap.hpp"

#include <algorithm>
#include <vector>

namespace tsr {

std::optional<std::pair<size_t, size_t>> find_overlap(std::span<const Tensor> tensors) {
    std::vector<size_t> by_address;
    for (size_t i = 0; i < tensors.size(); ++i) {
        if (tensors[i].data != nullptr && tensors[i].size_bytes() > 0) by_address.push_back(i);
    }
    std::ranges::sort(by_address, {}, [&](size_t i) { return std::pair(tensors[i].data, i); });
    for (size_t k = 1; k < by_address.size(); ++k) {
        const size_t before = by_address[k - 1];
        const size_t after = by_address[k];
        if (tensors[before].data + tensors[before].size_bytes() <= tensors[after].data) continue;
        return std::minmax(before, after);
    }
    return std::nullopt;
}

}  // namespace tsr
