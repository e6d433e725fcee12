// A part of a tensor on its way into a file.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "tensor/layout.hpp"

namespace tsr {

// Shared, as many of up to a hundred thousand pieces and entries have the same box.
using SharedBox = std::shared_ptr<const Box>;

// A part of a tensor on its way into a file: `data` is its row-major content. The name outlives the piece.
struct Piece {
    std::string_view name;
    DType dtype = DType::f32;
    SharedBox box;
    const std::byte* data = nullptr;
    Device device{};  // of the data

    [[nodiscard]] int64_t size_bytes() const { return box->numel() * static_cast<int64_t>(size_of(dtype)); }
};

// Sorts pieces into file order: sizes that are multiples of 4096 first, so that they stay aligned to 4096; then by
// element size, so that every tensor is aligned to its element size; larger before smaller.
void order_pieces(std::vector<Piece>& pieces);

}  // namespace tsr
