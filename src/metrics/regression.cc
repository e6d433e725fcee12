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

// A sum of squares is 0 only if all are: what is not 0 is at least the smallest double.
double kept(double square, bool is_zero) {
    return square == 0 && !is_zero ? std::numeric_limits<double>::denorm_min() : square;
}

double scaled(double value, int exponent) { return std::ldexp(value, exponent); }

Double2 scaled(Double2 value, int exponent) { return {scaled(value.high, exponent), scaled(value.low, exponent)}; }

// The coefficient of determination. The sums of targets and of their squares are exact, so that targets far from 0 lose nothing.
// Where the squares underflow it is undefined.
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
                    totals_.add(at + residuals, kept(w * (error * error), w == 0 || error == 0));
                    const double weighted = w * target;
                    const double rest = std::fma(w, target, -weighted);
                    totals_.add(at + targets, weighted);
                    totals_.add(at + targets, rest);
                    totals_.add_product(at + squares, weighted, target);
                    totals_.add_product(at + squares, rest, target);
                    if (weighted * target == 0) totals_.add(at + squares, kept(0, w == 0 || target == 0));
                }
            }
        });
    }

    void evaluate(const Totals& totals, Computed& out) const override {
        std::vector<double> values, spreads;
        for (size_t at = first; at < totals.size(); at += 3) {
            const Found found = find_output(totals, at);
            values.push_back(totals.value(rows) < 2 ? undefined : found.score);
            spreads.push_back(found.spread);
        }
        add_average(out, std::move(values), spreads, true);
    }

    struct Found {
        double score, spread;
    };

    // Weights are scaled by a power of two, targets by another, so that no product of two sums is out of a double's range.
    [[nodiscard]] static Found find_output(const Totals& totals, size_t at) {
        const auto pair = [&](size_t i, int exponent) {
            const auto [high, low] = totals.pair(i);
            return scaled(Double2{high, low}, exponent);
        };
        const double all = totals.value(weight);
        const double square = totals.value(at + squares);
        const int by_weight = all > 0 ? -std::ilogb(all) : 0;
        const int by_target = square > 0 ? (-std::ilogb(square) - by_weight) / 2 : 0;
        const int by_square = by_weight + 2 * by_target;
        const Double2 squared = product(pair(weight, by_weight), pair(at + squares, by_square));
        const Double2 target = pair(at + targets, by_weight + by_target);
        Double2 spread = difference(squared, product(target, target));
        // All targets are equal: what is left is the rounding of the products.
        const bool is_equal = spread.high <= squared.high * 0x1p-98;
        if (is_equal) spread = {0, 0};
        const double total = spread.high / scaled(all, by_weight);  // of the squared deviations
        const double residual = totals.value(at + residuals);
        // Squares lose up to 2^-1074 each.
        const double least = std::max(all, totals.value(rows)) * 0x1p-1020;
        const bool is_lost = square > 0 && scaled(total, -by_square) < least && (!is_equal || square < least * 0x1p50);
        const double score = is_lost         ? undefined
                             : total > 0     ? 1 - scaled(residual, by_square) / total
                             : residual == 0 ? 1
                                             : 0;
        return {score, scaled(spread.high, -2 * by_target)};
    }
};

}  // namespace

std::shared_ptr<Metric> make_regression(Kind kind, const Options& options) {
    if (kind == Kind::mean || kind == Kind::sum) return std::make_shared<Mean>(kind, options);
    if (kind == Kind::r2_score) return std::make_shared<R2>(kind, options);
    return std::make_shared<Errors>(kind, options);
}

}  // namespace tsr::metrics
