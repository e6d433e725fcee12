#include "engine/model.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"

namespace tsr {

EngineModel::EngineModel(const std::vector<EngineUnit>& units) : first_{0} {
    for (size_t u = 0; u < units.size(); ++u) {
        for (const NamedTensor& param : units[u].params) {
            names_.push_back(without_wrappers(param.name));
            shapes_.push_back(param.tensor.shape);
            unit_of_.push_back(u);
        }
        first_.push_back(unit_of_.size());
    }
}

size_t EngineModel::unit_of(size_t param) const {
    if (param < unit_of_.size()) return unit_of_[param];
    throw no_such("parameter", param, unit_of_.size());
}

void EngineModel::check_unit(size_t unit) const {
    if (unit >= units()) throw no_such("unit", unit, units());
}

const std::string& EngineModel::name_of_param(size_t param) const {
    (void)unit_of(param);
    return names_[param];
}

const Dims& EngineModel::shape_of_param(size_t param) const {
    (void)unit_of(param);
    return shapes_[param];
}

size_t EngineModel::find(const std::string& name) const {
    const auto found = std::ranges::find(names_, name);
    if (found != names_.end()) return static_cast<size_t>(found - names_.begin());
    throw Error(Code::invalid_argument, fmt::format("the model has no parameter \"{}\"", name));
}

namespace {

// What both kinds say of the division of gradients.
double pre_divide(const EngineConfig& config, int ranks) {
    return config.prescales ? static_cast<double>(ranks) : config.predivide;
}

// Stage 0 in the parameters' dtype: parameters and optimizer are replicated, and stay in the trainer's memory.
class Replicated final : public EngineModel {
   public:
    Replicated(const std::shared_ptr<Communicator>& comm, const std::vector<EngineUnit>& units,
               const EngineConfig& config)
        : EngineModel(units), ready_(params(), 0) {
        std::vector<NamedTensor> all;
        for (const EngineUnit& unit : units) all.insert(all.end(), unit.params.begin(), unit.params.end());
        DdpOptions options;
        options.op = config.op;
        options.pre_divide = pre_divide(config, comm->world_size());
        options.reduce_dtype = config.grad_dtype;
        ddp_ = std::make_shared<Ddp>(comm, std::move(all), options);
    }

    [[nodiscard]] Tensor param(size_t index) const override { return ddp_->param(index).tensor; }
    [[nodiscard]] Tensor grad(size_t index) const override { return ddp_->grad(index); }
    void forward(size_t unit) override { check_unit(unit); }
    void forward_done(size_t unit, bool /*keeps*/) override { check_unit(unit); }

    void begin_pass(bool reduces, bool /*adds*/) override {
        ddp_->set_sync(reduces);
        std::ranges::fill(ready_, char{0});
    }
    void backward(size_t unit) override { check_unit(unit); }
    void ready(size_t param) override {
        ddp_->ready(param);
        ready_[param] = 1;
    }
    void unit_ready(size_t unit) override {
        check_unit(unit);
        for (size_t i = first(unit + 1); i-- > first(unit);) {
            if (ready_[i] == 0) ready(i);
        }
    }
    // A missing gradient is zero already, or the sum of earlier passes.
    void end_pass(bool fills_missing) override {
        for (size_t u = fills_missing ? units() : 0; u-- > 0;) unit_ready(u);
        ddp_->wait();
    }
    void zero_grad() override { ddp_->zero_grad(); }

    [[nodiscard]] std::shared_ptr<Optimizer> make_optimizer(MakeOptimizer make) override {
        return optimizer_of(ddp_, make);
    }
    [[nodiscard]] std::shared_ptr<Ddp> ddp() const override { return ddp_; }

   private:
    std::shared_ptr<Ddp> ddp_;
    std::vector<char> ready_;  // in this pass
};

// Stages 1 to 3. At stage 1 gradients accumulate whole on each rank and are reduced at the boundary; from stage 2 on each
// pass reduces them into the shards, which accumulate. Stage 0 in another precision is this with one rank per shard group:
// replicas that have the optimizer's parameters besides those of the trainer.
class Sharded final : public EngineModel {
   public:
    Sharded(const std::shared_ptr<Communicator>& comm, std::vector<EngineUnit> units, const EngineConfig& config)
        : EngineModel(units),
          accumulates_in_shards_(config.reduces_each_pass()),
          waiting_for_(units.size(), 0),
          ready_(params(), 0) {
        FsdpOptions options;
        options.op = config.op;
        options.pre_divide = pre_divide(config, comm->world_size());
        options.reduce_dtype = config.grad_dtype;
        if (config.stage == 0) options.shard_ranks = 1;
        if (config.precision != Precision::of_params) {
            options.param_dtype = config.precision == Precision::f16 ? DType::f16 : DType::bf16;
        }
        std::vector<FsdpUnit> all;
        for (EngineUnit& unit : units) {
            FsdpUnit& one = all.emplace_back();
            one.name = std::move(unit.name);
            one.params = std::move(unit.params);
            one.reshard_after_forward = config.stage == 3 ? config.secondary_ranks : 0;
            one.flat = true;
        }
        fsdp_ = std::make_shared<Fsdp>(comm, std::move(all), options);
    }

    [[nodiscard]] Tensor param(size_t index) const override { return fsdp_->whole(index); }
    [[nodiscard]] Tensor grad(size_t index) const override { return fsdp_->grad(index); }
    void forward(size_t unit) override { fsdp_->forward(unit); }
    void forward_done(size_t unit, bool keeps) override {
        fsdp_->forward_done(unit);
        if (!keeps) fsdp_->reshard(unit);
    }

    void begin_pass(bool reduces, bool adds) override {
        fsdp_->set_sync(reduces);
        fsdp_->set_accumulate(adds && accumulates_in_shards_);
        clears_missing_ = reduces && (!adds || accumulates_in_shards_);
        std::ranges::fill(ready_, char{0});
    }
    void backward(size_t unit) override {
        fsdp_->backward(unit);
        if (waiting_for_[unit] > 0) return;  // resumed after an interrupt, or called twice
        waiting_for_[unit] = first(unit + 1) - first(unit);
        std::fill(ready_.begin() + at(first(unit)), ready_.begin() + at(first(unit + 1)), char{0});
    }
    void ready(size_t param) override {
        const size_t unit = unit_of(param);
        if (ready_[param] != 0) {
            throw Error(
                Code::invalid_state,
                fmt::format("the gradient of \"{}\" was marked ready twice in one backward pass; call ready() once, "
                            "after its last write",
                            name_of_param(param)));
        }
        if (waiting_for_[unit] == 0) {
            throw Error(
                Code::invalid_state,
                fmt::format("the gradient of \"{}\" was marked ready before the backward of its unit {} began; call "
                            "backward() for the unit first",
                            name_of_param(param), unit));
        }
        if (waiting_for_[unit] == 1) fsdp_->grads_ready(unit);
        ready_[param] = 1;
        --waiting_for_[unit];
    }
    void unit_ready(size_t unit) override {
        check_unit(unit);
        for (size_t i = first(unit + 1); i-- > first(unit) && waiting_for_[unit] > 0;) {
            if (ready_[i] == 0) ready(i);
        }
    }
    void end_pass(bool fills_missing) override {
        for (size_t u = fills_missing ? units() : 0; u-- > 0;) {
            if (waiting_for_[u] == 0) continue;
            clear_missing(u);
            unit_ready(u);
        }
        fsdp_->wait();
    }
    void zero_grad() override { fsdp_->zero_grad(); }

    [[nodiscard]] std::shared_ptr<Optimizer> make_optimizer(MakeOptimizer make) override {
        return optimizer_of(fsdp_, make);
    }
    [[nodiscard]] std::shared_ptr<Fsdp> fsdp() const override { return fsdp_; }

   private:
    static std::ptrdiff_t at(size_t index) { return static_cast<std::ptrdiff_t>(index); }

    // Memory that no earlier pass has written holds another unit's gradients.
    void clear_missing(size_t unit) {
        if (!clears_missing_) return;
        for (size_t i = first(unit); i < first(unit + 1); ++i) {
            const Tensor grad = fsdp_->grad(i);
            if (ready_[i] == 0 && grad.size_bytes() > 0) std::memset(grad.data, 0, grad.size_bytes());
        }
    }

    std::shared_ptr<Fsdp> fsdp_;
    const bool accumulates_in_shards_;
    std::vector<size_t> waiting_for_;  // per unit: gradients that are not ready in its backward; 0: not in its backward
    std::vector<char> ready_;          // per parameter
    bool clears_missing_ = false;
};

}  // namespace

std::unique_ptr<EngineModel> EngineModel::make(const std::shared_ptr<Communicator>& comm, std::vector<EngineUnit> units,
                                               const EngineConfig& config) {
    if (config.stage == 0 && config.precision == Precision::of_params) {
        return std::make_unique<Replicated>(comm, units, config);
    }
    return std::make_unique<Sharded>(comm, std::move(units), config);
}

}  // namespace tsr
