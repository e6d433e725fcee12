// A metric whose state are totals.
#pragma once

#include "metrics/metric.hpp"
#include "metrics/totals.hpp"

namespace tsr::metrics {

class TotalsMetric : public Metric {
   protected:
    TotalsMetric(Kind kind, const Options& options, size_t totals) : Metric(kind, options), totals_(totals) {}

    // The value of the totals of all ranks.
    virtual void evaluate(const Totals& totals, Computed& out) const = 0;

    void find(Ranks& ranks, Computed& out) final {
        Totals all = totals_;
        all.reduce(ranks);
        evaluate(all, out);
    }
    void add_from(const Metric& other) final { totals_.merge(static_cast<const TotalsMetric&>(other).totals_); }
    void move_to_first(Ranks& ranks) final {
        totals_.reduce(ranks);
        if (ranks.rank() != 0) totals_.clear();
    }
    void clear() final { totals_.clear(); }
    void write(ByteWriter& out) const final { totals_.save(out); }
    void read(ByteReader& in) final { totals_.load(in); }

    // Counts a sample, or adds its weight.
    void tally(const Block& block, size_t row, size_t total) {
        if (block.weights.empty()) {
            totals_.count(total);
        } else {
            totals_.add(total, block.weights[row]);
        }
    }

    Totals totals_;
};

}  // namespace tsr::metrics
