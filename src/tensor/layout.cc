#include "tensor/layout.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "base/error.hpp"

namespace tsr {

Box Box::whole(const Dims& shape) {
    Box box{shape, shape};
    for (int d = 0; d < shape.ndim(); ++d) box.offsets[d] = 0;
    return box;
}

Box Box::intersect(const Box& other) const {
    Box result = *this;
    for (int d = 0; d < sizes.ndim(); ++d) {
        const int64_t begin = std::max(offsets[d], other.offsets[d]);
        const int64_t end = std::min(offsets[d] + sizes[d], other.offsets[d] + other.sizes[d]);
        result.offsets[d] = begin;
        result.sizes[d] = std::max<int64_t>(end - begin, 0);
    }
    return result;
}

bool Box::inside(const Dims& shape) const {
    if (offsets.ndim() != shape.ndim() || sizes.ndim() != shape.ndim()) return false;
    for (int d = 0; d < shape.ndim(); ++d) {
        if (offsets[d] < 0 || sizes[d] < 0) return false;
        if (offsets[d] > shape[d] || sizes[d] > shape[d] - offsets[d]) return false;
    }
    return true;
}

void check_inside(const Box& box, const Dims& shape) {
    if (box.inside(shape)) return;
    throw Error(Code::invalid_argument, fmt::format("the box with offsets {} and sizes {} is not inside the shape {}",
                                                    box.offsets.str(), box.sizes.str(), shape.str()));
}

std::string Box::str() const {
    std::string text = "[";
    for (int d = 0; d < sizes.ndim(); ++d) {
        if (d > 0) text += ", ";
        text += fmt::format("{}:{}", offsets[d], offsets[d] + sizes[d]);
    }
    return text + "]";
}

std::string Placement::str() const { return kind == PlacementKind::replicate ? "R" : fmt::format("S({})", dim); }

std::optional<Placement> Placement::parse(std::string_view text) {
    if (text == "R") return replicate();
    if (text.size() != 4 || !text.starts_with("S(") || text[3] != ')') return std::nullopt;
    const int dim = text[2] - '0';
    if (dim < 0 || dim >= max_ndim) return std::nullopt;
    return shard(dim);
}

Range chunk(int64_t size, int64_t parts, int64_t index) {
    const int64_t full = size / parts + (size % parts != 0 ? 1 : 0);
    const auto edge = [&](int64_t i) { return full > 0 && i > size / full ? size : std::min(size, i * full); };
    return {edge(index), edge(index + 1)};
}

int64_t last_chunk(int64_t size, int64_t parts) {
    if (size == 0) return 0;
    const int64_t full = size / parts + (size % parts != 0 ? 1 : 0);
    return (size - 1) / full;
}

namespace {

// Appends the boxes of elements [begin, end) of `box`, whose dimensions before `d` have one index each.
void append_range(std::vector<Box>& boxes, Box box, int d, Range elements) {
    if (elements.begin == elements.end) return;
    if (d == box.sizes.ndim()) return boxes.push_back(box);
    int64_t inner = 1;
    for (int k = d + 1; k < box.sizes.ndim(); ++k) inner *= box.sizes[k];
    const auto within = [&](int64_t index, Range part) {
        Box one = box;
        one.offsets[d] = index;
        one.sizes[d] = 1;
        append_range(boxes, one, d + 1, part);
    };
    int64_t first = elements.begin / inner;
    const int64_t last = elements.end / inner;
    if (elements.begin % inner != 0) {
        if (first == last) return within(first, {elements.begin % inner, elements.end % inner});
        within(first++, {elements.begin % inner, inner});
    }
    if (first < last) {
        Box rows = box;
        rows.offsets[d] = first;
        rows.sizes[d] = last - first;
        boxes.push_back(rows);
    }
    within(last, {0, elements.end % inner});
}

}  // namespace

std::vector<Box> boxes_of_range(const Dims& shape, Range elements) {
    std::vector<Box> boxes;
    append_range(boxes, Box::whole(shape), 0, elements);
    return boxes;
}

Layout Layout::placed(const Dims& shape, std::span<const int> mesh_sizes, std::span<const Placement> placements) {
    if (mesh_sizes.empty() || mesh_sizes.size() > static_cast<size_t>(max_ndim)) {
        throw Error(Code::invalid_argument,
                    fmt::format("a mesh of {} dimensions; 1 to {} are supported", mesh_sizes.size(), max_ndim));
    }
    if (mesh_sizes.size() != placements.size()) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} placements for a mesh of {} dimensions", placements.size(), mesh_sizes.size()));
    }
    Layout layout;
    layout.shape_ = shape;
    int64_t world = 1;
    int64_t shards = 1;
    for (size_t m = 0; m < mesh_sizes.size(); ++m) {
        if (mesh_sizes[m] < 1) {
            throw Error(Code::invalid_argument,
                        fmt::format("mesh dimension {} has size {}; it must be positive", m, mesh_sizes[m]));
        }
        world *= mesh_sizes[m];
        if (world > max_layout_ranks) {
            throw Error(Code::invalid_argument, fmt::format("a mesh can have at most {} ranks", max_layout_ranks));
        }
        const Placement& placement = placements[m];
        if (placement.kind == PlacementKind::replicate) continue;
        if (placement.kind != PlacementKind::shard) {
            throw Error(Code::invalid_argument,
                        fmt::format("placement {} has unknown kind {}", m, static_cast<int>(placement.kind)));
        }
        shards *= mesh_sizes[m];
    }
    layout.world_size_ = static_cast<int>(world);
    layout.shard_count_ = static_cast<int>(shards);
    layout.placed_ = std::make_shared<const Placed>(
        Placed{{mesh_sizes.begin(), mesh_sizes.end()}, {placements.begin(), placements.end()}});
    layout.check_dims();
    return layout;
}

Layout Layout::of_shape(const Dims& shape) const {
    if (is_explicit()) throw Error(Code::internal, "a layout of explicit boxes cannot change its shape");
    Layout layout = *this;
    layout.shape_ = shape;
    layout.check_dims();
    return layout;
}

void Layout::check_dims() const {
    for (size_t m = 0; m < placed_->placements.size(); ++m) {
        const Placement& placement = placed_->placements[m];
        if (placement.kind == PlacementKind::replicate || (placement.dim >= 0 && placement.dim < shape_.ndim())) {
            continue;
        }
        throw Error(Code::invalid_argument, fmt::format("placement {} shards dimension {} of a tensor of shape {}", m,
                                                        placement.dim, shape_.str()));
    }
}

bool Layout::same_placements(const Layout& other) const {
    if (placed_ == other.placed_) return true;
    return placed_ && other.placed_ && *placed_ == *other.placed_;
}

Layout Layout::replicated(const Dims& shape, int world_size) {
    const Placement everywhere = Placement::replicate();
    return placed(shape, std::span(&world_size, 1), std::span(&everywhere, 1));
}

namespace {

// Along dimension `d`: how often one box begins inside another.
int64_t overlaps_along(int d, std::span<const Box* const> boxes) {
    std::vector<int64_t> begins;
    for (const Box* box : boxes) begins.push_back(box->offsets[d]);
    std::sort(begins.begin(), begins.end());
    int64_t count = 0;
    for (const Box* box : boxes) {
        const auto first = std::lower_bound(begins.begin(), begins.end(), box->offsets[d]);
        count += std::lower_bound(first, begins.end(), box->offsets[d] + box->sizes[d]) - first;
    }
    return count;
}

// Finds two different boxes that overlap; `name` describes a box for the message.
class Overlaps {
   public:
    Overlaps(std::vector<const Box*> boxes, FunctionRef<std::string(const Box* box)> name)
        : boxes_(std::move(boxes)), name_(name) {}
    void check() { check(boxes_, 0, 0); }

   private:
    static constexpr int max_cuts = 4 * max_ndim;                 // one inside the other
    static constexpr int64_t max_comparisons = int64_t{1} << 28;  // some seconds

    // Boxes separated by a plane are checked separately, so that grids take n log n; `first_d` is tried first.
    void check(std::span<const Box*> boxes, int first_d, int cuts) {
        if (boxes.size() < 2) return;
        const int ndim = boxes.front()->sizes.ndim();
        for (int i = 0; i < ndim && cuts < max_cuts; ++i) {
            const int d = (first_d + i) % ndim;
            sort_along(d, boxes);
            const size_t end = end_of_group(d, boxes);
            if (end == boxes.size()) continue;
            for (size_t begin = 0, stop = end; begin < boxes.size();) {
                check(boxes.subspan(begin, stop - begin), (d + 1) % ndim, cuts + 1);
                begin = stop;
                if (begin < boxes.size()) stop = begin + end_of_group(d, boxes.subspan(begin));
            }
            return;
        }
        sweep(boxes);
    }

    static void sort_along(int d, std::span<const Box*> boxes) {
        std::sort(boxes.begin(), boxes.end(),
                  [d](const Box* a, const Box* b) { return a->offsets[d] < b->offsets[d]; });
    }

    // The prefix of the sorted boxes in which no box begins after the end of all boxes before it.
    static size_t end_of_group(int d, std::span<const Box* const> boxes) {
        int64_t end = boxes.front()->offsets[d] + boxes.front()->sizes[d];
        size_t i = 1;
        for (; i < boxes.size() && boxes[i]->offsets[d] < end; ++i) {
            end = std::max(end, boxes[i]->offsets[d] + boxes[i]->sizes[d]);
        }
        return i;
    }

    // Over the dimension that separates them best.
    void sweep(std::span<const Box*> boxes) {
        int along = 0;
        int64_t best = INT64_MAX;
        for (int d = 0; d < boxes.front()->sizes.ndim(); ++d) {
            const int64_t overlaps = overlaps_along(d, boxes);
            if (overlaps >= best) continue;
            best = overlaps;
            along = d;
        }
        comparisons_ += best;
        if (comparisons_ > max_comparisons) {
            throw Error(
                Code::invalid_argument,
                fmt::format("checking {} interlocked boxes for overlap would take too long; cut the tensor along "
                            "planes",
                            boxes_.size()));
        }
        sort_along(along, boxes);
        for (size_t i = 0; i < boxes.size(); ++i) {
            const int64_t end = boxes[i]->offsets[along] + boxes[i]->sizes[along];
            for (size_t j = i + 1; j < boxes.size() && boxes[j]->offsets[along] < end; ++j) {
                if (boxes[i]->intersect(*boxes[j]).empty()) continue;
                throw Error(Code::invalid_argument,
                            fmt::format("boxes {} and {} overlap partly; boxes must be equal or disjoint",
                                        name_(boxes[i]), name_(boxes[j])));
            }
        }
    }

    std::vector<const Box*> boxes_;
    FunctionRef<std::string(const Box* box)> name_;
    int64_t comparisons_ = 0;
};

// Two boxes are equal or disjoint. `first` are the numbers of each rank's first box, and their count.
void check_disjoint(std::span<const Box> boxes, std::span<const int> first) {
    std::vector<const Box*> different;
    for (const Box& box : boxes) {
        if (!box.empty()) different.push_back(&box);
    }
    if (different.size() < 2 || different.front()->sizes.ndim() == 0) return;
    std::sort(different.begin(), different.end(), [](const Box* a, const Box* b) {
        if (a->offsets != b->offsets) {
            return std::lexicographical_compare(a->offsets.begin(), a->offsets.end(), b->offsets.begin(),
                                                b->offsets.end());
        }
        return std::lexicographical_compare(a->sizes.begin(), a->sizes.end(), b->sizes.begin(), b->sizes.end());
    });
    different.erase(
        std::unique(different.begin(), different.end(), [](const Box* a, const Box* b) { return *a == *b; }),
        different.end());
    const auto name = [&](const Box* box) {
        const auto next = std::upper_bound(first.begin(), first.end(), static_cast<int>(box - boxes.data()));
        return fmt::format("{} of rank {}", box->str(), next - first.begin() - 1);
    };
    Overlaps(std::move(different), name).check();
}

}  // namespace

Layout Layout::from_boxes(const Dims& shape, std::span<const Box> boxes, std::span<const int> counts) {
    if (counts.empty() || counts.size() > static_cast<size_t>(max_layout_ranks)) {
        throw Error(Code::invalid_argument,
                    fmt::format("a layout of {} ranks; 1 to {} are supported", counts.size(), max_layout_ranks));
    }
    auto parts = std::make_shared<Explicit>();
    parts->first.push_back(0);
    int64_t total = 0;
    for (const int count : counts) {
        if (count < 0)
            throw Error(Code::invalid_argument,
                        fmt::format("a rank has {} boxes; the number must not be negative", count));
        total += count;
        if (total > static_cast<int64_t>(boxes.size())) break;
        parts->first.push_back(static_cast<int>(total));
    }
    if (total != static_cast<int64_t>(boxes.size())) {
        throw Error(Code::invalid_argument,
                    fmt::format("the counts of the ranks do not add up to the {} boxes given", boxes.size()));
    }
    for (const Box& box : boxes) check_inside(box, shape);
    check_disjoint(boxes, parts->first);
    parts->boxes.assign(boxes.begin(), boxes.end());
    Layout layout;
    layout.shape_ = shape;
    layout.world_size_ = static_cast<int>(counts.size());
    layout.explicit_ = std::move(parts);
    return layout;
}

std::vector<Box> Layout::boxes_of(int rank) const {
    if (rank < 0 || rank >= world_size_) {
        throw Error(Code::invalid_argument,
                    fmt::format("rank {} is out of range for a layout of {} ranks; ranks are 0 to {}", rank,
                                world_size_, world_size_ - 1));
    }
    std::vector<Box> boxes;
    if (is_explicit()) {
        for (int i = explicit_->first[static_cast<size_t>(rank)]; i < explicit_->first[static_cast<size_t>(rank) + 1];
             ++i) {
            const Box& box = explicit_->boxes[static_cast<size_t>(i)];
            if (!box.empty()) boxes.push_back(box);
        }
        return boxes;
    }
    Box box = shape_.product() == 0 ? Box::whole(shape_) : shard(shard_of(rank));
    if (shape_.product() == 0 || !box.empty()) boxes.push_back(box);
    return boxes;
}

Box Layout::shard(int index) const {
    Box box = Box::whole(shape_);
    int below = shard_count_;  // shards that share the coordinates taken so far
    for (size_t m = 0; m < mesh_sizes().size(); ++m) {
        if (placements()[m].kind != PlacementKind::shard) continue;
        below /= mesh_sizes()[m];
        const int coordinate = index / below;
        index %= below;
        const int d = placements()[m].dim;
        const Range part = chunk(box.sizes[d], mesh_sizes()[m], coordinate);
        box.offsets[d] += part.begin;
        box.sizes[d] = part.end - part.begin;
    }
    return box;
}

int Layout::last_shard() const {
    Dims left = shape_;
    int number = 0;
    for (size_t m = 0; m < mesh_sizes().size(); ++m) {
        if (placements()[m].kind != PlacementKind::shard) continue;
        int64_t& size = left[placements()[m].dim];
        const int64_t last = last_chunk(size, mesh_sizes()[m]);
        const Range part = chunk(size, mesh_sizes()[m], last);
        size = part.end - part.begin;
        number = number * mesh_sizes()[m] + static_cast<int>(last);
    }
    return number;
}

// The row-major number of `rank`'s coordinates in the sharded (or the replicated) mesh dimensions.
int Layout::coordinate_sum(int rank, bool of_shards) const {
    int number = 0;
    int below = world_size_;
    for (size_t m = 0; m < mesh_sizes().size(); ++m) {
        below /= mesh_sizes()[m];
        const int coordinate = rank / below;
        rank %= below;
        if ((placements()[m].kind == PlacementKind::shard) == of_shards) number = number * mesh_sizes()[m] + coordinate;
    }
    return number;
}

int Layout::shard_of(int rank) const { return coordinate_sum(rank, true); }
int Layout::replica_of(int rank) const { return coordinate_sum(rank, false); }

int Layout::rank_of(int shard, int replica) const {
    int shards_below = shard_count_;
    int replicas_below = replica_count();
    int rank = 0;
    for (size_t m = 0; m < mesh_sizes().size(); ++m) {
        const bool sharded = placements()[m].kind == PlacementKind::shard;
        int& below = sharded ? shards_below : replicas_below;
        int& rest = sharded ? shard : replica;
        below /= mesh_sizes()[m];
        rank = rank * mesh_sizes()[m] + rest / below;
        rest %= below;
    }
    return rank;
}

void Layout::for_each_overlap(const Box& wanted, FunctionRef<void(int shard, const Box& box)> visit) const {
    overlaps_in(0, 0, Box::whole(shape_), wanted, visit);
}

// Takes, in each mesh dimension, only the chunks that meet the wanted range.
void Layout::overlaps_in(size_t m, int number, const Box& box, const Box& wanted,
                         FunctionRef<void(int shard, const Box& box)> visit) const {
    const std::vector<Placement>& placements = placed_->placements;
    while (m < placements.size() && placements[m].kind != PlacementKind::shard) ++m;
    if (m == placements.size()) {
        if (!box.intersect(wanted).empty()) visit(number, box);
        return;
    }
    const int d = placements[m].dim;
    const int parts = placed_->mesh_sizes[m];
    const int64_t size = box.sizes[d];
    const int64_t begin = std::max(wanted.offsets[d] - box.offsets[d], int64_t{0});
    const int64_t end = std::min(wanted.offsets[d] + wanted.sizes[d] - box.offsets[d], size);
    if (begin >= end) return;
    const int64_t full = size / parts + (size % parts != 0 ? 1 : 0);
    for (int64_t i = begin / full; i <= (end - 1) / full; ++i) {
        const Range part = chunk(size, parts, i);
        Box cut = box;
        cut.offsets[d] += part.begin;
        cut.sizes[d] = part.end - part.begin;
        overlaps_in(m + 1, number * parts + static_cast<int>(i), cut, wanted, visit);
    }
}

std::span<const Box> Layout::all_boxes() const {
    if (!is_explicit()) return {};
    return explicit_->boxes;
}

int Layout::first_box(int rank) const { return explicit_->first[static_cast<size_t>(rank)]; }

std::string Layout::str() const {
    std::string text;
    if (is_explicit()) {
        text = "boxes";
        for (int rank = 0; rank < world_size_; ++rank) {
            text += fmt::format(" {}:", rank);
            for (const Box& box : boxes_of(rank)) text += box.str();
        }
        return text;
    }
    text = "mesh [";
    for (size_t m = 0; m < mesh_sizes().size(); ++m) text += fmt::format("{}{}", m > 0 ? ", " : "", mesh_sizes()[m]);
    text += "],";
    for (const Placement& placement : placements()) text.append(" ").append(placement.str());
    return text;
}

bool operator==(const Layout& a, const Layout& b) {
    if (a.shape_ != b.shape_ || a.world_size_ != b.world_size_ || a.is_explicit() != b.is_explicit()) return false;
    if (a.is_explicit()) return a.explicit_->boxes == b.explicit_->boxes && a.explicit_->first == b.explicit_->first;
    return a.same_placements(b);
}

}  // namespace tsr
