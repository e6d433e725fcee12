// Means and sums, errors of predictions and R2, of one output or several.
#include <algorithm>
#include <cmath>

#include "metrics/totals_metric.hpp"

namespace tsr::metrics {

namespace {

constexpr double undefined = std::numeric_limits<double>::quiet_NaN();

// Mean or sum of the predictions.
class Mean final : public TotalsMetric {
   public:
    explicit Mean(Kind kind, const Options& options) : TotalsMetric(kind, options, 2) {}

   private:
    enum : size_t { weight, sum };

    Form form() const override { return {.predictions = Values::numbers, .arithmetic = true}; }

    void add(const Batch& batch) override {
        batch.for_each_block([&](const Block& block) {
            if (block.weights.empty()) {
                totals_.count(weight, static_cast<int64_t>(block.rows));
                for (const double value : block.predictions) totals_.add(sum, value);
                return;
            }
            for (size_t i = 0; i < block.rows; ++i) {
                totals_.add(weight, block.weights[i]);
                totals_.add_product(sum, block.weights[i], block.predictions[i]);
            }
        });
    }

    void evaluate(const Totals& totals, Computed& out) const override {
        out.value = kind() == Kind::sum ? totals.value(sum) : totals.value(sum) / totals.value(weight);
    }
};

Form form_of_outputs(const Options& options) {
    const auto outputs = static_cast<size_t>(options.outputs);
    return {.predictions = Values::numbers,
            .prediction_columns = outputs,
            .targets = Values::numbers,
            .target_columns = outputs,
            .arithmetic = true,
            .columns_from = "outputs"};
}

// Absolute or squared errors of each output.
class Errors final : public TotalsMetric {
   public:
    explicit Errors(Kind kind, const Options& options)
        : TotalsMetric(kind, options, 1 + static_cast<size_t>(options.outputs)) {}

   private:
    Form form() const override { return form_of_outputs(options()); }

    void add(const Batch& batch) override {
        const auto outputs = static_cast<size_t>(options().outputs);
        const bool squared = kind() != Kind::mean_absolute_error;
        batch.for_each_block([&](const Block& block) {
            for (size_t i = 0; i < block.rows; ++i) {
                tally(block, i, 0);
                for (size_t c = 0; c < outputs; ++c) {
                    const double error = block.predictions[i * outputs + c] - block.numbers[i * outputs + c];
                    const double loss = squared ? error * error : std::fabs(error);
                    totals_.add(1 + c, block.weights.empty() ? loss : block.weights[i] * loss);
                }
            }
        });
    }

    void evaluate(const Totals& totals, Computed& out) const override {
        std::vector<double> values;
        for (size_t c = 1; c < totals.size(); ++c) {
            const double mean = totals.value(c) / totals.value(0);
            values.push_back(kind() == Kind::root_mean_squared_error ? std::sqrt(mean) : mean);
        }
        add_average(out, std::move(values), {}, true);
    }
};

// A number of 106 bits, for the small difference of two large sums.
struct Double2 {
    double high, low;
};

Double2 sum_of(double a, double b) {
    const double sum = a + b;
    const double of_b = sum - a;
    return {sum, (a - (sum - of_b)) + (b - of_b)};
}

Double2 product(Double2 a, Double2 b) {
    const double high = a.high * b.high;
    const double low = std::fma(a.high, b.high, -high) + (a.high * b.low + a.low * b.high);
    return sum_of(high, low);
}

Double2 difference(Double2 a, Double2 b) {
    const Double2 high = sum_of(a.high, -b.high);
    const Double2 low = sum_of(a.low, -b.low);
    const Double2 both = sum_of(high.high, high.low + low.high);
    return sum_of(both.high, both.low + low.low);
}

// The coefficient of determination. The sums of targets and of their squares are exact, so that targets far from 0 lose nothing.
class R2 final : public TotalsMetric {
   public:
    explicit R2(Kind kind, const Options& options)
        : TotalsMetric(kind, options, 2 + 3 * static_cast<size_t>(options.outputs)) {}

   private:
    enum : size_t { weight, rows, first };
    enum : size_t { residuals, targets, squares };

    Form form() const override { return form_of_outputs(options()); }

    void add(const Batch& batch) override {
        const auto outputs = static_cast<size_t>(options().outputs);
        batch.for_each_block([&](const Block& block) {
            totals_.count(rows, static_cast<int64_t>(block.rows));
            for (size_t i = 0; i < block.rows; ++i) {
                tally(block, i, weight);
                const double w = block.weights.empty() ? 1 : block.weights[i];
                for (size_t c = 0; c < outputs; ++c) {
                    const double target = block.numbers[i * outputs + c];
                    const double error = block.predictions[i * outputs + c] - target;
                    const size_t at = first + 3 * c;
                    totals_.add(at + residuals, w * (error * error));
                    const double weighted = w * target;
                    const double rest = std::fma(w, target, -weighted);
                    totals_.add(at + targets, weighted);
                    totals_.add(at + targets, rest);
                    totals_.add_product(at + squares, weighted, target);
                    totals_.add_product(at + squares, rest, target);
                }
            }
        });
    }

    void evaluate(const Totals& totals, Computed& out) const override {
        std::vector<double> values, spreads;
        const auto pair = [&](size_t i) {
            const auto [high, low] = totals.pair(i);
            return Double2{high, low};
        };
        for (size_t at = first; at < totals.size(); at += 3) {
            const Double2 squared = product(pair(weight), pair(at + squares));
            Double2 spread = difference(squared, product(pair(at + targets), pair(at + targets)));
            // All targets are equal: what is left is the rounding of the products.
            if (spread.high <= squared.high * 0x1p-98) spread = {0, 0};
            const double residual = totals.value(at + residuals);
            const double score = spread.high > 0 ? 1 - residual / (spread.high / totals.value(weight))
                                 : residual == 0 ? 1
                                                 : 0;
            values.push_back(totals.value(rows) < 2 ? undefined : score);
            spreads.push_back(spread.high);
        }
        add_average(out, std::move(values), spreads, true);
    }
};

}  // namespace

std::shared_ptr<Metric> make_regression(Kind kind, const Options& options) {
    if (kind == Kind::mean || kind == Kind::sum) return std::make_shared<Mean>(kind, options);
    if (kind == Kind::r2_score) return std::make_shared<R2>(kind, options);
    return std::make_shared<Errors>(kind, options);
}

}  // namespace tsr::metrics
