// tessera/layout.h: who holds which box of a tensor.
#include "tessera/layout.h"

#include "checkpoint/model/gathered_layout.hpp"
#include "comm/communicator.hpp"
#include "handles.hpp"
#include "tensor/layout.hpp"

namespace tsr::capi {

namespace {

static_assert(TSR_MAX_NDIM == max_ndim);
static_assert(TSR_PLACE_REPLICATE == static_cast<int>(PlacementKind::replicate));
static_assert(TSR_PLACE_SHARD == static_cast<int>(PlacementKind::shard));

Dims dims_in(const int64_t* values, int32_t ndim, const char* what) {
    if (ndim < 0 || ndim > TSR_MAX_NDIM) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} has {} dimensions; 0 to {} are supported", what, ndim, TSR_MAX_NDIM));
    }
    if (ndim > 0) required(values, what);
    return Dims(std::span<const int64_t>(values, static_cast<size_t>(ndim)));
}

// A layout counts elements: bytes are checked where the dtype is known.
Dims shape_in(const int64_t* values, int32_t ndim) {
    const Dims shape = dims_in(values, ndim, "shape");
    check_shape(shape, DType::u8, "shape");
    return shape;
}

Layout layout_in(const int64_t* shape, int32_t ndim, const int32_t* mesh_sizes, const tsr_placement* placements,
                 int32_t mesh_ndim) {
    if (mesh_ndim < 1 || mesh_ndim > TSR_MAX_NDIM) {
        throw Error(Code::invalid_argument,
                    fmt::format("the mesh has {} dimensions; 1 to {} are supported", mesh_ndim, TSR_MAX_NDIM));
    }
    required(mesh_sizes, "mesh_sizes");
    required(placements, "placements");
    std::vector<Placement> list;
    for (int32_t m = 0; m < mesh_ndim; ++m) {
        list.push_back({static_cast<PlacementKind>(placements[m].kind), placements[m].dim});
    }
    return Layout::placed(shape_in(shape, ndim), std::span(mesh_sizes, static_cast<size_t>(mesh_ndim)), list);
}

std::vector<Box> boxes_in(const tsr_box* boxes, int64_t count, int32_t ndim) {
    if (count > 0) required(boxes, "boxes");
    std::vector<Box> list;
    for (int64_t i = 0; i < count; ++i) {
        list.push_back({dims_in(boxes[i].offsets, ndim, "box"), dims_in(boxes[i].sizes, ndim, "box")});
    }
    return list;
}

Layout layout_in(const int64_t* shape, int32_t ndim, const tsr_box* boxes, const int32_t* counts, int32_t world_size) {
    if (world_size < 1 || world_size > 4096) {
        throw Error(Code::invalid_argument,
                    fmt::format("world_size is {}; a layout from boxes supports 1 to 4096 ranks", world_size));
    }
    required(counts, "counts");
    int64_t total = 0;
    for (int32_t rank = 0; rank < world_size; ++rank) {
        if (counts[rank] < 0) {
            throw Error(Code::invalid_argument,
                        fmt::format("rank {} has {} boxes; the count must not be negative", rank, counts[rank]));
        }
        total += counts[rank];
    }
    const Dims whole = shape_in(shape, ndim);
    return Layout::from_boxes(whole, boxes_in(boxes, total, ndim), std::span(counts, static_cast<size_t>(world_size)));
}

}  // namespace

extern "C" {

tsr_status tsr_layout_create(const int64_t* shape, int32_t ndim, const int32_t* mesh_sizes,
                             const tsr_placement* placements, int32_t mesh_ndim, tsr_layout** out) {
    return guard([&] {
        create(out,
               [&] { return std::make_shared<Layout>(layout_in(shape, ndim, mesh_sizes, placements, mesh_ndim)); });
    });
}

tsr_status tsr_layout_from_boxes(const int64_t* shape, int32_t ndim, const tsr_box* boxes, const int32_t* counts,
                                 int32_t world_size, tsr_layout** out) {
    return guard([&] {
        create(out, [&] { return std::make_shared<Layout>(layout_in(shape, ndim, boxes, counts, world_size)); });
    });
}

tsr_status tsr_layout_gather(tsr_comm* comm, const int64_t* shape, int32_t ndim, const tsr_box* boxes, int32_t count,
                             tsr_layout** out) {
    return guard([&] {
        const auto& ranks = object_of(comm, "comm");
        create(out, [&] {
            return std::make_shared<Layout>(gather_layout(ranks, [&] {
                if (count < 0)
                    throw Error(Code::invalid_argument, fmt::format("count is {}; it must not be negative", count));
                Dims whole = shape_in(shape, ndim);
                return OwnBoxes{whole, boxes_in(boxes, count, ndim)};
            }));
        });
    });
}

tsr_status tsr_layout_box_count(const tsr_layout* layout, int32_t rank, int32_t* count) {
    return guard(
        [&] { required(count, "count") = static_cast<int32_t>(object_of(layout, "layout")->boxes_of(rank).size()); });
}

tsr_status tsr_layout_box(const tsr_layout* layout, int32_t rank, int32_t index, tsr_box* box) {
    return guard([&] {
        const auto boxes = object_of(layout, "layout")->boxes_of(rank);
        if (index < 0 || static_cast<size_t>(index) >= boxes.size()) {
            throw Error(Code::invalid_argument, fmt::format("box {} of rank {} does not exist; the rank holds {} boxes",
                                                            index, rank, boxes.size()));
        }
        tsr_box& out = required(box, "box");
        const Box& from = boxes[static_cast<size_t>(index)];
        for (int d = 0; d < TSR_MAX_NDIM; ++d) {
            out.offsets[d] = d < from.offsets.ndim() ? from.offsets[d] : 0;
            out.sizes[d] = d < from.sizes.ndim() ? from.sizes[d] : 0;
        }
    });
}

void tsr_layout_destroy(tsr_layout* layout) { destroy(layout); }

}  // extern "C"

}  // namespace tsr::capi
