// Conversion between floating-point dtypes, element by element: widening is exact, narrowing rounds to nearest, ties to
// even, and keeps NaN (of f16 and bf16 one alone) and infinities.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/vectors.hpp"
#include "tensor/dtype.hpp"

namespace tsr {

// `count` elements; memory need not be aligned, and does not overlap. Both dtypes are floating, or one (else INTERNAL).
// Every set of instructions gives the same bits.
void convert(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count,
             Vectors vectors = widest_vectors());

}  // namespace tsr
