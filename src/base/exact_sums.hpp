// Sums of doubles that are exact until they are read. A sum is a whole number of 2^-1074 in limbs of 32 bits, each with 31 bits of
// room for carries: the small superaccumulator of R. M. Neal, "Fast exact summation using small and large superaccumulators",
// arXiv:1505.05571 (2015). So neither the order of additions nor how they are split over ranks changes a bit. All sums of an
// object share one range of limbs, which grows with the exponents that occur: a weight near 1 takes three or four. Owned by one
// thread.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tsr {

class ExactSums {
   public:
    explicit ExactSums(size_t count) : count_(count) {}

    [[nodiscard]] size_t size() const { return count_; }
    [[nodiscard]] bool is_used() const { return high_ > 0; }  // something but zeros was added

    // Adds a finite number to sum `i`.
    void add(size_t i, double value) {
        const auto bits = std::bit_cast<uint64_t>(value);
        const auto field = static_cast<int>((bits >> 52) & 0x7ff);
        const uint64_t fraction = bits & ((uint64_t{1} << 52) - 1);
        if ((bits << 1) == 0) return;
        const uint64_t mantissa = field == 0 ? fraction : fraction | (uint64_t{1} << 52);
        const int shift = field == 0 ? 0 : field - 1;  // of the mantissa's last bit, from 2^-1074
        const int first = shift / limb_bits;
        const int by = shift % limb_bits;
        if (first < low_ || first + touched > high_) grow(first, first + touched);
        const uint64_t below = mantissa << by;
        const uint64_t above = by == 0 ? 0 : mantissa >> (64 - by);
        const int64_t sign = (bits >> 63) != 0 ? -1 : 0;
        int64_t* limb = &limbs_[i * width() + static_cast<size_t>(first - low_)];
        limb[0] += (static_cast<int64_t>(below & limb_mask) ^ sign) - sign;
        limb[1] += (static_cast<int64_t>(below >> limb_bits) ^ sign) - sign;
        limb[2] += (static_cast<int64_t>(above) ^ sign) - sign;
        if (++pending_ == most_pending) carry();
    }
    void add_count(size_t i, int64_t value);
    // Adds a * b without rounding, as long as the product's last bit is not below 2^-1074.
    void add_product(size_t i, double a, double b);

    // The double nearest to sum `i`; ties to even.
    [[nodiscard]] double value(size_t i) const;
    // The nearest double and the double nearest to the rest.
    struct Pair {
        double high, low;
    };
    [[nodiscard]] Pair pair(size_t i) const;

    // Sum `i` alone.
    [[nodiscard]] ExactSums slice(size_t i) const;

    // Adds sum `k` of another object to sum `i`.
    void add_sum(size_t i, const ExactSums& other, size_t k);
    void merge(const ExactSums& other);  // of the same size
    void clear();
    // Each sum becomes that of all ranks. `ranks` has size(), and sums, maxima and gather() of int64_t over them.
    template <class Ranks>
    void reduce(Ranks& ranks);
    // The objects of all ranks, in their order.
    template <class Ranks>
    [[nodiscard]] std::vector<ExactSums> gather(Ranks& ranks);

    // The range of limbs, and the limbs after all carries, sum after sum.
    struct Limbs {
        int low, high;
        std::vector<int64_t> words;
    };
    [[nodiscard]] Limbs limbs() const;
    // Throws MISMATCH unless limbs() could have returned them for this size.
    void set_limbs(Limbs limbs);

   private:
    static constexpr int limb_bits = 32;
    static constexpr uint64_t limb_mask = 0xffffffff;
    static constexpr int touched = 4;  // limbs that an addition needs: three, and one that takes carries
    static constexpr int all_limbs = 2046 / limb_bits + touched + 1;
    static constexpr int64_t most_pending = int64_t{1} << 30;

    [[nodiscard]] size_t width() const { return static_cast<size_t>(high_ - low_); }
    void grow(int low, int high);
    void carry();
    template <class Ranks>
    void agree_on_range(Ranks& ranks);

    size_t count_;
    int low_ = all_limbs;  // the limbs low_ to high_ - 1 are kept
    int high_ = 0;
    int64_t pending_ = 0;  // additions since the last carry
    std::vector<int64_t> limbs_;
};

template <class Ranks>
void ExactSums::agree_on_range(Ranks& ranks) {
    std::array<int64_t, 2> range{-low_, high_};
    ranks.max(range);
    if (range[1] > 0) grow(static_cast<int>(-range[0]), static_cast<int>(range[1]));
    carry();
}

template <class Ranks>
void ExactSums::reduce(Ranks& ranks) {
    if (ranks.size() == 1) return;
    agree_on_range(ranks);
    if (!is_used()) return;
    ranks.sum(limbs_);
    carry();
}

template <class Ranks>
std::vector<ExactSums> ExactSums::gather(Ranks& ranks) {
    agree_on_range(ranks);
    std::vector<ExactSums> all(static_cast<size_t>(ranks.size()), ExactSums(count_));
    if (!is_used()) return all;
    const std::vector<int64_t> limbs = ranks.gather(std::span<const int64_t>(limbs_));
    for (size_t r = 0; r < all.size(); ++r) {
        all[r].grow(low_, high_);
        std::copy_n(&limbs[r * limbs_.size()], limbs_.size(), all[r].limbs_.begin());
        all[r].pending_ = 1;
    }
    return all;
}

}  // namespace tsr
