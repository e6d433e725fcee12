#include "metrics/curve_values.hpp"

#include <algorithm>
#include <limits>

namespace tsr::metrics {

namespace {

constexpr double undefined = std::numeric_limits<double>::quiet_NaN();

}  // namespace

void Area::add(const Point& point) {
    const double above = point.positives_above * scales_[0];
    const double up = point.positives * scales_[0] - above;
    if (!is_roc_) {
        // A step of recall at this precision, times all positives.
        if (up > 0) sum_.add(0, up * (point.positives / (point.positives + point.negatives)));
        return;
    }
    // A trapezoid, times twice all positives and negatives.
    const double end = max_fpr_ < 1 ? max_fpr_ * negatives_ : negatives_;
    const double left = point.negatives_above * scales_[1];
    const double right = point.negatives * scales_[1];
    if (right == left || left >= end) return;
    const bool is_last = max_fpr_ < 1 && right > end;
    const double width = is_last ? end - left : right - left;
    const double top = is_last ? above + up * (width / (right - left)) : point.positives * scales_[0];
    sum_.add(0, width * (above + top));
}

double Area::value(Ranks& ranks) {
    sum_.reduce(ranks);
    const double sum = sum_.value(0);
    if (!is_roc_) {
        if (positives_ == 0) return negatives_ == 0 ? undefined : 0;
        return sum / positives_;
    }
    if (positives_ == 0 || negatives_ == 0) return undefined;
    const double area = sum / (2 * positives_ * negatives_);
    if (max_fpr_ == 1) return area;
    const double least = 0.5 * max_fpr_ * max_fpr_;
    return 0.5 * (1 + (area - least) / (max_fpr_ - least));
}

void CurveArrays::add(const Point& point) {
    scores.push_back(point.score);
    positives.push_back(point.positives);
    negatives.push_back(point.negatives);
}

void CurveArrays::gather(Ranks& ranks) {
    for (auto* array : {&scores, &positives, &negatives}) *array = ranks.gather_all(std::span<const double>(*array));
}

void add_roc(Computed& out, const std::string& suffix, const CurveArrays& points, const CurveFrame& frame,
             bool all_points) {
    const auto& [scores, positives, negatives] = points;
    const size_t size = scores.size();
    std::vector<double> fpr, tpr, thresholds;
    for (auto* array : {&fpr, &tpr, &thresholds}) array->reserve(all_points ? size + 1 : 0);
    const auto put = [&](double threshold, double positive, double negative) {
        thresholds.push_back(threshold);
        tpr.push_back(frame.positives > 0 ? positive / frame.positives : undefined);
        fpr.push_back(frame.negatives > 0 ? negative / frame.negatives : undefined);
    };
    const auto bends = [](const std::vector<double>& y, size_t i) {
        return (y[i + 1] - y[i]) - (y[i] - y[i - 1]) != 0;
    };
    if (frame.has_start) put(std::numeric_limits<double>::infinity(), 0, 0);
    for (size_t i = 0; i < scores.size(); ++i) {
        const bool kept =
            all_points || i == 0 || i + 1 == size || bends(points.negatives, i) || bends(points.positives, i);
        if (kept) put(scores[i], positives[i], negatives[i]);
    }
    out.add("fpr" + suffix, std::move(fpr));
    out.add("tpr" + suffix, std::move(tpr));
    out.add("thresholds" + suffix, std::move(thresholds));
}

void add_precision_recall(Computed& out, const std::string& suffix, const CurveArrays& points,
                          const CurveFrame& frame) {
    const auto& [scores, positives, negatives] = points;
    std::vector<double> precision, recall;
    for (auto* array : {&precision, &recall}) array->reserve(scores.size() + 1);
    for (size_t i = scores.size(); i-- > 0;) {
        const double both = positives[i] + negatives[i];
        precision.push_back(both > 0 ? positives[i] / both : 0);
        recall.push_back(frame.positives > 0 ? positives[i] / frame.positives : 1);
    }
    if (frame.has_start) {
        precision.push_back(1);
        recall.push_back(0);
    }
    out.add("precision" + suffix, std::move(precision));
    out.add("recall" + suffix, std::move(recall));
    out.add("thresholds" + suffix, {scores.rbegin(), scores.rend()});
}

}  // namespace tsr::metrics
