// How DeepSpeed lays out what belongs to parameters: as ranges of flat vectors that are cut into partitions, or one
// after the other in an order that has no names.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tensor/layout.hpp"

namespace tsr {

// A range of a partition, and the index in the whole range of its first element.
struct FlatRange {
    size_t partition = 0;
    int64_t begin = 0;
    int64_t count = 0;
    int64_t first = 0;
};
// Where the elements of a range of a vector are that is cut into partitions, which end at these elements. The range is
// inside the vector.
[[nodiscard]] std::vector<FlatRange> partitions_of(std::span<const int64_t> ends, Range elements);

// Which of `all` the `some` are, if they are in the same order and their shapes leave one way only. nullopt in `some`:
// any shape.
[[nodiscard]] std::optional<std::vector<size_t>> places_by_shape(std::span<const std::optional<Dims>> some,
                                                                 std::span<const Dims> all);

}  // namespace tsr
