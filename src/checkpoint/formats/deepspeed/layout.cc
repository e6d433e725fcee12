#include "checkpoint/formats/deepspeed/layout.hpp"

#include <algorithm>

namespace tsr {

std::vector<FlatRange> partitions_of(std::span<const int64_t> ends, Range elements) {
    std::vector<FlatRange> found;
    auto end = std::upper_bound(ends.begin(), ends.end(), elements.begin);
    for (int64_t at = elements.begin; at < elements.end && end != ends.end(); ++end) {
        const int64_t stop = std::min(*end, elements.end);
        if (stop == at) continue;
        const auto partition = static_cast<size_t>(end - ends.begin());
        const int64_t begin = partition == 0 ? 0 : ends[partition - 1];
        found.push_back({partition, at - begin, stop - at, at - elements.begin});
        at = stop;
    }
    return found;
}

std::optional<std::vector<size_t>> places_by_shape(std::span<const std::optional<Dims>> some,
                                                   std::span<const Dims> all) {
    const auto fits = [&](size_t one, size_t place) { return !some[one] || *some[one] == all[place]; };
    std::vector<size_t> earliest;
    for (size_t place = 0; place < all.size() && earliest.size() < some.size(); ++place) {
        if (fits(earliest.size(), place)) earliest.push_back(place);
    }
    if (earliest.size() < some.size()) return std::nullopt;
    // Every way is between the earliest and the latest.
    size_t left = some.size();
    for (size_t place = all.size(); place-- > 0 && left > 0;) {
        if (fits(left - 1, place) && earliest[--left] != place) return std::nullopt;
    }
    return earliest;
}

}  // namespace tsr
