// Metrics of predicted labels: accuracies, the confusion matrix, precision, recall and F-beta.
#include <algorithm>
#include <cmath>

#include "metrics/totals_metric.hpp"

namespace tsr::metrics {

namespace {

class Labels : public TotalsMetric {
   protected:
    using TotalsMetric::TotalsMetric;

    Form form() const override {
        const size_t labels = is_multilabel() ? columns() : 1;
        return {.predictions = Values::labels,
                .prediction_columns = labels,
                .targets = Values::labels,
                .target_columns = labels,
                .classes = is_multilabel() ? 2 : options().classes,
                .columns_from = "classes"};
    }
};

// The share of samples that are right; with several labels, in all of them.
class Accuracy final : public Labels {
   public:
    explicit Accuracy(Kind kind, const Options& options) : Labels(kind, options, 2) {}

   private:
    enum : size_t { all, right };

    void add(const Batch& batch) override {
        const size_t labels = form().target_columns;
        batch.for_each_block([&](const Block& block) {
            if (labels == 1 && block.weights.empty()) {
                int64_t equal = 0;
                for (size_t i = 0; i < block.rows; ++i) equal += block.predicted[i] == block.labels[i] ? 1 : 0;
                totals_.count(all, static_cast<int64_t>(block.rows));
                totals_.count(right, equal);
                return;
            }
            for (size_t i = 0; i < block.rows; ++i) {
                tally(block, i, all);
                const auto row = [&](std::span<const int64_t> values) { return values.subspan(i * labels, labels); };
                if (std::ranges::equal(row(block.predicted), row(block.labels))) tally(block, i, right);
            }
        });
    }

    void evaluate(const Totals& totals, Computed& out) const override {
        out.value = totals.value(right) / totals.value(all);
    }
};

// The share of samples whose class is among the k with the largest scores. Of equal scores the higher class is the larger.
class TopK final : public TotalsMetric {
   public:
    explicit TopK(Kind kind, const Options& options) : TotalsMetric(kind, options, 2) {}

   private:
    enum : size_t { all, right };

    Form form() const override {
        return {.predictions = Values::numbers,
                .prediction_columns = static_cast<size_t>(options().classes),
                .targets = Values::labels,
                .classes = options().classes,
                .columns_from = "classes"};
    }

    void add(const Batch& batch) override {
        const auto classes = static_cast<size_t>(options().classes);
        batch.for_each_block([&](const Block& block) {
            for (size_t i = 0; i < block.rows; ++i) {
                const double* scores = &block.predictions[i * classes];
                const auto own = static_cast<size_t>(block.labels[i]);
                int64_t larger = 0;
                for (size_t c = 0; c < classes; ++c) larger += scores[c] > scores[own] ? 1 : 0;
                for (size_t c = own + 1; c < classes; ++c) larger += scores[c] == scores[own] ? 1 : 0;
                tally(block, i, all);
                if (larger < options().top_k) tally(block, i, right);
            }
        });
    }

    void evaluate(const Totals& totals, Computed& out) const override {
        out.value = totals.value(right) / totals.value(all);
    }
};

// The samples of each true class (row) that were predicted as each class (column).
class ConfusionMatrix final : public Labels {
   public:
    explicit ConfusionMatrix(Kind kind, const Options& options)
        : Labels(kind, options, static_cast<size_t>(options.classes * options.classes)) {}

   private:
    void add(const Batch& batch) override {
        const int64_t classes = options().classes;
        batch.for_each_block([&](const Block& block) {
            for (size_t i = 0; i < block.rows; ++i) {
                tally(block, i, static_cast<size_t>(block.labels[i] * classes + block.predicted[i]));
            }
        });
    }

    void evaluate(const Totals& totals, Computed& out) const override {
        const auto classes = static_cast<size_t>(options().classes);
        Result matrix{"matrix", Dims{options().classes, options().classes}, {}, {}};
        const bool counts = totals.is_counted() && options().normalize == Normalize::none;
        for (size_t i = 0; i < totals.size(); ++i) {
            if (counts) {
                matrix.counts.push_back(totals.counted(i));
            } else {
                matrix.numbers.push_back(totals.value(i));
            }
        }
        if (options().normalize != Normalize::none) normalize(matrix.numbers, classes);
        out.results.push_back(std::move(matrix));
    }

    void normalize(std::vector<double>& cells, size_t classes) const {
        const auto part = [&](size_t i) {
            return options().normalize == Normalize::all     ? 0
                   : options().normalize == Normalize::truth ? i / classes
                                                             : i % classes;
        };
        std::vector<double> sums(classes);
        for (size_t i = 0; i < cells.size(); ++i) sums[part(i)] += cells[i];
        for (size_t i = 0; i < cells.size(); ++i) cells[i] = sums[part(i)] == 0 ? 0 : cells[i] / sums[part(i)];
    }
};

// Of each class or label: the samples that have it, are predicted to have it, and both.
class ClassTotals : public Labels {
   protected:
    enum : size_t { both, predicted, truly };

    ClassTotals(Kind kind, const Options& options, size_t more = 0)
        : Labels(kind, options, 3 * static_cast<size_t>(options.classes) + more) {}

    void add(const Batch& batch) override {
        batch.for_each_block([&](const Block& block) {
            if (is_multilabel()) return add_labels(block);
            for (size_t i = 0; i < block.rows; ++i) {
                const auto truth = static_cast<size_t>(block.labels[i]);
                const auto guess = static_cast<size_t>(block.predicted[i]);
                tally(block, i, 3 * truth + truly);
                tally(block, i, 3 * guess + predicted);
                if (truth == guess) tally(block, i, 3 * truth + both);
            }
        });
    }

    virtual void add_labels(const Block& block) {
        for (size_t i = 0; i < block.rows; ++i) {
            for (size_t c = 0; c < columns(); ++c) {
                const bool truth = block.labels[i * columns() + c] != 0;
                const bool guess = block.predicted[i * columns() + c] != 0;
                if (truth) tally(block, i, 3 * c + truly);
                if (guess) tally(block, i, 3 * c + predicted);
                if (truth && guess) tally(block, i, 3 * c + both);
            }
        }
    }
};

// The mean recall of the classes that have samples.
class BalancedAccuracy final : public ClassTotals {
   public:
    explicit BalancedAccuracy(Kind kind, const Options& options) : ClassTotals(kind, options) {}

   private:
    void evaluate(const Totals& totals, Computed& out) const override {
        std::vector<double> recalls;
        for (size_t at = 0; at < totals.size(); at += 3) {
            if (const double truth = totals.value(at + truly); truth != 0)
                recalls.push_back(totals.value(at + both) / truth);
        }
        out.value = averaged(Average::macro, recalls, {}, true);
        const double chance = 1 / static_cast<double>(recalls.size());
        if (options().adjusted) out.value = (out.value - chance) / (1 - chance);
    }
};

// Precision, recall and F-beta.
class Ratios final : public ClassTotals {
   public:
    explicit Ratios(Kind kind, const Options& options) : ClassTotals(kind, options, 2) {}

   private:
    // After the classes: the weighted values of samples, and their weights.
    [[nodiscard]] size_t of_samples() const { return 3 * static_cast<size_t>(options().classes); }

    [[nodiscard]] double ratio(double both_of, double predicted_of, double truly_of) const {
        double above = both_of;
        double below = kind() == Kind::precision ? predicted_of : truly_of;
        if (kind() == Kind::f_beta && std::isfinite(options().beta)) {
            const double beta = options().beta;
            const double squared = beta * beta;
            if (beta < 0x1p300) {
                above = (1 + squared) * both_of;
                below = squared * truly_of + predicted_of;
            } else {  // products with the square could be infinite; 1 + its inverse is 1
                below = truly_of + predicted_of / beta / beta;
            }
            // What is below was rounded to 0; what is above is 0.
            if (below == 0 && (predicted_of > 0 || (beta > 0 && truly_of > 0))) return 0;
        }
        return below == 0 ? options().zero_division : above / below;
    }

    void add_labels(const Block& block) override {
        if (options().average != Average::samples) return ClassTotals::add_labels(block);
        for (size_t i = 0; i < block.rows; ++i) {
            double counts[3] = {0, 0, 0};
            for (size_t c = 0; c < columns(); ++c) {
                const bool truth = block.labels[i * columns() + c] != 0;
                const bool guess = block.predicted[i * columns() + c] != 0;
                counts[both] += truth && guess ? 1 : 0;
                counts[predicted] += guess ? 1 : 0;
                counts[truly] += truth ? 1 : 0;
            }
            const double value = ratio(counts[both], counts[predicted], counts[truly]);
            if (std::isnan(value)) continue;
            totals_.add_product(of_samples(), value, block.weights.empty() ? 1 : block.weights[i]);
            tally(block, i, of_samples() + 1);
        }
    }

    void evaluate(const Totals& totals, Computed& out) const override {
        const auto of_class = [&](size_t c) {
            return ratio(totals.value(3 * c + both), totals.value(3 * c + predicted), totals.value(3 * c + truly));
        };
        if (options().task == Task::binary) {
            out.value = of_class(1);
            return;
        }
        if (options().average == Average::samples) {
            out.value = totals.value(of_samples()) / totals.value(of_samples() + 1);
            return;
        }
        const auto classes = static_cast<size_t>(options().classes);
        if (options().average == Average::micro) {
            out.value = micro(totals, classes);
            return;
        }
        std::vector<double> values, weights;
        for (size_t c = 0; c < classes; ++c) {
            values.push_back(of_class(c));
            weights.push_back(totals.value(3 * c + truly));
        }
        add_average(out, std::move(values), weights, false);
    }

    [[nodiscard]] double micro(const Totals& totals, size_t classes) const {
        double sums[3] = {0, 0, 0};
        for (size_t i = 0; i < 3 * classes; ++i) sums[i % 3] += totals.value(i);
        return ratio(sums[both], sums[predicted], sums[truly]);
    }
};

}  // namespace

std::shared_ptr<Metric> make_labels(Kind kind, const Options& options) {
    switch (kind) {
        case Kind::accuracy: return std::make_shared<Accuracy>(kind, options);
        case Kind::top_k_accuracy: return std::make_shared<TopK>(kind, options);
        case Kind::balanced_accuracy: return std::make_shared<BalancedAccuracy>(kind, options);
        case Kind::confusion_matrix: return std::make_shared<ConfusionMatrix>(kind, options);
        default: return std::make_shared<Ratios>(kind, options);
    }
}

}  // namespace tsr::metrics
