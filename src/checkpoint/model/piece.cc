#include "checkpoint/model/piece.hpp"

#include <algorithm>
#include <tuple>

#include "checkpoint/io/file_system.hpp"

namespace tsr {

void order_pieces(std::vector<Piece>& pieces) {
    struct Key {
        // Empty tensors first of all: readers sort by offsets, and [0, 0] comes before [0, n].
        bool has_bytes;
        bool is_unaligned;
        int64_t itemsize;
        int64_t bytes;
        size_t place;
    };
    std::vector<Key> keys;
    keys.reserve(pieces.size());
    for (const Piece& piece : pieces) {
        const int64_t bytes = piece.size_bytes();
        keys.push_back({bytes != 0, bytes % direct_alignment != 0, static_cast<int64_t>(size_of(piece.dtype)), bytes,
                        keys.size()});
    }
    const auto by_name = [](const Piece& a, const Piece& b) { return a.name < b.name; };
    const bool names_in_order = std::is_sorted(pieces.begin(), pieces.end(), by_name);
    const auto before = [&](const Key& a, const Key& b) {
        const auto sizes = [](const Key& key) {
            return std::tuple(key.has_bytes, key.is_unaligned, -key.itemsize, -key.bytes);
        };
        if (sizes(a) != sizes(b)) return sizes(a) < sizes(b);
        return names_in_order ? a.place < b.place : by_name(pieces[a.place], pieces[b.place]);
    };
    if (std::is_sorted(keys.begin(), keys.end(), before)) return;
    std::sort(keys.begin(), keys.end(), before);
    std::vector<Piece> ordered;
    ordered.reserve(pieces.size());
    for (const Key& key : keys) ordered.push_back(pieces[key.place]);
    pieces = std::move(ordered);
}

}  // namespace tsr
