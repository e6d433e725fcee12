// A part of a tensor in NumPy's notation: "0:2, :, -1". A number selects one index and removes its dimension.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tensor/layout.hpp"

namespace tsr::cli {

struct Slice {
    Box box;                // of all dimensions
    std::vector<int> kept;  // the dimensions that no number removed

    [[nodiscard]] static Slice whole(const Dims& shape);
    // INVALID_ARGUMENT describes the fault in `text`. Dimensions beyond those in `text` are taken completely.
    [[nodiscard]] static Slice parse(std::string_view text, const Dims& shape);
    [[nodiscard]] Dims shape() const;  // of the kept dimensions
};

}  // namespace tsr::cli
