#include "metrics/options.hpp"

#include <fmt/core.h>

#include <array>
#include <cmath>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "base/refuse.hpp"

namespace tsr::metrics {

namespace {

enum Field : uint32_t {
    task = 1 << 0,
    average = 1 << 1,
    normalize = 1 << 2,
    one_vs_one = 1 << 3,
    adjusted = 1 << 4,
    all_points = 1 << 5,
    from_logits = 1 << 6,
    classes = 1 << 7,
    outputs = 1 << 8,
    top_k = 1 << 9,
    thresholds = 1 << 10,
    ignore_index = 1 << 11,
    beta = 1 << 12,
    zero_division = 1 << 13,
    max_fpr = 1 << 14,
    sharded = 1 << 15,
};

struct KindTraits {
    std::string_view name;
    uint32_t fields;
};

constexpr std::array<KindTraits, kinds> traits{{
    {"mean", 0},
    {"sum", 0},
    {"mean_absolute_error", outputs | average},
    {"mean_squared_error", outputs | average},
    {"root_mean_squared_error", outputs | average},
    {"r2_score", outputs | average},
    {"accuracy", task | classes},
    {"top_k_accuracy", classes | top_k},
    {"balanced_accuracy", classes | adjusted},
    {"confusion_matrix", classes | normalize},
    {"precision", task | classes | average | zero_division},
    {"recall", task | classes | average | zero_division},
    {"f_beta", task | classes | average | zero_division | beta},
    {"roc_curve", task | classes | all_points | sharded},
    {"precision_recall_curve", task | classes | sharded},
    {"average_precision", task | classes | average},
    {"auroc", task | classes | average | one_vs_one | max_fpr},
    {"log_loss", task | classes | from_logits},
    {"perplexity", classes | ignore_index},
    {"binned_roc_curve", task | classes | thresholds},
    {"binned_precision_recall_curve", task | classes | thresholds},
    {"binned_average_precision", task | classes | thresholds | average},
    {"binned_auroc", task | classes | thresholds | average},
}};

// The numbers in a metric's state; more are refused before memory is.
constexpr int64_t most_numbers = int64_t{1} << 26;
constexpr int64_t list_numbers = 8;  // of an empty list of scores

// As users write them.
constexpr std::array<std::string_view, 3> tasks{"binary", "multiclass", "multilabel"};
constexpr std::array<std::string_view, 5> averages{"none", "micro", "macro", "weighted", "samples"};
constexpr std::array<std::string_view, 4> normalizations{"none", "true", "predictions", "all"};

template <class Enum>
void check_enum(Enum value, Enum last, const char* name) {
    if (value < Enum{} || value > last)
        refuse("{} is {}, which is not one of its values", name, static_cast<int>(value));
}

void check_range(int64_t value, int64_t low, int64_t high, const char* name) {
    if (value < low || value > high) refuse("{} is {}; it must be between {} and {}", name, value, low, high);
}

// Refuses what the kind would ignore.
void check_used(Kind kind, const Options& o) {
    const Options d;
    const std::array<std::tuple<uint32_t, bool, const char*>, 16> given{{
        {classes, o.task != d.task, "task"},  // what is of classes alone takes the task multiclass
        {average, o.average != d.average, "average"},
        {normalize, o.normalize != d.normalize, "normalize"},
        {one_vs_one, o.one_vs_one, "one_vs_one"},
        {adjusted, o.adjusted, "adjusted"},
        {all_points, o.all_points, "all_points"},
        {from_logits, o.from_logits, "from_logits"},
        {sharded, o.sharded, "sharded"},
        {classes, o.classes != d.classes, "classes"},
        {outputs, o.outputs != d.outputs, "outputs"},
        {top_k, o.top_k != d.top_k, "top_k"},
        {thresholds, o.thresholds != d.thresholds, "thresholds"},
        {ignore_index, o.ignore_index != d.ignore_index, "ignore_index"},
        {beta, o.beta != d.beta, "beta"},
        {zero_division, o.zero_division != d.zero_division, "zero_division"},
        {max_fpr, o.max_fpr != d.max_fpr, "max_fpr"},
    }};
    const KindTraits& own = traits.at(static_cast<size_t>(kind));
    if ((own.fields & (task | classes)) == classes && o.task == Task::multilabel) {
        refuse("{} is of classes: the task is multilabel; set it to multiclass, or leave it out", own.name);
    }
    for (const auto& [field, is_given, name] : given) {
        if (is_given && (own.fields & field) == 0) refuse("{} has no option {}", own.name, name);
    }
}

int64_t numbers_of(Kind kind, const Options& o) {
    switch (kind) {
        case Kind::confusion_matrix: return o.classes * o.classes;
        case Kind::roc_curve:
        case Kind::precision_recall_curve:
        case Kind::average_precision:
        case Kind::auroc: return list_numbers * (o.one_vs_one ? o.classes * o.classes : 2 * o.classes);
        case Kind::binned_roc_curve:
        case Kind::binned_precision_recall_curve:
        case Kind::binned_average_precision:
        case Kind::binned_auroc: return 2 * o.classes * (o.thresholds + 1);
        case Kind::log_loss:
        case Kind::perplexity:
        case Kind::top_k_accuracy:
        case Kind::accuracy: return 2;
        default: return 3 * o.classes;
    }
}

void check_averages(Kind kind, const Options& o) {
    const uint32_t fields = traits.at(static_cast<size_t>(kind)).fields;
    if ((fields & average) == 0) return;
    const std::string_view name = name_of(kind);
    if ((fields & task) == 0) {  // of the outputs of a regression
        const bool known = o.average == Average::none || o.average == Average::macro ||
                           (o.average == Average::weighted && kind == Kind::r2_score);
        if (!known) refuse("{} has the averages none and macro{}", name, kind == Kind::r2_score ? " and weighted" : "");
        return;
    }
    const bool binned = kind == Kind::binned_average_precision || kind == Kind::binned_auroc;
    if (binned && o.average == Average::micro) refuse("{} has the averages none, macro and weighted", name);
    if (o.task == Task::binary && o.average != Average::macro) {
        refuse(
            "{} of the task binary is one number: average must be the default; for an average over both classes set "
            "the task multiclass with 2 classes",
            name);
    }
    const bool by_sample = kind == Kind::precision || kind == Kind::recall || kind == Kind::f_beta;
    if (o.average == Average::samples && (!by_sample || o.task != Task::multilabel)) {
        refuse("the average samples is supported for precision, recall and f_beta of the task multilabel");
    }
}

}  // namespace

std::string_view name_of(Kind kind) { return traits.at(static_cast<size_t>(kind)).name; }

void check(Kind kind, const Options& o) {
    if (kind < Kind{} || static_cast<int>(kind) >= kinds) {
        refuse("kind is {}; there are the metrics 0 to {}", static_cast<int>(kind), kinds - 1);
    }
    check_enum(o.task, Task::multilabel, "task");
    check_enum(o.average, Average::samples, "average");
    check_enum(o.normalize, Normalize::all, "normalize");
    check_used(kind, o);
    check_range(o.classes, o.task == Task::multilabel ? 1 : 2, int64_t{1} << 31, "classes");
    check_range(o.outputs, 1, most_numbers / 4, "outputs");
    check_range(o.thresholds, 2, most_numbers, "thresholds");
    check_range(o.top_k, 1, int64_t{1} << 31, "top_k");
    if (kind != Kind::top_k_accuracy && kind != Kind::balanced_accuracy && kind != Kind::confusion_matrix &&
        kind != Kind::perplexity && o.task == Task::binary && o.classes != 2) {
        refuse("classes is {}, but the task is binary; set the task multiclass", o.classes);
    }
    if (kind == Kind::top_k_accuracy && o.top_k > o.classes) {
        refuse("top_k is {}, but there are only {} classes; set classes to their number, or lower top_k", o.top_k,
               o.classes);
    }
    if (numbers_of(kind, o) > most_numbers) {
        refuse("the state of {} with {} classes would have {} numbers, more than the limit of {}", name_of(kind),
               o.classes, numbers_of(kind, o), most_numbers);
    }
    check_averages(kind, o);
    if (!(o.beta >= 0)) refuse("beta is {}; it must not be negative", o.beta);
    if (!(std::isnan(o.zero_division) || o.zero_division == 0 || o.zero_division == 1)) {
        refuse("zero_division is {}; it must be 0, 1 or NaN", o.zero_division);
    }
    if (!(o.max_fpr > 0 && o.max_fpr <= 1)) refuse("max_fpr is {}; it must be above 0 and at most 1", o.max_fpr);
    if (o.max_fpr < 1 && o.task == Task::multiclass) refuse("max_fpr is not defined for the task multiclass");
    if (o.one_vs_one &&
        (o.task != Task::multiclass || (o.average != Average::macro && o.average != Average::weighted))) {
        refuse("one_vs_one needs the task multiclass and the average macro or weighted");
    }
    if (kind == Kind::log_loss && o.task == Task::multilabel) refuse("log_loss has the tasks binary and multiclass");
}

std::string described(Kind kind, const Options& o) {
    const uint32_t fields = traits.at(static_cast<size_t>(kind)).fields;
    std::string text(name_of(kind));
    const auto put = [&](uint32_t field, const char* name, auto value) {
        if ((fields & field) != 0) text += fmt::format(" {}={}", name, value);
    };
    put(task, "task", tasks.at(static_cast<size_t>(o.task)));
    put(classes, "classes", o.classes);
    put(outputs, "outputs", o.outputs);
    put(average, "average", averages.at(static_cast<size_t>(o.average)));
    put(normalize, "normalize", normalizations.at(static_cast<size_t>(o.normalize)));
    put(top_k, "top_k", o.top_k);
    put(thresholds, "thresholds", o.thresholds);
    put(beta, "beta", o.beta);
    put(zero_division, "zero_division", o.zero_division);
    put(max_fpr, "max_fpr", o.max_fpr);
    put(one_vs_one, "one_vs_one", o.one_vs_one);
    put(adjusted, "adjusted", o.adjusted);
    put(all_points, "all_points", o.all_points);
    put(sharded, "sharded", o.sharded);
    put(from_logits, "from_logits", o.from_logits);
    put(ignore_index, "ignore_index", o.ignore_index);
    return text;
}

}  // namespace tsr::metrics
