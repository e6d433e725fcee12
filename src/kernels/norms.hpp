// Sums of powers and the largest magnitude of many tensors, in double, in an order that depends only on sizes: each block adds
// up its chunk, then one block adds up the blocks.
#pragma once

#include "kernels/block_join.hpp"
#include "kernels/tensor_table.hpp"
#include "kernels/thread.hpp"

namespace tsr::kernels {

// The part of each chunk. Launches one after the other write one list.
template <class T>
struct PowerOfChunks {
    static constexpr unsigned threads = 256;
    static constexpr int phases = 4;
    using Shared = BlockJoin<threads>;

    TensorTable<1> tensors;
    Power power;
    const void* parts;  // of doubles, one for each block

    [[nodiscard]] unsigned blocks() const { return tensors.blocks(); }
    void advance() { parts = static_cast<const double*>(parts) + blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        tensors.memory(visit, {sizeof(T)});
        visit(parts, blocks() * sizeof(double));
    }
    template <int phase>
    TSR_HD void run(const Thread& thread, Shared& shared) const {
        if constexpr (phase == 0) {
            const auto chunk = tensors.chunk(thread.block);
            const T* const values = tensors.template at<const T>(0, chunk);
            double all = 0;
            for_elements<pack_bytes / sizeof(T)>(thread, chunk.elements, is_aligned(values, pack_bytes),
                                                 [&]<int n>(unsigned i) {
                                                     const auto pack = load<n>(values + i);
                                                     for (const T value : pack.values)
                                                         all = power.join(all, power.of(static_cast<double>(value)));
                                                 });
            shared.parts[thread.index] = all;
        } else if constexpr (phase < 3) {
            shared.template run<phase>(thread, power);
        } else if (thread.index == 0) {
            static_cast<double*>(const_cast<void*>(parts))[thread.block] = shared.parts[0];
        }
    }
};

// Joins a list of parts into one number.
struct PowerOfParts {
    static constexpr unsigned threads = 256;
    static constexpr int phases = 4;
    using Shared = BlockJoin<threads>;

    const void* parts;  // of doubles
    unsigned count;
    Power power;
    const void* result;  // of one double

    [[nodiscard]] unsigned blocks() const { return 1; }
    template <class Visit>
    void memory(Visit&& visit) {
        visit(parts, count * sizeof(double));
        visit(result, sizeof(double));
    }
    template <int phase>
    TSR_HD void run(const Thread& thread, Shared& shared) const {
        if constexpr (phase == 0) {
            double all = 0;
            for (unsigned i = thread.index; i < count; i += thread.count) {
                all = power.join(all, static_cast<const double*>(parts)[i]);
            }
            shared.parts[thread.index] = all;
        } else if constexpr (phase < 3) {
            shared.template run<phase>(thread, power);
        } else if (thread.index == 0) {
            *static_cast<double*>(const_cast<void*>(result)) = shared.parts[0];
        }
    }
};

}  // namespace tsr::kernels
