// The element loops of the optimizers, for float and double. Compiled with -ffp-contract=off, so that no compiler fuses
// a multiplication with an addition: every build and every vector width gives the same bits.
#pragma once

#include <cstddef>

#include "base/vectors.hpp"

namespace tsr {

template <class T>
struct SgdStep {
    T lr;
    T momentum;
    T one_minus_dampening;
    T weight_decay;
    bool nesterov;
    bool first;  // the momentum buffer is not set yet
};

// Without momentum `buffer` is not accessed.
template <class T>
void sgd_update(T* param, const T* grad, T* buffer, size_t n, const SgdStep<T>& step,
                Vectors vectors = widest_vectors());

template <class T>
struct AdamStep {
    T beta1;
    T one_minus_beta1;
    T beta2;
    T one_minus_beta2;
    T step_size;              // lr / (1 - beta1^step)
    T bias_correction2_sqrt;  // sqrt(1 - beta2^step)
    T eps;
    T weight_decay;  // added to the gradient
    T keep;          // 1 - lr * decoupled weight decay: multiplies the parameter
};

template <class T>
void adam_update(T* param, const T* grad, T* exp_avg, T* exp_avg_sq, size_t n, const AdamStep<T>& step,
                 Vectors vectors = widest_vectors());

}  // namespace tsr
