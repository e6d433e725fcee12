// Low-rank compression of gradients: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
// Distributed Optimization" (2019). One step of subspace iteration per training step, starting from the previous step's
// right factor (warm start): M = gradient + error, P = average of M Q, orthogonalised, Q = average of M^T P, gradient =
// P Q^T, error = M - gradient, kept for the next step. All arithmetic is in f32.
//
// Gradients of one dimension, of f64, or that would not shrink to half their size are left to the caller.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "tensor/tensor.hpp"

namespace tsr {

class PowerSgd {
   public:
    explicit PowerSgd(int rank) : rank_(static_cast<size_t>(rank)) {}

    [[nodiscard]] bool compresses(const Tensor& grad) const;

    // Replaces f32 numbers by their average over the ranks, with the same bits on each.
    using Average = std::function<void(std::span<float> values)>;
    struct Scale {
        float own = 1;     // a rank's share of the average; below 1 if the average is over fewer ranks than have errors
        float result = 1;  // 1, or the number of ranks for a sum
    };
    // `grads`: only gradients that compress.
    void reduce(std::span<const size_t> params, std::span<const Tensor> grads, const Average& average, Scale scale);

   private:
    struct Matrix {
        size_t rows = 0;
        size_t columns = 0;
        size_t rank = 0;
        std::vector<float> right;  // columns x rank
        std::vector<float> error;  // rows x columns; during a reduction: gradient + error
    };
    [[nodiscard]] Matrix& matrix_of(size_t param, const Tensor& grad);

    const size_t rank_;
    std::map<size_t, Matrix> matrices_;  // by parameter
};

}  // namespace tsr
