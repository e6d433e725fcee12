// Conversions, quotients and sums of floating-point tensors on a CUDA device, with the bits of the CPU's (tensor/convert.hpp,
// tensor/arithmetic.hpp).
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "device/device.hpp"
#include "tensor/dtype.hpp"

namespace tsr {

struct ConvertedRange {
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    size_t elements = 0;
};

// Divides each element of `from` by `before` in its dtype, converts it, and divides it by `after` in the other dtype. A divisor
// of 1 changes nothing. Ranges may be their own target if both dtypes are the same, and do not overlap otherwise. f16, bf16, f32
// or f64, else INTERNAL.
void convert_on(DeviceApi& device, std::span<const ConvertedRange> ranges, DType from, DType to, StreamHandle stream,
                double before = 1, double after = 1);

// The same for ranges of several dtypes, by those that they have, from and to.
using Conversions = std::map<std::pair<DType, DType>, std::vector<ConvertedRange>>;
void convert_on(DeviceApi& device, const Conversions& conversions, StreamHandle stream, double before = 1,
                double after = 1);
// The same, but adds the results to `to`, in its dtype.
void add_on(DeviceApi& device, const Conversions& conversions, StreamHandle stream, double before = 1,
            double after = 1);

// Divides tensors of the device in place.
void divide_on(DeviceApi& device, std::span<const Tensor> tensors, double divisor, StreamHandle stream);

}  // namespace tsr
