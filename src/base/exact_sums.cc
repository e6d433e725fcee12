#include "base/exact_sums.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/error.hpp"

namespace tsr {

namespace {

// Moves carries up. All limbs but the last are then 0 to 2^32 - 1; the last has the sign.
void carry_up(std::span<int64_t> limbs) {
    int64_t carried = 0;
    for (size_t k = 0; k + 1 < limbs.size(); ++k) {
        const int64_t limb = limbs[k] + carried;
        limbs[k] = limb & 0xffffffff;
        carried = limb >> 32;
    }
    if (!limbs.empty()) limbs.back() += carried;
}

// The double nearest to `words`, the last of which is not 0, times 2^(32 * low - 1074).
double rounded(std::span<const uint32_t> words, int low) {
    const auto at = [&](size_t from_top) {
        return from_top < words.size() ? uint64_t{words[words.size() - 1 - from_top]} : 0;
    };
    const int zeros = std::countl_zero(words.back());
    uint64_t window = (at(0) << 32 | at(1)) << zeros;
    if (zeros > 0) window |= at(2) >> (32 - zeros);
    bool more = (static_cast<uint32_t>(at(2)) << zeros) != 0;
    for (size_t k = 3; !more && k < words.size(); ++k) more = at(k) != 0;
    uint64_t mantissa = window >> 11;
    const uint64_t rest = window & 0x7ff;
    if (rest > 0x400 || (rest == 0x400 && (more || (mantissa & 1) != 0))) ++mantissa;
    const int top_bit = 32 * (low + static_cast<int>(words.size())) - 1 - zeros;
    return std::ldexp(static_cast<double>(mantissa), top_bit - 52 - 1074);
}

}  // namespace

void ExactSums::add_count(size_t i, int64_t value) {
    add(i, static_cast<double>(value >> 32) * 0x1p32);
    add(i, static_cast<double>(value & 0xffffffff));
}

void ExactSums::add_product(size_t i, double a, double b) {
    const double product = a * b;
    add(i, product);
    add(i, std::fma(a, b, -product));
}

double ExactSums::value(size_t i) const {
    if (!is_used()) return 0;
    std::array<int64_t, all_limbs + 1> limbs;
    const std::span own(limbs.data(), width());
    std::copy_n(&limbs_[i * width()], width(), own.begin());
    carry_up(own);
    const bool negative = own.back() < 0;
    if (negative) {
        for (int64_t& limb : own) limb = -limb;
        carry_up(own);
    }
    std::array<uint32_t, all_limbs + 2> words;
    for (size_t k = 0; k < own.size(); ++k) words[k] = static_cast<uint32_t>(own[k]);
    words[own.size()] = static_cast<uint32_t>(own.back() >> 32);
    size_t used = own.size() + 1;
    while (used > 0 && words[used - 1] == 0) --used;
    if (used == 0) return 0;
    const double magnitude = rounded({words.data(), used}, low_);
    return negative ? -magnitude : magnitude;
}

ExactSums::Pair ExactSums::pair(size_t i) const {
    const double high = value(i);
    if (!std::isfinite(high)) return {high, 0};
    ExactSums rest = slice(i);
    rest.add(0, -high);
    return {high, rest.value(0)};
}

ExactSums ExactSums::slice(size_t i) const {
    ExactSums one(1);
    if (!is_used()) return one;
    one.grow(low_, high_);
    std::copy_n(&limbs_[i * width()], width(), one.limbs_.begin());
    one.pending_ = pending_;
    return one;
}

void ExactSums::grow(int low, int high) {
    const int new_low = std::min(low, low_);
    const int new_high = std::max(high, high_);
    if (new_low == low_ && new_high == high_) return;
    const auto new_width = static_cast<size_t>(new_high - new_low);
    std::vector<int64_t> limbs(count_ * new_width);
    if (is_used()) {
        for (size_t i = 0; i < count_; ++i) {
            std::copy_n(&limbs_[i * width()], width(), &limbs[i * new_width + static_cast<size_t>(low_ - new_low)]);
        }
    }
    limbs_ = std::move(limbs);
    low_ = new_low;
    high_ = new_high;
}

void ExactSums::carry() {
    for (size_t i = 0; is_used() && i < count_; ++i) carry_up(std::span(limbs_).subspan(i * width(), width()));
    pending_ = 1;
}

void ExactSums::add_sum(size_t i, const ExactSums& other, size_t k) {
    if (!other.is_used()) return;
    grow(other.low_, other.high_);
    std::vector<int64_t> added(other.limbs_.begin() + static_cast<std::ptrdiff_t>(k * other.width()),
                               other.limbs_.begin() + static_cast<std::ptrdiff_t>((k + 1) * other.width()));
    carry_up(added);
    int64_t* to = &limbs_[i * width() + static_cast<size_t>(other.low_ - low_)];
    for (size_t at = 0; at < added.size(); ++at) to[at] += added[at];
    carry_up(std::span(limbs_).subspan(i * width(), width()));
}

void ExactSums::merge(const ExactSums& other) {
    for (size_t i = 0; i < count_; ++i) add_sum(i, other, i);
}

void ExactSums::clear() {
    limbs_.clear();
    low_ = all_limbs;
    high_ = 0;
    pending_ = 0;
}

ExactSums::Limbs ExactSums::limbs() const {
    if (!is_used()) return {0, 0, {}};
    Limbs out{low_, high_, limbs_};
    for (size_t i = 0; i < count_; ++i) carry_up(std::span(out.words).subspan(i * width(), width()));
    return out;
}

void ExactSums::set_limbs(Limbs limbs) {
    const bool none = limbs.high == 0 && limbs.low == 0 && limbs.words.empty();
    const bool in_range = limbs.low >= 0 && limbs.low < limbs.high && limbs.high <= all_limbs &&
                          limbs.words.size() == count_ * static_cast<size_t>(limbs.high - limbs.low);
    const auto small = [](int64_t limb) { return limb > -(int64_t{1} << 48) && limb < int64_t{1} << 48; };
    if (!none && (!in_range || !std::ranges::all_of(limbs.words, small))) {
        throw Error(Code::mismatch, "the saved sums of a metric are not sums");
    }
    clear();
    if (none) return;
    low_ = limbs.low;
    high_ = limbs.high;
    limbs_ = std::move(limbs.words);
    carry();
}

}  // namespace tsr
