#include "checkpoint/formats/deepspeed/layout.hpp"

#include <algorithm>

namespace tsr {

std::vector<FlatRange> partitions_of(std::span<const int64_t> sizes, Range elements) {
    std::vector<FlatRange> found;
    int64_t begin = 0;  // of the partition in the vector
    for (size_t i = 0; i < sizes.size() && begin < elements.end; ++i) {
        const int64_t from = std::max(begin, elements.begin);
        const int64_t to = std::min(begin + sizes[i], elements.end);
        if (from < to) found.push_back({i, from - begin, to - from, from - elements.begin});
        begin += sizes[i];
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
