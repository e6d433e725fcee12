// Reduction kernels: out[i] = in[0][i] op in[1][i] op ... in exactly this order, so that the same inputs give the same
// bits wherever and whenever. f16 and bf16 are accumulated in f32 and rounded once, to nearest even; avg divides the
// sum by the divisor at the end (integers in a wider type, truncated towards zero); integer sum and prod wrap.
// min and max pass a NaN of any input on; of zeros with different signs either may be taken, but the same everywhere.
// A NaN of f16 or bf16 is always the same one. Which NaN of f32 or f64 comes out when several go in is not specified: each
// element is computed once, or by the same code on every rank, so the ranks still agree.
#pragma once

#include <cstddef>
#include <span>

#include "base/vectors.hpp"
#include "comm/request.hpp"
#include "tensor/dtype.hpp"

namespace tsr {

// All pointers are aligned to the element. `out` may be one of the inputs; otherwise it overlaps none. `divisor` is of avg
// alone: the number of inputs or, where an input is itself the sum of several, of those.
// Every set of instructions gives the same bits, but for which NaN of f32 or f64 it is.
void reduce(std::byte* out, std::span<const std::byte* const> inputs, size_t count, DType dtype, ReduceOp op,
            size_t divisor, Vectors vectors = widest_vectors());
inline void reduce(std::byte* out, std::span<const std::byte* const> inputs, size_t count, DType dtype, ReduceOp op) {
    reduce(out, inputs, count, dtype, op, inputs.size());
}

}  // namespace tsr
