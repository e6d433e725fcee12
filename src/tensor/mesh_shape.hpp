// The shape of a mesh: named dimensions over which ranks are arranged in row-major order (the last dimension varies
// fastest). Does not communicate.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tsr {

class MeshShape {
   public:
    // 1 to 8 dimensions with different, non-empty names and sizes of at least 1; throws INVALID_ARGUMENT.
    MeshShape(std::vector<std::string> names, std::vector<int> sizes);

    [[nodiscard]] int ndim() const { return static_cast<int>(sizes_.size()); }
    [[nodiscard]] int rank_count() const { return rank_count_; }
    [[nodiscard]] const std::string& name(int dim) const { return names_[static_cast<size_t>(dim)]; }
    [[nodiscard]] int size(int dim) const { return sizes_[static_cast<size_t>(dim)]; }

    [[nodiscard]] int dim(std::string_view name) const;  // throws NOT_FOUND, listing the names
    [[nodiscard]] int coordinate(int rank, int dim) const;
    // The smallest rank that differs from `rank` only in dimension `dim`. It identifies the group of `rank` along
    // `dim`: the same for all ranks of the group, different for every other group.
    [[nodiscard]] int first_of_group(int rank, int dim) const;

    [[nodiscard]] std::string str() const;  // "dp 2, tp 4"

   private:
    std::vector<std::string> names_;
    std::vector<int> sizes_;
    std::vector<int> strides_;
    int rank_count_ = 1;
};

}  // namespace tsr
