#include "optim/kernels.hpp"

namespace tsr {

namespace {

using kernels::decayed;

// Each loop is plain code, inlined into one function per instruction set, where the compiler vectorises it. Measured on
// one core: Adam over 10,000 elements takes 0.9 ns an element plain, 0.45 with AVX2, 0.2 with AVX-512; over 4 million,
// limited by memory, 1.15, 1.05, 0.9. __restrict holds: an optimizer's tensors do not overlap.
template <class T>
TSR_INLINE void sgd_loops(T* __restrict param, const T* __restrict grad, T* __restrict buffer, size_t n,
                          const SgdStep<T>& step) {
    const auto [lr, momentum, one_minus_dampening, weight_decay, nesterov, first] = step;
    if (momentum == 0) {
        for (size_t i = 0; i < n; ++i) param[i] -= lr * decayed(grad[i], param[i], weight_decay);
        return;
    }
    if (first) {
        for (size_t i = 0; i < n; ++i) buffer[i] = decayed(grad[i], param[i], weight_decay);
    } else {
        for (size_t i = 0; i < n; ++i) {
            buffer[i] = momentum * buffer[i] + one_minus_dampening * decayed(grad[i], param[i], weight_decay);
        }
    }
    if (nesterov) {
        for (size_t i = 0; i < n; ++i) {
            param[i] -= lr * (decayed(grad[i], param[i], weight_decay) + momentum * buffer[i]);
        }
    } else {
        for (size_t i = 0; i < n; ++i) param[i] -= lr * buffer[i];
    }
}

template <class T>
TSR_INLINE void adam_loop(T* __restrict param, const T* __restrict grad, T* __restrict exp_avg,
                          T* __restrict exp_avg_sq, size_t n, const AdamStep<T>& step) {
    const AdamStep<T> c = step;  // a local copy: stores through T* cannot change it
    for (size_t i = 0; i < n; ++i) kernels::adam_element(param[i], grad[i], exp_avg[i], exp_avg_sq[i], c);
}

template <class T, class Step>
TSR_INLINE void one_moment_loop(T* __restrict param, const T* __restrict grad, T* __restrict moment, size_t n,
                                const Step& step) {
    const Step c = step;
    for (size_t i = 0; i < n; ++i) kernels::one_moment_element(param[i], grad[i], moment[i], c);
}

template <class T>
TSR_INLINE void lamb_directions_loop(const T* __restrict param, const T* __restrict grad, const T* __restrict exp_avg,
                                     const T* __restrict exp_avg_sq, T* __restrict directions, size_t n,
                                     const LambStep<T>& step) {
    const LambStep<T> c = step;
    for (size_t i = 0; i < n; ++i) {
        T average = exp_avg[i];
        T square = exp_avg_sq[i];
        directions[i] = kernels::lamb_direction(param[i], grad[i], average, square, c);
    }
}

template <class T>
TSR_INLINE void lamb_loop(T* __restrict param, const T* __restrict grad, T* __restrict exp_avg,
                          T* __restrict exp_avg_sq, size_t n, const LambStep<T>& step, T rate) {
    const LambStep<T> c = step;
    for (size_t i = 0; i < n; ++i) {
        param[i] -= rate * kernels::lamb_direction(param[i], grad[i], exp_avg[i], exp_avg_sq[i], c);
    }
}

#if defined(__x86_64__)
template <class T>
[[gnu::target("avx2")]] void sgd_avx2(T* p, const T* g, T* b, size_t n, const SgdStep<T>& step) {
    sgd_loops(p, g, b, n, step);
}
template <class T>
[[gnu::target("avx512f,prefer-vector-width=512")]] void sgd_avx512(T* p, const T* g, T* b, size_t n,
                                                                   const SgdStep<T>& step) {
    sgd_loops(p, g, b, n, step);
}
template <class T>
[[gnu::target("avx2")]] void adam_avx2(T* p, const T* g, T* m, T* v, size_t n, const AdamStep<T>& step) {
    adam_loop(p, g, m, v, n, step);
}
template <class T>
[[gnu::target("avx512f,prefer-vector-width=512")]] void adam_avx512(T* p, const T* g, T* m, T* v, size_t n,
                                                                    const AdamStep<T>& step) {
    adam_loop(p, g, m, v, n, step);
}
template <class T, class Step>
[[gnu::target("avx2")]] void one_moment_avx2(T* p, const T* g, T* m, size_t n, const Step& step) {
    one_moment_loop(p, g, m, n, step);
}
template <class T, class Step>
[[gnu::target("avx512f,prefer-vector-width=512")]] void one_moment_avx512(T* p, const T* g, T* m, size_t n,
                                                                          const Step& step) {
    one_moment_loop(p, g, m, n, step);
}
template <class T>
[[gnu::target("avx2")]] void lamb_directions_avx2(const T* p, const T* g, const T* m, const T* v, T* d, size_t n,
                                                  const LambStep<T>& step) {
    lamb_directions_loop(p, g, m, v, d, n, step);
}
template <class T>
[[gnu::target("avx512f,prefer-vector-width=512")]] void lamb_directions_avx512(const T* p, const T* g, const T* m,
                                                                               const T* v, T* d, size_t n,
                                                                               const LambStep<T>& step) {
    lamb_directions_loop(p, g, m, v, d, n, step);
}
template <class T>
[[gnu::target("avx2")]] void lamb_avx2(T* p, const T* g, T* m, T* v, size_t n, const LambStep<T>& step, T rate) {
    lamb_loop(p, g, m, v, n, step, rate);
}
template <class T>
[[gnu::target("avx512f,prefer-vector-width=512")]] void lamb_avx512(T* p, const T* g, T* m, T* v, size_t n,
                                                                    const LambStep<T>& step, T rate) {
    lamb_loop(p, g, m, v, n, step, rate);
}
#endif

}  // namespace

template <class T>
void sgd_update(T* param, const T* grad, T* buffer, size_t n, const SgdStep<T>& step, Vectors vectors) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) return sgd_avx512(param, grad, buffer, n, step);
    if (vectors == Vectors::avx2) return sgd_avx2(param, grad, buffer, n, step);
#endif
    (void)vectors;
    sgd_loops(param, grad, buffer, n, step);
}

template <class T>
void adam_update(T* param, const T* grad, T* exp_avg, T* exp_avg_sq, size_t n, const AdamStep<T>& step,
                 Vectors vectors) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) return adam_avx512(param, grad, exp_avg, exp_avg_sq, n, step);
    if (vectors == Vectors::avx2) return adam_avx2(param, grad, exp_avg, exp_avg_sq, n, step);
#endif
    (void)vectors;
    adam_loop(param, grad, exp_avg, exp_avg_sq, n, step);
}

template <class T, class Step>
void one_moment_update(T* param, const T* grad, T* moment, size_t n, const Step& step, Vectors vectors) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) return one_moment_avx512(param, grad, moment, n, step);
    if (vectors == Vectors::avx2) return one_moment_avx2(param, grad, moment, n, step);
#endif
    (void)vectors;
    one_moment_loop(param, grad, moment, n, step);
}

template <class T>
void lamb_directions(const T* param, const T* grad, const T* exp_avg, const T* exp_avg_sq, T* directions, size_t n,
                     const LambStep<T>& step, Vectors vectors) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) {
        return lamb_directions_avx512(param, grad, exp_avg, exp_avg_sq, directions, n, step);
    }
    if (vectors == Vectors::avx2) return lamb_directions_avx2(param, grad, exp_avg, exp_avg_sq, directions, n, step);
#endif
    (void)vectors;
    lamb_directions_loop(param, grad, exp_avg, exp_avg_sq, directions, n, step);
}

template <class T>
void lamb_update(T* param, const T* grad, T* exp_avg, T* exp_avg_sq, size_t n, const LambStep<T>& step, T rate,
                 Vectors vectors) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) return lamb_avx512(param, grad, exp_avg, exp_avg_sq, n, step, rate);
    if (vectors == Vectors::avx2) return lamb_avx2(param, grad, exp_avg, exp_avg_sq, n, step, rate);
#endif
    (void)vectors;
    lamb_loop(param, grad, exp_avg, exp_avg_sq, n, step, rate);
}

template void sgd_update(float*, const float*, float*, size_t, const SgdStep<float>&, Vectors);
template void sgd_update(double*, const double*, double*, size_t, const SgdStep<double>&, Vectors);
template void adam_update(float*, const float*, float*, float*, size_t, const AdamStep<float>&, Vectors);
template void adam_update(double*, const double*, double*, double*, size_t, const AdamStep<double>&, Vectors);
template void one_moment_update(float*, const float*, float*, size_t, const AdagradStep<float>&, Vectors);
template void one_moment_update(double*, const double*, double*, size_t, const AdagradStep<double>&, Vectors);
template void lamb_directions(const float*, const float*, const float*, const float*, float*, size_t,
                              const LambStep<float>&, Vectors);
template void lamb_directions(const double*, const double*, const double*, const double*, double*, size_t,
                              const LambStep<double>&, Vectors);
template void lamb_update(float*, const float*, float*, float*, size_t, const LambStep<float>&, float, Vectors);
template void lamb_update(double*, const double*, double*, double*, size_t, const LambStep<double>&, double, Vectors);
template void one_moment_update(float*, const float*, float*, size_t, const LionStep<float>&, Vectors);
template void one_moment_update(double*, const double*, double*, size_t, const LionStep<double>&, Vectors);

}  // namespace tsr
