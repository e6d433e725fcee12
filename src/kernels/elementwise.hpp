// Conversions, quotients, sums, products and bounds of many tensors, element by element as on the CPU (tensor/convert.hpp,
// tensor/arithmetic.hpp, optim/clip.hpp), and zeroing.
#pragma once

#include <limits>

#include "kernels/tensor_table.hpp"
#include "kernels/thread.hpp"
#include "tensor/convert_element.hpp"

namespace tsr::kernels {

// Divides in one dtype, converts, divides in the other, and adds if asked to: what gradients need before and after their
// reduction in another dtype. A divisor of 1 changes nothing. Both arrays may be the same if the dtypes are.
template <class From, class To>
struct Convert {
    static constexpr unsigned threads = 256;
    static constexpr int width = static_cast<int>(pack_bytes / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To)));

    TensorTable<2> tensors;  // from, to
    double before;
    double after;
    bool adds;  // to what is there

    [[nodiscard]] unsigned blocks() const { return tensors.blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        tensors.memory(visit, {sizeof(From), sizeof(To)});
    }
    TSR_HD void operator()(const Thread& thread) const {
        const auto chunk = tensors.chunk(thread.block);
        const From* const from = tensors.template at<const From>(0, chunk);
        To* const to = tensors.template at<To>(1, chunk);
        const bool packed = is_aligned(from, width * sizeof(From)) && is_aligned(to, width * sizeof(To));
        for_elements<width>(thread, chunk.elements, packed, [&]<int n>(unsigned i) {
            const auto values = load<n>(from + i);
            Pack<To, n> results;
            for (int k = 0; k < n; ++k) {
                results.values[k] = divided(converted<To>(divided(values.values[k], before)), after);
            }
            if (adds) {
                const auto sums = load<n>(to + i);
                for (int k = 0; k < n; ++k) {
                    results.values[k] = converted<To>(wide(sums.values[k]) + wide(results.values[k]));
                }
            }
            store(to + i, results);
        });
    }

   private:
    template <class T>
    static TSR_HD T divided(T value, double divisor) {
        if (divisor == 1) return value;
        using Wide = decltype(wide(value));
        return converted<T>(wide(value) / static_cast<Wide>(divisor));
    }
};

// Multiplies. `overflow`, if not null, is set to 1 if a product is not finite.
template <class T>
struct Scale {
    static constexpr unsigned threads = 256;

    TensorTable<1> tensors;
    T factor;
    const void* overflow;  // of one unsigned

    [[nodiscard]] unsigned blocks() const { return tensors.blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        tensors.memory(visit, {sizeof(T)});
        if (overflow != nullptr) visit(overflow, sizeof(unsigned));
    }
    TSR_HD void operator()(const Thread& thread) const {
        const auto chunk = tensors.chunk(thread.block);
        T* const values = tensors.template at<T>(0, chunk);
        bool finite = true;
        for_elements<pack_bytes / sizeof(T)>(thread, chunk.elements, is_aligned(values, pack_bytes),
                                             [&]<int n>(unsigned i) {
                                                 auto pack = load<n>(values + i);
                                                 for (int k = 0; k < n; ++k) {
                                                     pack.values[k] *= factor;
                                                     finite &= is_finite(pack.values[k]);
                                                 }
                                                 store(values + i, pack);
                                             });
        // All that write it write the same.
        if (!finite && overflow != nullptr) *static_cast<unsigned*>(const_cast<void*>(overflow)) = 1;
    }

   private:
    static TSR_HD bool is_finite(T value) {
        constexpr T most = std::numeric_limits<T>::max();
        return value <= most && value >= -most;
    }
};

// Clamps to [-most, most]; NaN stays.
template <class T>
struct Bound {
    static constexpr unsigned threads = 256;

    TensorTable<1> tensors;
    T most;

    [[nodiscard]] unsigned blocks() const { return tensors.blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        tensors.memory(visit, {sizeof(T)});
    }
    TSR_HD void operator()(const Thread& thread) const {
        const auto chunk = tensors.chunk(thread.block);
        T* const values = tensors.template at<T>(0, chunk);
        for_elements<pack_bytes / sizeof(T)>(thread, chunk.elements, is_aligned(values, pack_bytes),
                                             [&]<int n>(unsigned i) {
                                                 auto pack = load<n>(values + i);
                                                 for (T& value : pack.values) {
                                                     value = value > most ? most : value < -most ? -most : value;
                                                 }
                                                 store(values + i, pack);
                                             });
    }
};

// Zeroes tensors of 4-byte words; an f64 is two.
struct Zero {
    static constexpr unsigned threads = 256;

    TensorTable<1> tensors;

    [[nodiscard]] unsigned blocks() const { return tensors.blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        tensors.memory(visit, {sizeof(unsigned)});
    }
    TSR_HD void operator()(const Thread& thread) const {
        const auto chunk = tensors.chunk(thread.block);
        auto* const words = tensors.at<unsigned>(0, chunk);
        for_elements<pack_bytes / sizeof(unsigned)>(thread, chunk.elements, is_aligned(words, pack_bytes),
                                                    [&]<int n>(unsigned i) { store(words + i, Pack<unsigned, n>{}); });
    }
};

}  // namespace tsr::kernels
