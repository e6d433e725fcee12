// Whether the launcher wants its ranks to save and end (agent_page.hpp). A rank that asks tells the
// agent so, by TESSERA_PREEMPT_ASKED_FD or TESSERA_PREEMPT_ASKED_FILE, and the agent waits for it.
#pragma once

namespace tsr {

// At the first call the environment is read and the agent told; then it is one load.
[[nodiscard]] bool preempt_requested();

}  // namespace tsr
