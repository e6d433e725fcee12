// What a cross-entropy is computed of, for the CPU (cross_entropy.cc) and for devices (loss_on_device.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "parallel/tensor/cross_entropy.hpp"
#include "tensor/layout.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

[[nodiscard]] inline int64_t integer_at(const Tensor& tensor, size_t i) {
    return tensor.dtype == DType::i64 ? tensor.as<int64_t>()[i] : tensor.as<int32_t>()[i];
}

// The rows of a loss and what is asked of them, as one rank sees it.
struct LossRows {
    Tensor logits;
    Tensor targets;
    Tensor loss;
    std::optional<Tensor> grad;
    int64_t vocabulary = 0;
    Range classes;  // of this rank
    int64_t ignore_index = 0;
    double smoothing = 0;
    LossReduction reduction = LossReduction::mean;
    double grad_scale = 1;
    std::optional<Tensor> weights;
    double weights_sum = 0;  // of all classes
    double divisor = 1;      // of the summed losses

    [[nodiscard]] size_t count() const { return static_cast<size_t>(targets.numel()); }
    [[nodiscard]] size_t width() const { return static_cast<size_t>(classes.end - classes.begin); }
    [[nodiscard]] double weight(int64_t c) const {
        if (!weights) return 1;
        const auto i = static_cast<size_t>(c);
        return weights->dtype == DType::f64 ? weights->as<double>()[i] : static_cast<double>(weights->as<float>()[i]);
    }
    [[nodiscard]] bool is_own(int64_t c) const { return c >= classes.begin && c < classes.end; }
};

// The computation for rows whose tensors are all on the model's device. The divisor of a mean is computed there. Throws
// INVALID_ARGUMENT or UNSUPPORTED before anything is sent.
void loss_on_device(TensorParallel& model, const LossRows& rows, const std::shared_ptr<Communicator>& data_ranks,
                    StreamHandle stream, WorkPtr* work);

}  // namespace tsr
