// Sorts unsigned keys, and values that go with them, by their digits from the last to the first. Stable. Digits that all keys
// share cost one look.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tsr::metrics {

// `values` is empty or as long as `keys`. `spare_keys` and `spare_values` are memory, which calls use again.
template <class Key>
void radix_sort(std::vector<Key>& keys, std::vector<double>& values, std::vector<Key>& spare_keys,
                std::vector<double>& spare_values) {
    constexpr int digit_bits = 11;
    constexpr size_t digits = size_t{1} << digit_bits;
    constexpr int passes = (8 * sizeof(Key) + digit_bits - 1) / digit_bits;
    if (std::ranges::is_sorted(keys)) return;
    const auto digit = [](Key key, int pass) { return static_cast<size_t>(key >> (pass * digit_bits)) & (digits - 1); };
    std::vector<std::array<size_t, digits>> counts(passes);
    for (const Key key : keys) {
        for (int pass = 0; pass < passes; ++pass) ++counts[static_cast<size_t>(pass)][digit(key, pass)];
    }
    spare_keys.resize(keys.size());
    spare_values.resize(values.size());
    for (int pass = 0; pass < passes; ++pass) {
        auto& places = counts[static_cast<size_t>(pass)];
        if (places[digit(keys[0], pass)] == keys.size()) continue;
        size_t at = 0;
        for (size_t& place : places) at += std::exchange(place, at);
        for (size_t i = 0; i < keys.size(); ++i) {
            const size_t place = places[digit(keys[i], pass)]++;
            spare_keys[place] = keys[i];
            if (!values.empty()) spare_values[place] = values[i];
        }
        keys.swap(spare_keys);
        values.swap(spare_values);
    }
}

}  // namespace tsr::metrics
