#include "launch/preempt.hpp"

#include "launch/agent_page.hpp"

namespace tsr {

bool preempt_requested() {
    static const AgentWords* const words = [] {
        const AgentWords* found = agent_words();
        if (found != nullptr) tell_agent_of_listening();
        return found;
    }();
    return words != nullptr && words->preempt.load(std::memory_order_relaxed) != 0;
}

}  // namespace tsr
