#include "optim/kernels.hpp"

#include <cmath>

namespace tsr {

// One branch-free loop a case; the compiler vectorises each. __restrict holds: an optimizer's tensors do not overlap.
template <class T>
void sgd_update(T* __restrict param, const T* __restrict grad, T* __restrict buffer, size_t n, const SgdStep<T>& s) {
    const SgdStep<T> c = s;  // a local copy: stores through T* cannot change it
    const T lr = c.lr;
    const auto gradient_at = [&](size_t i) {
        return c.weight_decay != 0 ? grad[i] + c.weight_decay * param[i] : grad[i];
    };
    if (c.momentum == 0) {
        for (size_t i = 0; i < n; ++i) param[i] -= lr * gradient_at(i);
        return;
    }
    if (c.first) {
        for (size_t i = 0; i < n; ++i) buffer[i] = gradient_at(i);
    } else {
        for (size_t i = 0; i < n; ++i) buffer[i] = c.momentum * buffer[i] + c.one_minus_dampening * gradient_at(i);
    }
    if (c.nesterov) {
        for (size_t i = 0; i < n; ++i) param[i] -= lr * (gradient_at(i) + c.momentum * buffer[i]);
    } else {
        for (size_t i = 0; i < n; ++i) param[i] -= lr * buffer[i];
    }
}

template <class T>
void adam_update(T* __restrict param, const T* __restrict grad, T* __restrict exp_avg, T* __restrict exp_avg_sq,
                 size_t n, const AdamStep<T>& s) {
    const AdamStep<T> c = s;
    // torch.lerp takes the form that is exact at the nearer end.
    const bool near_average = c.one_minus_beta1 < T(0.5);
    for (size_t i = 0; i < n; ++i) {
        const T old = param[i] * c.keep;
        const T gradient = c.weight_decay != 0 ? grad[i] + c.weight_decay * old : grad[i];
        const T toward = gradient - exp_avg[i];
        const T average = near_average ? exp_avg[i] + c.one_minus_beta1 * toward : gradient - toward * c.beta1;
        const T square = c.beta2 * exp_avg_sq[i] + c.one_minus_beta2 * gradient * gradient;
        exp_avg[i] = average;
        exp_avg_sq[i] = square;
        param[i] = old - c.step_size * average / (std::sqrt(square) / c.bias_correction2_sqrt + c.eps);
    }
}

template void sgd_update(float*, const float*, float*, size_t, const SgdStep<float>&);
template void sgd_update(double*, const double*, double*, size_t, const SgdStep<double>&);
template void adam_update(float*, const float*, float*, float*, size_t, const AdamStep<float>&);
template void adam_update(double*, const double*, double*, double*, size_t, const AdamStep<double>&);

}  // namespace tsr
