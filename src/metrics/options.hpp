// What metric it is. Numbers are those of tessera/metrics.h; capi/metrics.cc asserts it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tsr::metrics {

enum class Kind : int32_t {
    mean = 0,
    sum,
    mean_absolute_error,
    mean_squared_error,
    root_mean_squared_error,
    r2_score,
    accuracy,
    top_k_accuracy,
    balanced_accuracy,
    confusion_matrix,
    precision,
    recall,
    f_beta,
    roc_curve,
    precision_recall_curve,
    average_precision,
    auroc,
    log_loss,
    perplexity,
    binned_roc_curve,
    binned_precision_recall_curve,
    binned_average_precision,
    binned_auroc,
};
inline constexpr int kinds = 23;

enum class Task : int32_t { binary = 0, multiclass, multilabel };
enum class Average : int32_t { none = 0, micro, macro, weighted, samples };
enum class Normalize : int32_t { none = 0, truth, predictions, all };

struct Options {
    Task task = Task::binary;
    Average average = Average::macro;
    Normalize normalize = Normalize::none;
    bool one_vs_one = false;
    bool adjusted = false;
    bool all_points = false;
    bool sharded = false;
    bool from_logits = false;
    int64_t classes = 2;
    int64_t outputs = 1;
    int64_t top_k = 2;
    int64_t thresholds = 100;
    int64_t ignore_index = -100;
    double beta = 1;
    double zero_division = 0;
    double max_fpr = 1;

    friend bool operator==(const Options&, const Options&) = default;
};

[[nodiscard]] std::string_view name_of(Kind kind);
// Throws INVALID_ARGUMENT for a value out of range and for one that the kind does not use and that is not the default.
void check(Kind kind, const Options& options);
// One line that tells two metrics apart: the kind and the options that it uses.
[[nodiscard]] std::string described(Kind kind, const Options& options);

}  // namespace tsr::metrics
