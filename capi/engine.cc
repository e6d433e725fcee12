// tessera/engine.h: DeepSpeed's engine.
#include "tessera/engine.h"

#include <limits>
#include <optional>
#include <tuple>

#include "comm/communicator.hpp"
#include "comm/fingerprint.hpp"
#include "engine/config_file.hpp"
#include "engine/config_json.hpp"
#include "engine/engine.hpp"
#include "handles.hpp"

namespace tsr::capi {

namespace {

EngineUnit unit_in(const tsr_engine_unit& unit, size_t index) {
    EngineUnit out;
    out.name = name_in(unit.name, "a unit's name");
    const std::string whose = fmt::format("unit {} (\"{}\")", index, out.name);
    if (unit.reserved != 0) {
        throw Error(Code::unsupported, fmt::format("the reserved field of {} is {}, not zero", whose, unit.reserved));
    }
    if (unit.n > 0) required(unit.params, ("the params of " + whose).c_str());
    for (size_t i = 0; i < unit.n; ++i) {
        const std::string name = name_in(unit.params[i].name, "a parameter's name");
        const std::string what = fmt::format("parameter {} (\"{}\") of {}", i, name, whose);
        out.params.push_back({name, tensor_in(&unit.params[i].tensor, what.c_str())});
    }
    return out;
}

std::vector<EngineUnit> units_in(const tsr_engine_unit* units, size_t n) {
    required(units, "units");
    std::vector<EngineUnit> out;
    for (size_t u = 0; u < n; ++u) out.push_back(unit_in(units[u], u));
    return out;
}

// The configuration as an engine of another library reads it.
EngineConfig config_in(const char* config) {
    return EngineConfig::of(ConfigText(config_text_of(text(config, "config"))), ConfigReader::other);
}

std::optional<bool> boundary_in(int32_t boundary) {
    if (boundary == -1) return std::nullopt;
    if (boundary == 0 || boundary == 1) return boundary == 1;
    throw Error(Code::invalid_argument,
                fmt::format("boundary is {}; it must be 1, 0, or -1 for what the accumulation says", boundary));
}

}  // namespace

extern "C" {

tsr_status tsr_engine_config(const char* config, int32_t ranks, char* json, size_t capacity, size_t* size) {
    return guard([&] {
        const EngineConfig found = config_in(config);
        if (ranks < 1) throw Error(Code::invalid_argument, fmt::format("ranks is {}; it must be at least 1", ranks));
        text_out(to_json(found, solve_batch(found.batch, ranks), ranks).dump(), json, capacity, size);
    });
}

tsr_status tsr_engine_config_schedule(const char* config, tsr_lr_schedule** out) {
    return guard([&] {
        create(out, [&] {
            const EngineConfig found = config_in(config);
            if (found.schedule) return std::make_shared<LrSchedule>(found.schedule);
            if (!found.scheduler_part) {
                throw Error(Code::invalid_argument, "the configuration has no \"scheduler\"; give its \"type\"");
            }
            throw Error(Code::unsupported, found.scheduler_part->refusal);
        });
    });
}

tsr_status tsr_engine_create(tsr_comm* comm, const tsr_engine_unit* units, size_t n, const char* config,
                             tsr_lr_schedule* schedule, tsr_engine** out) {
    return guard([&] {
        create(out, [&] {
            const auto& ranks = object_of(comm, "comm");
            auto model = or_refuse_on_all_ranks(*ranks, Compared::models, [&] {
                return std::tuple(units_in(units, n), config_text_of(text(config, "config")),
                                  schedule == nullptr ? nullptr : object_of(schedule, "schedule"));
            });
            return std::make_shared<Engine>(ranks, std::move(std::get<0>(model)), std::get<1>(model),
                                            std::move(std::get<2>(model)));
        });
    });
}

tsr_status tsr_engine_description(const tsr_engine* engine, char* json, size_t capacity, size_t* size) {
    return guard([&] {
        const Engine& e = *object_of(engine, "engine");
        text_out(to_json(e.config(), e.batch(), e.ranks()).dump(), json, capacity, size);
    });
}

tsr_status tsr_engine_unit_count(const tsr_engine* engine, size_t* count) {
    return guard([&] { required(count, "count") = object_of(engine, "engine")->model().units(); });
}

tsr_status tsr_engine_param_count(const tsr_engine* engine, size_t* count) {
    return guard([&] { required(count, "count") = object_of(engine, "engine")->model().params(); });
}

tsr_status tsr_engine_param_name(const tsr_engine* engine, size_t index, const char** name, size_t* unit) {
    return guard([&] {
        const EngineModel& model = object_of(engine, "engine")->model();
        const std::string& found = model.name_of_param(index);
        if (name != nullptr) *name = found.c_str();
        if (unit != nullptr) *unit = model.unit_of(index);
    });
}

tsr_status tsr_engine_find(const tsr_engine* engine, const char* name, size_t* index) {
    return guard([&] {
        const EngineModel& model = object_of(engine, "engine")->model();
        required(index, "index") = model.find(name_in(name, "name"));
    });
}

tsr_status tsr_engine_param(tsr_engine* engine, size_t index, tsr_tensor* param) {
    return guard([&] {
        const EngineModel& model = object_of(engine, "engine")->model();
        required(param, "param") = tensor_out(model.param(index), model.shape_of_param(index));
    });
}

tsr_status tsr_engine_grad(tsr_engine* engine, size_t index, tsr_tensor* grad) {
    return guard([&] {
        const EngineModel& model = object_of(engine, "engine")->model();
        required(grad, "grad") = tensor_out(model.grad(index), model.shape_of_param(index));
    });
}

tsr_status tsr_engine_forward(tsr_engine* engine, size_t unit) {
    return guard([&] { object_of(engine, "engine")->forward(unit); });
}

tsr_status tsr_engine_forward_done(tsr_engine* engine, size_t unit) {
    return guard([&] { object_of(engine, "engine")->forward_done(unit); });
}

tsr_status tsr_engine_backward(tsr_engine* engine, size_t unit) {
    return guard([&] { object_of(engine, "engine")->backward(unit); });
}

tsr_status tsr_engine_ready(tsr_engine* engine, size_t param) {
    return guard([&] { object_of(engine, "engine")->ready(param); });
}

tsr_status tsr_engine_unit_ready(tsr_engine* engine, size_t unit) {
    return guard([&] { object_of(engine, "engine")->unit_ready(unit); });
}

tsr_status tsr_engine_backward_done(tsr_engine* engine) {
    return guard([&] { object_of(engine, "engine")->backward_done(); });
}

tsr_status tsr_engine_loss_factor(const tsr_engine* engine, double* factor) {
    return guard([&] { required(factor, "factor") = object_of(engine, "engine")->loss_factor(); });
}

tsr_status tsr_engine_adds_gradients(const tsr_engine* engine, int32_t* adds) {
    return guard([&] { required(adds, "adds") = object_of(engine, "engine")->adds_gradients() ? 1 : 0; });
}

tsr_status tsr_engine_is_boundary(const tsr_engine* engine, int32_t* boundary) {
    return guard([&] { required(boundary, "boundary") = object_of(engine, "engine")->is_boundary() ? 1 : 0; });
}

tsr_status tsr_engine_set_boundary(tsr_engine* engine, int32_t boundary) {
    return guard([&] { object_of(engine, "engine")->set_boundary(boundary_in(boundary)); });
}

tsr_status tsr_engine_begin_no_sync(tsr_engine* engine) {
    return guard([&] { object_of(engine, "engine")->begin_no_sync(); });
}

tsr_status tsr_engine_end_no_sync(tsr_engine* engine) {
    return guard([&] { object_of(engine, "engine")->end_no_sync(); });
}

tsr_status tsr_engine_step(tsr_engine* engine, int32_t* stepped) {
    return guard([&] {
        const bool made = object_of(engine, "engine")->step();
        if (stepped != nullptr) *stepped = made ? 1 : 0;
    });
}

tsr_status tsr_engine_set_training(tsr_engine* engine, int32_t training) {
    return guard([&] {
        Engine& e = *object_of(engine, "engine");
        if (flag(training, "training")) {
            e.train();
        } else {
            e.eval();
        }
    });
}

tsr_status tsr_engine_is_training(const tsr_engine* engine, int32_t* training) {
    return guard([&] { required(training, "training") = object_of(engine, "engine")->is_training() ? 1 : 0; });
}

tsr_status tsr_engine_counters(const tsr_engine* engine, tsr_engine_counts* counts) {
    return guard([&] {
        const auto& [steps, samples, skipped, micro] = object_of(engine, "engine")->counters();
        const tsr_engine_counts values{sizeof(tsr_engine_counts), steps, samples, skipped, micro};
        write_options(counts, required(counts, "counts").struct_size, &values, sizeof values, "counts");
    });
}

tsr_status tsr_engine_grad_norm(const tsr_engine* engine, double* norm) {
    return guard([&] {
        required(norm, "norm") =
            object_of(engine, "engine")->grad_norm().value_or(std::numeric_limits<double>::quiet_NaN());
    });
}

tsr_status tsr_engine_lr(const tsr_engine* engine, double* lr) {
    return guard([&] { required(lr, "lr") = object_of(engine, "engine")->lr(); });
}

tsr_status tsr_engine_set_lr(tsr_engine* engine, double lr) {
    return guard([&] { object_of(engine, "engine")->set_lr(lr); });
}

tsr_status tsr_engine_loss_scale(const tsr_engine* engine, double* scale) {
    return guard([&] { required(scale, "scale") = object_of(engine, "engine")->loss_scale().scale(); });
}

tsr_status tsr_engine_batch(const tsr_engine* engine, int64_t* train, int64_t* micro, int64_t* accumulation) {
    return guard([&] {
        const BatchSizes& batch = object_of(engine, "engine")->batch();
        if (train != nullptr) *train = batch.train;
        if (micro != nullptr) *micro = batch.micro;
        if (accumulation != nullptr) *accumulation = batch.accumulation;
    });
}

tsr_status tsr_engine_set_train_batch_size(tsr_engine* engine, int64_t train) {
    return guard([&] { object_of(engine, "engine")->set_train_batch_size(train); });
}

tsr_status tsr_engine_set_train_micro_batch_size(tsr_engine* engine, int64_t micro) {
    return guard([&] { object_of(engine, "engine")->set_train_micro_batch_size(micro); });
}

tsr_status tsr_engine_optimizer(tsr_engine* engine, tsr_optimizer** out) {
    return guard([&] {
        const Engine& e = *object_of(engine, "engine");
        create(out, [&] { return e.optimizer(); });
    });
}

tsr_status tsr_engine_lr_schedule(tsr_engine* engine, tsr_lr_schedule** out) {
    return guard([&] {
        const Engine& e = *object_of(engine, "engine");
        create(out, [&] {
            if (e.schedule()) return e.schedule();
            throw Error(Code::invalid_state,
                        "the engine has no learning-rate schedule; its configuration has no \"scheduler\"");
        });
    });
}

void tsr_engine_destroy(tsr_engine* engine) { destroy(engine); }

}  // extern "C"

}  // namespace tsr::capi
