// The embedding of a vocabulary of which a rank has some words: looking up rows, and adding gradients to them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/rows.hpp"
#include "kernels/thread.hpp"

namespace tsr::kernels {

// Integers of 4 or 8 bytes.
struct Integers {
    const void* data;
    size_t count;
    bool wide;

    [[nodiscard]] TSR_HD int64_t at(size_t i) const {
        return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    }
    template <class Visit>
    void memory(Visit&& visit) {
        if (count > 0) visit(data, count * (wide ? sizeof(int64_t) : sizeof(int32_t)));
    }
};

// A word that the host looks at later. All that write it write the same.
struct Flag {
    const void* word;  // an unsigned

    TSR_HD void set() const { *static_cast<unsigned*>(const_cast<void*>(word)) = 1; }
    template <class Visit>
    void memory(Visit&& visit) {
        visit(word, sizeof(unsigned));
    }
};

// The ids, and a range of words that are consecutive rows of this rank's slice.
struct Words {
    Integers ids;
    Flag outside;  // set if an id is not of the vocabulary
    int64_t vocabulary;
    int64_t begin;
    int64_t end;
    size_t row;    // of `begin`
    size_t width;  // of a row, in elements

    [[nodiscard]] TSR_HD bool has(int64_t id) const { return id >= begin && id < end; }
    [[nodiscard]] TSR_HD size_t first_element(int64_t id) const {
        return (row + static_cast<size_t>(id - begin)) * width;
    }
    TSR_HD void check(const Thread& thread, int64_t id) const {
        if (thread.index == 0 && (id < 0 || id >= vocabulary)) outside.set();
    }
    [[nodiscard]] unsigned blocks() const { return static_cast<unsigned>(ids.count); }
    [[nodiscard]] size_t elements() const { return (row + static_cast<size_t>(end - begin)) * width; }
};

// Writes the row of each id. `Unit` has the size of an element. A block writes one row.
template <class Unit>
struct LookUp {
    static constexpr unsigned threads = 256;

    Words words;
    const void* weight;
    const void* out;
    bool clears;  // the rows of ids that are not among the words are zeroed, else left

    [[nodiscard]] unsigned blocks() const { return words.blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        words.ids.memory(visit);
        words.outside.memory(visit);
        if (words.elements() > 0) visit(weight, words.elements() * sizeof(Unit));
        visit(out, words.ids.count * words.width * sizeof(Unit));
    }
    TSR_HD void operator()(const Thread& thread) const {
        const int64_t id = words.ids.at(thread.block);
        words.check(thread, id);
        const bool has = words.has(id);
        if (!has && !clears) return;
        Unit* const to = static_cast<Unit*>(const_cast<void*>(out)) + thread.block * words.width;
        const Unit* const from = static_cast<const Unit*>(weight) + (has ? words.first_element(id) : 0);
        const bool packed = is_aligned(to, pack_bytes) && is_aligned(from, pack_bytes);
        for_elements<pack_bytes / sizeof(Unit)>(
            thread, static_cast<unsigned>(words.width), packed,
            [&]<int n>(unsigned i) { store(to + i, has ? load<n>(from + i) : Pack<Unit, n>{}); });
    }
};

// Adds the gradient of each id to its row, for repeated ids in their order. The block of the first of equal ids does it for
// all of them.
template <class T>
struct AddWords {
    static constexpr unsigned threads = 256;
    static constexpr int phases = 3;
    struct Shared {
        unsigned is_repeated;
    };

    Words words;
    const void* grad;
    const void* sum;

    [[nodiscard]] unsigned blocks() const { return words.blocks(); }
    template <class Visit>
    void memory(Visit&& visit) {
        words.ids.memory(visit);
        words.outside.memory(visit);
        visit(grad, words.ids.count * words.width * sizeof(T));
        if (words.elements() > 0) visit(sum, words.elements() * sizeof(T));
    }
    template <int phase>
    TSR_HD void run(const Thread& thread, Shared& shared) const {
        const int64_t id = words.ids.at(thread.block);
        if constexpr (phase == 0) {
            words.check(thread, id);
            if (thread.index == 0) shared.is_repeated = 0;
        } else if constexpr (phase == 1) {
            if (!words.has(id)) return;
            for (unsigned i = thread.index; i < thread.block; i += thread.count) {
                if (words.ids.at(i) == id) shared.is_repeated = 1;  // all that write it write the same
            }
        } else {
            if (!words.has(id) || shared.is_repeated != 0) return;
            add_all(thread, id);
        }
    }

   private:
    TSR_HD void add_all(const Thread& thread, int64_t id) const {
        T* const to = static_cast<T*>(const_cast<void*>(sum)) + words.first_element(id);
        const T* const grads = static_cast<const T*>(grad);
        const bool packed =
            is_aligned(to, pack_bytes) && is_aligned(grads, pack_bytes) && words.width * sizeof(T) % pack_bytes == 0;
        for_elements<pack_bytes / sizeof(T)>(thread, static_cast<unsigned>(words.width), packed,
                                             [&]<int n>(unsigned i) {
                                                 auto sums = load<n>(to + i);
                                                 for (size_t place = thread.block; place < words.ids.count; ++place) {
                                                     if (words.ids.at(place) != id) continue;
                                                     const auto more = load<n>(grads + place * words.width + i);
                                                     for (int k = 0; k < n; ++k)
                                                         sums.values[k] = sum_of(sums.values[k], more.values[k]);
                                                 }
                                                 store(to + i, sums);
                                             });
    }
};

}  // namespace tsr::kernels
