#include "train/optimizer_of.hpp"

#include <fmt/core.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/exact_sums.hpp"
#include "base/json.hpp"
#include "comm/communicator.hpp"
#include "comm/peers.hpp"
#include "metrics/ranks.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

namespace {

std::vector<OptimizerParam> params_in(const Ddp& ddp) {
    std::vector<OptimizerParam> out;
    out.reserve(ddp.params().size());
    for (size_t i = 0; i < ddp.params().size(); ++i) {
        out.push_back({ddp.param(i).name, ddp.param(i).tensor, ddp.grad(i), ddp.held(i)});
    }
    return out;
}

// Each step requires gradients reduced since the previous step.
template <class Model>
void set_gate(Optimizer& optimizer, const std::shared_ptr<Model>& model, const char* what) {
    const auto stepped = std::make_shared<int64_t>(0);
    optimizer.set_gate([model, what] { model->check_idle(what); },
                       [model, stepped] { model->check_reduced_after(*stepped); },
                       [model, stepped] { *stepped = model->synced_steps(); });
    optimizer.set_model(model.get());
}

// Numbers over gradients are those of all ranks of `comm`, each of which holds a part: of the same parameters, or other ones.
enum class Parts { of_same_params, of_others };
void join_numbers(Optimizer& optimizer, const std::shared_ptr<Communicator>& comm,
                  Parts parts = Parts::of_same_params) {
    const auto of_ranks = [comm](double own, Optimizer::Over how) {
        const Tensor number = tensor_of(std::span<double>(&own, 1), DType::f64);
        comm->run({.collective = Collective::all_reduce,
                   .inputs = {},
                   .outputs = {&number, 1},
                   .op = how == Optimizer::Over::max ? ReduceOp::max : ReduceOp::sum,
                   .label = "norm of gradients"});
        return own;
    };
    Optimizer::Together together{of_ranks, [comm](FunctionRef<void()> body) { comm->in_one_call(body); }};
    if (parts == Parts::of_same_params) {
        together.of_params = [comm](ExactSums& sums) {
            metrics::Ranks ranks(comm, "norms of parameters");
            sums.reduce(ranks);
        };
    }
    optimizer.add_together(std::move(together));
}

// Deletes an optimizer of a DDP model, after a bucket that is being updated is finished; no other update begins.
struct Delete {
    std::shared_ptr<Optimizer> made;
    std::shared_ptr<Ddp> model;

    void operator()(Optimizer* ending) {
        model->forget_optimizer(*ending);
        made.reset();
    }
};

}  // namespace

std::shared_ptr<Optimizer> optimizer_of(const std::shared_ptr<Ddp>& model, MakeOptimizer make) {
    std::shared_ptr<Optimizer> made = make(params_in(*model), model->host_copy());
    std::shared_ptr<Optimizer> optimizer(made.get(), Delete{made, model});
    set_gate(*optimizer, model, "the optimizer cannot use the gradients");
    if (model->slices()) join_numbers(*optimizer, model->slices()->comm());
    if (model->host_copy()) model->step_in_backward(*optimizer);
    return optimizer;
}

std::shared_ptr<Optimizer> optimizer_of(const std::shared_ptr<Fsdp>& model, MakeOptimizer make) {
    std::vector<OptimizerParam> params;
    std::vector<size_t> numbers;  // in the model
    for (size_t i = 0; i < model->params(); ++i) {
        const FsdpParam& param = model->param(i);
        if (!param.trained) continue;
        numbers.push_back(i);
        params.push_back({param.name, model->shard(i), model->shard_grad(i), model->held(i)});
    }
    std::shared_ptr<Optimizer> optimizer = make(std::move(params), nullptr);
    set_gate(*optimizer, model, "the optimizer cannot change the shards");
    optimizer->set_has_grad(
        [model, numbers = std::move(numbers)](size_t param) { return model->has_grad(numbers[param]); },
        [model] { model->forget_gradients(); });
    join_numbers(*optimizer, model->comm());
    if (model->slices()) join_numbers(*optimizer, model->slices()->comm());
    return optimizer;
}

std::shared_ptr<Optimizer> optimizer_of(const std::shared_ptr<TensorParallel>& model, MakeOptimizer make) {
    std::vector<OptimizerParam> params;
    for (size_t i = 0; i < model->params(); ++i) {
        if (!is_floating(model->param(i).dtype)) continue;
        params.push_back({model->param(i).name, model->slice(i), model->grad(i), model->held(i)});
    }
    std::shared_ptr<Optimizer> optimizer = make(std::move(params), nullptr);
    set_gate(*optimizer, model, "the optimizer cannot use the gradients");
    optimizer->gate_clips_like_steps();
    join_numbers(*optimizer, model->comm());
    return optimizer;
}

namespace {

// [[name, part], ...]: the parameters, and which parts of them this rank holds.
std::string description(const Optimizer& optimizer) {
    Json::Array all;
    for (const OptimizerParam& param : optimizer.params()) {
        std::string part = fmt::format("{} {}", name_of(param.value.dtype), param.value.shape.str());
        if (param.held) {
            part = fmt::format("{} of {}", name_of(param.value.dtype), param.held->layout.shape().str());
            for (const Box& box : param.held->layout.boxes_of(param.held->rank)) part += fmt::format(" {}", box.str());
        }
        all.emplace_back(Json::Array{param.name, std::move(part)});
    }
    return Json(std::move(all)).dump();
}

}  // namespace

void join_optimizers(Optimizer& optimizer, const std::shared_ptr<Communicator>& comm) {
    Peers peers(comm);
    std::string mine;
    peers.all_or_none("join", [&] {
        if (optimizer.is_counted()) throw Error(Code::invalid_state, "the optimizer was joined already");
        mine = description(optimizer);
    });
    const std::vector<std::string> texts = peers.gather(mine);

    struct First {
        int rank;
        std::string part;
    };
    std::map<std::string, First, std::less<>> firsts;
    peers.all_or_none("join", [&] {
        for (int rank = 0; rank < peers.world_size(); ++rank) {
            const Json told = Json::parse(texts[static_cast<size_t>(rank)], "the parameters of a rank");
            for (const Json& one : told.as_array()) {
                const std::string& name = one.as_array()[0].as_string();
                const std::string& part = one.as_array()[1].as_string();
                const auto [first, is_new] = firsts.try_emplace(name, First{rank, part});
                if (is_new || first->second.part == part) continue;
                throw Error(
                    Code::invalid_argument,
                    fmt::format("ranks {} and {} hold different parts of \"{}\" ({}; {}); join the optimizers of "
                                "ranks that have different parameters, such as one rank of each stage of a "
                                "pipeline",
                                first->second.rank, rank, name, first->second.part, part));
            }
        }
    });
    std::vector<size_t> elsewhere;
    for (size_t i = 0; i < optimizer.params().size(); ++i) {
        if (firsts.find(optimizer.params()[i].name)->second.rank != peers.rank()) elsewhere.push_back(i);
    }
    join_numbers(optimizer, comm, Parts::of_others);
    optimizer.count_elsewhere(elsewhere);
}

void step_in_backward(Ddp& model, Optimizer& optimizer) {
    if (optimizer.model() != &model) {
        throw Error(Code::invalid_argument,
                    "the optimizer was not created from this model; only one that was can step in its backward pass");
    }
    if (optimizer.needs_norms() && model.slices()) {
        throw Error(Code::unsupported,
                    fmt::format("{} needs the norms of full parameters, of which these ranks hold slices, so it cannot "
                                "step in the backward pass; step it after the wait",
                                optimizer.kind()));
    }
    model.step_in_backward(optimizer);
}

}  // namespace tsr
