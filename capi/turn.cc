// tessera/turn.h: one rank works while the others wait.
#include "tessera/turn.h"

#include "comm/turn.hpp"
#include "handles.hpp"

namespace tsr::capi {

extern "C" {

tsr_status tsr_turn_create(tsr_comm* comm, int32_t rank, int32_t timeout_ms, tsr_turn** out) {
    return guard([&] {
        create(out, [&] { return std::make_shared<Turn>(object_of(comm, "comm"), rank, milliseconds{timeout_ms}); });
    });
}

tsr_status tsr_turn_progress(tsr_turn* turn, int64_t done, int64_t total) {
    return guard([&] { object_of(turn, "turn")->progress(done, total); });
}

tsr_status tsr_turn_end(tsr_turn* turn, const char* failure) {
    return guard(
        [&] { object_of(turn, "turn")->end(failure == nullptr ? std::nullopt : std::optional<std::string>(failure)); });
}

void tsr_turn_destroy(tsr_turn* turn) { destroy(turn); }

}  // extern "C"

}  // namespace tsr::capi
