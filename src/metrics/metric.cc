#include "metrics/metric.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/attempt.hpp"

namespace tsr::metrics {

Tensor Result::tensor() const {
    const auto view = [&](const auto& values, DType dtype) {
        using T = std::remove_cvref_t<decltype(values[0])>;
        Tensor tensor =
            tensor_of(std::span(const_cast<T*>(values.data()), values.size()), dtype);  // NOLINT: to be read
        tensor.shape = shape;
        return tensor;
    };
    return counts.empty() ? view(numbers, DType::f64) : view(counts, DType::i64);
}

void Computed::add(std::string name, std::vector<double> numbers) {
    const auto size = static_cast<int64_t>(numbers.size());
    results.push_back({std::move(name), Dims{size}, std::move(numbers), {}});
}

std::shared_ptr<Metric> Metric::create(Kind kind, const Options& options) {
    check(kind, options);
    switch (kind) {
        case Kind::mean:
        case Kind::sum:
        case Kind::mean_absolute_error:
        case Kind::mean_squared_error:
        case Kind::root_mean_squared_error:
        case Kind::r2_score: return make_regression(kind, options);
        case Kind::log_loss:
        case Kind::perplexity: return make_likelihood(kind, options);
        case Kind::roc_curve:
        case Kind::precision_recall_curve:
        case Kind::average_precision:
        case Kind::auroc: return make_curve(kind, options);
        case Kind::binned_roc_curve:
        case Kind::binned_precision_recall_curve:
        case Kind::binned_average_precision:
        case Kind::binned_auroc: return make_binned(kind, options);
        default: return make_labels(kind, options);
    }
}

void Metric::update(const Inputs& inputs) {
    refused_ = attempt([&] {
        Form own = form();
        own.metric = name_of(kind_);
        const Batch batch(inputs, own, scratch_);
        batch.check_values();
        check_rows(batch);
        add(batch);
        samples_ += static_cast<int64_t>(batch.rows());
    });
    if (refused_) throw Error(*refused_);
}

double Metric::compute(const std::shared_ptr<Communicator>& comm) {
    const auto body = [&] {
        Ranks ranks(comm);
        ranks.agree(std::exchange(refused_, std::nullopt), description());
        Computed found;
        find(ranks, found);
        computed_ = std::move(found);
    };
    computed_ = {};
    if (comm) {
        comm->in_one_call(body);
    } else {
        body();
    }
    return computed_.value;
}

const Result& Metric::result(std::string_view name) const {
    const auto found = std::ranges::find(computed_.results, name, &Result::name);
    if (found != computed_.results.end()) return *found;
    std::vector<std::string_view> names;
    for (const Result& result : computed_.results) names.push_back(result.name);
    throw Error(Code::not_found, names.empty() ? fmt::format("the metric {} has computed no arrays", name_of(kind_))
                                               : fmt::format("the metric {} has computed no '{}', but {}",
                                                             name_of(kind_), name, fmt::join(names, ", ")));
}

void Metric::merge(const Metric& other) {
    if (&other == this) throw Error(Code::invalid_argument, "a metric cannot be merged with itself");
    if (other.description() != description()) {
        throw Error(Code::invalid_argument,
                    fmt::format("a metric {} cannot be merged into a metric {}", other.description(), description()));
    }
    if (other.refused_) throw other.unreported("cannot be merged");
    add_from(other);
    samples_ += other.samples_;
}

Error Metric::unreported(std::string_view what) const {
    return Error(
               Code::invalid_state,
               fmt::format("the metric {} {}: an update of it has failed ({}); repeat the update, call reset, or call "
                           "compute, which reports it once and continues without it",
                           name_of(kind_), what, refused_->what()))
        .caused_by(*refused_);
}

void Metric::gather(const std::shared_ptr<Communicator>& comm) {
    if (!comm || comm->world_size() == 1) {
        if (const auto error = std::exchange(refused_, std::nullopt)) throw Error(*error);
        return;
    }
    comm->in_one_call([&] {
        Ranks ranks(comm);
        ranks.agree(std::exchange(refused_, std::nullopt), description());
        std::array<int64_t, 1> samples{samples_};
        ranks.sum(samples);
        move_to_first(ranks);
        samples_ = ranks.rank() == 0 ? samples[0] : 0;
    });
}

void Metric::reset() {
    clear();
    samples_ = 0;
    refused_.reset();
    computed_ = {};
}

std::string Metric::save() const {
    if (refused_) throw unreported("cannot be saved, nor loaded");
    ByteWriter out;
    out.number(static_cast<uint64_t>(samples_));
    write(out);
    return out.take();
}

void Metric::load(std::string_view bytes) {
    ByteReader in(bytes);
    const uint64_t samples = in.number();
    if (samples > uint64_t{1} << 62) ByteReader::refuse();
    const std::shared_ptr<Metric> loaded = empty_copy();
    loaded->read(in);
    in.end();
    reset();
    add_from(*loaded);
    samples_ = static_cast<int64_t>(samples);
}

void Metric::add_average(Computed& out, std::vector<double> values, std::span<const double> weights,
                         bool keep_nan) const {
    out.value = averaged(options_.average, values, weights, keep_nan);
    if (options_.average == Average::none) out.add("values", std::move(values));
}

Form Metric::form_of_scores() const {
    return {.predictions = Values::numbers,
            .prediction_columns = columns(),
            .targets = Values::labels,
            .target_columns = is_multilabel() ? columns() : 1,
            .classes = options_.task == Task::multiclass ? options_.classes : 2,
            .columns_from = "classes",
            .is_binary = options_.task == Task::binary};
}

double averaged(Average average, std::span<const double> values, std::span<const double> weights, bool keep_nan) {
    if (average == Average::none) return std::numeric_limits<double>::quiet_NaN();
    double sum = 0;
    double weight = 0;
    double plain = 0;
    double count = 0;
    const double scale = weights.empty() ? 1 : scale_of(*std::ranges::max_element(weights));
    for (size_t i = 0; i < values.size(); ++i) {
        if (std::isnan(values[i]) && !keep_nan) continue;
        plain += values[i];
        count += 1;
        if (average == Average::weighted && weights[i] != 0) {  // without samples, NaN does not matter
            sum += weights[i] * scale * values[i];
            weight += weights[i] * scale;
        }
    }
    return average == Average::weighted && weight != 0 ? sum / weight : plain / count;
}

}  // namespace tsr::metrics
