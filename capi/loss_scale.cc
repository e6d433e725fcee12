// tessera/loss_scale.h: DeepSpeed's loss scale.
#include "tessera/loss_scale.h"

#include "engine/loss_scale.hpp"
#include "handles.hpp"

namespace tsr::capi {

namespace {

constexpr tsr_loss_scale_options default_options{.struct_size = sizeof(tsr_loss_scale_options),
                                                 .fixed = 0,
                                                 .initial = 65536,
                                                 .window = 1000,
                                                 .hysteresis = 2,
                                                 .restores_every_step = 0,
                                                 .minimum = 1};

}  // namespace

extern "C" {

tsr_status tsr_loss_scale_options_init(tsr_loss_scale_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_options, "options");
}

tsr_status tsr_loss_scale_create(const tsr_loss_scale_options* options, tsr_loss_scale** out) {
    return guard([&] {
        create(out, [&] {
            const auto o = options_in(options, default_options, "options");
            return std::make_shared<LossScale>(LossScaleOptions{o.fixed, o.initial, o.window, o.hysteresis,
                                                                flag(o.restores_every_step, "restores_every_step"),
                                                                o.minimum});
        });
    });
}

tsr_status tsr_loss_scale_value(const tsr_loss_scale* scale, double* value) {
    return guard([&] { required(value, "value") = object_of(scale, "scale")->scale(); });
}

tsr_status tsr_loss_scale_update(tsr_loss_scale* scale, int32_t overflow, double* value) {
    return guard([&] {
        LossScale& found = *object_of(scale, "scale");
        found.update(flag(overflow, "overflow"));
        if (value != nullptr) *value = found.scale();
    });
}

tsr_status tsr_loss_scale_get_state(const tsr_loss_scale* scale, tsr_loss_scale_state* state) {
    return guard([&] {
        const LossScale::State& found = object_of(scale, "scale")->state();
        const tsr_loss_scale_state values{sizeof(tsr_loss_scale_state), found.scale, found.iteration,
                                          found.last_overflow, found.hysteresis};
        write_options(state, required(state, "state").struct_size, &values, sizeof values, "state");
    });
}

tsr_status tsr_loss_scale_set_state(tsr_loss_scale* scale, const tsr_loss_scale_state* state) {
    return guard([&] {
        LossScale& to = *object_of(scale, "scale");
        required(state, "state");
        const auto s = options_in(state, tsr_loss_scale_state{}, "state");
        to.restore({s.scale, s.iteration, s.last_overflow, s.hysteresis});
    });
}

void tsr_loss_scale_destroy(tsr_loss_scale* scale) { destroy(scale); }

}  // extern "C"

}  // namespace tsr::capi
