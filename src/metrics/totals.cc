#include "metrics/totals.hpp"

#include <algorithm>
#include <utility>

namespace tsr::metrics {

ExactSums::Pair Totals::pair(size_t i) const {
    ExactSums one = sums_.slice(i);
    one.add_count(0, counts_[i]);
    return one.pair(0);
}

void Totals::add_total(size_t i, const Totals& other, size_t k) {
    counts_[i] += other.counts_[k];
    sums_.add_sum(i, other.sums_, k);
}

void Totals::merge(const Totals& other) {
    for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
    sums_.merge(other.sums_);
}

void Totals::clear() {
    std::ranges::fill(counts_, 0);
    sums_.clear();
}

void Totals::reduce(Ranks& ranks) {
    ranks.sum(counts_);
    sums_.reduce(ranks);
}

std::vector<Totals> Totals::gather(Ranks& ranks) {
    const std::vector<int64_t> counts = ranks.gather(std::span<const int64_t>(counts_));
    std::vector<ExactSums> sums = sums_.gather(ranks);
    std::vector<Totals> all(sums.size(), Totals(size()));
    for (size_t r = 0; r < all.size(); ++r) {
        std::copy_n(counts.begin() + static_cast<std::ptrdiff_t>(r * size()), size(), all[r].counts_.begin());
        all[r].sums_ = std::move(sums[r]);
    }
    return all;
}

void Totals::save(ByteWriter& out) const {
    const ExactSums::Limbs limbs = sums_.limbs();
    out.list(std::span<const int64_t>(counts_));
    out.number(static_cast<uint64_t>(limbs.low));
    out.number(static_cast<uint64_t>(limbs.high));
    out.list(std::span<const int64_t>(limbs.words));
}

void Totals::load(ByteReader& in) {
    std::vector<int64_t> counts = in.list<int64_t>();
    const uint64_t low = in.number();
    const uint64_t high = in.number();
    ExactSums sums(size());
    const bool good =
        counts.size() == size() && low <= 4096 && high <= 4096 &&
        std::ranges::all_of(counts, [](int64_t count) { return count >= 0 && count <= int64_t{1} << 60; });
    if (!good) ByteReader::refuse();
    sums.set_limbs({static_cast<int>(low), static_cast<int>(high), in.list<int64_t>()});
    counts_ = std::move(counts);
    sums_ = std::move(sums);
}

}  // namespace tsr::metrics
