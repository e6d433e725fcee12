#include "device/convert.hpp"

#include <vector>

#include "base/error.hpp"
#include "device/launch.hpp"

namespace tsr {

namespace {

// Calls use.operator()<T>() with the type of an element.
template <class Use>
void with_type(DType dtype, Use&& use) {
    switch (dtype) {
        case DType::f16: return use.template operator()<Half>();
        case DType::bf16: return use.template operator()<BFloat>();
        case DType::f32: return use.template operator()<float>();
        case DType::f64: return use.template operator()<double>();
        default: throw Error(Code::internal, "cannot convert a dtype that is not floating point");
    }
}

}  // namespace

void convert_on(DeviceApi& device, std::span<const ConvertedRange> ranges, DType from, DType to, StreamHandle stream,
                double before, double after) {
    with_type(from, [&]<class From> {
        with_type(to, [&]<class To> {
            OverTensors<kernels::Convert<From, To>> all(device, {{}, before, after}, stream);
            for (const ConvertedRange& range : ranges) all.add(range.elements, range.from, range.to);
            all.finish();
        });
    });
}

void divide_on(DeviceApi& device, std::span<const Tensor> tensors, double divisor, StreamHandle stream) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
        std::vector<ConvertedRange> ranges;
        for (const Tensor& tensor : tensors) {
            if (tensor.dtype == dtype)
                ranges.push_back({tensor.data, tensor.data, static_cast<size_t>(tensor.numel())});
        }
        convert_on(device, ranges, dtype, dtype, stream, divisor);
    }
}

}  // namespace tsr
