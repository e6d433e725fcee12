#include "train/optimizer_of.hpp"

#include <cstdint>
#include <span>
#include <utility>

#include "base/error.hpp"
#include "comm/communicator.hpp"
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

// Numbers over gradients are those of all ranks, which hold parts of them: each communicator joins what the ones before
// have joined.
void join_norms(Optimizer& optimizer, const std::vector<std::shared_ptr<Communicator>>& comms) {
    const auto over_ranks = [comms](double own, Optimizer::Over how) {
        const Tensor number = tensor_of(std::span<double>(&own, 1), DType::f64);
        for (const std::shared_ptr<Communicator>& comm : comms) {
            comm->run({.collective = Collective::all_reduce,
                       .inputs = {},
                       .outputs = {&number, 1},
                       .op = how == Optimizer::Over::max ? ReduceOp::max : ReduceOp::sum,
                       .label = "norm of gradients"});
        }
        return own;
    };
    optimizer.set_together(over_ranks, [comms](FunctionRef<void()> body) {
        if (comms.size() == 1) return comms[0]->in_one_call(body);
        comms[0]->in_one_call([&] { comms[1]->in_one_call(body); });
    });
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
    if (model->slices()) join_norms(*optimizer, {model->slices()->comm()});
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
    std::vector<std::shared_ptr<Communicator>> comms{model->comm()};
    if (model->slices()) comms.push_back(model->slices()->comm());
    join_norms(*optimizer, comms);
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
    join_norms(*optimizer, {model->comm()});
    return optimizer;
}

void step_in_backward(Ddp& model, Optimizer& optimizer) {
    if (optimizer.model() != &model) {
        throw Error(Code::invalid_argument,
                    "the optimizer was not created from this model; only one that was can step in its backward pass");
    }
    model.step_in_backward(optimizer);
}

}  // namespace tsr
