// Launches kernels on a stream.
#pragma once

#include <array>
#include <cstddef>

#include "device/device.hpp"
#include "kernels/list.hpp"

namespace tsr {

template <class K>
void launch(DeviceApi& device, const K& kernel, StreamHandle stream) {
    if (kernel.blocks() == 0) return;
    device.launch({kernels::id_of<K>, kernel.blocks(), K::threads, &kernel}, stream);
}

// Launches a kernel over any number of tensors: as many at once as its table holds.
template <class K>
class OverTensors {
   public:
    OverTensors(DeviceApi& device, const K& kernel, StreamHandle stream)
        : device_(device), kernel_(kernel), stream_(stream) {}

    // The arrays of a tensor, in the order that the kernel wants, with `elements` elements each.
    template <class... Arrays>
    void add(size_t elements, Arrays*... arrays) {
        if (elements == 0) return;
        const std::array<const void*, sizeof...(Arrays)> data{arrays...};
        if (kernel_.tensors.add(data, elements)) return;
        finish();
        (void)kernel_.tensors.add(data, elements);
    }
    // After the last one.
    void finish() {
        launch(device_, kernel_, stream_);
        if constexpr (requires { kernel_.advance(); }) kernel_.advance();
        kernel_.tensors.clear();
    }

    [[nodiscard]] const K& kernel() const { return kernel_; }

   private:
    DeviceApi& device_;
    K kernel_;
    StreamHandle stream_;
};

}  // namespace tsr
