#include "engine/state.hpp"

#include <fmt/core.h>

#include <utility>

#include "base/error.hpp"
#include "checkpoint/model/value.hpp"
#include "train/state_of.hpp"

namespace tsr {

namespace {

class EngineValues final : public StateSource {
   public:
    EngineValues(std::string prefix, std::shared_ptr<Engine> engine)
        : prefix_(std::move(prefix)), engine_(std::move(engine)) {}

    const std::string& prefix() const override { return prefix_; }

    Values collect() const override {
        const auto [counters, is_dynamic, scale] = engine_->state();
        Values values;
        values.emplace(full("global_steps"), counters.global_steps);
        values.emplace(full("global_samples"), counters.global_samples);
        values.emplace(full("skipped_steps"), counters.skipped_steps);
        values.emplace(full("micro_steps"), counters.micro_steps);
        values.emplace(full("loss_scale"), double_value(scale.scale));
        values.emplace(full("loss_scale_dynamic"), is_dynamic);
        values.emplace(full("loss_scale_iteration"), scale.iteration);
        values.emplace(full("loss_scale_last_overflow"), scale.last_overflow);
        values.emplace(full("loss_scale_hysteresis"), scale.hysteresis);
        return values;
    }

    void check(const Values& values) const override { engine_->check_state(state_in(values)); }
    void apply(const Values& values) override { engine_->restore(state_in(values)); }

   private:
    Engine::State state_in(const Values& values) const {
        const auto value = [&](const char* name) -> const Json& { return values.at(full(name)); };
        const auto integer = [&](const char* name) { return int_of(value(name), full(name)); };
        const Json& is_dynamic = value("loss_scale_dynamic");
        if (!is_dynamic.is(Json::Kind::boolean)) {
            throw Error(Code::mismatch, fmt::format("the saved '{}' is {}, not a boolean", full("loss_scale_dynamic"),
                                                    is_dynamic.dump()));
        }
        return {{integer("global_steps"), integer("global_samples"), integer("skipped_steps"), integer("micro_steps")},
                is_dynamic.as_bool(),
                {double_of(value("loss_scale"), full("loss_scale")), integer("loss_scale_iteration"),
                 integer("loss_scale_last_overflow"), integer("loss_scale_hysteresis")}};
    }

    std::string prefix_;
    std::shared_ptr<Engine> engine_;
};

}  // namespace

void add_engine(State& state, const std::string& prefix, const std::shared_ptr<Engine>& engine) {
    State part;
    const std::string model = prefix + ".model";
    if (const auto ddp = engine->model().ddp()) {
        add_ddp(part, model, ddp);
    } else {
        add_fsdp(part, model, engine->model().fsdp());
    }
    add_optimizer(part, prefix + ".optim", engine->optimizer());
    if (engine->schedule()) add_lr_schedule(part, prefix + ".schedule", engine->schedule());
    part.add_source(std::make_shared<EngineValues>(prefix + ".engine", engine));
    state.add_all(std::move(part));
}

}  // namespace tsr
