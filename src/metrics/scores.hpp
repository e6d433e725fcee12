// The scores of a curve metric: lists of keys, which sort as the scores do from the largest to the smallest, and weights if any
// sample has one. Scores are kept as f32 until a double comes, then all are kept as doubles. Equal scores have equal keys: -0 is 0.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "metrics/bytes.hpp"
#include "metrics/ranks.hpp"

namespace tsr::metrics {

inline uint32_t key_of(float score) {
    const auto bits = std::bit_cast<uint32_t>(score + 0.0F);
    return ~((bits >> 31) != 0 ? ~bits : bits | 0x80000000U);
}
inline uint64_t key_of(double score) {
    const auto bits = std::bit_cast<uint64_t>(score + 0.0);
    return ~((bits >> 63) != 0 ? ~bits : bits | 0x8000000000000000U);
}
inline float score_of(uint32_t key) {
    const uint32_t bits = ~key;
    return std::bit_cast<float>((bits >> 31) != 0 ? bits & 0x7fffffffU : ~bits);
}
inline double score_of(uint64_t key) {
    const uint64_t bits = ~key;
    return std::bit_cast<double>((bits >> 63) != 0 ? bits & 0x7fffffffffffffffU : ~bits);
}

// Some samples of one kind, such as the positive ones of a class.
template <class Key>
struct Samples {
    std::vector<Key> keys;
    std::vector<double> weights;  // empty: 1 each
};

template <class Key>
void append(Samples<Key>& to, const Samples<Key>& from) {
    to.keys.insert(to.keys.end(), from.keys.begin(), from.keys.end());
    to.weights.insert(to.weights.end(), from.weights.begin(), from.weights.end());
}

class Scores {
   public:
    explicit Scores(size_t lists) : single_(lists) {}

    [[nodiscard]] size_t lists() const { return is_double_ ? doubles_.size() : single_.size(); }
    [[nodiscard]] bool is_double() const { return is_double_; }
    [[nodiscard]] bool is_weighted() const { return is_weighted_; }
    template <class Key>
    [[nodiscard]] std::vector<Samples<Key>>& of() {
        if constexpr (sizeof(Key) == 4) {
            return single_;
        } else {
            return doubles_;
        }
    }

    void use_doubles();
    void use_weights();

    void merge(const Scores& other);
    void clear();
    // All ranks then keep scores in the same way.
    void agree(Ranks& ranks);
    void move_to_first(Ranks& ranks);
    void save(ByteWriter& out) const;
    void load(ByteReader& in);

   private:
    bool is_double_ = false;
    bool is_weighted_ = false;
    std::vector<Samples<uint32_t>> single_;
    std::vector<Samples<uint64_t>> doubles_;
};

}  // namespace tsr::metrics
