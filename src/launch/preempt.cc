#include "launch/preempt.hpp"

#include <fcntl.h>

#include <cerrno>
#include <system_error>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/log.hpp"
#include "launch/agent_page.hpp"

namespace tsr {

namespace {

// Tells the agent that this rank listens. Without it the rank may be ended before it has saved.
void tell_agent() noexcept try {
    const auto path = env_text("TESSERA_PREEMPT_ASKED_FILE");
    if (!path) return;
    const Fd file(::open(path->c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (file.valid()) return;
    log::warning(
        "the launcher cannot be told that this rank listens for preemption: {}: {}; it may end the rank at once when "
        "it is asked to stop",
        *path, std::generic_category().message(errno));
} catch (...) {
    log::warning("{}", current_error().what());
}

}  // namespace

bool preempt_requested() {
    static const AgentWords* const words = [] {
        const AgentWords* found = agent_words();
        if (found != nullptr) tell_agent();
        return found;
    }();
    return words != nullptr && words->preempt.load(std::memory_order_relaxed) != 0;
}

}  // namespace tsr
