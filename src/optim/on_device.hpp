// What an optimizer does on a CUDA device: the same steps, bits and bounds as on the CPU, as kernels on one stream. Norms add up
// in another order than the CPU's, which depends only on sizes, too. Calls that return a number wait for the stream.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "device/device.hpp"
#include "kernels/optimizers.hpp"
#include "optim/param.hpp"

namespace tsr {

class OnDevice {
   public:
    // The parameters' device. Throws INVALID_ARGUMENT for memory that is not of that device, UNSUPPORTED if there are no
    // kernels for it.
    OnDevice(Device device, std::span<const OptimizerParam> params);
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

    [[nodiscard]] DeviceApi& api() const { return api_; }
    void set_stream(StreamHandle stream);

    // A parameter, its gradient and its moments, or parts of them.
    struct Updated {
        DType dtype = DType::f32;
        size_t elements = 0;
        std::byte* param = nullptr;
        const std::byte* grad = nullptr;
        std::array<std::byte*, 2> moments{};  // without the count of steps; nullptr: there is none
    };
    void adam(std::span<const Updated> tensors, const AdamStep<float>& in_float, const AdamStep<double>& in_double);
    void sgd(std::span<const Updated> tensors, const SgdStep<float>& in_float, const SgdStep<double>& in_double);
    // Adagrad and Lion.
    template <template <class> class Step>
    void one_moment(std::span<const Updated> tensors, const Step<float>& in_float, const Step<double>& in_double);

    // Sets every element of a tensor of this device, which nothing uses yet, to a value.
    void fill(const Tensor& tensor, double value);

    void zero_grads(std::span<const OptimizerParam> params);
    // As those of optim/clip.hpp.
    [[nodiscard]] double power_sum(std::span<const OptimizerParam> params, double p);
    void scale_grads(std::span<const OptimizerParam> params, double factor) { scale(params, factor, nullptr); }
    [[nodiscard]] bool scale_grads_finitely(std::span<const OptimizerParam> params, double factor);
    void bound_grads(std::span<const OptimizerParam> params, double most);

    // Whether any byte is not zero.
    [[nodiscard]] bool is_any_set(std::span<const std::byte> memory);

   private:
    void scale(std::span<const OptimizerParam> params, double factor, const std::byte* overflow);
    // Waits until the stream has copied `size` bytes to host_.
    void fetch(const std::byte* from, size_t size);
    template <class T>
    [[nodiscard]] T fetched(const std::byte* from);

    DeviceApi& api_;
    StreamHandle stream_ = nullptr;
    size_t chunks_;                       // of all gradients
    std::shared_ptr<std::byte> scratch_;  // a number for each chunk, then one for the result
    std::shared_ptr<std::byte> host_;     // where results arrive
};

}  // namespace tsr
