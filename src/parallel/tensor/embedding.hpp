// The embedding of a vocabulary that is cut over the ranks (Shoeybi et al. 2019): each rank looks up the words that it
// holds, and the results are summed, which is exact, since all but one rank add zeros.
#pragma once

#include "parallel/tensor/tensor_parallel.hpp"

namespace tsr {

// `ids` (i32 or i64, any shape, the same on every rank) are rows of parameter `index`, which is a matrix that is whole or
// cut along dimension 0. `out` has the shape of `ids` and one more dimension, the features; with `dim`, it is this
// rank's part along that dimension. An id outside of the vocabulary is INVALID_ARGUMENT, before anything is sent. On a device
// the kernels find it: its row is zeros, and once the device is done the communicator and `work` fail. Collective.
void embed(TensorParallel& model, size_t index, const Tensor& ids, const Tensor& out, int dim, StreamHandle stream,
           WorkPtr* work);

// Adds the gradient of this rank's words to `sum`, which has the shape of its slice. `grad` is the gradient of embed()'s
// `out`, and with `dim`, of this rank's part. Ids are added in their order. Collective with `dim`.
void embed_backward(TensorParallel& model, size_t index, const Tensor& ids, const Tensor& grad, int dim,
                    const Tensor& sum, StreamHandle stream, WorkPtr* work);

}  // namespace tsr
