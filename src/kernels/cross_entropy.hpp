// Cross-entropy of logits whose classes are cut over ranks (parallel/tensor/cross_entropy.hpp says what it computes), between the
// reductions over the ranks. A block has one row of logits; what is computed of one is in float, or in double for logits in
// double, and added up in double.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/block_join.hpp"
#include "kernels/embedding.hpp"
#include "kernels/thread.hpp"
#include "tensor/convert_element.hpp"

namespace tsr::kernels {

// The type of what is computed of logits.
template <class T>
using LossOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

TSR_HD inline Power adding() { return {1}; }
TSR_HD inline Power taking_largest() { return {std::numeric_limits<double>::infinity()}; }

// The targets, and the weights of classes.
struct Targets {
    Integers classes;
    Flag outside;  // set if a target is neither a class nor ignored; it counts as ignored
    int64_t vocabulary;
    int64_t ignored;
    const void* weights;  // null: all are 1
    bool wide_weights;    // double, else float

    [[nodiscard]] TSR_HD bool is_class(int64_t y) const { return y != ignored && y >= 0 && y < vocabulary; }
    [[nodiscard]] TSR_HD double weight(int64_t c) const {
        if (weights == nullptr) return 1;
        return wide_weights ? static_cast<const double*>(weights)[c]
                            : static_cast<double>(static_cast<const float*>(weights)[c]);
    }
    template <class Visit>
    void memory(Visit&& visit) {
        classes.memory(visit);
        outside.memory(visit);
        const size_t size = wide_weights ? sizeof(double) : sizeof(float);
        if (weights != nullptr) visit(weights, static_cast<size_t>(vocabulary) * size);
    }
};

// The rows, of which this rank has the classes from `begin` on.
template <class T>
struct Logits {
    Targets targets;
    const void* data;
    int64_t begin;
    size_t width;  // classes of this rank

    [[nodiscard]] TSR_HD const T* row(unsigned number) const { return static_cast<const T*>(data) + number * width; }
    [[nodiscard]] TSR_HD bool has(int64_t c) const { return c >= begin && c < begin + static_cast<int64_t>(width); }
    // Calls use(class, logit) for what this thread has of a row.
    template <class Use>
    TSR_HD void each(const Thread& thread, Use&& use) const {
        const T* const from = row(thread.block);
        for_elements<pack_bytes / sizeof(T)>(thread, static_cast<unsigned>(width), is_aligned(from, pack_bytes),
                                             [&]<int n>(unsigned i) {
                                                 const auto pack = load<n>(from + i);
                                                 for (int k = 0; k < n; ++k) use(i + k, wide(pack.values[k]));
                                             });
    }
    [[nodiscard]] unsigned blocks() const { return static_cast<unsigned>(targets.classes.count); }
    template <class Visit>
    void memory(Visit&& visit) {
        targets.memory(visit);
        if (width > 0) visit(data, targets.classes.count * width * sizeof(T));
    }
};

// The largest logit of each row.
template <class T>
struct LargestLogits {
    static constexpr unsigned threads = 256;
    static constexpr int phases = 4;
    using Shared = BlockJoin<threads>;

    Logits<T> logits;
    const void* largest;  // of LossOf<T>, one for each row

    [[nodiscard]] unsigned blocks() const { return logits.blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        logits.memory(visit);
        visit(largest, blocks() * sizeof(LossOf<T>));
    }
    template <int phase>
    TSR_HD void run(const Thread& thread, Shared& shared) const {
        if constexpr (phase == 0) {
            double most = -std::numeric_limits<double>::infinity();
            logits.each(thread, [&](unsigned, LossOf<T> x) { most = taking_largest().join(most, x); });
            shared.parts[thread.index] = most;
        } else if constexpr (phase < 3) {
            shared.template run<phase>(thread, taking_largest());
        } else if (thread.index == 0) {
            static_cast<LossOf<T>*>(const_cast<void*>(largest))[thread.block] = static_cast<LossOf<T>>(shared.parts[0]);
        }
    }
};

// Three numbers of each row: its sum of exponentials, its target's logit, and for label smoothing its weighted sum of logits,
// all relative to its largest logit.
template <class T>
struct SumsOfLogits {
    static constexpr unsigned threads = 256;
    static constexpr int phases = 4;
    struct Shared {
        BlockJoin<threads> exponentials;
        BlockJoin<threads> weighted;
    };

    Logits<T> logits;
    bool smooths;
    const void* largest;  // of LossOf<T>
    const void* sums;     // of LossOf<T>

    [[nodiscard]] unsigned blocks() const { return logits.blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        logits.memory(visit);
        visit(largest, blocks() * sizeof(LossOf<T>));
        visit(sums, 3 * blocks() * sizeof(LossOf<T>));
    }
    template <int phase>
    TSR_HD void run(const Thread& thread, Shared& shared) const {
        const LossOf<T> most = static_cast<const LossOf<T>*>(largest)[thread.block];
        if constexpr (phase == 0) {
            double exponentials = 0;
            double weighted = 0;
            logits.each(thread, [&](unsigned i, LossOf<T> x) {
                exponentials += std::exp(x - most);
                if (!smooths) return;
                const double weight = logits.targets.weight(logits.begin + i);
                if (weight != 0) weighted += weight * static_cast<double>(x - most);
            });
            shared.exponentials.parts[thread.index] = exponentials;
            shared.weighted.parts[thread.index] = weighted;
        } else if constexpr (phase < 3) {
            shared.exponentials.template run<phase>(thread, adding());
            shared.weighted.template run<phase>(thread, adding());
        } else if (thread.index == 0) {
            const int64_t y = logits.targets.classes.at(thread.block);
            if (!logits.targets.is_class(y) && y != logits.targets.ignored) logits.targets.outside.set();
            auto* const to = static_cast<LossOf<T>*>(const_cast<void*>(sums)) + size_t{3} * thread.block;
            to[0] = static_cast<LossOf<T>>(shared.exponentials.parts[0]);
            const bool has = logits.targets.is_class(y) && logits.has(y);
            to[1] = has ? wide(logits.row(thread.block)[y - logits.begin]) - most : 0;
            to[2] = static_cast<LossOf<T>>(shared.weighted.parts[0]);
        }
    }
};

// Sums of weights: over the targets, and if asked for over all classes. One block for each.
struct SumsOfWeights {
    static constexpr unsigned threads = 256;
    static constexpr int phases = 4;
    using Shared = BlockJoin<threads>;

    Targets targets;
    bool of_classes;
    const void* sums;  // of double: over the targets, over the classes

    [[nodiscard]] unsigned blocks() const { return of_classes ? 2 : 1; }
    template <class Visit>
    void memory(Visit&& visit) {
        targets.memory(visit);
        visit(sums, 2 * sizeof(double));
    }
    template <int phase>
    TSR_HD void run(const Thread& thread, Shared& shared) const {
        if constexpr (phase == 0) {
            double sum = 0;
            const size_t count = thread.block == 0 ? targets.classes.count : static_cast<size_t>(targets.vocabulary);
            for (size_t i = thread.index; i < count; i += thread.count) {
                const int64_t c = thread.block == 0 ? targets.classes.at(i) : static_cast<int64_t>(i);
                if (thread.block == 1 || targets.is_class(c)) sum += targets.weight(c);
            }
            shared.parts[thread.index] = sum;
        } else if constexpr (phase < 3) {
            shared.template run<phase>(thread, adding());
        } else if (thread.index == 0) {
            static_cast<double*>(const_cast<void*>(sums))[thread.block] = shared.parts[0];
        }
    }
};

// The loss of each row, and its gradient.
template <class T>
struct LossOfRows {
    static constexpr unsigned threads = 256;

    Logits<T> logits;
    double smoothing;
    double grad_scale;
    const void* divisor;           // of the gradient, a double; null: 1
    const void* weight_of_all;     // of all classes, a double; null: the vocabulary
    const void* largest;           // of LossOf<T>
    const void* sums;              // as SumsOfLogits writes them, over all ranks
    const void* losses;            // of double
    const void* losses_of_caller;  // of LossOf<T>; null: only their sum is wanted
    const void* grad;              // of T, may be the logits; null: it is not wanted

    [[nodiscard]] unsigned blocks() const { return logits.blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        const bool in_place = grad == logits.data;
        logits.memory(visit);
        if (divisor != nullptr) visit(divisor, sizeof(double));
        if (weight_of_all != nullptr) visit(weight_of_all, sizeof(double));
        visit(largest, blocks() * sizeof(LossOf<T>));
        visit(sums, 3 * blocks() * sizeof(LossOf<T>));
        visit(losses, blocks() * sizeof(double));
        if (losses_of_caller != nullptr) visit(losses_of_caller, blocks() * sizeof(LossOf<T>));
        if (in_place) {
            grad = logits.data;
        } else if (grad != nullptr && logits.width > 0) {
            visit(grad, blocks() * logits.width * sizeof(T));
        }
    }
    TSR_HD void operator()(const Thread& thread) const {
        const int64_t y = logits.targets.classes.at(thread.block);
        const LossOf<T>* const of_row = static_cast<const LossOf<T>*>(sums) + size_t{3} * thread.block;
        if (thread.index == 0) {
            const double loss = loss_of(y, of_row);
            static_cast<double*>(const_cast<void*>(losses))[thread.block] = loss;
            if (losses_of_caller != nullptr) {
                static_cast<LossOf<T>*>(const_cast<void*>(losses_of_caller))[thread.block] =
                    static_cast<LossOf<T>>(loss);
            }
        }
        if (grad != nullptr) write_grad(thread, y, of_row[0]);
    }

   private:
    [[nodiscard]] TSR_HD double of_all_classes() const {
        return weight_of_all != nullptr ? *static_cast<const double*>(weight_of_all)
                                        : static_cast<double>(logits.targets.vocabulary);
    }
    [[nodiscard]] TSR_HD double loss_of(int64_t y, const LossOf<T>* of_row) const {
        if (!logits.targets.is_class(y)) return 0;
        const double log_sum = std::log(static_cast<double>(of_row[0]));
        const double plain = logits.targets.weight(y) * (log_sum - static_cast<double>(of_row[1]));
        if (smoothing == 0) return plain;
        const double smooth = of_all_classes() * log_sum - static_cast<double>(of_row[2]);
        return (1 - smoothing) * plain + smoothing / static_cast<double>(logits.targets.vocabulary) * smooth;
    }
    TSR_HD void write_grad(const Thread& thread, int64_t y, LossOf<T> exponentials) const {
        const bool counts = logits.targets.is_class(y);
        const LossOf<T> most = static_cast<const LossOf<T>*>(largest)[thread.block];
        const double scale = divisor != nullptr ? grad_scale / *static_cast<const double*>(divisor) : grad_scale;
        const double plain = counts ? (1 - smoothing) * logits.targets.weight(y) * scale : 0;
        const double smooth = smoothing / static_cast<double>(logits.targets.vocabulary) * scale;
        const auto of_softmax =
            static_cast<LossOf<T>>((plain + smooth * of_all_classes()) / static_cast<double>(exponentials));
        const T* const from = logits.row(thread.block);
        T* const to = static_cast<T*>(const_cast<void*>(grad)) + thread.block * logits.width;
        const bool packed = is_aligned(from, pack_bytes) && is_aligned(to, pack_bytes);
        for_elements<pack_bytes / sizeof(T)>(
            thread, static_cast<unsigned>(logits.width), packed, [&]<int n>(unsigned i) {
                auto pack = load<n>(from + i);
                for (int k = 0; k < n; ++k) {
                    const int64_t c = logits.begin + i + k;
                    LossOf<T> value = 0;
                    if (counts) {
                        value = std::exp(wide(pack.values[k]) - most) * of_softmax;
                        if (smooth != 0) value -= static_cast<LossOf<T>>(smooth * logits.targets.weight(c));
                        if (c == y) value -= static_cast<LossOf<T>>(plain);
                    }
                    pack.values[k] = converted<T>(value);
                }
                store(to + i, pack);
            });
    }
};

// The sum of the losses of all rows, divided.
template <class Loss>
struct SumOfLosses {
    static constexpr unsigned threads = 256;
    static constexpr int phases = 4;
    using Shared = BlockJoin<threads>;

    const void* losses;  // of double
    size_t count;
    const void* divisor;  // a double; null: 1
    const void* loss;     // one Loss

    [[nodiscard]] unsigned blocks() const { return 1; }
    template <class Visit>
    void memory(Visit&& visit) {
        if (count > 0) visit(losses, count * sizeof(double));
        if (divisor != nullptr) visit(divisor, sizeof(double));
        visit(loss, sizeof(Loss));
    }
    template <int phase>
    TSR_HD void run(const Thread& thread, Shared& shared) const {
        if constexpr (phase == 0) {
            double sum = 0;
            for (size_t i = thread.index; i < count; i += thread.count) sum += static_cast<const double*>(losses)[i];
            shared.parts[thread.index] = sum;
        } else if constexpr (phase < 3) {
            shared.template run<phase>(thread, adding());
        } else if (thread.index == 0) {
            const double by = divisor != nullptr ? *static_cast<const double*>(divisor) : 1;
            *static_cast<Loss*>(const_cast<void*>(loss)) = static_cast<Loss>(shared.parts[0] / by);
        }
    }
};

}  // namespace tsr::kernels
