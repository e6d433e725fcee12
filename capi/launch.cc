// tessera/launch.h: what the launcher tells the ranks.
#include "tessera/launch.h"

#include "guard.hpp"
#include "launch/error_file.hpp"
#include "launch/preempt.hpp"

using tsr::capi::guard;
using tsr::capi::text;

extern "C" {

int32_t tsr_preempt_requested(void) { return tsr::preempt_requested() ? 1 : 0; }

tsr_status tsr_record_error(const char* message, const char* traceback) {
    return guard([&] { tsr::record_error(text(message, "message"), traceback == nullptr ? "" : traceback); });
}

}  // extern "C"
