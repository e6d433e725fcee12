// tessera/metrics.h: metrics over the samples of all ranks.
#include "tessera/metrics.h"

#include "comm/communicator.hpp"
#include "handles.hpp"
#include "metrics/metric.hpp"

namespace tsr::capi {

namespace {

using metrics::Average;
using metrics::Kind;
using metrics::Normalize;
using metrics::Task;

static_assert(static_cast<int>(Kind::confusion_matrix) == TSR_METRIC_CONFUSION_MATRIX &&
              static_cast<int>(Kind::auroc) == TSR_METRIC_AUROC &&
              static_cast<int>(Kind::binned_auroc) == TSR_METRIC_BINNED_AUROC &&
              metrics::kinds == TSR_METRIC_BINNED_AUROC + 1);
static_assert(static_cast<int>(Task::multilabel) == TSR_TASK_MULTILABEL &&
              static_cast<int>(Average::samples) == TSR_AVERAGE_SAMPLES &&
              static_cast<int>(Normalize::all) == TSR_NORMALIZE_ALL);

constexpr tsr_metric_options default_options{.struct_size = sizeof(tsr_metric_options),
                                             .task = TSR_TASK_BINARY,
                                             .average = TSR_AVERAGE_MACRO,
                                             .normalize = TSR_NORMALIZE_NONE,
                                             .one_vs_one = 0,
                                             .adjusted = 0,
                                             .all_points = 0,
                                             .sharded = 0,
                                             .from_logits = 0,
                                             .classes = 2,
                                             .outputs = 1,
                                             .top_k = 2,
                                             .thresholds = 100,
                                             .ignore_index = -100,
                                             .beta = 1,
                                             .zero_division = 0,
                                             .max_fpr = 1};

metrics::Options options_of(const tsr_metric_options& o) {
    return {.task = static_cast<Task>(o.task),
            .average = static_cast<Average>(o.average),
            .normalize = static_cast<Normalize>(o.normalize),
            .one_vs_one = flag(o.one_vs_one, "one_vs_one"),
            .adjusted = flag(o.adjusted, "adjusted"),
            .all_points = flag(o.all_points, "all_points"),
            .sharded = flag(o.sharded, "sharded"),
            .from_logits = flag(o.from_logits, "from_logits"),
            .classes = o.classes,
            .outputs = o.outputs,
            .top_k = o.top_k,
            .thresholds = o.thresholds,
            .ignore_index = o.ignore_index,
            .beta = o.beta,
            .zero_division = o.zero_division,
            .max_fpr = o.max_fpr};
}

// A tensor that need not be given.
class Given {
   public:
    Given(const tsr_tensor* tensor, const char* what) {
        if (tensor != nullptr) tensor_ = tensor_in(tensor, what);
        is_given_ = tensor != nullptr;
    }
    [[nodiscard]] const Tensor* get() const { return is_given_ ? &tensor_ : nullptr; }

   private:
    Tensor tensor_;
    bool is_given_ = false;
};

}  // namespace

extern "C" {

tsr_status tsr_metric_options_init(tsr_metric_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_options, "options");
}

tsr_status tsr_metric_create(tsr_metric_kind kind, const tsr_metric_options* options, tsr_metric** out) {
    return guard([&] {
        create(out, [&] {
            const auto o = options_in(options, default_options, "options");
            return metrics::Metric::create(static_cast<Kind>(kind), options_of(o));
        });
    });
}

tsr_status tsr_metric_update(tsr_metric* metric, const tsr_tensor* predictions, const tsr_tensor* targets,
                             const tsr_tensor* weights, const tsr_tensor* valid) {
    return guard([&] {
        auto& m = *object_of(metric, "metric");
        required(predictions, "predictions");
        const Given p(predictions, "predictions");
        const Given t(targets, "targets");
        const Given w(weights, "weights");
        const Given v(valid, "valid");
        m.update({p.get(), t.get(), w.get(), v.get()});
    });
}

tsr_status tsr_metric_compute(tsr_metric* metric, tsr_comm* comm, double* value) {
    return guard([&] {
        const auto m = object_of(metric, "metric");
        double& out = required(value, "value");
        out = m->compute(comm == nullptr ? nullptr : object_of(comm, "comm"));
    });
}

tsr_status tsr_metric_result(const tsr_metric* metric, const char* name, tsr_tensor* array) {
    return guard([&] {
        const auto& m = *object_of(metric, "metric");
        tsr_tensor& out = required(array, "array");
        const metrics::Result& found = m.result(name_in(name, "name"));
        out = tensor_out(found.tensor(), found.shape);
    });
}

tsr_status tsr_metric_merge(tsr_metric* metric, const tsr_metric* other) {
    return guard([&] { object_of(metric, "metric")->merge(*object_of(other, "other")); });
}

tsr_status tsr_metric_gather(tsr_metric* metric, tsr_comm* comm) {
    return guard([&] {
        const auto m = object_of(metric, "metric");
        m->gather(object_of(comm, "comm"));
    });
}

tsr_status tsr_metric_reset(tsr_metric* metric) {
    return guard([&] { object_of(metric, "metric")->reset(); });
}

void tsr_metric_destroy(tsr_metric* metric) { destroy(metric); }

}  // extern "C"

}  // namespace tsr::capi
