// tessera/state.h: what a checkpoint saves and loads. Optimizers, samplers and objects of the program's are adapted to
// StateSource here, because checkpoint/ knows none of them. A callback of an object may destroy the state that it serves,
// so what may call one holds the state itself.
#include "tessera/state.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "callback.hpp"
#include "checkpoint/agreement.hpp"
#include "checkpoint/state.hpp"
#include "checkpoint/state_gather.hpp"
#include "comm/communicator.hpp"
#include "data/sampler.hpp"
#include "handles.hpp"
#include "optim/grad_scaler.hpp"
#include "optim/optimizer.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "tensor/layout.hpp"

namespace {

using tsr::Json;
using tsr::Values;
using tsr::capi::create;
using tsr::capi::destroy;
using tsr::capi::guard;
using tsr::capi::object_of;
using tsr::capi::options_in;
using tsr::capi::Reply;
using tsr::capi::required;
using tsr::capi::tensor_in;
using tsr::capi::tensor_out;
using tsr::capi::tensors_in;
using tsr::capi::text;
using tsr::capi::text_out;

Json to_value(const tsr::Setting& setting) {
    if (const auto* flag_value = std::get_if<bool>(&setting)) return Json(*flag_value);
    if (const auto* integer = std::get_if<int64_t>(&setting)) return Json(*integer);
    if (const auto* number = std::get_if<double>(&setting)) return tsr::double_value(*number);
    Json::Array list;
    for (const double number : std::get<std::vector<double>>(setting)) list.push_back(tsr::double_value(number));
    return Json(std::move(list));
}

// Of the same type as `like`, which is the setting that it will replace.
tsr::Setting to_setting(const Json& value, const tsr::Setting& like, const std::string& name) {
    if (std::holds_alternative<bool>(like) && value.is(Json::Kind::boolean)) return value.as_bool();
    if (std::holds_alternative<int64_t>(like)) return tsr::int_of(value, name);
    if (std::holds_alternative<double>(like)) return tsr::double_of(value, name);
    if (std::holds_alternative<std::vector<double>>(like)) {
        const bool tuple = value.is(Json::Kind::object) && value.find("~") != nullptr && value.at("~") == Json("tuple");
        const Json& numbers = tuple ? value.at("v") : value;  // PyTorch's betas
        if (numbers.is(Json::Kind::array)) {
            std::vector<double> list;
            for (const Json& number : numbers.as_array()) list.push_back(tsr::double_of(number, name));
            return list;
        }
    }
    throw tsr::Error(tsr::Code::mismatch,
                     fmt::format("the saved setting '{}' is {}, of another type", name, value.dump()));
}

constexpr const char* below_optimizer = ".param_groups.0.";

// The settings of an optimizer, "<prefix>.param_groups.0.<setting>", or a scaler, "<prefix>.<setting>".
template <class Object>
class SettingsOf final : public tsr::StateSource {
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
        const tsr::Settings settings = merged(values);
        if constexpr (std::is_same_v<Object, tsr::GradScaler>) {
            tsr::GradScaler copy = *object_;
            copy.load_settings(settings);
        }
    }
    void apply(const Values& values) override { object_->load_settings(merged(values)); }
    bool has_tensors() const override { return std::is_same_v<Object, tsr::Optimizer>; }

   private:
    tsr::Settings merged(const Values& values) const {
        tsr::Settings settings = object_->settings();
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
    throw tsr::Error(tsr::Code::mismatch,
                     fmt::format("the saved '{}' is {}, not an unsigned number", name, value.dump()));
}

// "<prefix>.epoch", "<prefix>.consumed" and the order that they are a position in.
class SamplerValues final : public tsr::StateSource {
   public:
    SamplerValues(std::string prefix, std::shared_ptr<tsr::Sampler> sampler)
        : prefix_(std::move(prefix)), sampler_(std::move(sampler)) {}

    const std::string& prefix() const override { return prefix_; }

    Values collect() const override {
        const tsr::SamplerState state = sampler_->state();
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
        tsr::Sampler copy = *sampler_;
        copy.load_state(merged(values));
    }
    void apply(const Values& values) override { sampler_->load_state(merged(values)); }

   private:
    std::string full(const char* name) const { return prefix_ + "." + name; }

    tsr::SamplerState merged(const Values& values) const {
        tsr::SamplerState state = sampler_->state();
        const auto take = [&](const char* name, auto&& set) { set(values.at(full(name)), full(name)); };
        const auto take_int = [&](const char* name, int64_t& out) {
            take(name, [&](const Json& value, const std::string& what) { out = tsr::int_of(value, what); });
        };
        const auto take_bool = [&](const char* name, bool& out) {
            take(name, [&](const Json& value, const std::string& what) {
                if (!value.is(Json::Kind::boolean)) {
                    throw tsr::Error(tsr::Code::mismatch, fmt::format("the saved '{}' is {}", what, value.dump()));
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
    std::shared_ptr<tsr::Sampler> sampler_;
};

// Values in a state of their own, which a callback is lent for its time.
class LentValues {
   public:
    LentValues() {
        create(&handle_, [&] { return state_; });
    }
    ~LentValues() { destroy(handle_); }
    LentValues(const LentValues&) = delete;
    LentValues& operator=(const LentValues&) = delete;

    [[nodiscard]] tsr::State& state() { return *state_; }
    [[nodiscard]] tsr_state* handle() const { return handle_; }

   private:
    std::shared_ptr<tsr::State> state_ = std::make_shared<tsr::State>();
    tsr_state* handle_ = nullptr;
};

// What tsr_state_add_source was given. Its owner destroys the program's data.
class Callbacks {
   public:
    explicit Callbacks(const tsr_state_source& table) : table_(table) {}
    Callbacks(Callbacks&& other) noexcept : table_(std::exchange(other.table_, {})) {}
    Callbacks& operator=(Callbacks&&) = delete;
    ~Callbacks() {
        if (table_.destroy != nullptr) table_.destroy(table_.user_data);
    }

    [[nodiscard]] const tsr_state_source& table() const { return table_; }

   private:
    tsr_state_source table_;
};

// "<prefix>.<name>", by the program's callbacks.
class ProgramValues final : public tsr::StateSource {
   public:
    ProgramValues(std::string prefix, Callbacks callbacks)
        : prefix_(std::move(prefix)), callbacks_(std::move(callbacks)) {}

    const std::string& prefix() const override { return prefix_; }

    Values collect() const override {
        LentValues lent;
        Reply reply;
        const tsr_state_source& table = callbacks_.table();
        reply.check(table.collect(lent.handle(), reply.message(), table.user_data),
                    [&] { return fmt::format("collecting the values of '{}' failed", prefix_); });
        if (!lent.state().has_values_alone()) {
            throw tsr::Error(
                tsr::Code::invalid_argument,
                fmt::format("collecting the values of '{}' gave more than values; add tensors, objects and "
                            "metrics to the state that is saved",
                            prefix_));
        }
        Values values;
        for (auto& [name, value] : lent.state().collect()) {
            std::string full = begin() + name;
            tsr::check_name(full, "a value's name");
            values.emplace(std::move(full), value);
        }
        return values;
    }

    void check(const Values& values) const override {
        if (callbacks_.table().check != nullptr) give(values, callbacks_.table().check, "refused");
    }
    void apply(const Values& values) override { give(values, callbacks_.table().apply, "could not take"); }

   private:
    std::string begin() const { return prefix_ + "."; }

    void give(const Values& values, tsr_state_take_fn take, const char* otherwise) const {
        LentValues lent;
        for (const auto& [name, value] : values) lent.state().set_value(name.substr(begin().size()), value);
        Reply reply;
        reply.check(take(lent.handle(), reply.message(), callbacks_.table().user_data),
                    [&] { return fmt::format("'{}' {} the values of the checkpoint", prefix_, otherwise); });
    }

    std::string prefix_;
    Callbacks callbacks_;
};

Callbacks callbacks_in(const tsr_state_source* source) {
    Callbacks callbacks(options_in(&required(source, "source"), tsr_state_source{}, "source"));
    for (const auto& [there, name] : {std::pair(callbacks.table().collect != nullptr, "collect"),
                                      std::pair(callbacks.table().apply != nullptr, "apply")}) {
        if (!there) throw tsr::Error(tsr::Code::invalid_argument, fmt::format("source.{} is NULL", name));
    }
    return callbacks;
}

std::string prefix_in(const char* prefix) {
    std::string out = text(prefix, "prefix");
    tsr::check_name(out, "prefix");
    return out;
}

// This rank's boxes of a larger tensor, one after the other in `tensor`; none if it is empty.
void add_held(tsr::State& state, const std::string& name, const tsr::Tensor& tensor, const tsr::Held& held) {
    std::vector<tsr::Tensor> pieces;
    std::byte* at = tensor.data;
    for (const tsr::Box& box : held.layout.boxes_of(held.rank)) {
        pieces.push_back({at, box.sizes, tensor.dtype, tensor.device});
        at += pieces.back().size_bytes();
    }
    state.add_sharded(name, held.layout, tensor.dtype, pieces, held.rank);
}

// `copy`: what the tensor lies in, if ranks of a host share it.
void add_whole(tsr::State& state, const std::string& name, const tsr::Tensor& tensor,
               const std::shared_ptr<tsr::SharedCopy>& copy) {
    if (copy) {
        state.add_shared(name, tensor, copy);
    } else {
        state.add_tensor(name, tensor);
    }
}

}  // namespace

extern "C" {

tsr_status tsr_state_create(tsr_state** out) {
    return guard([&] { create(out, [] { return std::make_shared<tsr::State>(); }); });
}

tsr_status tsr_state_add_tensor(tsr_state* state, const char* name, const tsr_tensor* tensor) {
    return guard([&] { object_of(state, "state")->add_tensor(text(name, "name"), tensor_in(tensor, "tensor")); });
}

tsr_status tsr_state_add_sharded(tsr_state* state, const char* name, const tsr_layout* layout, tsr_dtype dtype,
                                 const tsr_tensor* pieces, int32_t rank) {
    return guard([&] {
        const auto& s = object_of(state, "state");
        const tsr::Layout& l = *object_of(layout, "layout");
        const auto list = tensors_in(pieces, l.boxes_of(rank).size(), "pieces");
        s->add_sharded(text(name, "name"), l, static_cast<tsr::DType>(dtype), list, rank);
    });
}

tsr_status tsr_state_add_ddp(tsr_state* state, const char* prefix, tsr_ddp* ddp) {
    return guard([&] {
        const auto& s = object_of(state, "state");
        const auto& model = object_of(ddp, "ddp");
        const std::string begin = prefix_in(prefix) + ".";
        tsr::State part;
        for (const tsr::NamedTensor& param : model->params()) {
            add_whole(part, begin + param.name, param.tensor, model->host_copy());
        }
        part.keep(model);
        s->add_all(std::move(part));
    });
}

tsr_status tsr_state_add_fsdp(tsr_state* state, const char* prefix, tsr_fsdp* fsdp) {
    return guard([&] {
        const auto& s = object_of(state, "state");
        const auto& model = object_of(fsdp, "fsdp");
        const std::string begin = prefix_in(prefix) + ".";
        tsr::State part;
        for (size_t i = 0; i < model->params(); ++i) {
            add_held(part, begin + model->param(i).name, model->shard(i), model->held(i));
        }
        part.add_gate([model] { model->check_idle("a checkpoint cannot be loaded into the shards"); });
        s->add_all(std::move(part));
    });
}

tsr_status tsr_state_add_optimizer(tsr_state* state, const char* prefix, tsr_optimizer* optimizer) {
    return guard([&] {
        const auto& s = object_of(state, "state");
        const auto& o = object_of(optimizer, "optimizer");
        const std::string begin = prefix_in(prefix);
        tsr::State part;
        part.add_source(std::make_shared<SettingsOf<tsr::Optimizer>>(begin, below_optimizer, o));
        for (const tsr::Moment& moment : o->moments()) {
            const std::string name = fmt::format("{}.state.{}.{}", begin, moment.param, moment.name);
            if (moment.held) {
                add_held(part, name, moment.tensor, *moment.held);
            } else {
                add_whole(part, name, moment.tensor, o->shared_copy());
            }
        }
        part.add_barrier(o->barrier());
        // Shards of different steps are no model. Replicas may step on their own.
        const auto is_held = [](const tsr::OptimizerParam& param) { return param.held.has_value(); };
        if (std::any_of(o->params().begin(), o->params().end(), is_held)) {
            part.require_same(begin + below_optimizer + "step");
        }
        s->add_all(std::move(part));
    });
}

tsr_status tsr_state_add_grad_scaler(tsr_state* state, const char* prefix, tsr_grad_scaler* scaler) {
    return guard([&] {
        object_of(state, "state")
            ->add_source(
                std::make_shared<SettingsOf<tsr::GradScaler>>(prefix_in(prefix), ".", object_of(scaler, "scaler")));
    });
}

tsr_status tsr_state_add_sampler(tsr_state* state, const char* prefix, tsr_sampler* sampler) {
    return guard([&] {
        object_of(state, "state")
            ->add_source(std::make_shared<SamplerValues>(prefix_in(prefix), object_of(sampler, "sampler")));
    });
}

tsr_status tsr_state_add_source(tsr_state* state, const char* prefix, const tsr_state_source* source) {
    return guard([&] {
        // Read first: whatever else is wrong, the program's data is the library's from here.
        std::optional<Callbacks> callbacks;
        const auto refused = tsr::attempt([&] { callbacks.emplace(callbacks_in(source)); });
        const auto& s = object_of(state, "state");
        if (refused) throw tsr::Error(*refused);
        s->add_source(std::make_shared<ProgramValues>(prefix_in(prefix), std::move(*callbacks)));
    });
}

tsr_status tsr_state_set_int64(tsr_state* state, const char* name, int64_t value) {
    return guard([&] { object_of(state, "state")->set_value(text(name, "name"), Json(value)); });
}

tsr_status tsr_state_get_int64(const tsr_state* state, const char* name, int64_t* value) {
    return guard([&] {
        const std::string key = text(name, "name");
        const auto s = object_of(state, "state");
        required(value, "value") = tsr::int_of(s->value(key), fmt::format("value '{}'", key));
    });
}

tsr_status tsr_state_set_double(tsr_state* state, const char* name, double value) {
    return guard([&] { object_of(state, "state")->set_value(text(name, "name"), tsr::double_value(value)); });
}

tsr_status tsr_state_get_double(const tsr_state* state, const char* name, double* value) {
    return guard([&] {
        const std::string key = text(name, "name");
        const auto s = object_of(state, "state");
        required(value, "value") = tsr::double_of(s->value(key), fmt::format("value '{}'", key));
    });
}

tsr_status tsr_state_set_value(tsr_state* state, const char* name, const char* json) {
    return guard([&] {
        const std::string key = text(name, "name");
        object_of(state, "state")->set_value(key, tsr::parse_value(text(json, "json"), fmt::format("value '{}'", key)));
    });
}

tsr_status tsr_state_get_value(const tsr_state* state, const char* name, char* json, size_t capacity, size_t* size) {
    return guard([&] {
        const auto s = object_of(state, "state");
        text_out(s->value(text(name, "name")).dump(), json, capacity, size);
    });
}

tsr_status tsr_state_tensor_count(const tsr_state* state, size_t* count) {
    return guard([&] { required(count, "count") = object_of(state, "state")->tensors().size(); });
}

tsr_status tsr_state_tensor(const tsr_state* state, size_t index, tsr_param* tensor) {
    return guard([&] {
        const auto& [name, found] = object_of(state, "state")->tensor(index);
        const tsr::Tensor described{nullptr, found.kind->shape, found.kind->dtype, {}};
        required(tensor, "tensor") = {name.c_str(), tensor_out(described)};
        tensor->tensor.shape = found.kind->shape.data();
    });
}

tsr_status tsr_state_gather(tsr_state* state, tsr_comm* comm, const char* name, int32_t root, const tsr_tensor* whole) {
    return guard([&] {
        const auto& s = object_of(state, "state");
        const auto& ranks = object_of(comm, "comm");
        tsr::gather_tensor(*ranks, *s, text(name, "name"), root, [&] { return tensor_in(whole, "whole"); });
    });
}

tsr_status tsr_state_set_metric(tsr_state* state, const char* name, double value) {
    return guard([&] { object_of(state, "state")->set_metric(text(name, "name"), value); });
}

void tsr_state_destroy(tsr_state* state) { destroy(state); }

}  // extern "C"
