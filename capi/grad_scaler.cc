// tessera/grad_scaler.h: dynamic scaling of losses.
#include "tessera/grad_scaler.h"

#include "handles.hpp"
#include "optim/grad_scaler.hpp"
#include "optim/optimizer.hpp"

namespace tsr::capi {

namespace {

constexpr tsr_grad_scaler_options default_options{sizeof(tsr_grad_scaler_options), 65536, 2, 0.5, 2000};

}  // namespace

extern "C" {

tsr_status tsr_grad_scaler_options_init(tsr_grad_scaler_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_options, "options");
}

tsr_status tsr_grad_scaler_create(const tsr_grad_scaler_options* options, tsr_grad_scaler** out) {
    return guard([&] {
        create(out, [&] {
            const auto o = options_in(options, default_options, "options");
            return std::make_shared<GradScaler>(
                GradScalerOptions{o.init_scale, o.growth_factor, o.backoff_factor, o.growth_interval});
        });
    });
}

tsr_status tsr_grad_scaler_scale(const tsr_grad_scaler* scaler, double* scale) {
    return guard([&] { required(scale, "scale") = object_of(scaler, "scaler")->scale(); });
}

tsr_status tsr_grad_scaler_unscale(tsr_grad_scaler* scaler, tsr_optimizer* optimizer) {
    return guard([&] { object_of(scaler, "scaler")->unscale(object_of(optimizer, "optimizer")); });
}

tsr_status tsr_grad_scaler_step(tsr_grad_scaler* scaler, tsr_optimizer* optimizer, int32_t* stepped) {
    return guard([&] {
        const bool made = object_of(scaler, "scaler")->step(object_of(optimizer, "optimizer"));
        if (stepped != nullptr) *stepped = made ? 1 : 0;
    });
}

tsr_status tsr_grad_scaler_update(tsr_grad_scaler* scaler) {
    return guard([&] { object_of(scaler, "scaler")->update(); });
}

void tsr_grad_scaler_destroy(tsr_grad_scaler* scaler) { destroy(scaler); }

}  // extern "C"

}  // namespace tsr::capi
