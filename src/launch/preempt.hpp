// The agent's word to its ranks that they shall save and end: one flag in a page of shared memory, which the agent writes
// and the ranks map read-only. TESSERA_PREEMPT_FD names the inherited descriptor, TESSERA_PREEMPT_FILE a path to the same
// page for processes that did not inherit it. A rank that asks for the flag makes the file TESSERA_PREEMPT_ASKED_FILE, so
// that the agent knows whom to wait for.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/fd.hpp"

namespace tsr {

// The agent's side.
class PreemptPage {
   public:
    PreemptPage();
    ~PreemptPage();
    PreemptPage(const PreemptPage&) = delete;
    PreemptPage& operator=(const PreemptPage&) = delete;

    void request();  // async-signal-safe
    // A read-only descriptor of the page, close-on-exec; nobody who has it can write the flag.
    [[nodiscard]] int fd() const { return reader_.get(); }

   private:
    Fd writer_;
    Fd reader_;
    std::atomic<uint32_t>* flag_ = nullptr;
};

// The rank's side. At the first call the environment is read and the agent told; then it is one load.
[[nodiscard]] bool preempt_requested();

}  // namespace tsr
