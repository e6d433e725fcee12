#include "parallel/fsdp/unit_plan.hpp"

#include <algorithm>
#include <array>

#include "base/round_up.hpp"

namespace tsr {

namespace {

// Parameters in a piece begin at a cache line in each of its dtypes.
constexpr int64_t flat_alignment = fsdp_alignment / size_of(DType::bf16);

int64_t row_of(const Dims& shape) { return shape.ndim() > 0 && shape[0] > 0 ? shape.product() / shape[0] : 0; }

// Rows per rank, padding included.
int64_t rows_each(int64_t rows, int64_t block, int ranks) {
    block = std::min(block, std::max<int64_t>(rows, 1));
    return chunk((rows + block - 1) / block, ranks, 0).end * block;
}

// Appends the parameter to a piece of its unit.
void place(FsdpParam& param, UnitPlan& unit, int ranks) {
    size_t p = unit.flat ? 0 : unit.pieces.size();
    while (p < unit.pieces.size() && (unit.pieces[p].dtype != param.dtype || unit.pieces[p].trained != param.trained))
        ++p;
    if (p == unit.pieces.size()) {
        unit.pieces.push_back({param.dtype, param.whole_dtype, param.grad_dtype, param.trained});
    }
    FsdpPiece& piece = unit.pieces[p];
    param.piece = p;
    if (unit.flat) {
        param.at = round_up(piece.elements, flat_alignment);
        piece.elements = param.at + param.shape.product();
        piece.chunk = round_up((piece.elements + ranks - 1) / ranks, flat_alignment);
    } else {
        piece.elements = param.shape.product();
        piece.chunk = rows_each(param.shape[0], unit.row_block, ranks) * row_of(param.shape);
    }
}

// This rank's rows, which may be none.
Range rows_of(const FsdpParam& param, const UnitPlan& unit, int ranks, int rank) {
    const int64_t each = rows_each(param.shape[0], unit.row_block, ranks);
    return {std::min(rank * each, param.shape[0]), std::min((rank + 1) * each, param.shape[0])};
}

}  // namespace

void lay_out(FsdpPlan& plan, int rank) {
    const auto advance = [](size_t& at, int64_t elements, DType dtype) {
        const size_t place = at;
        at += round_up(static_cast<size_t>(elements) * size_of(dtype), fsdp_alignment);
        return place;
    };
    plan.shard_size = plan.shard_grad_size = 0;
    for (UnitPlan& unit : plan.units) {
        unit.pieces.clear();
        unit.whole_size = unit.grad_size = 0;
        for (const size_t index : unit.params) place(plan.params[index], unit, plan.ranks);
        for (FsdpPiece& piece : unit.pieces) {
            piece.whole_at = advance(unit.whole_size, piece.chunk * plan.ranks, piece.whole_dtype);
            piece.shard_at = advance(plan.shard_size, piece.chunk, piece.dtype);
            if (!piece.trained) continue;
            piece.grad_at = advance(unit.grad_size, piece.chunk * plan.ranks, piece.grad_dtype);
            piece.shard_grad_at = advance(plan.shard_grad_size, piece.chunk, piece.dtype);
        }
        for (const size_t index : unit.params) {
            FsdpParam& param = plan.params[index];
            const FsdpPiece& piece = unit.pieces[param.piece];
            param.elements = elements_of(plan, param, rank);
            if (unit.flat) {
                param.shard_shape = Dims{param.elements.end - param.elements.begin};
            } else {
                const Range rows = rows_of(param, unit, plan.ranks, rank);
                param.shard_shape = param.shape;
                param.shard_shape[0] = rows.end - rows.begin;
            }
            const auto in_piece = static_cast<size_t>(param.at);
            const size_t in_chunk = place_in_chunk(plan, param, rank);
            param.whole_at = piece.whole_at + in_piece * size_of(piece.whole_dtype);
            param.grad_at = piece.grad_at + in_piece * size_of(piece.grad_dtype);
            param.shard_at = piece.shard_at + in_chunk * size_of(piece.dtype);
            param.shard_grad_at = piece.shard_grad_at + in_chunk * size_of(piece.dtype);
        }
    }
}

Range elements_of(const FsdpPlan& plan, const FsdpParam& param, int rank) {
    const FsdpPiece& piece = plan.units[param.unit].pieces[param.piece];
    const int64_t begin = std::max(param.at, rank * piece.chunk);
    const int64_t end = std::min(param.at + param.shape.product(), (rank + 1) * piece.chunk);
    return begin < end ? Range{begin - param.at, end - param.at} : Range{};
}

size_t place_in_chunk(const FsdpPlan& plan, const FsdpParam& param, int rank) {
    const FsdpPiece& piece = plan.units[param.unit].pieces[param.piece];
    const int64_t first = param.at + elements_of(plan, param, rank).begin;
    return static_cast<size_t>(std::clamp<int64_t>(first - rank * piece.chunk, 0, piece.chunk));
}

Layout layout_of(const FsdpPlan& plan, const FsdpParam& param, int replicas) {
    const UnitPlan& unit = plan.units[param.unit];
    const auto cut_as_rows = [&] {
        const int64_t rows = param.shape[0];
        return rows_each(rows, unit.row_block, plan.ranks) == rows_each(rows, 1, plan.ranks);
    };
    if (param.shape.product() == 0 || (!unit.flat && cut_as_rows())) {
        const std::array mesh{replicas, plan.ranks};
        constexpr std::array placements{Placement{}, Placement{PlacementKind::shard, 0}};
        const auto from = replicas > 1 ? size_t{0} : size_t{1};  // without replicas, a mesh of one dimension
        return Layout::placed(param.shape, std::span(mesh).subspan(from), std::span(placements).subspan(from));
    }
    std::vector<Box> boxes;
    std::vector<int> counts;
    for (int replica = 0; replica < replicas; ++replica) {
        for (int rank = 0; rank < plan.ranks; ++rank) {
            const std::vector<Box> held = boxes_of_range(param.shape, elements_of(plan, param, rank));
            boxes.insert(boxes.end(), held.begin(), held.end());
            counts.push_back(static_cast<int>(held.size()));
        }
    }
    return Layout::from_boxes(param.shape, boxes, counts);
}

}  // namespace tsr
