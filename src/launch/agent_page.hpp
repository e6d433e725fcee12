// How the agent sends requests to its ranks: one page of shared memory that the agent writes and the ranks map
// read-only. It asks them to save and exit, or to write their flight records. TESSERA_PREEMPT_FD names the inherited
// descriptor, TESSERA_PREEMPT_FILE a path to the same page for processes that did not inherit it. A rank that polls for
// preemption truncates a file of one byte, TESSERA_PREEMPT_ASKED_FD or TESSERA_PREEMPT_ASKED_FILE, to tell the agent.
// Both are in memory, not on disk: a job that runs for weeks must not depend on cleaners of TMPDIR.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "base/fd.hpp"

namespace tsr {

struct AgentWords {
    std::atomic<uint32_t> preempt;  // 1: save and exit. Relaxed on both sides: it publishes nothing else
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
    // A read-only descriptor of the page, close-on-exec; its holders cannot write.
    [[nodiscard]] int fd() const { return reader_.get(); }

    // Takes a request for preemption back; from then on somebody_listens() shows whether a rank has polled for one.
    void begin_round();
    [[nodiscard]] bool somebody_listens() const;
    [[nodiscard]] int asked_fd() const { return asked_.get(); }

   private:
    Fd writer_;
    Fd reader_;
    Fd asked_;
    AgentWords* words_ = nullptr;
};

// Whether `fd` is a memory file of this size; it may be another file that a program opened under the same number.
[[nodiscard]] bool is_memory(int fd, size_t size);

// The rank's side: the page that the environment names, mapped at the first call; nullptr if there is none.
// Thread-safe.
[[nodiscard]] const AgentWords* agent_words();
// Tells the agent that this rank polls for preemption.
void tell_agent_of_listening() noexcept;

}  // namespace tsr
