// Whether the launcher asks its ranks to save and exit (agent_page.hpp). A rank that polls notifies the agent through
// TESSERA_PREEMPT_ASKED_FD or TESSERA_PREEMPT_ASKED_FILE, and the agent then waits for it to save.
#pragma once

namespace tsr {

// The first call reads the environment and notifies the agent; later calls are a single load. Thread-safe.
[[nodiscard]] bool preempt_requested();

}  // namespace tsr
