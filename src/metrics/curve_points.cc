#include "metrics/curve_points.hpp"

#include <algorithm>
#include <utility>

#include "metrics/radix_sort.hpp"

namespace tsr::metrics {

namespace {

constexpr size_t samples_per_rank = 512;
constexpr int most_runs = 8;  // of each side, that for_each() takes from in turns

template <class Key>
void sort(Samples<Key>& samples, Samples<Key>& spare) {
    radix_sort(samples.keys, samples.weights, spare.keys, spare.weights);
}

// A key and the number of samples that it stands for.
struct Pick {
    uint64_t key;
    int64_t weight;
};

template <class Key>
void pick(const Samples<Key>& samples, std::vector<int64_t>& picks) {
    const size_t count = samples.keys.size();
    for (size_t i = 0; i < samples_per_rank / 2; ++i) {
        const size_t begin = count * i / (samples_per_rank / 2);
        const size_t end = count * (i + 1) / (samples_per_rank / 2);
        picks.push_back(begin < end ? static_cast<int64_t>(samples.keys[begin + (end - begin) / 2]) : 0);
        picks.push_back(static_cast<int64_t>(end - begin));
    }
}

// The last keys of all ranges but the last, from evenly spaced samples of every rank.
template <class Key>
std::vector<Key> splitters(Ranks& ranks, const Samples<Key>& positives, const Samples<Key>& negatives) {
    std::vector<int64_t> own;
    pick(positives, own);
    pick(negatives, own);
    const std::vector<int64_t> words = ranks.gather(own);
    std::vector<Pick> picks;
    int64_t total = 0;
    for (size_t i = 0; i < words.size(); i += 2) {
        if (words[i + 1] > 0) picks.push_back({static_cast<uint64_t>(words[i]), words[i + 1]});
        total += words[i + 1];
    }
    std::ranges::sort(picks, {}, &Pick::key);
    std::vector<Key> found;
    int64_t passed = 0;
    const int64_t size = ranks.size();
    for (const Pick& one : picks) {
        passed += one.weight;
        while (static_cast<int64_t>(found.size()) + 1 < size &&
               passed >= (total / size) * (static_cast<int64_t>(found.size()) + 1)) {
            found.push_back(static_cast<Key>(one.key));
        }
    }
    found.resize(static_cast<size_t>(size) - 1, static_cast<Key>(~Key{0}));
    return found;
}

}  // namespace

template <class Key>
CurvePoints<Key>::CurvePoints(Ranks& ranks, Samples<Key>& positives, Samples<Key>& negatives, bool weighted) {
    {
        Samples<Key> spare;
        sort(positives, spare);
        sort(negatives, spare);
    }
    if (ranks.size() == 1) {
        const size_t ends[] = {positives.keys.size(), negatives.keys.size()};
        add_runs(0, positives, {&ends[0], 1});
        add_runs(1, negatives, {&ends[1], 1});
    } else {
        const std::vector<Key> last_keys = splitters(ranks, positives, negatives);
        take(ranks, 0, positives, last_keys, weighted);
        take(ranks, 1, negatives, last_keys, weighted);
    }
    for (const Run& run : runs_) {
        if (run.weights.empty()) all_.count(run.side, static_cast<int64_t>(run.keys.size()));
        for (const double weight : run.weights) all_.add(run.side, weight);
    }
    if (ranks.size() == 1) return;
    const std::vector<Totals> of_ranks = all_.gather(ranks);
    all_.clear();
    for (int r = 0; r < ranks.size(); ++r) {
        if (r < ranks.rank()) above_.merge(of_ranks[static_cast<size_t>(r)]);
        all_.merge(of_ranks[static_cast<size_t>(r)]);
    }
}

template <class Key>
void CurvePoints<Key>::add_runs(size_t side, const Samples<Key>& samples, std::span<const size_t> ends) {
    size_t begin = 0;
    for (const size_t end : ends) {
        const std::span keys(samples.keys);
        const std::span weights(samples.weights);
        const auto part = [&](auto all) { return all.empty() ? all : all.subspan(begin, end - begin); };
        if (begin < end) runs_.push_back({side, part(keys), part(weights)});
        begin = end;
    }
}

// Brings together what all ranks have of this rank's range. Every rank's part is sorted; many are sorted into one, as looking
// at each would take longer.
template <class Key>
void CurvePoints<Key>::take(Ranks& ranks, size_t side, const Samples<Key>& samples, std::span<const Key> last_keys,
                            bool weighted) {
    std::vector<size_t> ends;
    for (const Key last : last_keys) {
        ends.push_back(static_cast<size_t>(std::ranges::upper_bound(samples.keys, last) - samples.keys.begin()));
    }
    ends.push_back(samples.keys.size());
    auto received = ranks.exchange(std::span<const Key>(samples.keys), ends);
    Samples<Key>& own = own_[side];
    own.keys = std::move(received.values);
    if (weighted) own.weights = ranks.exchange(std::span<const double>(samples.weights), ends).values;
    if (ranks.size() > most_runs) {
        Samples<Key> spare;
        sort(own, spare);
        received.ends = {own.keys.size()};
    }
    add_runs(side, own, received.ends);
}

template <class Key>
void CurvePoints<Key>::for_each(FunctionRef<void(const Point&)> body) const {
    Totals above = above_;
    Point point{0, 0, 0, above.value(0), above.value(1)};
    std::vector<Run> left = runs_;
    while (!left.empty()) {
        Key key = left[0].keys[0];
        for (const Run& run : left) key = std::min(key, run.keys[0]);
        for (size_t i = 0; i < left.size();) {
            Run& run = left[i];
            size_t equal = 0;
            while (equal < run.keys.size() && run.keys[equal] == key) ++equal;
            if (run.weights.empty()) {
                above.count(run.side, static_cast<int64_t>(equal));
            } else {
                for (const double weight : run.weights.first(equal)) above.add(run.side, weight);
                run.weights = run.weights.subspan(equal);
            }
            run.keys = run.keys.subspan(equal);
            if (run.keys.empty()) {
                run = left.back();
                left.pop_back();
            } else {
                ++i;
            }
        }
        point.score = score_of(key);
        point.positives_above = point.positives;
        point.negatives_above = point.negatives;
        point.positives = above.value(0);
        point.negatives = above.value(1);
        body(point);
    }
}

template class CurvePoints<uint32_t>;
template class CurvePoints<uint64_t>;

}  // namespace tsr::metrics
