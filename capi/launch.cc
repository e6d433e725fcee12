// tessera/launch.h: messages between the launcher and the ranks.
#include "tessera/launch.h"

#include <fmt/core.h>

#include <string>

#include "guard.hpp"
#include "launch/error_file.hpp"
#include "launch/preempt.hpp"

namespace tsr::capi {

extern "C" {

int32_t tsr_preempt_requested(void) { return preempt_requested() ? 1 : 0; }

tsr_status tsr_record_error(const char* message, const char* traceback) {
    const auto last = newest_record();
    return guard([&] {
        const std::string said = text(message, "message");
        const std::string trace = traceback == nullptr ? "" : traceback;
        const bool tells_of_it =
            last && !last->message.empty() &&  // an exception may contain the message of its cause
            (said.find(last->message) != std::string::npos || trace.find(last->message) != std::string::npos);
        const ErrorRecord* facts = tells_of_it ? last.get() : nullptr;
        // The root cause says more than its consequence, that the communicator could no longer be used.
        for (const ErrorRecord* record = facts; record != nullptr; record = record->cause.get()) {
            if (record->launcher_peer >= 0) facts = record;
        }
        record_error(said, trace, facts);
    });
}

tsr_status tsr_record_error_about(const char* message, const char* traceback, tsr_status code, int32_t peer) {
    return guard([&] {
        const std::string said = text(message, "message");
        if (code < TSR_E_INVALID_ARGUMENT || code > TSR_E_INTERNAL) {
            throw Error(Code::invalid_argument,
                        fmt::format("code is {}; it must be 1 to {}", code, int{TSR_E_INTERNAL}));
        }
        const auto facts = Error(static_cast<Code>(code), said).with_launcher_peer(peer).record();
        record_error(said, traceback == nullptr ? "" : traceback, facts.get());
    });
}

}  // extern "C"

}  // namespace tsr::capi
