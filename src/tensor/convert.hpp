// Converts between floating-point dtypes, element by element: widening is exact, narrowing rounds to nearest, ties to
// even, and keeps infinities and NaN (for f16 and bf16 always the same NaN).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/vectors.hpp"
#include "tensor/dtype.hpp"

namespace tsr {

// Converts `count` elements. The memory need not be aligned and must not overlap. Both dtypes must be floating point,
// or equal (else INTERNAL). Every instruction set gives the same bits.
void convert(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count,
             Vectors vectors = widest_vectors());

}  // namespace tsr
