// Reduction kernels: out[i] = in[0][i] op in[1][i] op ... in exactly this order, so that the same inputs always give
// the same bits. f16 and bf16 are accumulated in f32 and rounded once, to nearest even; avg divides the sum by the
// divisor at the end (integers in a wider type, truncated towards zero); integer sum and prod wrap. min and max
// propagate a NaN of any input; of zeros with different signs either may be returned, but the same one everywhere. A
// NaN result of f16 or bf16 always has the same bits. Which NaN of f32 or f64 results from several is unspecified: each
// element is computed once, or by the same code on every rank, so the ranks still agree.
#pragma once

#include <cstddef>
#include <span>

#include "base/vectors.hpp"
#include "comm/request.hpp"
#include "tensor/dtype.hpp"

namespace tsr {

// All pointers must be aligned to the element. `out` may be one of the inputs; otherwise it must not overlap any.
// `divisor` is used by avg only: the number of inputs, or of their addends if an input is itself a sum. Every
// instruction set gives the same bits, except for which NaN of f32 or f64 results.
void reduce(std::byte* out, std::span<const std::byte* const> inputs, size_t count, DType dtype, ReduceOp op,
            size_t divisor, Vectors vectors = widest_vectors());
inline void reduce(std::byte* out, std::span<const std::byte* const> inputs, size_t count, DType dtype, ReduceOp op) {
    reduce(out, inputs, count, dtype, op, inputs.size());
}

}  // namespace tsr
