// Cross-entropy of logits whose vocabulary is cut over the ranks, and its gradient, without gathering the logits (Shoeybi
// et al. 2019): each row's maximum is reduced, then, together, its sum of exponentials, its target's logit and what label
// smoothing needs. Values are those of torch.nn.functional.cross_entropy over the whole vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "parallel/tensor/tensor_parallel.hpp"

namespace tsr {

enum class LossReduction : int32_t { none = 0, mean = 1, sum = 2 };

struct CrossEntropyOptions {
    int64_t vocabulary = 0;  // classes, over all ranks
    int64_t ignore_index = -100;
    double label_smoothing = 0;
    LossReduction reduction = LossReduction::mean;
    double grad_scale = 1;  // multiplies the gradient
    // A weight for each class of the whole vocabulary, f32 or f64.
    std::optional<Tensor> class_weights;
    // The ranks with other rows of the batch. Then the mean is over the rows of all of them: each rank's loss is its
    // rows' part of it, and their losses and gradients add up.
    std::shared_ptr<Communicator> data_ranks;
};

// `logits` [..., classes of this rank]: of chunk(vocabulary), so a rank may have none. `targets` [...], i32 or i64, are
// the same on every rank. `loss` is f32 (f64 if the logits are): of no dimension, or for LossReduction::none of the shape
// of `targets`. `grad` is null or receives the gradient of the loss (none: of each row's) by the logits, in their shape
// and dtype; it may be their memory. The mean over no rows is NaN, its gradient 0. A target outside of the vocabulary is
// INVALID_ARGUMENT, before anything is sent. Collective; with `data_ranks` over these too, and blocking for that part.
//
// On a device nothing blocks. The kernels find such a target: it counts as ignored, and once the device is done the communicator
// and `work` fail.
void cross_entropy(TensorParallel& model, const Tensor& logits, const Tensor& targets,
                   const CrossEntropyOptions& options, const Tensor& loss, const Tensor* grad, StreamHandle stream,
                   WorkPtr* work);

}  // namespace tsr
