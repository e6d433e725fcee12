#include "engine/model.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"

namespace tsr {

EngineModel::EngineModel(int rank, const std::vector<EngineUnit>& units) : rank_(rank), first_{0} {
    for (size_t u = 0; u < units.size(); ++u) {
        unit_names_.push_back(units[u].name);
        for (const NamedTensor& param : units[u].params) {
            names_.push_back(without_wrappers(param.name));
            shapes_.push_back(param.tensor.shape);
            unit_of_.push_back(u);
        }
        first_.push_back(unit_of_.size());
    }
    forget_pass();
}

size_t EngineModel::unit_of(size_t param) const {
    if (param < unit_of_.size()) return unit_of_[param];
    throw no_such("parameter", param, unit_of_.size());
}

void EngineModel::check_unit(size_t unit) const {
    if (unit >= units()) throw no_such("unit", unit, units());
}

const std::string& EngineModel::name_of_unit(size_t unit) const {
    check_unit(unit);
    return unit_names_[unit];
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

Error EngineModel::refusal(const std::string& why) const {
    return Error(Code::invalid_state, fmt::format("rank {}: {}", rank_, why)).with_rank(rank_);
}

// --- a pass

void EngineModel::forget_pass() {
    begun_.assign(units(), 0);
    ready_.assign(params(), 0);
    missing_.clear();
    for (size_t u = 0; u < units(); ++u) missing_.push_back(first(u + 1) - first(u));
}

Tensor EngineModel::grad(size_t index) const {
    const size_t unit = unit_of(index);
    if (in_backward(unit)) return grad_to_write(index);
    throw refusal(fmt::format(
        "the gradient of \"{}\" can be written only between backward() and the last ready() of its unit \"{}\"",
        names_[index], unit_names_[unit]));
}

void EngineModel::forward(size_t unit) {
    check_unit(unit);
    take_unit(unit);
}

void EngineModel::forward_done(size_t unit, bool keeps) {
    check_unit(unit);
    if (in_backward(unit)) {
        throw refusal(
            fmt::format("the forward of unit \"{}\" cannot end during its backward; call unit_ready() for it first",
                        unit_names_[unit]));
    }
    leave_unit(unit, keeps);
}

void EngineModel::backward(size_t unit) {
    check_unit(unit);
    if (missing_[unit] == 0) {
        throw refusal(fmt::format(
            "the backward of unit \"{}\" cannot begin twice in one backward pass: its gradients were marked "
            "ready; call unit_ready() once, after the last gradient of all its uses",
            unit_names_[unit]));
    }
    begin_backward(unit);
    begun_[unit] = 1;
}

void EngineModel::ready(size_t param) {
    const size_t unit = unit_of(param);
    if (ready_[param] != 0) {
        throw refusal(
            fmt::format("the gradient of \"{}\" was marked ready twice in one backward pass; call ready() once, after "
                        "its last write",
                        names_[param]));
    }
    if (begun_[unit] == 0) {
        throw refusal(
            fmt::format("the gradient of \"{}\" was marked ready before the backward of its unit \"{}\" began; call "
                        "backward() for the unit first",
                        names_[param], unit_names_[unit]));
    }
    mark_ready(param, missing_[unit] == 1);
    ready_[param] = 1;
    --missing_[unit];
}

void EngineModel::unit_ready(size_t unit) {
    check_unit(unit);
    for (size_t i = first(unit + 1); i-- > first(unit);) {
        if (ready_[i] == 0) ready(i);
    }
}

void EngineModel::check_all_ready() const {
    constexpr size_t names_in_message = 8;
    std::string shown;
    size_t count = 0;
    for (size_t i = 0; i < params(); ++i) {
        if (ready_[i] != 0 || ++count > names_in_message) continue;
        shown += fmt::format("{}\"{}\" of unit \"{}\"", count > 1 ? ", " : "", names_[i], unit_names_[unit_of_[i]]);
    }
    if (count == 0) return;
    if (count > names_in_message) shown += fmt::format(" and {} more", count - names_in_message);
    throw refusal(fmt::format(
        "{} of {} gradients were not marked ready in this backward pass: {}; call backward() and unit_ready() "
        "for their units, or let \"ignore_unused_parameters\" of the configuration be true",
        count, params(), shown));
}

void EngineModel::end_pass() {
    for (size_t u = units(); u-- > 0;) {
        if (missing_[u] == 0) continue;
        backward(u);
        clear_missing(u);
        unit_ready(u);
    }
    finish();
    forget_pass();
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
        : EngineModel(comm->rank(), units) {
        std::vector<NamedTensor> all;
        for (const EngineUnit& unit : units) all.insert(all.end(), unit.params.begin(), unit.params.end());
        DdpOptions options;
        options.op = config.op;
        options.pre_divide = pre_divide(config, comm->world_size());
        options.reduce_dtype = config.grad_dtype;
        options.compares = true;
        ddp_ = std::make_shared<Ddp>(comm, std::move(all), options);
    }

    [[nodiscard]] Tensor param(size_t index) const override { return ddp_->param(index).tensor; }
    void zero_grad() override { ddp_->zero_grad(); }
    void begin_pass(bool reduces, bool /*adds*/) override { ddp_->set_sync(reduces); }
    void compare(uint64_t number) override { ddp_->compare(number); }
    [[nodiscard]] bool ranks_agreed() const override { return ddp_->ranks_agreed(); }

    [[nodiscard]] std::shared_ptr<Optimizer> make_optimizer(MakeOptimizer make) override {
        return optimizer_of(ddp_, make);
    }
    [[nodiscard]] std::shared_ptr<Ddp> ddp() const override { return ddp_; }

   private:
    [[nodiscard]] Tensor grad_to_write(size_t param) const override { return ddp_->grad(param); }
    void take_unit(size_t) override {}
    void leave_unit(size_t, bool) override {}
    void begin_backward(size_t) override {}
    void mark_ready(size_t param, bool /*is_last*/) override { ddp_->ready(param); }
    void clear_missing(size_t) override {}  // zero already, or the sum of earlier passes
    void finish() override { ddp_->wait(); }

    std::shared_ptr<Ddp> ddp_;
};

// Stages 1 to 3. At stage 1 gradients accumulate whole on each rank and are reduced at the boundary; from stage 2 on each
// pass reduces them into the shards, which accumulate. Stage 0 in another precision is this with one rank per shard group:
// replicas that have the optimizer's parameters besides those of the trainer.
class Sharded final : public EngineModel {
   public:
    Sharded(const std::shared_ptr<Communicator>& comm, std::vector<EngineUnit> units, const EngineConfig& config)
        : EngineModel(comm->rank(), units), accumulates_in_shards_(config.reduces_each_pass()) {
        FsdpOptions options;
        options.calls = {.ready = "unit_ready()", .reshard = "forward_done()", .or_unused = ""};
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
    void zero_grad() override { fsdp_->zero_grad(); }
    void begin_pass(bool reduces, bool adds) override {
        fsdp_->set_sync(reduces);
        fsdp_->set_accumulate(adds && accumulates_in_shards_);
        clears_missing_ = reduces && (!adds || accumulates_in_shards_);
    }
    void compare(uint64_t number) override { fsdp_->compare(number); }
    [[nodiscard]] bool ranks_agreed() const override { return fsdp_->ranks_agreed(); }

    [[nodiscard]] std::shared_ptr<Optimizer> make_optimizer(MakeOptimizer make) override {
        return optimizer_of(fsdp_, make);
    }
    [[nodiscard]] std::shared_ptr<Fsdp> fsdp() const override { return fsdp_; }

   private:
    [[nodiscard]] Tensor grad_to_write(size_t param) const override { return fsdp_->grad(param); }
    void take_unit(size_t unit) override { fsdp_->forward(unit); }
    void leave_unit(size_t unit, bool keeps) override {
        fsdp_->forward_done(unit);
        if (!keeps) fsdp_->reshard(unit);
    }
    void begin_backward(size_t unit) override { fsdp_->backward(unit); }
    void mark_ready(size_t param, bool is_last) override {
        if (is_last) fsdp_->grads_ready(unit_of(param));
    }
    // Memory that no earlier pass has written holds another unit's gradients.
    void clear_missing(size_t unit) override {
        if (!clears_missing_) return;
        for (size_t i = first(unit); i < first(unit + 1); ++i) {
            const Tensor grad = fsdp_->grad(i);
            if (!is_ready(i) && grad.size_bytes() > 0) std::memset(grad.data, 0, grad.size_bytes());
        }
    }
    void finish() override { fsdp_->wait(); }

    std::shared_ptr<Fsdp> fsdp_;
    const bool accumulates_in_shards_;
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
