#include "device/convert.hpp"

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

void run(DeviceApi& device, std::span<const ConvertedRange> ranges, DType from, DType to, StreamHandle stream,
         double before, double after, bool adds) {
    with_type(from, [&]<class From> {
        with_type(to, [&]<class To> {
            OverTensors<kernels::Convert<From, To>> all(device, {{}, before, after, adds}, stream);
            for (const ConvertedRange& range : ranges) all.add(range.elements, range.from, range.to);
            all.finish();
        });
    });
}

}  // namespace

void convert_on(DeviceApi& device, std::span<const ConvertedRange> ranges, DType from, DType to, StreamHandle stream,
                double before, double after) {
    run(device, ranges, from, to, stream, before, after, false);
}

void convert_on(DeviceApi& device, const Conversions& conversions, StreamHandle stream, double before, double after) {
    for (const auto& [dtypes, ranges] : conversions) {
        run(device, ranges, dtypes.first, dtypes.second, stream, before, after, false);
    }
}

void add_on(DeviceApi& device, const Conversions& conversions, StreamHandle stream, double before, double after) {
    for (const auto& [dtypes, ranges] : conversions) {
        run(device, ranges, dtypes.first, dtypes.second, stream, before, after, true);
    }
}

void divide_on(DeviceApi& device, std::span<const Tensor> tensors, double divisor, StreamHandle stream) {
    if (divisor == 1) return;
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
