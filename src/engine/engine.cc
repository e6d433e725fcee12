#include "engine/engine.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/refuse.hpp"
#include "base/splitmix64.hpp"
#include "comm/fingerprint.hpp"
#include "comm/peers.hpp"
#include "comm/rendezvous.hpp"
#include "optim/adagrad.hpp"
#include "optim/adam.hpp"
#include "optim/lamb.hpp"
#include "optim/lion.hpp"
#include "optim/sgd.hpp"

namespace tsr {

namespace {

// One line per key, whatever the order of the keys is.
std::vector<std::string> description(const Json& config) {
    std::vector<std::string> lines;
    for (const Json::Member& member : config.as_object()) {
        lines.push_back(fmt::format("the configuration's {} {}", Json(member.key).dump(), member.value.dump()));
    }
    std::ranges::sort(lines);
    return lines;
}

void check_units(const std::vector<EngineUnit>& units) {
    if (units.empty()) throw Error(Code::invalid_argument, "the model has no units");
    for (const EngineUnit& unit : units) {
        if (unit.params.empty()) {
            throw Error(Code::invalid_argument, fmt::format("unit \"{}\" has no parameters", unit.name));
        }
        for (const NamedTensor& param : unit.params) {
            if (param.tensor.device.type == DeviceType::cpu) continue;
            throw Error(
                Code::unsupported,
                fmt::format("parameter \"{}\" is on a CUDA device; the engine trains on the CPU: copy the parameters "
                            "there, or use DDP or FSDP on the device",
                            param.name));
        }
    }
}

std::shared_ptr<Optimizer> make_optimizer(EngineModel& model, const OptimizerConfig& config) {
    return model.make_optimizer([&](std::vector<OptimizerParam> params, std::shared_ptr<SharedCopy> copy) {
        std::shared_ptr<Optimizer> made;
        if (const auto* adam = std::get_if<AdamOptions>(&config)) {
            made = std::make_shared<Adam>(std::move(params), *adam, std::move(copy));
        } else if (const auto* adagrad = std::get_if<AdagradOptions>(&config)) {
            made = std::make_shared<Adagrad>(std::move(params), *adagrad, std::move(copy));
        } else if (const auto* lion = std::get_if<LionOptions>(&config)) {
            made = std::make_shared<Lion>(std::move(params), *lion, std::move(copy));
        } else if (const auto* lamb = std::get_if<LambOptions>(&config)) {
            made = std::make_shared<Lamb>(std::move(params), *lamb, std::move(copy));
        } else {
            made = std::make_shared<Sgd>(std::move(params), std::get<SgdOptions>(config), std::move(copy));
        }
        return made;
    });
}

std::string text_of(const Setting& setting) {
    return std::visit(
        [](const auto& value) {
            if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::vector<double>>) {
                return fmt::format("[{}]", fmt::join(value, ", "));
            } else {
                return fmt::format("{}", value);
            }
        },
        setting);
}

uint64_t number_of(const std::vector<std::string>& lines) {
    uint64_t number = 0;
    for (const std::string& line : lines) {
        for (const char c : line) number = SplitMix64::mix(number ^ static_cast<unsigned char>(c));
        number = SplitMix64::mix(~number);
    }
    return number;
}

// The names of parameters whose gradients have an infinity or NaN here; empty: there are none.
std::string not_finite(const std::vector<OptimizerParam>& params) {
    constexpr size_t most_named = 4;
    std::string names;
    size_t count = 0;
    for (const OptimizerParam& param : params) {
        const auto is_finite = [](const auto value) { return std::isfinite(value); };
        const bool is_good = param.grad.dtype == DType::f64 ? std::ranges::all_of(param.grad.as<double>(), is_finite)
                                                            : std::ranges::all_of(param.grad.as<float>(), is_finite);
        if (is_good || ++count > most_named) continue;
        names += fmt::format("{}\"{}\"", count > 1 ? ", " : "", param.name);
    }
    return count > most_named ? fmt::format("{} and {} more", names, count - most_named) : names;
}

int64_t saturated_sum(int64_t a, int64_t b) {
    int64_t sum = 0;
    return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

}  // namespace

Engine::Engine(const std::shared_ptr<Communicator>& comm, std::vector<EngineUnit> units, std::string_view config,
               std::shared_ptr<LrSchedule> schedule)
    : comm_(comm), schedule_(std::move(schedule)) {
    std::string shown;
    const std::vector<std::string> lines = or_refuse_on_all_ranks(*comm_, Compared::models, [&] {
        const ConfigText text(config);
        config_ = EngineConfig::of(text);
        batch_ = solve_batch(config_.batch, comm_->world_size());
        loss_scale_ =
            LossScale(config_.precision == Precision::f16 ? config_.loss_scale : LossScaleOptions{.fixed = 1});
        if (!config_.optimizer) {
            throw Error(
                Code::invalid_argument,
                "the configuration has no \"optimizer\"; the engine creates it: give its \"type\" and \"params\"");
        }
        if (schedule_ && config_.schedule) {
            throw Error(
                Code::invalid_argument,
                "the configuration has a \"scheduler\", and the program gives a schedule; leave one of the two out");
        }
        check_units(units);
        shown = text.root().dump();
        std::vector<std::string> described = description(text.root());
        if (schedule_) described.push_back(fmt::format("the schedule {}", schedule_->curve()->text));
        return described;
    });
    check_same_on_all_ranks(*comm_, Compared::models, lines, "the ranks' configurations differ");
    if (comm_->rank() == 0) {
        for (const ConfigReport& report : config_.reports) log::warning("{}", report.text);
        if (config_.dump_state) {
            log::info("the engine's configuration: {}; train batch {} = micro-batch {} * accumulation {} * {} ranks",
                      shown, batch_.train, batch_.micro, batch_.accumulation, comm_->world_size());
        }
    }
    model_ = EngineModel::make(comm_, std::move(units), config_);
    optimizer_ = make_optimizer(*model_, *config_.optimizer);
    optimizer_->own(
        "it belongs to an engine; call the engine's step(), which unscales and clips, makes the step and sets "
        "the gradients to zero");
    if (config_.schedule) schedule_ = std::make_shared<LrSchedule>(config_.schedule);
    if (schedule_) schedule_->attach(optimizer_);
    if (config_.wall_clock_breakdown && config_.steps_per_print > 0 && comm_->rank() == 0) times_.emplace();
}

// --- a pass

void Engine::check_not_failed() const {
    if (failed_) throw Error(*failed_);
}

// A rank alone may evaluate, but not train.
void Engine::refuse_in_turn(std::string_view what) const {
    if (comm_->world_size() > 1) comm_->refuse_in_turn(what);
}

void Engine::forward(size_t unit) {
    check_not_failed();
    const std::string& name = model_->name_of_unit(unit);
    if (pass_ == Pass::begun) {
        throw refusal(fmt::format(
            "the forward of unit \"{}\" cannot begin during a backward pass; call backward_done() first", name));
    }
    if (times_ && is_training_) times_->begin(StepTimes::forward);
    model_->forward(unit);
}

void Engine::forward_done(size_t unit) {
    check_not_failed();
    model_->forward_done(unit, is_training_);
    if (times_) times_->end();
}

bool Engine::reduces() const { return !in_no_sync_ && (config_.reduces_each_pass() || is_boundary()); }

// One line for each thing that all ranks must have alike.
std::vector<std::string> Engine::settings() const {
    const int64_t micro_step = saturated_sum(counters_.micro_steps, 1);
    std::vector<std::string> lines{
        fmt::format("{} boundary at micro-step {}", is_boundary() ? "a" : "no", micro_step),
        fmt::format("train_micro_batch_size_per_gpu {}", batch_.micro),
        fmt::format("gradient_accumulation_steps {}", batch_.accumulation),
        fmt::format("the loss scale {}", loss_scale_.scale()),
    };
    for (const auto& [name, value] : optimizer_->settings()) {
        lines.push_back(fmt::format("the optimizer's {} {}", name, text_of(value)));
    }
    if (last_step_lr_) lines.push_back(fmt::format("lr {} in the last step", *last_step_lr_));
    if (schedule_) lines.push_back(fmt::format("the schedule at step {}", schedule_->steps()));
    return lines;
}

void Engine::check_settings() {
    if (model_->ranks_agreed()) return;
    try {
        check_same_on_all_ranks(*comm_, Compared::settings, settings_, "the ranks' settings of the engine differ");
    } catch (const Error& error) {
        failed_ = error;
        throw;
    }
}

void Engine::begin_pass() {
    if (pass_ == Pass::begun) return;
    if (pass_ == Pass::due) {
        throw refusal(
            "a backward pass begins, but step() was not called after the last one; call it after each pass, or "
            "run the earlier passes inside no_sync");
    }
    refuse_in_turn("a backward pass of an engine");
    settings_ = settings();
    model_->compare(number_of(settings_));
    if (times_) times_->begin(StepTimes::backward);
    model_->begin_pass(reduces(), passes_ > 0);
    pass_ = Pass::begun;
}

void Engine::backward(size_t unit) {
    check_not_failed();
    model_->check_unit(unit);
    begin_pass();
    model_->backward(unit);
}

void Engine::ready(size_t param) {
    check_not_failed();
    model_->ready(param);
}

void Engine::unit_ready(size_t unit) {
    check_not_failed();
    model_->unit_ready(unit);
}

void Engine::backward_done() {
    check_not_failed();
    if (pass_ != Pass::due && !config_.fills_missing) model_->check_all_ready();
    begin_pass();
    model_->end_pass();
    if (times_) {
        times_->end();
        times_->count_pass();
    }
    ++passes_;
    pass_ = in_no_sync_ ? Pass::none : Pass::due;
    if (reduces()) check_settings();
}

double Engine::loss_factor() const { return loss_scale_.scale() / static_cast<double>(batch_.accumulation); }

bool Engine::adds_gradients() const { return passes_ > 0 && !config_.reduces_each_pass(); }

// --- boundaries

bool Engine::is_boundary() const {
    if (boundary_) return *boundary_;
    return config_.every_step_is_boundary || steps_ + 1 >= batch_.accumulation;
}

void Engine::check_between_passes(const char* what) const {
    check_not_failed();
    if (pass_ == Pass::none) return;
    throw refusal(fmt::format("{} {}", what,
                              pass_ == Pass::begun
                                  ? "in a backward pass; call it before the pass"
                                  : "between a backward pass and its step(); call it before the pass"));
}

void Engine::check_nothing_accumulated(const char* what) const {
    check_between_passes(what);
    if (passes_ == 0) return;
    throw refusal(
        fmt::format("{} while the gradients of {} backward passes wait for the optimizer's step; call it after a "
                    "step at a boundary",
                    what, passes_));
}

void Engine::set_boundary(std::optional<bool> boundary) {
    check_between_passes("the boundary cannot be set");
    boundary_ = boundary;
}

void Engine::begin_no_sync() {
    if (in_no_sync_) throw refusal("no_sync is already on; it cannot be nested");
    if (config_.reduces_each_pass()) {
        throw refusal(
            fmt::format("no_sync is not possible at stage {}: gradients are sharded, so that each backward pass "
                        "reduces them; use stage 0 or 1",
                        config_.stage));
    }
    check_between_passes("no_sync cannot begin");
    in_no_sync_ = true;
}

void Engine::end_no_sync() {
    if (!in_no_sync_) throw refusal("no_sync is not on");
    check_between_passes("no_sync cannot end");
    in_no_sync_ = false;
}

void Engine::set_train_batch_size(int64_t train) {
    check_nothing_accumulated("train_batch_size cannot be changed");
    batch_ = with_train_batch(batch_, train, comm_->world_size());
}

void Engine::set_train_micro_batch_size(int64_t micro) {
    check_nothing_accumulated("train_micro_batch_size_per_gpu cannot be changed");
    batch_ = with_micro_batch(batch_, micro, comm_->world_size());
}

// --- a step

bool Engine::step() {
    check_not_failed();
    if (in_no_sync_) throw refusal("step() is not allowed inside no_sync; end no_sync first");
    if (pass_ == Pass::begun) throw refusal("step() in a backward pass; call backward_done() first");
    if (pass_ == Pass::none)
        throw refusal("step() without a backward pass since the last one; run a backward pass first");
    refuse_in_turn("a step of an engine");
    const bool is_last = is_boundary();
    if (is_last && schedule_) schedule_->check_step();  // nothing has changed yet
    const bool is_made = is_last && step_of_optimizer();
    counters_.micro_steps = saturated_sum(counters_.micro_steps, 1);
    ++steps_;
    if (is_last) steps_ = passes_ = 0;
    pass_ = Pass::none;
    if (is_made && schedule_) schedule_->step();
    return is_made;
}

// Whether the gradients are finite, over all ranks.
bool Engine::unscale_and_clip() {
    const bool is_scaled = config_.precision == Precision::f16;
    bool finite = true;
    if (is_scaled || (config_.skips_overflow && !config_.computes_norm)) {
        finite = optimizer_->unscale_grads(loss_scale_.scale());
    }
    if (!config_.computes_norm) return finite;
    double norm = std::numeric_limits<double>::infinity();
    if (finite) {
        const double most = config_.gradient_clipping > 0 ? config_.gradient_clipping : DBL_MAX;
        norm = optimizer_->clip_grad_norm(most, 2);
    }
    grad_norm_ = norm;
    return finite && (!config_.skips_overflow || std::isfinite(norm));
}

bool Engine::step_of_optimizer() {
    const Optimizer::OwnersCall own(*optimizer_);
    optimizer_->check_step();
    if (times_) times_->begin(StepTimes::step);
    const bool finite = unscale_and_clip();
    try {
        loss_scale_.update(!finite);
    } catch (const Error& error) {
        fail_at_minimum(error);
    }
    if (finite) {
        last_step_lr_ = optimizer_->lr();
        optimizer_->step();
    } else {
        counters_.skipped_steps = saturated_sum(counters_.skipped_steps, 1);
    }
    model_->zero_grad();
    if (times_) {
        times_->end();
        times_->count_step();
    }
    counters_.global_steps = saturated_sum(counters_.global_steps, 1);
    counters_.global_samples = saturated_sum(counters_.global_samples, batch_.train);
    print_step();
    return finite;
}

// The gradients are the same for all ranks by now, but each looks at those that it holds.
void Engine::fail_at_minimum(const Error& why) {
    const std::vector<std::string> found =
        Peers(comm_, {}, "overflow at the minimum").gather(not_finite(optimizer_->params()));
    std::vector<int> ranks;
    for (size_t rank = 0; rank < found.size(); ++rank) {
        if (!found[rank].empty()) ranks.push_back(static_cast<int>(rank));
    }
    std::string where;
    if (!ranks.empty()) {
        where = fmt::format(" The gradients of {} have infinities or NaN (rank {}: {}).", name_ranks(ranks),
                            ranks.front(), found[static_cast<size_t>(ranks.front())]);
    }
    failed_ = refusal(fmt::format("{}.{} This engine makes no more steps: load the last checkpoint into a new one",
                                  why.what(), where));
    throw Error(*failed_);
}

void Engine::print_step() {
    if (config_.steps_per_print == 0 || counters_.global_steps % config_.steps_per_print != 0 || comm_->rank() != 0)
        return;
    log::info("step {}, skipped {}, lr {}, loss scale {}", counters_.global_steps, counters_.skipped_steps, lr(),
              loss_scale_.scale());
    if (times_) log::info("step {}, {}", counters_.global_steps, times_->take_means());
}

// --- the state

Engine::State Engine::state() const {
    check_nothing_accumulated("the state cannot be saved or loaded");
    return {counters_, loss_scale_.is_dynamic(), loss_scale_.state()};
}

bool Engine::continues_scale(const State& state) const { return state.scale_is_dynamic && loss_scale_.is_dynamic(); }

void Engine::check_state(const State& state) const {
    check_nothing_accumulated("the state cannot be saved or loaded");
    const auto& [steps, samples, skipped, micro] = state.counters;
    refuse_unless(steps >= 0, "the saved number of global steps", steps, "at least 0");
    refuse_unless(samples >= 0, "the saved number of global samples", samples, "at least 0");
    refuse_unless(skipped >= 0 && skipped <= steps, "the saved number of skipped steps", skipped,
                  "at least 0 and at most the number of global steps");
    refuse_unless(micro >= 0, "the saved number of micro-steps", micro, "at least 0");
    if (!continues_scale(state)) return;
    LossScale copy = loss_scale_;
    copy.restore(state.scale);
}

void Engine::restore(const State& state) {
    check_state(state);
    if (continues_scale(state)) loss_scale_.restore(state.scale);
    counters_ = state.counters;
    steps_ = 0;
    grad_norm_.reset();
}

Error Engine::refusal(std::string_view why) const {
    return Error(Code::invalid_state, fmt::format("rank {}: {}", comm_->rank(), why)).with_rank(comm_->rank());
}

}  // namespace tsr
