// A plain value as atomic words, which many threads or processes may read while its owner writes it. A sequence lock
// beside it (`version` is odd during a write) lets a reader detect an inconsistent read. Words are stored with release
// and loaded with acquire, so that a reader that sees a new word also sees the odd version before it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>

namespace tsr {

using AtomicWord = std::atomic<uint64_t>;

template <class T>
inline constexpr size_t words_of = sizeof(T) / sizeof(uint64_t);

template <class T>
void store_words(std::span<AtomicWord, words_of<T>> to, const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
    const auto* from = reinterpret_cast<const std::byte*>(&value);
    const auto store = [&](size_t i) {
        uint64_t word = 0;
        std::memcpy(&word, from + i * sizeof word, sizeof word);
        to[i].store(word, std::memory_order_release);
    };
    // Runs twice per collective: unrolled, since the compiler would keep a loop.
    [&]<size_t... i>(std::index_sequence<i...>) { (store(i), ...); }(std::make_index_sequence<words_of<T>>{});
}

template <class T>
void load_words(T& value, std::span<const AtomicWord, words_of<T>> from) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
    auto* to = reinterpret_cast<std::byte*>(&value);
    for (size_t i = 0; i < from.size(); ++i) {
        const uint64_t word = from[i].load(std::memory_order_acquire);
        std::memcpy(to + i * sizeof word, &word, sizeof word);
    }
}

}  // namespace tsr
