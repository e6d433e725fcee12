// Adds a row to all rows of a matrix, element by element as on the CPU (tensor/arithmetic.hpp).
#pragma once

#include <cstddef>

#include "kernels/thread.hpp"
#include "tensor/convert_element.hpp"

namespace tsr::kernels {

template <class T>
TSR_HD inline T sum_of(T a, T b) {
    return converted<T>(wide(a) + wide(b));
}

// A block adds to one row.
template <class T>
struct AddRow {
    static constexpr unsigned threads = 256;

    const void* rows;
    const void* row;
    size_t count;  // of rows
    size_t width;  // of a row, in elements

    [[nodiscard]] unsigned blocks() const { return static_cast<unsigned>(count); }
    template <class Visit>
    void memory(Visit&& visit) {
        visit(rows, count * width * sizeof(T));
        visit(row, width * sizeof(T));
    }
    TSR_HD void operator()(const Thread& thread) const {
        T* const to = static_cast<T*>(const_cast<void*>(rows)) + thread.block * width;
        const T* const from = static_cast<const T*>(row);
        const bool packed = is_aligned(to, pack_bytes) && is_aligned(from, pack_bytes);
        for_elements<pack_bytes / sizeof(T)>(thread, static_cast<unsigned>(width), packed, [&]<int n>(unsigned i) {
            auto sums = load<n>(to + i);
            const auto more = load<n>(from + i);
            for (int k = 0; k < n; ++k) sums.values[k] = sum_of(sums.values[k], more.values[k]);
            store(to + i, sums);
        });
    }
};

}  // namespace tsr::kernels
