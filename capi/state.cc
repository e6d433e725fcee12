// tessera/state.h: what a checkpoint saves and loads. Adapts objects of the program to StateSource. A callback of an
// object may destroy the state that it serves, so functions that may call one hold the state.
#include "tessera/state.h"

#include <optional>
#include <utility>

#include "base/attempt.hpp"
#include "callback.hpp"
#include "checkpoint/model/state.hpp"
#include "checkpoint/model/state_gather.hpp"
#include "checkpoint/model/state_join.hpp"
#include "comm/communicator.hpp"
#include "engine/state.hpp"
#include "handles.hpp"
#include "tensor/layout.hpp"
#include "train/state_of.hpp"

namespace tsr::capi {

namespace {

// Values in a separate state, lent to a callback for the duration of its call.
class LentValues {
   public:
    LentValues() {
        create(&handle_, [&] { return state_; });
    }
    ~LentValues() { destroy(handle_); }
    LentValues(const LentValues&) = delete;
    LentValues& operator=(const LentValues&) = delete;

    [[nodiscard]] State& state() { return *state_; }
    [[nodiscard]] tsr_state* handle() const { return handle_; }

   private:
    std::shared_ptr<State> state_ = std::make_shared<State>();
    tsr_state* handle_ = nullptr;
};

// The arguments of tsr_state_add_source. The owner of this object destroys the program's data.
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

// The values "<prefix>.<name>", through the program's callbacks.
class ProgramValues final : public StateSource {
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
            throw Error(Code::invalid_argument,
                        fmt::format("collecting the values of '{}' added more than values; add tensors, objects and "
                                    "metrics to the saved state instead",
                                    prefix_));
        }
        Values values;
        for (auto& [name, value] : lent.state().collect()) {
            std::string full = begin() + name;
            check_name(full, "a value's name");
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
        if (!there) throw Error(Code::invalid_argument, fmt::format("source.{} is NULL", name));
    }
    return callbacks;
}

std::string prefix_in(const char* prefix) {
    std::string out = name_in(prefix, "prefix");
    check_name(out, "prefix");
    return out;
}

}  // namespace

extern "C" {

tsr_status tsr_state_create(tsr_state** out) {
    return guard([&] { create(out, [] { return std::make_shared<State>(); }); });
}

tsr_status tsr_state_add_tensor(tsr_state* state, const char* name, const tsr_tensor* tensor) {
    return guard([&] { object_of(state, "state")->add_tensor(name_in(name, "name"), tensor_in(tensor, "tensor")); });
}

tsr_status tsr_state_add_sharded(tsr_state* state, const char* name, const tsr_layout* layout, tsr_dtype dtype,
                                 const tsr_tensor* pieces, int32_t rank) {
    return guard([&] {
        const auto& s = object_of(state, "state");
        const Layout& l = *object_of(layout, "layout");
        const auto list = tensors_in(pieces, l.boxes_of(rank).size(), "pieces");
        s->add_sharded(name_in(name, "name"), l, static_cast<DType>(dtype), list, rank);
    });
}

tsr_status tsr_state_set_stream(tsr_state* state, int32_t cuda_device, void* stream) {
    return guard([&] { object_of(state, "state")->set_stream({DeviceType::cuda, cuda_device}, stream); });
}

tsr_status tsr_state_add_ddp(tsr_state* state, const char* prefix, tsr_ddp* ddp) {
    return guard([&] {
        State& to = *object_of(state, "state");
        const auto& added = object_of(ddp, "ddp");
        add_ddp(to, prefix_in(prefix), added);
    });
}

tsr_status tsr_state_add_fsdp(tsr_state* state, const char* prefix, tsr_fsdp* fsdp) {
    return guard([&] {
        State& to = *object_of(state, "state");
        const auto& added = object_of(fsdp, "fsdp");
        add_fsdp(to, prefix_in(prefix), added);
    });
}

tsr_status tsr_state_add_tp(tsr_state* state, const char* prefix, tsr_tp* tp) {
    return guard([&] {
        State& to = *object_of(state, "state");
        const auto& added = object_of(tp, "tp");
        add_tp(to, prefix_in(prefix), added);
    });
}

tsr_status tsr_state_add_optimizer(tsr_state* state, const char* prefix, tsr_optimizer* optimizer) {
    return guard([&] {
        State& to = *object_of(state, "state");
        const auto& added = object_of(optimizer, "optimizer");
        add_optimizer(to, prefix_in(prefix), added);
    });
}

tsr_status tsr_state_add_grad_scaler(tsr_state* state, const char* prefix, tsr_grad_scaler* scaler) {
    return guard([&] {
        State& to = *object_of(state, "state");
        const auto& added = object_of(scaler, "scaler");
        add_grad_scaler(to, prefix_in(prefix), added);
    });
}

tsr_status tsr_state_add_lr_schedule(tsr_state* state, const char* prefix, tsr_lr_schedule* schedule) {
    return guard([&] {
        State& to = *object_of(state, "state");
        const auto& added = object_of(schedule, "schedule");
        add_lr_schedule(to, prefix_in(prefix), added);
    });
}

tsr_status tsr_state_add_engine(tsr_state* state, const char* prefix, tsr_engine* engine) {
    return guard([&] {
        State& to = *object_of(state, "state");
        const auto& added = object_of(engine, "engine");
        add_engine(to, prefix_in(prefix), added);
    });
}

tsr_status tsr_state_add_sampler(tsr_state* state, const char* prefix, tsr_sampler* sampler) {
    return guard([&] {
        State& to = *object_of(state, "state");
        const auto& added = object_of(sampler, "sampler");
        add_sampler(to, prefix_in(prefix), added);
    });
}

tsr_status tsr_state_add_metric(tsr_state* state, const char* prefix, tsr_metric* metric, const tsr_comm* comm) {
    return guard([&] {
        State& to = *object_of(state, "state");
        const auto& added = object_of(metric, "metric");
        const int rank = object_of(comm, "comm")->rank();
        add_metric(to, prefix_in(prefix), added, rank);
    });
}

tsr_status tsr_state_add_source(tsr_state* state, const char* prefix, const tsr_state_source* source) {
    return guard([&] {
        // Read first: from now on the library owns the program's data, whatever else fails.
        std::optional<Callbacks> callbacks;
        const auto refused = attempt([&] { callbacks.emplace(callbacks_in(source)); });
        const auto& s = object_of(state, "state");
        if (refused) throw Error(*refused);
        s->add_source(std::make_shared<ProgramValues>(prefix_in(prefix), std::move(*callbacks)));
    });
}

tsr_status tsr_state_set_int64(tsr_state* state, const char* name, int64_t value) {
    return guard([&] { object_of(state, "state")->set_value(name_in(name, "name"), Json(value)); });
}

tsr_status tsr_state_get_int64(const tsr_state* state, const char* name, int64_t* value) {
    return guard([&] {
        const std::string key = name_in(name, "name");
        const auto s = object_of(state, "state");
        required(value, "value") = int_of(s->value(key), fmt::format("value '{}'", key));
    });
}

tsr_status tsr_state_set_double(tsr_state* state, const char* name, double value) {
    return guard([&] { object_of(state, "state")->set_value(name_in(name, "name"), double_value(value)); });
}

tsr_status tsr_state_get_double(const tsr_state* state, const char* name, double* value) {
    return guard([&] {
        const std::string key = name_in(name, "name");
        const auto s = object_of(state, "state");
        required(value, "value") = double_of(s->value(key), fmt::format("value '{}'", key));
    });
}

tsr_status tsr_state_set_value(tsr_state* state, const char* name, const char* json) {
    return guard([&] {
        const std::string key = name_in(name, "name");
        object_of(state, "state")->set_value(key, parse_value(text(json, "json"), fmt::format("value '{}'", key)));
    });
}

tsr_status tsr_state_get_value(const tsr_state* state, const char* name, char* json, size_t capacity, size_t* size) {
    return guard([&] {
        const auto s = object_of(state, "state");
        text_out(s->value(name_in(name, "name")).dump(), json, capacity, size);
    });
}

tsr_status tsr_state_tensor_count(const tsr_state* state, size_t* count) {
    return guard([&] { required(count, "count") = object_of(state, "state")->tensors().size(); });
}

tsr_status tsr_state_tensor(const tsr_state* state, size_t index, tsr_param* tensor) {
    return guard([&] {
        const auto& [name, found] = object_of(state, "state")->tensor(index);
        const Tensor described{nullptr, found.kind->shape, found.kind->dtype, {}};
        required(tensor, "tensor") = {name.c_str(), tensor_out(described)};
        tensor->tensor.shape = found.kind->shape.data();
    });
}

tsr_status tsr_state_join(tsr_state* state, tsr_comm* comm) {
    return guard([&] {
        State& to = *object_of(state, "state");
        Peers peers(object_of(comm, "comm"));
        join_states(to, peers);
    });
}

tsr_status tsr_state_gather(tsr_state* state, tsr_comm* comm, const char* name, int32_t root, const tsr_tensor* whole) {
    return guard([&] {
        const auto& s = object_of(state, "state");
        const auto& ranks = object_of(comm, "comm");
        gather_tensor(*ranks, *s, name_in(name, "name"), root, [&] { return cpu_tensor_in(whole, "whole"); });
    });
}

tsr_status tsr_state_set_metric(tsr_state* state, const char* name, double value) {
    return guard([&] { object_of(state, "state")->set_metric(name_in(name, "name"), value); });
}

void tsr_state_destroy(tsr_state* state) { destroy(state); }

}  // extern "C"

}  // namespace tsr::capi
