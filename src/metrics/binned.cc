// Curves at fixed thresholds, evenly spaced from 0 to 1: counts of constant size. Exact at the thresholds; areas are those of the
// curve through them.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/refuse.hpp"
#include "metrics/curve_values.hpp"
#include "metrics/totals_metric.hpp"

namespace tsr::metrics {

namespace {

class Binned final : public TotalsMetric {
   public:
    Binned(Kind kind, const Options& options)
        : TotalsMetric(kind, options,
                       (options.task == Task::binary ? 2 : 2 * static_cast<size_t>(options.classes)) *
                           static_cast<size_t>(options.thresholds)) {}

   private:
    [[nodiscard]] size_t thresholds() const { return static_cast<size_t>(options().thresholds); }
    [[nodiscard]] double threshold(size_t k) const {
        return static_cast<double>(k) / static_cast<double>(options().thresholds - 1);
    }
    // The samples of a column, negative or positive, that reach threshold k and not the next.
    [[nodiscard]] size_t bin(size_t column, bool positive, size_t k) const {
        return (2 * column + (positive ? 1 : 0)) * thresholds() + k;
    }

    Form form() const override { return form_of_scores(); }

    void check_rows(const Batch& batch) const override {
        batch.for_each_block([&](const Block& block) {
            const auto outside = [](double score) { return !(score >= 0 && score <= 1); };
            const auto found = std::ranges::find_if(block.predictions, outside);
            if (found == block.predictions.end()) return;
            const auto at = static_cast<size_t>(found - block.predictions.begin());
            refuse("predictions{} is {}; binned metrics take scores from 0 to 1",
                   batch.place(block, at / columns(), at % columns(), columns()), *found);
        });
    }

    [[nodiscard]] size_t bin_of(double score) const {
        auto k = static_cast<size_t>(score * static_cast<double>(thresholds() - 1));
        if (k + 1 < thresholds() && score >= threshold(k + 1)) ++k;
        if (score < threshold(k)) --k;
        return k;
    }

    void add(const Batch& batch) override {
        batch.for_each_block([&](const Block& block) {
            for (size_t i = 0; i < block.rows; ++i) {
                for (size_t c = 0; c < columns(); ++c) {
                    const int64_t label = block.labels[is_multilabel() ? i * columns() + c : i];
                    const bool positive =
                        options().task == Task::multiclass ? label == static_cast<int64_t>(c) : label == 1;
                    tally(block, i, bin(c, positive, bin_of(block.predictions[i * columns() + c])));
                }
            }
        });
    }

    // Each threshold's point, from the highest.
    [[nodiscard]] std::vector<Point> points_of(const Totals& totals, size_t column) const {
        std::vector<Point> points;
        Point point{0, 0, 0, 0, 0};
        Totals passed(2);
        for (size_t k = thresholds(); k-- > 0;) {
            point.score = threshold(k);
            point.positives_above = point.positives;
            point.negatives_above = point.negatives;
            passed.add_total(0, totals, bin(column, true, k));
            passed.add_total(1, totals, bin(column, false, k));
            point.positives = passed.value(0);
            point.negatives = passed.value(1);
            points.push_back(point);
        }
        return points;
    }

    void evaluate(const Totals& totals, Computed& out) const override {
        Ranks alone(nullptr);
        std::vector<double> values, weights;
        for (size_t c = 0; c < columns(); ++c) {
            const std::vector<Point> points = points_of(totals, c);
            if (!is_area(kind())) {
                add_curve(points, c, out);
                continue;
            }
            Area area(is_roc(kind()), 1, points.back().positives, points.back().negatives);
            for (const Point& point : points) area.add(point);
            values.push_back(area.value(alone));
            weights.push_back(points.back().positives);
        }
        if (!is_area(kind())) return;
        if (options().task == Task::binary) {
            out.value = values[0];
            return;
        }
        add_average(out, std::move(values), weights, true);
    }

    void add_curve(const std::vector<Point>& points, size_t column, Computed& out) const {
        CurveArrays arrays;
        for (const Point& point : points) arrays.add(point);
        const std::string suffix = options().task == Task::binary ? "" : fmt::format(".{}", column);
        const CurveFrame frame{points.back().positives, points.back().negatives};
        if (is_roc(kind())) {
            add_roc(out, suffix, arrays, frame, true);
        } else {
            add_precision_recall(out, suffix, arrays, frame);
        }
    }
};

}  // namespace

std::shared_ptr<Metric> make_binned(Kind kind, const Options& options) {
    return std::make_shared<Binned>(kind, options);
}

}  // namespace tsr::metrics
