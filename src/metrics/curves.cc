// ROC and precision-recall curves and the areas under them, exactly: of one score per sample, of each class against the rest,
// of each label, or of pairs of classes.
#include <fmt/core.h>

#include <algorithm>

#include "metrics/curve_values.hpp"

namespace tsr::metrics {

namespace {

class Curve final : public Metric {
   public:
    Curve(Kind kind, const Options& options) : Metric(kind, options), scores_(lists_of(options)) {}

   private:
    static size_t lists_of(const Options& options) {
        const auto classes = static_cast<size_t>(options.classes);
        return options.task == Task::binary ? 2 : options.one_vs_one ? classes * classes : 2 * classes;
    }
    // The negative samples of a column; the positive ones follow.
    static size_t list_of(size_t column) { return 2 * column; }
    // Of one_vs_one: the samples of class `truth`, by their score for class `column`.
    [[nodiscard]] size_t list_of(size_t truth, size_t column) const { return truth * columns() + column; }

    Form form() const override { return form_of_scores(); }

    void add(const Batch& batch) override {
        if (!batch.is_single()) scores_.use_doubles();
        if (scores_.is_double()) {
            add_keys<uint64_t, double>(batch);
        } else {
            add_keys<uint32_t, float>(batch);
        }
    }

    template <class Key, class Score>
    void add_keys(const Batch& batch) {
        auto& lists = scores_.of<Key>();
        std::vector<size_t> sizes;
        for (const auto& list : lists) sizes.push_back(list.keys.size());
        try {
            batch.for_each_block([&](const Block& block) {
                if (!block.weights.empty()) scores_.use_weights();
                if (options().task == Task::binary && !scores_.is_weighted()) return add_binary<Key, Score>(block);
                for (size_t i = 0; i < block.rows; ++i) {
                    const double weight = block.weights.empty() ? 1 : block.weights[i];
                    if (weight == 0) continue;
                    for (size_t c = 0; c < columns(); ++c) {
                        auto& list = lists[list_of_sample(block, i, c)];
                        list.keys.push_back(key_of(static_cast<Score>(block.predictions[i * columns() + c])));
                        if (scores_.is_weighted()) list.weights.push_back(weight);
                    }
                }
            });
        } catch (...) {  // no memory: nothing is added
            for (size_t i = 0; i < lists.size(); ++i) {
                lists[i].keys.resize(sizes[i]);
                if (scores_.is_weighted()) lists[i].weights.resize(sizes[i], 1);
            }
            throw;
        }
    }

    // Every key goes to the ends of both lists, one of which keeps it: no branch depends on the data.
    template <class Key, class Score>
    void add_binary(const Block& block) {
        auto& lists = scores_.of<Key>();
        const size_t old_negatives = lists[0].keys.size();
        const size_t old_positives = lists[1].keys.size();
        lists[0].keys.resize(old_negatives + block.rows + 1);
        lists[1].keys.resize(old_positives + block.rows + 1);
        Key* negative = &lists[0].keys[old_negatives];
        Key* positive = &lists[1].keys[old_positives];
        for (size_t i = 0; i < block.rows; ++i) {
            const Key key = key_of(static_cast<Score>(block.predictions[i]));
            *negative = key;
            *positive = key;
            positive += block.labels[i];
            negative += 1 - block.labels[i];
        }
        lists[0].keys.resize(static_cast<size_t>(negative - lists[0].keys.data()));
        lists[1].keys.resize(static_cast<size_t>(positive - lists[1].keys.data()));
    }

    [[nodiscard]] size_t list_of_sample(const Block& block, size_t row, size_t column) const {
        if (is_multilabel()) return list_of(column) + static_cast<size_t>(block.labels[row * columns() + column]);
        const auto truth = static_cast<size_t>(block.labels[row]);
        if (options().task == Task::binary) return truth;
        return options().one_vs_one ? list_of(truth, column) : list_of(column) + (truth == column ? 1 : 0);
    }

    void find(Ranks& ranks, Computed& out) override {
        scores_.agree(ranks);
        if (scores_.is_double()) {
            find_in<uint64_t>(ranks, out);
        } else {
            find_in<uint32_t>(ranks, out);
        }
    }

    template <class Key>
    void find_in(Ranks& ranks, Computed& out) {
        auto& lists = scores_.of<Key>();
        if (!is_area(kind())) {
            for (size_t c = 0; c < columns(); ++c) find_curve(ranks, lists[list_of(c)], lists[list_of(c) + 1], c, out);
        } else if (options().one_vs_one) {
            out.value = pairs_of(ranks, lists);
        } else if (options().average == Average::micro) {
            Samples<Key> negatives, positives;
            for (size_t c = 0; c < columns(); ++c) {
                append(negatives, lists[list_of(c)]);
                append(positives, lists[list_of(c) + 1]);
            }
            out.value = area_of(ranks, positives, negatives).value;
        } else {
            find_areas(ranks, lists, out);
        }
    }

    template <class Key>
    void find_areas(Ranks& ranks, std::vector<Samples<Key>>& lists, Computed& out) {
        std::vector<double> values, weights;
        for (size_t c = 0; c < columns(); ++c) {
            const Found found = area_of(ranks, lists[list_of(c) + 1], lists[list_of(c)]);
            values.push_back(found.value);
            weights.push_back(found.positives);
        }
        if (options().task == Task::binary) {
            out.value = values[0];
            return;
        }
        add_average(out, std::move(values), weights, true);
    }

    struct Found {
        double value, positives, negatives;
    };

    template <class Key>
    Found area_of(Ranks& ranks, Samples<Key>& positives, Samples<Key>& negatives) const {
        const CurvePoints<Key> points(ranks, positives, negatives, scores_.is_weighted());
        Area area(is_roc(kind()), options().max_fpr, points.positives(), points.negatives());
        points.for_each([&](const Point& point) { area.add(point); });
        return {area.value(ranks), points.positives(), points.negatives()};
    }

    // The measure of D. J. Hand and R. J. Till, "A simple generalisation of the area under the ROC curve for multiple class
    // classification problems", Machine Learning 45, 2001.
    template <class Key>
    double pairs_of(Ranks& ranks, std::vector<Samples<Key>>& lists) const {
        std::vector<double> values, weights;
        for (size_t i = 0; i < columns(); ++i) {
            for (size_t j = i + 1; j < columns(); ++j) {
                const Found one = area_of(ranks, lists[list_of(i, i)], lists[list_of(j, i)]);
                const Found other = area_of(ranks, lists[list_of(j, j)], lists[list_of(i, j)]);
                values.push_back((one.value + other.value) / 2);
                weights.push_back(one.positives + one.negatives);
            }
        }
        return averaged(options().average, values, weights, true);
    }

    template <class Key>
    void find_curve(Ranks& ranks, Samples<Key>& negatives, Samples<Key>& positives, size_t column,
                    Computed& out) const {
        CurveArrays arrays;
        CurveFrame frame{};
        {
            const CurvePoints<Key> points(ranks, positives, negatives, scores_.is_weighted());
            points.for_each([&](const Point& point) { arrays.add(point); });
            frame = {points.positives(), points.negatives(), !options().sharded || ranks.rank() == 0};
        }
        if (!options().sharded) arrays.gather(ranks);
        const std::string suffix = options().task == Task::binary ? "" : fmt::format(".{}", column);
        if (is_roc(kind())) {
            add_roc(out, suffix, arrays, frame, options().all_points || options().sharded);
        } else {
            add_precision_recall(out, suffix, arrays, frame);
        }
    }

    void add_from(const Metric& other) override { scores_.merge(static_cast<const Curve&>(other).scores_); }
    void move_to_first(Ranks& ranks) override { scores_.move_to_first(ranks); }
    void clear() override { scores_.clear(); }
    void write(ByteWriter& out) const override { scores_.save(out); }
    void read(ByteReader& in) override { scores_.load(in); }

    Scores scores_;
};

}  // namespace

std::shared_ptr<Metric> make_curve(Kind kind, const Options& options) { return std::make_shared<Curve>(kind, options); }

}  // namespace tsr::metrics
