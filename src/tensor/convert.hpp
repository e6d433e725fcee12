// Conversion between floating-point dtypes, element by element: widening is exact, narrowing rounds to nearest, ties to
// even, and keeps NaN and infinities.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.hpp"

namespace tsr {

// `count` elements; memory need not be aligned. Both dtypes are floating (else INTERNAL).
void convert(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype, int64_t count);

}  // namespace tsr
