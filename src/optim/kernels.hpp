// The element loops of the optimizers, for float and double. Compiled with -ffp-contract=off, so that no compiler fuses
// a multiplication with an addition: every build and every vector width gives the same bits.
#pragma once

#include <cstddef>

#include "base/vectors.hpp"
#include "kernels/optimizers.hpp"

namespace tsr {

// Without momentum `buffer` is not accessed.
template <class T>
void sgd_update(T* param, const T* grad, T* buffer, size_t n, const SgdStep<T>& step,
                Vectors vectors = widest_vectors());

template <class T>
void adam_update(T* param, const T* grad, T* exp_avg, T* exp_avg_sq, size_t n, const AdamStep<T>& step,
                 Vectors vectors = widest_vectors());

// Adagrad and Lion.
template <class T, class Step>
void one_moment_update(T* param, const T* grad, T* moment, size_t n, const Step& step,
                       Vectors vectors = widest_vectors());

// Writes what a step would move; moments stay.
template <class T>
void lamb_directions(const T* param, const T* grad, const T* exp_avg, const T* exp_avg_sq, T* directions, size_t n,
                     const LambStep<T>& step, Vectors vectors = widest_vectors());

// Moves by these directions times `rate`.
template <class T>
void lamb_update(T* param, const T* grad, T* exp_avg, T* exp_avg_sq, size_t n, const LambStep<T>& step, T rate,
                 Vectors vectors = widest_vectors());

}  // namespace tsr
