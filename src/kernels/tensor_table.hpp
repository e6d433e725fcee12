// The tensors of one launch, by value among a kernel's parameters: several arrays for each (a parameter, its gradient, ...)
// with the same number of elements. A block works on one chunk of one tensor. Kernels of more tensors are launched several
// times (device/launch.hpp), so that no table in a device's memory has to live until they are done.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/host_device.hpp"
#include "kernels/thread.hpp"

namespace tsr::kernels {

inline constexpr unsigned chunk_elements = 4096;  // of a block; a multiple of every pack
inline constexpr size_t most_parameter_bytes = 4096;

template <size_t arrays>
class TensorTable {
   public:
    // Leaves 200 bytes for the kernel's other arguments.
    static constexpr unsigned capacity = (most_parameter_bytes - 200) / (arrays * sizeof(void*) + 12);

    // False if the table is full.
    [[nodiscard]] bool add(const std::array<const void*, arrays>& data, size_t elements) {
        if (tensors_ == capacity) return false;
        for (size_t i = 0; i < arrays; ++i) data_[i][tensors_] = data[i];
        elements_[tensors_] = elements;
        const size_t chunks = (elements + chunk_elements - 1) / chunk_elements;
        first_block_[tensors_ + 1] = first_block_[tensors_] + static_cast<unsigned>(chunks);
        ++tensors_;
        return true;
    }
    void clear() { tensors_ = 0; }
    [[nodiscard]] unsigned blocks() const { return first_block_[tensors_]; }

    // `sizes`: bytes of an element of each array.
    template <class Visit>
    void memory(Visit&& visit, const std::array<size_t, arrays>& sizes) {
        for (size_t i = 0; i < arrays; ++i) {
            for (unsigned tensor = 0; tensor < tensors_; ++tensor)
                visit(data_[i][tensor], elements_[tensor] * sizes[i]);
        }
    }

    // What a block works on.
    struct Chunk {
        unsigned tensor;
        size_t begin;
        unsigned elements;
    };
    [[nodiscard]] TSR_HD Chunk chunk(unsigned block) const {
        unsigned low = 0;
        unsigned high = tensors_;  // the tensor is in [low, high)
        while (high - low > 1) {
            const unsigned middle = (low + high) / 2;
            (first_block_[middle] <= block ? low : high) = middle;
        }
        const size_t begin = static_cast<size_t>(block - first_block_[low]) * chunk_elements;
        const size_t rest = elements_[low] - begin;
        return {low, begin, rest < chunk_elements ? static_cast<unsigned>(rest) : chunk_elements};
    }
    // The first element of a chunk in array i.
    template <class T>
    [[nodiscard]] TSR_HD T* at(size_t i, const Chunk& chunk) const {
        return static_cast<T*>(const_cast<void*>(data_[i][chunk.tensor])) + chunk.begin;
    }

   private:
    const void* data_[arrays][capacity];
    size_t elements_[capacity];
    unsigned first_block_[capacity + 1] = {};
    unsigned tensors_ = 0;
};

}  // namespace tsr::kernels
