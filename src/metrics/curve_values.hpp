// What curves are reduced to: areas, as exact sums over the points of all ranks, and arrays as scikit-learn returns them.
#pragma once

#include <string>
#include <vector>

#include "base/exact_sums.hpp"
#include "metrics/curve_points.hpp"
#include "metrics/metric.hpp"

namespace tsr::metrics {

// Average precision, or the area under the ROC curve up to a false positive rate.
class Area {
   public:
    Area(bool is_roc, double max_fpr, double positives, double negatives)
        : is_roc_(is_roc),
          max_fpr_(max_fpr),
          scales_{scale_of(positives), scale_of(negatives)},
          positives_(positives * scales_[0]),
          negatives_(negatives * scales_[1]) {}

    void add(const Point& point);
    // Over the points of all ranks: collective.
    [[nodiscard]] double value(Ranks& ranks);

   private:
    bool is_roc_;
    double max_fpr_;
    double scales_[2];  // of positives, and of negatives
    double positives_, negatives_;
    ExactSums sum_{1};
};

// The points of all ranks, from the highest score to the lowest.
struct CurveArrays {
    std::vector<double> scores, positives, negatives;

    void add(const Point& point);
    void gather(Ranks& ranks);
};

// What a part of a curve has to know of it all.
struct CurveFrame {
    double positives, negatives;  // all of them
    bool has_start = true;        // it has the point above all scores
};

// Adds the arrays of the ROC curve or the precision-recall curve to `out`, with `suffix` after their names.
void add_roc(Computed& out, const std::string& suffix, const CurveArrays& points, const CurveFrame& frame,
             bool all_points);
void add_precision_recall(Computed& out, const std::string& suffix, const CurveArrays& points, const CurveFrame& frame);

[[nodiscard]] inline bool is_roc(Kind kind) {
    return kind == Kind::roc_curve || kind == Kind::auroc || kind == Kind::binned_roc_curve ||
           kind == Kind::binned_auroc;
}
[[nodiscard]] inline bool is_area(Kind kind) {
    return kind == Kind::average_precision || kind == Kind::auroc || kind == Kind::binned_average_precision ||
           kind == Kind::binned_auroc;
}

}  // namespace tsr::metrics
