#include "tensor/mesh_shape.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

MeshShape::MeshShape(std::vector<std::string> names, std::vector<int> sizes)
    : names_(std::move(names)), sizes_(std::move(sizes)), strides_(sizes_.size()) {
    if (sizes_.empty() || sizes_.size() > static_cast<size_t>(max_ndim) || names_.size() != sizes_.size()) {
        throw Error(Code::invalid_argument,
                    fmt::format("a mesh has {} sizes and {} names; it must have 1 to {} of each", sizes_.size(),
                                names_.size(), max_ndim));
    }
    for (size_t d = sizes_.size(); d-- > 0;) {
        if (names_[d].empty()) throw Error(Code::invalid_argument, fmt::format("mesh dimension {} has no name", d));
        if (std::count(names_.begin(), names_.end(), names_[d]) > 1) {
            throw Error(Code::invalid_argument, fmt::format("two mesh dimensions are named \"{}\"", names_[d]));
        }
        if (sizes_[d] < 1) {
            throw Error(Code::invalid_argument,
                        fmt::format("mesh dimension \"{}\" has size {}; it must be positive", names_[d], sizes_[d]));
        }
        strides_[d] = rank_count_;
        if (__builtin_mul_overflow(rank_count_, sizes_[d], &rank_count_)) {
            throw Error(Code::invalid_argument, "a mesh must have fewer than 2^31 ranks");
        }
    }
}

int MeshShape::dim(std::string_view name) const {
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found != names_.end()) return static_cast<int>(found - names_.begin());
    throw Error(Code::not_found,
                fmt::format("the mesh has no dimension \"{}\"; it has {}", name, fmt::join(names_, ", ")));
}

int MeshShape::coordinate(int rank, int dim) const {
    const auto d = static_cast<size_t>(dim);
    return rank / strides_[d] % sizes_[d];
}

int MeshShape::first_of_group(int rank, int dim) const {
    return rank - coordinate(rank, dim) * strides_[static_cast<size_t>(dim)];
}

std::string MeshShape::str() const {
    std::string text;
    for (int d = 0; d < ndim(); ++d) text += fmt::format("{}{} {}", d > 0 ? ", " : "", name(d), size(d));
    return text;
}

}  // namespace tsr
