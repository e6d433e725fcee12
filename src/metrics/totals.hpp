// Totals of samples, which add up over ranks in any order to the same bits: each is a count of samples without weights plus an
// exact sum of weighted ones.
#pragma once

#include <cstdint>
#include <vector>

#include "base/exact_sums.hpp"
#include "metrics/bytes.hpp"
#include "metrics/ranks.hpp"

namespace tsr::metrics {

class Totals {
   public:
    explicit Totals(size_t size) : counts_(size), sums_(size) {}

    [[nodiscard]] size_t size() const { return counts_.size(); }
    void count(size_t i, int64_t samples = 1) { counts_[i] += samples; }
    void add(size_t i, double value) { sums_.add(i, value); }
    void add_product(size_t i, double a, double b) { sums_.add_product(i, a, b); }

    [[nodiscard]] bool is_counted() const { return !sums_.is_used(); }  // nothing but counts
    [[nodiscard]] int64_t counted(size_t i) const { return counts_[i]; }
    // The nearest double.
    [[nodiscard]] double value(size_t i) const {
        if (is_counted()) return static_cast<double>(counts_[i]);
        return counts_[i] == 0 ? sums_.value(i) : pair(i).high;
    }
    [[nodiscard]] ExactSums::Pair pair(size_t i) const;

    // Adds total `k` of another object to total `i`.
    void add_total(size_t i, const Totals& other, size_t k);
    void merge(const Totals& other);
    void clear();
    void reduce(Ranks& ranks);
    [[nodiscard]] std::vector<Totals> gather(Ranks& ranks);

    void save(ByteWriter& out) const;
    // Throws MISMATCH unless they were saved from totals of this size.
    void load(ByteReader& in);

   private:
    std::vector<int64_t> counts_;
    ExactSums sums_;
};

}  // namespace tsr::metrics
