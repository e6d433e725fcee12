// A metric: a state that each rank updates with its own samples, and a value that the ranks compute from all of them. States
// are whole numbers and exact sums, or the scores themselves, so the value has the same bits on all ranks, for every number of
// ranks and every distribution of the samples over them. Owned by one thread; compute() and gather() are collective.
#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "metrics/bytes.hpp"
#include "metrics/inputs.hpp"
#include "metrics/options.hpp"
#include "metrics/ranks.hpp"
#include "tensor/tensor.hpp"

namespace tsr::metrics {

// An array that a metric has computed; either of doubles or of integers.
struct Result {
    std::string name;
    Dims shape;
    std::vector<double> numbers;
    std::vector<int64_t> counts;

    [[nodiscard]] Tensor tensor() const;
};

// What compute() finds: a number, which is NaN if the metric is none, and arrays.
struct Computed {
    double value = std::numeric_limits<double>::quiet_NaN();
    std::vector<Result> results;

    void add(std::string name, std::vector<double> numbers);
};

class Metric {
   public:
    // Throws INVALID_ARGUMENT for options out of range or that the kind has not.
    [[nodiscard]] static std::shared_ptr<Metric> create(Kind kind, const Options& options);

    virtual ~Metric() = default;
    Metric(const Metric&) = delete;
    Metric& operator=(const Metric&) = delete;

    [[nodiscard]] Kind kind() const { return kind_; }
    [[nodiscard]] const Options& options() const { return options_; }
    [[nodiscard]] int64_t samples() const { return samples_; }  // that this object has
    [[nodiscard]] std::string description() const { return described(kind_, options_); }

    // Adds samples. If it throws, it has added none; compute() then throws the error on all ranks, once, unless an update has
    // succeeded since.
    void update(const Inputs& inputs);
    // Collective over `comm`; nullptr: of this object's samples. The state stays.
    double compute(const std::shared_ptr<Communicator>& comm);
    // An array of the last compute(), valid until the next one. Throws NOT_FOUND, which lists the names.
    [[nodiscard]] const Result& result(std::string_view name) const;
    // Adds the samples of another metric of the same description. Throws INVALID_STATE if an update of that one failed and this
    // was not reported yet; so does save().
    void merge(const Metric& other);
    // Moves all samples to rank 0: collective.
    void gather(const std::shared_ptr<Communicator>& comm);
    void reset();

    [[nodiscard]] std::string save() const;
    // Replaces the state by a saved one. Throws MISMATCH, and changes nothing, if save() of such a metric cannot have returned it.
    void load(std::string_view bytes);
    [[nodiscard]] std::shared_ptr<Metric> empty_copy() const { return create(kind_, options_); }

   protected:
    Metric(Kind kind, const Options& options) : kind_(kind), options_(options) {}

    [[nodiscard]] virtual Form form() const = 0;
    // Throws if values of the rows of `batch` are wrong in a way that its form does not say.
    virtual void check_rows(const Batch& batch) const { (void)batch; }
    virtual void add(const Batch& batch) = 0;
    virtual void find(Ranks& ranks, Computed& out) = 0;
    virtual void add_from(const Metric& other) = 0;
    virtual void move_to_first(Ranks& ranks) = 0;
    virtual void clear() = 0;
    virtual void write(ByteWriter& out) const = 0;
    virtual void read(ByteReader& in) = 0;

    [[nodiscard]] bool is_multilabel() const { return options_.task == Task::multilabel; }
    // The columns of scores or labels of a sample.
    [[nodiscard]] size_t columns() const {
        return options_.task == Task::binary ? 1 : static_cast<size_t>(options_.classes);
    }

    // The average of classes or outputs (averaged()) or, with Average::none, the array "values" of them.
    void add_average(Computed& out, std::vector<double> values, std::span<const double> weights, bool keep_nan) const;
    // Of metrics of scores and labels.
    [[nodiscard]] Form form_of_scores() const;

   private:
    [[nodiscard]] Error unreported(std::string_view what) const;

    Kind kind_;
    Options options_;
    int64_t samples_ = 0;
    Scratch scratch_;
    std::optional<Error> refused_;
    Computed computed_;
};

// By kinds.
[[nodiscard]] std::shared_ptr<Metric> make_regression(Kind kind, const Options& options);
[[nodiscard]] std::shared_ptr<Metric> make_labels(Kind kind, const Options& options);
[[nodiscard]] std::shared_ptr<Metric> make_likelihood(Kind kind, const Options& options);
[[nodiscard]] std::shared_ptr<Metric> make_curve(Kind kind, const Options& options);
[[nodiscard]] std::shared_ptr<Metric> make_binned(Kind kind, const Options& options);

// A power of two for a sum of weights and its parts, so that products of two such sums do not underflow: 1 unless it is small.
[[nodiscard]] inline double scale_of(double sum) { return sum < 0x1p-400 ? 0x1p700 : 1; }

// The average of what classes or outputs have, as scikit-learn takes it: values that are NaN count only if `keep_nan`. With
// Average::none it is NaN.
[[nodiscard]] double averaged(Average average, std::span<const double> values, std::span<const double> weights,
                              bool keep_nan);

}  // namespace tsr::metrics
