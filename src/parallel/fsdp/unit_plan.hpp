// How the parameters of a unit are sharded and where their parts are: pure arithmetic, the same on every rank.
//
// A piece is split as one array into one chunk per rank. All chunks have the same size; those of the last ranks are
// padded, or all padding. Chunk r of the piece is rank r's shard:
//
//     whole      [ chunk 0 | chunk 1 | ... | chunk n-1 .. ]     elements, then padding
//     shard                [ chunk r ]                          its first elements are the piece's, the rest padding
//
// A piece is one parameter, split by rows (torch.chunk's shards with FSDP2's padding) or by blocks of rows; or, in a
// flat unit, all parameters of one dtype, one after another, split anywhere (FSDP1's flat parameter). Padding exists in
// memory only: no view, layout, norm or checkpoint contains it. Immutable values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tensor/layout.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

// Parameters in memory begin at a cache line.
inline constexpr size_t fsdp_alignment = 64;

struct FsdpParam {
    std::string name;
    Dims shape;
    DType dtype = DType::f32;        // of its shards
    DType whole_dtype = DType::f32;  // of the unsharded parameter
    DType grad_dtype = DType::f32;   // of its unsharded gradient, in which it is reduced
    bool trained = true;             // has a gradient
    size_t unit = 0;
    size_t piece = 0;  // of its unit
    int64_t at = 0;    // its first element in the piece
    Range elements;    // this rank's
    Dims shard_shape;  // of this rank's elements: rows, or a number of elements
    // Byte offsets of its first element (for shards: this rank's first element) among the unsharded parameters of its
    // unit, their gradients, the shards of all units, and the gradients of the shards.
    size_t whole_at = 0;
    size_t grad_at = 0;
    size_t shard_at = 0;
    size_t shard_grad_at = 0;
};

struct FsdpPiece {
    DType dtype = DType::f32;  // the dtype of its parameters
    DType whole_dtype = DType::f32;
    DType grad_dtype = DType::f32;
    bool trained = true;
    int64_t elements = 0;  // including gaps between its parameters, without the padding of chunks
    int64_t chunk = 0;     // elements per rank, padding included
    // Byte offsets of its first element (for shards: of this rank's chunk), as for a parameter.
    size_t whole_at = 0;
    size_t grad_at = 0;
    size_t shard_at = 0;
    size_t shard_grad_at = 0;
};

struct UnitPlan {
    std::string name;
    std::vector<size_t> params;  // indices
    int64_t row_block = 1;       // parameters are split between blocks of this many rows
    bool flat = false;
    std::vector<FsdpPiece> pieces;
    size_t whole_size = 0;  // bytes of memory for the unsharded parameters
    size_t grad_size = 0;   // for their gradients; 0: none is trained
};

struct FsdpPlan {
    std::vector<FsdpParam> params;
    std::vector<UnitPlan> units;
    int ranks = 1;  // ranks that shard the parameters
    size_t shard_size = 0;
    size_t shard_grad_size = 0;
};

// Completes `plan`, whose parameters and units already have their names, shapes, dtypes and sharding options.
void lay_out(FsdpPlan& plan, int rank);

// The elements of a parameter in the chunk of a rank.
[[nodiscard]] Range elements_of(const FsdpPlan& plan, const FsdpParam& param, int rank);
// The element of that chunk at which these begin.
[[nodiscard]] size_t place_in_chunk(const FsdpPlan& plan, const FsdpParam& param, int rank);
// The layout of a parameter with this many replicas of each chunk: rank r holds chunk r % plan.ranks.
[[nodiscard]] Layout layout_of(const FsdpPlan& plan, const FsdpParam& param, int replicas);

}  // namespace tsr
