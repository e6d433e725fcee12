// The steps of optimizers over many tensors, and what they do with an element, there and in the CPU's loops
// (optim/kernels.cc).
#pragma once

#include <cmath>

#include "base/vectors.hpp"
#include "kernels/tensor_table.hpp"
#include "kernels/thread.hpp"

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
struct AdagradStep {
    T rate;  // lr / (1 + (step - 1) * lr_decay)
    T eps;
    T weight_decay;
};

template <class T>
struct LionStep {
    T beta1;
    T one_minus_beta1;
    T beta2;
    T one_minus_beta2;
    T lr;
    T keep;  // 1 - lr * weight decay: multiplies the parameter
};

template <class T>
struct LambStep {
    T beta1;
    T one_minus_beta1;
    T beta2;
    T one_minus_beta2;
    T eps;
    T weight_decay;
};

}  // namespace tsr

namespace tsr::kernels {

template <class T>
TSR_INLINE T decayed(T grad, T param, T weight_decay) {
    return weight_decay != 0 ? grad + weight_decay * param : grad;
}

template <class T>
TSR_INLINE void adam_element(T& param, T grad, T& exp_avg, T& exp_avg_sq, const AdamStep<T>& step) {
    const T old = param * step.keep;
    const T gradient = decayed(grad, old, step.weight_decay);
    const T toward = gradient - exp_avg;
    // torch.lerp uses the form that is exact at the nearer end.
    const T average =
        step.one_minus_beta1 < T(0.5) ? exp_avg + step.one_minus_beta1 * toward : gradient - toward * step.beta1;
    const T square = step.beta2 * exp_avg_sq + step.one_minus_beta2 * gradient * gradient;
    exp_avg = average;
    exp_avg_sq = square;
    param = old - step.step_size * average / (std::sqrt(square) / step.bias_correction2_sqrt + step.eps);
}

// Without momentum `buffer` is not used.
template <class T>
TSR_HD inline void sgd_element(T& param, T grad, T& buffer, const SgdStep<T>& step) {
    const T gradient = decayed(grad, param, step.weight_decay);
    if (step.momentum == 0) {
        param -= step.lr * gradient;
        return;
    }
    buffer = step.first ? gradient : step.momentum * buffer + step.one_minus_dampening * gradient;
    param -= step.lr * (step.nesterov ? gradient + step.momentum * buffer : buffer);
}

template <class T>
TSR_INLINE void one_moment_element(T& param, T grad, T& sum, const AdagradStep<T>& step) {
    const T gradient = decayed(grad, param, step.weight_decay);
    const T total = sum + gradient * gradient;
    sum = total;
    param -= step.rate * gradient / (std::sqrt(total) + step.eps);
}

template <class T>
TSR_INLINE void one_moment_element(T& param, T grad, T& exp_avg, const LionStep<T>& step) {
    const T toward = step.beta1 * exp_avg + step.one_minus_beta1 * grad;
    const T move = toward > 0 ? step.lr : toward < 0 ? -step.lr : toward;  // 0 stays 0, and NaN shows
    exp_avg = step.beta2 * exp_avg + step.one_minus_beta2 * grad;
    param = param * step.keep - move;
}

// Updates the moments of Lamb. Returns in which direction, and how far but for a factor of the whole parameter, it moves.
template <class T>
TSR_INLINE T lamb_direction(T param, T grad, T& exp_avg, T& exp_avg_sq, const LambStep<T>& step) {
    exp_avg = step.beta1 * exp_avg + step.one_minus_beta1 * grad;
    exp_avg_sq = step.beta2 * exp_avg_sq + step.one_minus_beta2 * grad * grad;
    return exp_avg / (std::sqrt(exp_avg_sq) + step.eps) + step.weight_decay * param;
}

template <class T>
struct AdamUpdate {
    static constexpr unsigned threads = 256;

    TensorTable<4> tensors;  // parameters, gradients, exp_avg, exp_avg_sq
    AdamStep<T> step;

    [[nodiscard]] unsigned blocks() const { return tensors.blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        tensors.memory(visit, {sizeof(T), sizeof(T), sizeof(T), sizeof(T)});
    }
    TSR_HD void operator()(const Thread& thread) const {
        const auto chunk = tensors.chunk(thread.block);
        T* const params = tensors.template at<T>(0, chunk);
        const T* const grads = tensors.template at<const T>(1, chunk);
        T* const averages = tensors.template at<T>(2, chunk);
        T* const squares = tensors.template at<T>(3, chunk);
        const bool packed = is_aligned(params, pack_bytes) && is_aligned(grads, pack_bytes) &&
                            is_aligned(averages, pack_bytes) && is_aligned(squares, pack_bytes);
        for_elements<pack_bytes / sizeof(T)>(thread, chunk.elements, packed, [&]<int n>(unsigned i) {
            auto param = load<n>(params + i);
            const auto grad = load<n>(grads + i);
            auto average = load<n>(averages + i);
            auto square = load<n>(squares + i);
            for (int k = 0; k < n; ++k) {
                adam_element(param.values[k], grad.values[k], average.values[k], square.values[k], step);
            }
            store(params + i, param);
            store(averages + i, average);
            store(squares + i, square);
        });
    }
};

// A step of an optimizer that has one moment and updates it with each element.
template <class T, class Step>
struct OneMomentUpdate {
    static constexpr unsigned threads = 256;

    TensorTable<3> tensors;  // parameters, gradients, moments
    Step step;

    [[nodiscard]] unsigned blocks() const { return tensors.blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        tensors.memory(visit, {sizeof(T), sizeof(T), sizeof(T)});
    }
    TSR_HD void operator()(const Thread& thread) const {
        const auto chunk = tensors.chunk(thread.block);
        T* const params = tensors.template at<T>(0, chunk);
        const T* const grads = tensors.template at<const T>(1, chunk);
        T* const moments = tensors.template at<T>(2, chunk);
        const bool packed =
            is_aligned(params, pack_bytes) && is_aligned(grads, pack_bytes) && is_aligned(moments, pack_bytes);
        for_elements<pack_bytes / sizeof(T)>(thread, chunk.elements, packed, [&]<int n>(unsigned i) {
            auto param = load<n>(params + i);
            const auto grad = load<n>(grads + i);
            auto moment = load<n>(moments + i);
            for (int k = 0; k < n; ++k) one_moment_element(param.values[k], grad.values[k], moment.values[k], step);
            store(params + i, param);
            store(moments + i, moment);
        });
    }
};

// Without momentum the third array is the parameters again, and is not accessed.
template <class T>
struct SgdUpdate {
    static constexpr unsigned threads = 256;

    TensorTable<3> tensors;  // parameters, gradients, momentum buffers
    SgdStep<T> step;

    [[nodiscard]] unsigned blocks() const { return tensors.blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        tensors.memory(visit, {sizeof(T), sizeof(T), sizeof(T)});
    }
    TSR_HD void operator()(const Thread& thread) const {
        const auto chunk = tensors.chunk(thread.block);
        T* const params = tensors.template at<T>(0, chunk);
        const T* const grads = tensors.template at<const T>(1, chunk);
        T* const buffers = tensors.template at<T>(2, chunk);
        const bool packed =
            is_aligned(params, pack_bytes) && is_aligned(grads, pack_bytes) && is_aligned(buffers, pack_bytes);
        for_elements<pack_bytes / sizeof(T)>(thread, chunk.elements, packed, [&]<int n>(unsigned i) {
            auto param = load<n>(params + i);
            const auto grad = load<n>(grads + i);
            Pack<T, n> buffer{};
            if (step.momentum != 0 && !step.first) buffer = load<n>(buffers + i);
            for (int k = 0; k < n; ++k) sgd_element(param.values[k], grad.values[k], buffer.values[k], step);
            store(params + i, param);
            if (step.momentum != 0) store(buffers + i, buffer);
        });
    }
};

}  // namespace tsr::kernels
