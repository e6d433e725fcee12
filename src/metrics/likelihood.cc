// Log loss and perplexity. The loss of a sample is rounded once; their sum is exact.
#include <algorithm>
#include <cmath>

#include "base/refuse.hpp"
#include "metrics/totals_metric.hpp"

namespace tsr::metrics {

namespace {

// -log of the softmax of `logits` at `target`.
double cross_entropy(std::span<const double> logits, size_t target) {
    const double largest = *std::ranges::max_element(logits);
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - largest);
    return std::log(sum) + (largest - logits[target]);
}

// log(1 + exp(x))
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

class Likelihood final : public TotalsMetric {
   public:
    explicit Likelihood(Kind kind, const Options& options) : TotalsMetric(kind, options, 2) {}

   private:
    enum : size_t { weight, loss };

    [[nodiscard]] bool is_perplexity() const { return kind() == Kind::perplexity; }
    [[nodiscard]] size_t width() const { return is_perplexity() ? static_cast<size_t>(options().classes) : columns(); }

    Form form() const override {
        Form form{.predictions = Values::numbers,
                  .prediction_columns = width(),
                  .targets = Values::labels,
                  .classes = options().classes,
                  .columns_from = "classes",
                  .is_binary = !is_perplexity() && options().task == Task::binary};
        if (is_perplexity()) form.ignored = options().ignore_index;
        return form;
    }

    void check_rows(const Batch& batch) const override {
        if (is_perplexity() || options().from_logits) return check_losses(batch);
        const double tolerance = std::sqrt(batch.epsilon());
        batch.for_each_block([&](const Block& block) {
            for (size_t i = 0; i < block.rows; ++i) {
                double sum = 0;
                for (size_t c = 0; c < width(); ++c) {
                    const double p = block.predictions[i * width() + c];
                    if (p < 0 || p > 1) {
                        refuse("predictions{} is {}; probabilities must be 0 to 1: set from_logits for logits",
                               batch.place(block, i, c, width()), p);
                    }
                    sum += p;
                }
                if (width() > 1 && std::fabs(sum - 1) > tolerance) {
                    refuse("predictions{} sum to {}; probabilities must sum to 1: set from_logits for logits",
                           batch.place(block, i), sum);
                }
            }
        });
    }

    // Weights times losses, and their sums, are finite if losses are at most largest_number, as those of smaller dtypes are.
    void check_losses(const Batch& batch) const {
        if (batch.is_single()) return;
        const auto is_small = [](double logit) { return std::fabs(logit) <= largest_number / 2; };
        batch.for_each_block([&](const Block& block) {
            if (std::ranges::all_of(block.predictions, is_small)) return;
            for (size_t i = 0; i < block.rows; ++i) {
                const auto row = block.predictions.subspan(i * width(), width());
                const auto target = static_cast<size_t>(block.labels[i]);
                const double best = width() > 1 ? *std::ranges::max_element(row) : target == 1 ? 0 : row[0];
                const double own = width() > 1 ? row[target] : target == 1 ? row[0] : 0;
                if (best - own <= largest_number) continue;
                refuse("predictions{} are logits with a loss of {} for the target {}; losses must be at most 2^256",
                       batch.place(block, i), best - own, target);
            }
        });
    }

    void add(const Batch& batch) override {
        const double epsilon = batch.epsilon();
        batch.for_each_block([&](const Block& block) {
            for (size_t i = 0; i < block.rows; ++i) {
                tally(block, i, weight);
                const auto row = block.predictions.subspan(i * width(), width());
                const double own = loss_of(row, static_cast<size_t>(block.labels[i]), epsilon);
                if (block.weights.empty()) {
                    totals_.add(loss, own);
                } else {
                    totals_.add_product(loss, block.weights[i], own);
                }
            }
        });
    }

    [[nodiscard]] double loss_of(std::span<const double> row, size_t target, double epsilon) const {
        if (is_perplexity() || (options().from_logits && row.size() > 1)) return cross_entropy(row, target);
        if (options().from_logits) return softplus(target == 1 ? -row[0] : row[0]);
        const double p = row.size() > 1 ? row[target] : target == 1 ? row[0] : 1 - row[0];
        return -std::log(std::clamp(p, epsilon, 1 - epsilon));
    }

    void evaluate(const Totals& totals, Computed& out) const override {
        const double mean = totals.value(loss) / totals.value(weight);
        out.value = is_perplexity() ? std::exp(mean) : mean;
    }
};

}  // namespace

std::shared_ptr<Metric> make_likelihood(Kind kind, const Options& options) {
    return std::make_shared<Likelihood>(kind, options);
}

}  // namespace tsr::metrics
