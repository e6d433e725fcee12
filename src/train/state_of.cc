#include "train/state_of.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/base64.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "tensor/layout.hpp"

namespace tsr {

namespace {

Json to_value(const Setting& setting) {
    if (const auto* flag_value = std::get_if<bool>(&setting)) return Json(*flag_value);
    if (const auto* integer = std::get_if<int64_t>(&setting)) return Json(*integer);
    if (const auto* number = std::get_if<double>(&setting)) return double_value(*number);
    Json::Array list;
    for (const double number : std::get<std::vector<double>>(setting)) list.push_back(double_value(number));
    return Json(std::move(list));
}

// PyTorch saves settings such as weight_decay=0 as integers.
double number_of(const Json& value, const std::string& name) {
    return value.is(Json::Kind::int64) ? static_cast<double>(value.as_int()) : double_of(value, name);
}

// Converts to the type of `like`, the setting that it will replace.
Setting to_setting(const Json& value, const Setting& like, const std::string& name) {
    if (std::holds_alternative<bool>(like) && value.is(Json::Kind::boolean)) return value.as_bool();
    if (std::holds_alternative<int64_t>(like)) return int_of(value, name);
    if (std::holds_alternative<double>(like)) return number_of(value, name);
    if (std::holds_alternative<std::vector<double>>(like)) {
        const bool tuple = value.is(Json::Kind::object) && value.find("~") != nullptr && value.at("~") == Json("tuple");
        const Json& numbers = tuple ? value.at("v") : value;  // PyTorch's betas
        if (numbers.is(Json::Kind::array)) {
            std::vector<double> list;
            for (const Json& number : numbers.as_array()) list.push_back(number_of(number, name));
            return list;
        }
    }
    throw Error(Code::mismatch,
                fmt::format("the saved setting '{}' is {}, which has the wrong type", name, value.dump()));
}

constexpr const char* below_optimizer = ".param_groups.0.";

// The settings of an optimizer, "<prefix>.param_groups.0.<setting>", or a scaler, "<prefix>.<setting>".
template <class Object>
class SettingsOf final : public StateSource {
   public:
    SettingsOf(std::string prefix, const char* below, std::shared_ptr<Object> object)
        : prefix_(std::move(prefix)), begin_(prefix_ + below), object_(std::move(object)) {}

    const std::string& prefix() const override { return prefix_; }

    Values collect() const override {
        Values values;
        for (const auto& [name, setting] : object_->settings()) values.emplace(begin_ + name, to_value(setting));
        return values;
    }

    void check(const Values& values) const override {
        const Settings settings = merged(values);
        if constexpr (std::is_same_v<Object, GradScaler>) {
            GradScaler copy = *object_;
            copy.load_settings(settings);
        }
    }
    void apply(const Values& values) override { object_->load_settings(merged(values)); }
    bool has_tensors() const override { return std::is_same_v<Object, Optimizer>; }

   private:
    Settings merged(const Values& values) const {
        Settings settings = object_->settings();
        for (auto& [name, setting] : settings) setting = to_setting(values.at(begin_ + name), setting, begin_ + name);
        return settings;
    }

    std::string prefix_;
    std::string begin_;
    std::shared_ptr<Object> object_;
};

Json unsigned_value(uint64_t number) {
    const Json json(number);
    if (json.is(Json::Kind::int64)) return json;
    Json tagged;
    tagged.set("~", "int");
    tagged.set("v", std::to_string(number));
    return tagged;
}

uint64_t unsigned_of(const Json& value, const std::string& name) {
    if (value.is(Json::Kind::int64) && value.as_int() >= 0) return static_cast<uint64_t>(value.as_int());
    if (value.is(Json::Kind::object) && value.find("v") != nullptr && value.at("v").is(Json::Kind::string)) {
        const std::string& digits = value.at("v").as_string();
        uint64_t number = 0;
        const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
        if (error == std::errc{} && end == digits.data() + digits.size()) return number;
    }
    throw Error(Code::mismatch, fmt::format("the saved '{}' is {}, not an unsigned integer", name, value.dump()));
}

// "<prefix>.epoch", "<prefix>.consumed" and the values that identify the order of samples.
class SamplerValues final : public StateSource {
   public:
    SamplerValues(std::string prefix, std::shared_ptr<Sampler> sampler)
        : prefix_(std::move(prefix)), sampler_(std::move(sampler)) {}

    const std::string& prefix() const override { return prefix_; }

    Values collect() const override {
        const SamplerState state = sampler_->state();
        Values values;
        values.emplace(full("length"), state.length);
        values.emplace(full("seed"), unsigned_value(state.seed));
        values.emplace(full("shuffle"), state.shuffle);
        values.emplace(full("drop_last"), state.drop_last);
        values.emplace(full("epoch"), state.epoch);
        values.emplace(full("consumed"), state.consumed);
        return values;
    }

    void check(const Values& values) const override {
        Sampler copy = *sampler_;
        copy.load_state(merged(values));
    }
    void apply(const Values& values) override { sampler_->load_state(merged(values)); }

   private:
    SamplerState merged(const Values& values) const {
        SamplerState state = sampler_->state();
        const auto take = [&](const char* name, auto&& set) { set(values.at(full(name)), full(name)); };
        const auto take_int = [&](const char* name, int64_t& out) {
            take(name, [&](const Json& value, const std::string& what) { out = int_of(value, what); });
        };
        const auto take_bool = [&](const char* name, bool& out) {
            take(name, [&](const Json& value, const std::string& what) {
                if (!value.is(Json::Kind::boolean)) {
                    throw Error(Code::mismatch, fmt::format("the saved '{}' is {}, not a boolean", what, value.dump()));
                }
                out = value.as_bool();
            });
        };
        take_int("length", state.length);
        take("seed", [&](const Json& value, const std::string& what) { state.seed = unsigned_of(value, what); });
        take_bool("shuffle", state.shuffle);
        take_bool("drop_last", state.drop_last);
        take_int("epoch", state.epoch);
        take_int("consumed", state.consumed);
        return state;
    }

    std::string prefix_;
    std::shared_ptr<Sampler> sampler_;
};

// "<prefix>.kind" is a metric's description, "<prefix>.state" the bytes of its samples. All ranks load rank 0's values, but only
// rank 0 takes the samples, so that each counts once.
class MetricValues final : public StateSource {
   public:
    MetricValues(std::string prefix, std::shared_ptr<metrics::Metric> metric, int rank)
        : prefix_(std::move(prefix)), metric_(std::move(metric)), rank_(rank) {}

    const std::string& prefix() const override { return prefix_; }

    Values collect() const override {
        if (rank_ != 0 && metric_->samples() > 0) {
            throw Error(
                Code::invalid_state,
                fmt::format("rank {} has samples of the metric '{}'; gather it on all ranks before a save, or reset it "
                            "before a load",
                            rank_, prefix_));
        }
        Json bytes;
        bytes.set("~", "bytes");
        bytes.set("v", to_base64(metric_->save()));
        Values values;
        values.emplace(full("kind"), metric_->description());
        values.emplace(full("state"), std::move(bytes));
        return values;
    }

    void check(const Values& values) const override { metric_->empty_copy()->load(bytes_of(values)); }
    void apply(const Values& values) override {
        const std::string bytes = bytes_of(values);
        if (rank_ == 0) {
            metric_->load(bytes);
        } else {
            metric_->reset();
        }
    }
    [[nodiscard]] bool is_replicated() const override { return false; }

   private:
    std::string bytes_of(const Values& values) const {
        const Json& kind = values.at(full("kind"));
        if (!kind.is(Json::Kind::string) || kind.as_string() != metric_->description()) {
            throw Error(Code::mismatch,
                        fmt::format("the checkpoint has samples of the metric {} as '{}', but this is a metric {}",
                                    kind.dump(), prefix_, metric_->description()));
        }
        const Json& state = values.at(full("state"));
        if (!state.is(Json::Kind::object) || state.find("v") == nullptr || !state.at("v").is(Json::Kind::string)) {
            throw Error(Code::mismatch, fmt::format("the saved '{}.state' is not the state of a metric", prefix_));
        }
        return from_base64(state.at("v").as_string());
    }

    std::string prefix_;
    std::shared_ptr<metrics::Metric> metric_;
    int rank_;
};

// "<prefix>.schedule", which identifies it, "<prefix>.steps" and "<prefix>.base_lrs".
class LrScheduleValues final : public StateSource {
   public:
    LrScheduleValues(std::string prefix, std::shared_ptr<LrSchedule> schedule)
        : prefix_(std::move(prefix)), schedule_(std::move(schedule)) {}

    const std::string& prefix() const override { return prefix_; }

    Values collect() const override {
        const LrScheduleState state = schedule_->state();
        Values values;
        values.emplace(full("schedule"), state.text);
        values.emplace(full("steps"), state.steps);
        values.emplace(full("base_lrs"), to_value(state.base_lrs));
        return values;
    }

    void check(const Values& values) const override { schedule_->check_state(state_in(values)); }
    void apply(const Values& values) override { schedule_->load_state(state_in(values)); }

   private:
    LrScheduleState state_in(const Values& values) const {
        const Json& text = values.at(full("schedule"));
        if (!text.is(Json::Kind::string)) {
            throw Error(Code::mismatch,
                        fmt::format("the saved '{}' is {}, not a string", full("schedule"), text.dump()));
        }
        const Setting base_lrs = to_setting(values.at(full("base_lrs")), std::vector<double>{}, full("base_lrs"));
        return {text.as_string(), int_of(values.at(full("steps")), full("steps")),
                std::get<std::vector<double>>(base_lrs)};
    }

    std::string prefix_;
    std::shared_ptr<LrSchedule> schedule_;
};

// Adds this rank's boxes of a larger tensor, stored one after another in `tensor`; none if it is empty.
void add_held(State& state, const std::string& name, const Tensor& tensor, const Held& held) {
    std::vector<Tensor> pieces;
    std::byte* at = tensor.data;
    for (const Box& box : held.layout.boxes_of(held.rank)) {
        pieces.push_back({at, box.sizes, tensor.dtype, tensor.device});
        at += pieces.back().size_bytes();
    }
    state.add_sharded(name, held.layout, tensor.dtype, pieces, held.rank);
}

// `copy`: the shared copy that contains the tensor, if ranks of a host share it.
void add_whole(State& state, const std::string& name, const Tensor& tensor, const std::shared_ptr<SharedCopy>& copy) {
    if (copy) {
        state.add_shared(name, tensor, copy);
    } else {
        state.add_tensor(name, tensor);
    }
}

}  // namespace

void add_ddp(State& state, const std::string& prefix, const std::shared_ptr<Ddp>& model) {
    State part;
    for (size_t i = 0; i < model->params().size(); ++i) {
        const NamedTensor& param = model->param(i);
        const std::string name = fmt::format("{}.{}", prefix, param.name);
        if (const std::optional<Held> held = model->held(i)) {
            add_held(part, name, param.tensor, *held);
        } else {
            add_whole(part, name, param.tensor, model->host_copy());
        }
    }
    part.keep(model);
    state.add_all(std::move(part));
}

void add_fsdp(State& state, const std::string& prefix, const std::shared_ptr<Fsdp>& model) {
    State part;
    for (size_t i = 0; i < model->params(); ++i) {
        add_held(part, fmt::format("{}.{}", prefix, model->param(i).name), model->shard(i), model->held(i));
    }
    part.add_gate([model] { model->check_idle("a checkpoint cannot be loaded into the shards"); });
    state.add_all(std::move(part));
}

void add_tp(State& state, const std::string& prefix, const std::shared_ptr<TensorParallel>& model) {
    State part;
    for (size_t i = 0; i < model->params(); ++i) {
        add_held(part, fmt::format("{}.{}", prefix, model->param(i).name), model->slice(i), model->held(i));
    }
    part.keep(model);
    state.add_all(std::move(part));
}

void add_optimizer(State& state, const std::string& prefix, const std::shared_ptr<Optimizer>& optimizer) {
    State part;
    part.add_source(std::make_shared<SettingsOf<Optimizer>>(prefix, below_optimizer, optimizer));
    for (const Moment& moment : optimizer->moments()) {
        const std::string name = fmt::format("{}.state.{}.{}", prefix, moment.param, moment.name);
        if (moment.held) {
            add_held(part, name, moment.tensor, *moment.held);
        } else {
            add_whole(part, name, moment.tensor, optimizer->shared_copy());
        }
    }
    part.add_barrier(optimizer->barrier());
    // Shards of different steps do not form a model. Replicas may step independently.
    const auto is_held = [](const OptimizerParam& param) { return param.held.has_value(); };
    part.count_updates(prefix + below_optimizer + "step");
    if (std::ranges::any_of(optimizer->params(), is_held)) part.require_same_updates();
    state.add_all(std::move(part));
}

void add_grad_scaler(State& state, const std::string& prefix, const std::shared_ptr<GradScaler>& scaler) {
    state.add_source(std::make_shared<SettingsOf<GradScaler>>(prefix, ".", scaler));
}

void add_lr_schedule(State& state, const std::string& prefix, const std::shared_ptr<LrSchedule>& schedule) {
    state.add_source(std::make_shared<LrScheduleValues>(prefix, schedule));
}

void add_sampler(State& state, const std::string& prefix, const std::shared_ptr<Sampler>& sampler) {
    state.add_source(std::make_shared<SamplerValues>(prefix, sampler));
}

void add_metric(State& state, const std::string& prefix, const std::shared_ptr<metrics::Metric>& metric, int rank) {
    state.add_source(std::make_shared<MetricValues>(prefix, metric, rank));
}

}  // namespace tsr
