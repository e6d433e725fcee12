// The points of a curve, distributed over the ranks by score: a sample sort (W. D. Frazer and A. C. McKellar, "Samplesort: a
// sampling approach to minimal storage tree sorting", J. ACM 17(3), 1970). Each rank gets a range of scores, so that equal
// scores meet on one rank, and what is above them is known from the ranks' totals. A rank's memory is its share of all scores, if
// no score is very frequent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/function_ref.hpp"
#include "metrics/ranks.hpp"
#include "metrics/scores.hpp"
#include "metrics/totals.hpp"

namespace tsr::metrics {

// A distinct score, with the weights of the positive and negative samples whose score is higher, and higher or equal.
struct Point {
    double score;
    double positives_above, negatives_above;
    double positives, negatives;
};

template <class Key>
class CurvePoints {
   public:
    // Collective; sorts `positives` and `negatives` in place. They must outlive this. `weighted`: all samples of all ranks have
    // weights; otherwise none has.
    CurvePoints(Ranks& ranks, Samples<Key>& positives, Samples<Key>& negatives, bool weighted);

    // Calls body(point) for each distinct score of this rank's range, from the highest to the lowest.
    void for_each(FunctionRef<void(const Point&)> body) const;
    // Of all ranks.
    [[nodiscard]] double positives() const { return all_.value(0); }
    [[nodiscard]] double negatives() const { return all_.value(1); }

   private:
    // Sorted samples of this rank's range.
    struct Run {
        size_t side;  // 0: positive, 1: negative
        std::span<const Key> keys;
        std::span<const double> weights;
    };
    void add_runs(size_t side, const Samples<Key>& samples, std::span<const size_t> ends);
    void take(Ranks& ranks, size_t side, const Samples<Key>& samples, std::span<const Key> last_keys, bool weighted);

    std::vector<Run> runs_;
    Samples<Key> own_[2];  // what the ranks have of this rank's range, if there are others
    Totals above_{2};      // positives and negatives of the ranks before
    Totals all_{2};
};

extern template class CurvePoints<uint32_t>;
extern template class CurvePoints<uint64_t>;

}  // namespace tsr::metrics
