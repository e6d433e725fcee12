// How the parameters of a unit are cut and where their parts lie: arithmetic alone, the same on every rank.
//
// A piece is what is cut at once, into one chunk a rank, all of the same size: the chunks of the last ranks are padded, or all
// padding. Chunk r of the whole piece is rank r's shard:
//
//     whole      [ chunk 0 | chunk 1 | ... | chunk n-1 .. ]     elements, then padding
//     shard                [ chunk r ]                          its first elements are the piece's, the rest padding
//
// A piece is one parameter, cut by rows (torch.chunk's shards with FSDP2's padding) or by blocks of rows; or, in a flat unit,
// all parameters of one dtype, one after the other, cut anywhere (FSDP1's flat parameter). Padding lies in memory alone: no
// view, layout, norm or checkpoint has it. Values, immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tensor/layout.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

// Parameters in memory begin at whole cache lines.
inline constexpr size_t fsdp_alignment = 64;

struct FsdpParam {
    std::string name;
    Dims shape;
    DType dtype = DType::f32;        // of its shards
    DType whole_dtype = DType::f32;  // of the whole parameter
    DType grad_dtype = DType::f32;   // of its whole gradient, in which it is reduced
    bool trained = true;             // has a gradient
    size_t unit = 0;
    size_t piece = 0;  // of its unit
    int64_t at = 0;    // its first element in the piece
    Range elements;    // this rank's
    Dims shard_shape;  // of these: rows, or as many elements
    // Byte offsets of its first element (of this rank's first one, of shards): among the whole parameters of its unit in
    // memory, the gradients of these, the shards of all units and their gradients.
    size_t whole_at = 0;
    size_t grad_at = 0;
    size_t shard_at = 0;
    size_t shard_grad_at = 0;
};

struct FsdpPiece {
    DType dtype = DType::f32;  // as of its parameters
    DType whole_dtype = DType::f32;
    DType grad_dtype = DType::f32;
    bool trained = true;
    int64_t elements = 0;  // with what lies between its parameters, without the padding of chunks
    int64_t chunk = 0;     // elements a rank, padding included
    // Byte offsets of its first element (of this rank's chunk, of shards), as those of a parameter.
    size_t whole_at = 0;
    size_t grad_at = 0;
    size_t shard_at = 0;
    size_t shard_grad_at = 0;
};

struct UnitPlan {
    std::string name;
    std::vector<size_t> params;  // indices
    int64_t row_block = 1;       // parameters are cut between blocks of so many rows
    bool flat = false;
    std::vector<FsdpPiece> pieces;
    size_t whole_size = 0;  // bytes of memory for the whole parameters
    size_t grad_size = 0;   // for their gradients; 0: none is trained
};

struct FsdpPlan {
    std::vector<FsdpParam> params;
    std::vector<UnitPlan> units;
    int ranks = 1;  // among which parameters are cut
    size_t shard_size = 0;
    size_t shard_grad_size = 0;
};

// Completes `plan`, of whose parameters and units the names, shapes, dtypes and ways of being cut are given.
void lay_out(FsdpPlan& plan, int rank);

// Which elements of a parameter are in the chunk of a rank.
[[nodiscard]] Range elements_of(const FsdpPlan& plan, const FsdpParam& param, int rank);
// The element of that chunk at which they begin.
[[nodiscard]] size_t place_in_chunk(const FsdpPlan& plan, const FsdpParam& param, int rank);
// Who holds what of a parameter, where each chunk has so many replicas: rank r holds chunk r % plan.ranks.
[[nodiscard]] Layout layout_of(const FsdpPlan& plan, const FsdpParam& param, int replicas);

}  // namespace tsr
