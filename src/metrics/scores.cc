#include "metrics/scores.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace tsr::metrics {

namespace {

template <class Key>
bool is_score(Key key) {
    return std::isfinite(score_of(key)) && key_of(score_of(key)) == key;
}

template <class Key>
void load_lists(ByteReader& in, std::vector<Samples<Key>>& lists, bool weighted) {
    for (Samples<Key>& list : lists) {
        list.keys = in.list<Key>();
        list.weights = in.list<double>();
        const auto is_weight = [](double weight) { return std::isfinite(weight) && weight > 0; };
        if (!std::ranges::all_of(list.keys, is_score<Key>) || !std::ranges::all_of(list.weights, is_weight) ||
            list.weights.size() != (weighted ? list.keys.size() : 0)) {
            ByteReader::refuse();
        }
    }
}

}  // namespace

void Scores::use_doubles() {
    if (is_double_) return;
    std::vector<Samples<uint64_t>> doubles(single_.size());
    for (size_t i = 0; i < doubles.size(); ++i) {
        doubles[i].keys.reserve(single_[i].keys.size());
        for (const uint32_t key : single_[i].keys) doubles[i].keys.push_back(key_of(double{score_of(key)}));
    }
    for (size_t i = 0; i < doubles.size(); ++i) doubles[i].weights = std::move(single_[i].weights);
    doubles_ = std::move(doubles);
    single_.clear();
    is_double_ = true;
}

void Scores::use_weights() {
    if (is_weighted_) return;
    for (auto& list : single_) list.weights.resize(list.keys.size(), 1);
    for (auto& list : doubles_) list.weights.resize(list.keys.size(), 1);
    is_weighted_ = true;
}

void Scores::merge(const Scores& other) {
    Scores added = other;
    if (other.is_double_) use_doubles();
    if (other.is_weighted_) use_weights();
    if (is_double_) added.use_doubles();
    if (is_weighted_) added.use_weights();
    for (size_t i = 0; i < single_.size(); ++i) append(single_[i], added.single_[i]);
    for (size_t i = 0; i < doubles_.size(); ++i) append(doubles_[i], added.doubles_[i]);
}

void Scores::clear() { *this = Scores(lists()); }

void Scores::agree(Ranks& ranks) {
    std::array<int64_t, 2> used{is_double_ ? 1 : 0, is_weighted_ ? 1 : 0};
    ranks.max(used);
    if (used[0] != 0) use_doubles();
    if (used[1] != 0) use_weights();
}

void Scores::move_to_first(Ranks& ranks) {
    agree(ranks);
    const auto move = [&](auto& list) {
        using Key = typename std::remove_reference_t<decltype(list.keys)>::value_type;
        list.keys = ranks.gather_to_first(std::span<const Key>(list.keys));
        if (is_weighted_) list.weights = ranks.gather_to_first(std::span<const double>(list.weights));
    };
    std::ranges::for_each(single_, move);
    std::ranges::for_each(doubles_, move);
}

void Scores::save(ByteWriter& out) const {
    out.number(is_double_ ? 1 : 0);
    out.number(is_weighted_ ? 1 : 0);
    const auto put = [&](const auto& list) {
        out.list(std::span(list.keys));
        out.list(std::span(list.weights));
    };
    std::ranges::for_each(single_, put);
    std::ranges::for_each(doubles_, put);
}

void Scores::load(ByteReader& in) {
    Scores loaded(lists());
    if (in.number() != 0) loaded.use_doubles();
    if (in.number() != 0) loaded.use_weights();
    load_lists(in, loaded.single_, loaded.is_weighted_);
    load_lists(in, loaded.doubles_, loaded.is_weighted_);
    *this = std::move(loaded);
}

}  // namespace tsr::metrics
