// A part of a tensor as one writes it in NumPy: "0:2, :, -1". A number takes one index and its dimension away.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tensor/layout.hpp"

namespace tsr::cli {

struct Slice {
    Box box;                // of all dimensions
    std::vector<int> kept;  // the dimensions that no number took away

    [[nodiscard]] static Slice whole(const Dims& shape);
    // INVALID_ARGUMENT says what is wrong with `text`. Dimensions that it does not tell of are taken whole.
    [[nodiscard]] static Slice parse(std::string_view text, const Dims& shape);
    [[nodiscard]] Dims shape() const;  // of what is kept
};

}  // namespace tsr::cli
