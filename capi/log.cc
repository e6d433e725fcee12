// tessera/log.h: the log and the interrupt callback.
#include "tessera/log.h"

#include "base/clock.hpp"
#include "base/log.hpp"
#include "guard.hpp"

namespace tsr::capi {

extern "C" {

tsr_status tsr_log_set_level(int32_t level) {
    return guard([&] {
        if (level < TSR_LOG_DEBUG || level > TSR_LOG_OFF) {
            throw Error(Code::invalid_argument, fmt::format("the log level is {}; it must be 1 to 5", level));
        }
        log::set_level(static_cast<log::Level>(level));
    });
}

tsr_status tsr_log_set_callback(tsr_log_fn fn, void* user_data, tsr_destroy_fn destroy) {
    return guard([&] { log::set_sink(fn, user_data, destroy); });
}

tsr_status tsr_interrupt_set(tsr_interrupt_fn fn, void* user_data) {
    return guard([&] { set_interrupt(fn, user_data); });
}

}  // extern "C"

}  // namespace tsr::capi
