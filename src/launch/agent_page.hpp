// The agent's word to its ranks: one page of shared memory, which the agent writes and the ranks map read-only. They shall
// save and end; or write their flight records. TESSERA_PREEMPT_FD names the inherited descriptor, TESSERA_PREEMPT_FILE a
// path to the same page for processes that did not inherit it. A file of one byte, TESSERA_PREEMPT_ASKED_FD and
// TESSERA_PREEMPT_ASKED_FILE, is what a rank empties to tell that it listens. Both are memory, and on no disk: a job of weeks
// shall not depend on what a cleaner leaves in TMPDIR.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "base/fd.hpp"

namespace tsr {

struct AgentWords {
    std::atomic<uint32_t> preempt;  // 1: save and end. Relaxed on both sides: nothing else is published by it
    std::atomic<uint32_t> flights;  // counts the requests for flight records; released after flight_directory
    std::array<char, 2048> flight_directory;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// The agent's side.
class AgentPage {
   public:
    AgentPage();
    ~AgentPage();
    AgentPage(const AgentPage&) = delete;
    AgentPage& operator=(const AgentPage&) = delete;

    void request_preemption();  // async-signal-safe
    // Throws INVALID_ARGUMENT if the path is too long.
    void request_flights(const std::string& directory);
    // A read-only descriptor of the page, close-on-exec; nobody who has it can write.
    [[nodiscard]] int fd() const { return reader_.get(); }

    // Whether a rank has asked for the word since begin_round().
    void begin_round();
    [[nodiscard]] bool somebody_listens() const;
    [[nodiscard]] int asked_fd() const { return asked_.get(); }

   private:
    Fd writer_;
    Fd reader_;
    Fd asked_;
    AgentWords* words_ = nullptr;
};

// The rank's side: the page that the environment names, which is looked for at the first call; nullptr without one.
[[nodiscard]] const AgentWords* agent_words();
// Tells the agent that this rank listens.
void tell_agent_of_listening() noexcept;

}  // namespace tsr
