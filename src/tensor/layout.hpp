// Which rank holds which part of a tensor, computed locally: a layout is a shape, an n-D mesh and one placement per
// mesh dimension (or, for irregular tensors, explicit boxes per rank), and every rank's boxes follow without
// communication. A *shard* is one distinct box; ranks that hold the same shard are its replicas. Layouts are immutable
// values, cheap to copy.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/function_ref.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

// A part of a tensor. Offsets and sizes have the tensor's number of dimensions.
struct Box {
    Dims offsets;
    Dims sizes;

    [[nodiscard]] static Box whole(const Dims& shape);
    [[nodiscard]] int64_t numel() const { return sizes.product(); }
    [[nodiscard]] bool empty() const { return numel() == 0; }
    [[nodiscard]] Box intersect(const Box& other) const;  // may be empty
    [[nodiscard]] bool inside(const Dims& shape) const;   // safe for any values, without overflow
    [[nodiscard]] std::string str() const;                // "[0:64, 0:128]"
    friend bool operator==(const Box&, const Box&) = default;
};
void check_inside(const Box& box, const Dims& shape);  // INVALID_ARGUMENT

enum class PlacementKind : int32_t { replicate = 1, shard = 2 };

struct Placement {
    PlacementKind kind = PlacementKind::replicate;
    int dim = 0;  // the tensor dimension that is cut; 0 for replicate

    [[nodiscard]] static Placement replicate() { return {}; }
    [[nodiscard]] static Placement shard(int dim) { return {PlacementKind::shard, dim}; }
    [[nodiscard]] std::string str() const;  // "R" or "S(0)"
    [[nodiscard]] static std::optional<Placement> parse(std::string_view text);
    friend bool operator==(const Placement&, const Placement&) = default;
};

// The `index`-th of `parts` parts of `size` elements, split like torch.chunk: parts of ceil(size / parts), then a
// shorter one, then empty ones.
struct Range {
    int64_t begin = 0;
    int64_t end = 0;
};
[[nodiscard]] Range chunk(int64_t size, int64_t parts, int64_t index);
[[nodiscard]] int64_t last_chunk(int64_t size, int64_t parts);  // the last part that is not empty; 0 if all are

// The boxes, in order, that cover the elements [begin, end) of a tensor in row-major order: at most 2 * ndim - 1.
[[nodiscard]] std::vector<Box> boxes_of_range(const Dims& shape, Range elements);

inline constexpr int max_layout_ranks = 1 << 20;

class Layout {
   public:
    // Throws INVALID_ARGUMENT for different numbers of sizes and placements, a shard dimension that the shape does not
    // have, or more than max_layout_ranks ranks.
    [[nodiscard]] static Layout placed(const Dims& shape, std::span<const int> mesh_sizes,
                                       std::span<const Placement> placements);
    [[nodiscard]] static Layout replicated(const Dims& shape, int world_size);
    // The same mesh and placements (shared, not copied) for another shape. Regular layouts only.
    [[nodiscard]] Layout of_shape(const Dims& shape) const;
    // `boxes` has counts[r] boxes for each rank r, in rank order. Boxes must be inside the shape, and equal or
    // disjoint.
    [[nodiscard]] static Layout from_boxes(const Dims& shape, std::span<const Box> boxes, std::span<const int> counts);

    [[nodiscard]] const Dims& shape() const { return shape_; }
    [[nodiscard]] int world_size() const { return world_size_; }
    [[nodiscard]] bool is_explicit() const { return explicit_ != nullptr; }
    // Empty for an explicit layout.
    [[nodiscard]] std::span<const int> mesh_sizes() const { return placed_ ? placed_->mesh_sizes : none<int>(); }
    [[nodiscard]] std::span<const Placement> placements() const {
        return placed_ ? placed_->placements : none<Placement>();
    }
    [[nodiscard]] bool same_placements(const Layout& other) const;  // of the same mesh

    // The boxes of `rank`, in order, without empty ones. A tensor without elements has one box, the complete tensor, on
    // each rank of a regular layout.
    [[nodiscard]] std::vector<Box> boxes_of(int rank) const;

    // Regular layouts: shards are numbered row-major over the sharded mesh dimensions, replicas row-major over the
    // others. A shard may be empty.
    [[nodiscard]] int shard_count() const { return shard_count_; }
    [[nodiscard]] int replica_count() const { return world_size_ / shard_count_; }
    [[nodiscard]] Box shard(int index) const;
    [[nodiscard]] int last_shard() const;  // the last shard that is not empty; for shapes with elements only
    [[nodiscard]] int shard_of(int rank) const;
    [[nodiscard]] int replica_of(int rank) const;
    [[nodiscard]] int rank_of(int shard, int replica) const;
    // Calls `visit` for each shard that overlaps `wanted`, in order; takes time proportional to the overlapping shards
    // only.
    void for_each_overlap(const Box& wanted, FunctionRef<void(int shard, const Box& box)> visit) const;

    // Explicit layouts: all boxes in rank order, and the first of each rank.
    [[nodiscard]] std::span<const Box> all_boxes() const;
    [[nodiscard]] int first_box(int rank) const;

    // "mesh [2, 2], R S(0)" or "boxes ...". For equal shapes, equal texts mean equal layouts.
    [[nodiscard]] std::string str() const;
    friend bool operator==(const Layout& a, const Layout& b);

   private:
    struct Placed {
        std::vector<int> mesh_sizes;
        std::vector<Placement> placements;
        friend bool operator==(const Placed&, const Placed&) = default;
    };
    struct Explicit {
        std::vector<Box> boxes;
        std::vector<int> first;  // world_size + 1 entries
    };

    Layout() = default;
    template <class T>
    static const std::vector<T>& none() {
        static const std::vector<T> empty;
        return empty;
    }
    void check_dims() const;
    // Visits the shards in `box`, the part that mesh dimensions before `m` selected, with this partial shard number.
    void overlaps_in(size_t m, int number, const Box& box, const Box& wanted,
                     FunctionRef<void(int shard, const Box& box)> visit) const;
    [[nodiscard]] int coordinate_sum(int rank, bool of_shards) const;

    Dims shape_;
    int world_size_ = 1;
    int shard_count_ = 1;
    std::shared_ptr<const Placed> placed_;
    std::shared_ptr<const Explicit> explicit_;
};

}  // namespace tsr
