// How the parameters of a unit are cut and where their parts lie: arithmetic alone, the same on every rank.
//
// A parameter is cut by rows into one chunk a rank, all of the same size: the chunks of the last ranks are padded, or all
// padding (torch.chunk's shards with FSDP2's padding). Chunk r of the whole parameter is rank r's shard:
//
//     whole      [ chunk 0 | chunk 1 | ... | chunk n-1 .. ]     rows, then padding
//     shard                [ chunk r ]                          its first rows are elements, the rest padding
//
// Padding lies in memory alone: no view, layout, norm or checkpoint has it. Values, immutable.
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
    int64_t chunk = 0;  // elements a rank, padding included
    Range rows;         // this rank's
    Dims shard_shape;   // of these rows
    // Byte offsets of its first element (of this rank's chunk, of shards): among the whole parameters of its unit in
    // memory, the gradients of these, the shards of all units and their gradients.
    size_t whole_at = 0;
    size_t grad_at = 0;
    size_t shard_at = 0;
    size_t shard_grad_at = 0;
};

struct UnitPlan {
    std::string name;
    std::vector<size_t> params;  // indices
    size_t whole_size = 0;       // bytes of memory for the whole parameters
    size_t grad_size = 0;        // for their gradients; 0: none is trained
};

struct FsdpPlan {
    std::vector<FsdpParam> params;
    std::vector<UnitPlan> units;
    size_t shard_size = 0;
    size_t shard_grad_size = 0;
};

// Completes `plan`, of whose parameters and units what is not an offset, a size, a chunk or rows is given.
void lay_out(FsdpPlan& plan, int ranks, int rank);

}  // namespace tsr
