// tessera/tp.h: tensor-parallel training.
#include "tessera/tp.h"

#include <optional>

#include "callback.hpp"
#include "comm/communicator.hpp"
#include "comm/fingerprint.hpp"
#include "comm/work.hpp"
#include "handles.hpp"
#include "mesh_object.hpp"
#include "parallel/tensor/cross_entropy.hpp"
#include "parallel/tensor/embedding.hpp"
#include "parallel/tensor/tensor_parallel.hpp"
#include "tensor/layout.hpp"

namespace tsr::capi {

namespace {

static_assert(static_cast<int>(TpStyle::replicate) == TSR_TP_REPLICATE);
static_assert(static_cast<int>(TpStyle::column) == TSR_TP_COLUMN);
static_assert(static_cast<int>(TpStyle::row) == TSR_TP_ROW);
static_assert(static_cast<int>(TpStyle::vocabulary) == TSR_TP_VOCABULARY);
static_assert(static_cast<int>(TpStyle::sequence) == TSR_TP_SEQUENCE);
static_assert(static_cast<int>(TpStyle::shard) == TSR_TP_SHARD);
static_assert(static_cast<int>(TpStyle::layout) == TSR_TP_LAYOUT);
static_assert(static_cast<int>(LossReduction::none) == TSR_LOSS_NONE);
static_assert(static_cast<int>(LossReduction::mean) == TSR_LOSS_MEAN);
static_assert(static_cast<int>(LossReduction::sum) == TSR_LOSS_SUM);

constexpr tsr_tp_options default_options{
    .struct_size = sizeof(tsr_tp_options), .sync_values = 1, .sequence_parallel = 0};

constexpr tsr_cross_entropy_options default_loss{.struct_size = sizeof(tsr_cross_entropy_options),
                                                 .ignore_index = -100,
                                                 .label_smoothing = 0,
                                                 .reduction = TSR_LOSS_MEAN,
                                                 .class_weights = nullptr,
                                                 .grad_scale = 1,
                                                 .data_ranks = nullptr};

struct Model {
    std::vector<NamedTensor> params;
    std::vector<TpRule> rules;
    TpOptions options;
};

// The program's function for parts of an activation.
auto parts_of(tsr_tp_part_fn compute, void* user_data) {
    if (compute == nullptr) throw Error(Code::invalid_argument, "compute is NULL");
    return [compute, user_data](int rank, int64_t begin, const Tensor& part) {
        const tsr_tensor view = tensor_out(part);
        Reply reply;
        reply.check(compute(begin, &view, reply.message(), user_data),
                    [&] { return fmt::format("compute failed for the part of rank {}", rank); });
    };
}

TpRule rule_in(const tsr_tp_rule& rule, size_t index) {
    TpRule out;
    out.pattern = name_in(rule.pattern, fmt::format("the pattern of rule {}", index).c_str());
    out.style = static_cast<TpStyle>(rule.style);
    out.dim = rule.dim;
    const auto refuse = [&](const std::string& why) {
        throw Error(Code::invalid_argument, fmt::format("rule {} (\"{}\"): {}", index, out.pattern, why));
    };
    if (rule.style < TSR_TP_REPLICATE || rule.style > TSR_TP_LAYOUT) {
        refuse(fmt::format("unknown style {}; it is a TSR_TP_ value, 1 to 7", rule.style));
    }
    if (rule.style != TSR_TP_SHARD && rule.dim != 0) {
        refuse(fmt::format("dim is {}; only TSR_TP_SHARD has one, otherwise it must be 0", rule.dim));
    }
    const bool has_heads = rule.style == TSR_TP_COLUMN || rule.style == TSR_TP_ROW || rule.style == TSR_TP_SHARD;
    if (rule.heads < 0 || (rule.heads != 0 && !has_heads)) {
        refuse(
            fmt::format("heads is {}; with TSR_TP_COLUMN, TSR_TP_ROW and TSR_TP_SHARD it may be above 0, otherwise it "
                        "must be 0",
                        rule.heads));
    }
    if (rule.reserved != 0) refuse(fmt::format("reserved is {}; it must be 0", rule.reserved));
    out.heads = rule.heads;
    if (rule.style == TSR_TP_LAYOUT) {
        out.layout = *object_of(rule.layout, "the layout of a rule");
    } else if (rule.layout != nullptr) {
        refuse("only TSR_TP_LAYOUT has a layout; otherwise it must be NULL");
    }
    return out;
}

Model model_in(const tsr_param* params, size_t n, const tsr_tp_rule* rules, size_t n_rules,
               const tsr_tp_options* options) {
    Model model;
    if (n > 0) required(params, "params");
    for (size_t i = 0; i < n; ++i) {
        const std::string name = name_in(params[i].name, "a parameter's name");
        const std::string what = fmt::format("parameter {} (\"{}\")", i, name);
        model.params.push_back({name, described_in(params[i].tensor, what)});
    }
    if (n_rules > 0) required(rules, "rules");
    for (size_t i = 0; i < n_rules; ++i) model.rules.push_back(rule_in(rules[i], i));
    const auto o = options_in(options, default_options, "options");
    model.options.sync_values = flag(o.sync_values, "sync_values");
    model.options.sequence_parallel = flag(o.sequence_parallel, "sequence_parallel");
    return model;
}

int dim_in(int32_t dim) {
    if (dim >= -1) return dim;
    throw Error(Code::invalid_argument, fmt::format("dim is {}; it is a dimension, from 0, or -1 for none", dim));
}

// Runs `call(work)`, and hands its work to the caller who wants it.
template <class Call>
tsr_status issue(tsr_work** work, Call&& call) {
    return guard([&] {
        if (work == nullptr) return call(static_cast<WorkPtr*>(nullptr));
        create(work, [&] {
            WorkPtr made;
            call(&made);
            return made;
        });
    });
}

}  // namespace

extern "C" {

tsr_status tsr_tp_options_init(tsr_tp_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_options, "options");
}

tsr_status tsr_cross_entropy_options_init(tsr_cross_entropy_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_loss, "options");
}

tsr_status tsr_tp_create(tsr_mesh* mesh, const tsr_param* params, size_t n, const tsr_tp_rule* rules, size_t n_rules,
                         const tsr_tp_options* options, tsr_tp** out) {
    return guard([&] {
        create(out, [&] {
            const DeviceMesh& ranks = object_of(mesh, "mesh")->mesh;
            TensorParallel::check_mesh(ranks);
            const Model model = or_refuse_on_all_ranks(*ranks.comm(0), Compared::models,
                                                       [&] { return model_in(params, n, rules, n_rules, options); });
            return std::make_shared<TensorParallel>(ranks, model.params, model.rules, model.options);
        });
    });
}

tsr_status tsr_tp_param_count(const tsr_tp* tp, size_t* count) {
    return guard([&] { required(count, "count") = object_of(tp, "tp")->params(); });
}

tsr_status tsr_tp_param(const tsr_tp* tp, size_t index, tsr_param* param, tsr_tp_style* style, int32_t* cut) {
    return guard([&] {
        const TpParam& found = object_of(tp, "tp")->param(index);
        if (param != nullptr)
            *param = {found.name.c_str(), tensor_out({nullptr, found.shape, found.dtype, {}}, found.shape)};
        if (style != nullptr) *style = static_cast<tsr_tp_style>(found.style);
        if (cut != nullptr) *cut = found.cut;
    });
}

tsr_status tsr_tp_slice(const tsr_tp* tp, size_t index, tsr_param* slice) {
    return guard([&] {
        const auto& model = object_of(tp, "tp");
        const TpParam& param = model->param(index);
        required(slice, "slice") = {param.name.c_str(), tensor_out(model->slice(index), model->slice_shape(index))};
    });
}

tsr_status tsr_tp_grad(tsr_tp* tp, size_t index, tsr_tensor* grad) {
    return guard([&] {
        const auto& model = object_of(tp, "tp");
        required(grad, "grad") = tensor_out(model->grad(index), model->slice_shape(index));
    });
}

tsr_status tsr_tp_layout(const tsr_tp* tp, size_t index, tsr_layout** out) {
    return guard(
        [&] { create(out, [&] { return std::make_shared<Layout>(object_of(tp, "tp")->held(index).layout); }); });
}

tsr_status tsr_tp_set_stream(tsr_tp* tp, void* stream) {
    return guard([&] { object_of(tp, "tp")->set_stream(stream); });
}

tsr_status tsr_tp_enter(tsr_tp* tp, const tsr_tensor* input, int32_t dim, const tsr_tensor* output, void* stream,
                        tsr_work** work) {
    return issue(work, [&](WorkPtr* made) {
        object_of(tp, "tp")->enter(tensor_in(input, "input"), tensor_in(output, "output"), dim_in(dim), stream, made);
    });
}

tsr_status tsr_tp_enter_backward(tsr_tp* tp, const tsr_tensor* grad, int32_t dim, const tsr_tensor* output,
                                 void* stream, tsr_work** work) {
    return issue(work, [&](WorkPtr* made) {
        object_of(tp, "tp")->enter_backward(tensor_in(grad, "grad"), tensor_in(output, "output"), dim_in(dim), stream,
                                            made);
    });
}

tsr_status tsr_tp_leave(tsr_tp* tp, const tsr_tensor* input, int32_t dim, const tsr_tensor* bias,
                        const tsr_tensor* output, void* stream, tsr_work** work) {
    return issue(work, [&](WorkPtr* made) {
        TensorParallel& model = *object_of(tp, "tp");
        std::optional<Tensor> added;
        if (bias != nullptr) added = tensor_in(bias, "bias");
        model.leave(tensor_in(input, "input"), tensor_in(output, "output"), dim_in(dim), added ? &*added : nullptr,
                    stream, made);
    });
}

tsr_status tsr_tp_leave_backward(tsr_tp* tp, const tsr_tensor* grad, int32_t dim, const tsr_tensor* output,
                                 void* stream, tsr_work** work) {
    return issue(work, [&](WorkPtr* made) {
        object_of(tp, "tp")->leave_backward(tensor_in(grad, "grad"), tensor_in(output, "output"), dim_in(dim), stream,
                                            made);
    });
}

tsr_status tsr_tp_enter_parts(tsr_tp* tp, const tsr_tensor* input, int32_t dim, const tsr_tensor* output, void* stream,
                              tsr_tp_part_fn compute, void* user_data) {
    return guard([&] {
        const auto model = object_of(tp, "tp");
        model->enter_parts(tensor_in(input, "input"), tensor_in(output, "output"), dim, stream,
                           parts_of(compute, user_data));
    });
}

tsr_status tsr_tp_leave_parts(tsr_tp* tp, int64_t size, int32_t dim, const tsr_tensor* bias, const tsr_tensor* output,
                              void* stream, tsr_tp_part_fn compute, void* user_data) {
    return guard([&] {
        const auto model = object_of(tp, "tp");
        std::optional<Tensor> added;
        if (bias != nullptr) added = tensor_in(bias, "bias");
        model->leave_parts(tensor_in(output, "output"), size, dim, added ? &*added : nullptr, stream,
                           parts_of(compute, user_data));
    });
}

tsr_status tsr_tp_gather(tsr_tp* tp, const tsr_tensor* input, int32_t dim, const tsr_tensor* output, void* stream,
                         tsr_work** work) {
    return issue(work, [&](WorkPtr* made) {
        object_of(tp, "tp")->gather(tensor_in(input, "input"), tensor_in(output, "output"), dim, stream, made);
    });
}

tsr_status tsr_tp_split(const tsr_tp* tp, const tsr_tensor* input, int32_t dim, const tsr_tensor* output,
                        void* stream) {
    return guard(
        [&] { object_of(tp, "tp")->split(tensor_in(input, "input"), tensor_in(output, "output"), dim, stream); });
}

tsr_status tsr_tp_embed(tsr_tp* tp, size_t index, const tsr_tensor* ids, int32_t dim, const tsr_tensor* output,
                        void* stream, tsr_work** work) {
    return issue(work, [&](WorkPtr* made) {
        TensorParallel& model = *object_of(tp, "tp");
        embed(model, index, tensor_in(ids, "ids"), tensor_in(output, "output"), dim_in(dim), stream, made);
    });
}

tsr_status tsr_tp_embed_backward(tsr_tp* tp, size_t index, const tsr_tensor* ids, const tsr_tensor* grad, int32_t dim,
                                 const tsr_tensor* sum, void* stream, tsr_work** work) {
    return issue(work, [&](WorkPtr* made) {
        TensorParallel& model = *object_of(tp, "tp");
        embed_backward(model, index, tensor_in(ids, "ids"), tensor_in(grad, "grad"), dim_in(dim), tensor_in(sum, "sum"),
                       stream, made);
    });
}

tsr_status tsr_tp_cross_entropy(tsr_tp* tp, const tsr_tensor* logits, int64_t vocabulary, const tsr_tensor* targets,
                                const tsr_cross_entropy_options* options, const tsr_tensor* loss,
                                const tsr_tensor* grad, void* stream, tsr_work** work) {
    return issue(work, [&](WorkPtr* made) {
        TensorParallel& model = *object_of(tp, "tp");
        const auto o = options_in(options, default_loss, "options");
        CrossEntropyOptions core;
        core.vocabulary = vocabulary;
        core.ignore_index = o.ignore_index;
        core.label_smoothing = o.label_smoothing;
        core.reduction = static_cast<LossReduction>(o.reduction);
        core.grad_scale = o.grad_scale;
        if (o.class_weights != nullptr) core.class_weights = tensor_in(o.class_weights, "class_weights");
        if (o.data_ranks != nullptr) core.data_ranks = object_of(o.data_ranks, "data_ranks");
        std::optional<Tensor> wanted;
        if (grad != nullptr) wanted = tensor_in(grad, "grad");
        cross_entropy(model, tensor_in(logits, "logits"), tensor_in(targets, "targets"), core, tensor_in(loss, "loss"),
                      wanted ? &*wanted : nullptr, stream, made);
    });
}

tsr_status tsr_tp_sum_grads(tsr_tp* tp, tsr_work** work) {
    return issue(work, [&](WorkPtr* made) { object_of(tp, "tp")->sum_grads(made); });
}

tsr_status tsr_tp_zero_grad(tsr_tp* tp) {
    return guard([&] { object_of(tp, "tp")->zero_grad(); });
}

void tsr_tp_destroy(tsr_tp* tp) { destroy(tp); }

}  // extern "C"

}  // namespace tsr::capi
