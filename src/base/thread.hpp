// Starts library threads. They block all signals, which are left to the program's own threads (Python signal handlers,
// JVM safepoints), and have names that a debugger shows.
#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace tsr {

// During its lifetime, the calling thread takes no signals except for its own faults. Threads started meanwhile never
// do.
class BlockedSignals {
   public:
    BlockedSignals() {
        sigset_t all;
        sigfillset(&all);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&all, fault);
        pthread_sigmask(SIG_BLOCK, &all, &former_);
    }
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &former_, nullptr); }
    BlockedSignals(const BlockedSignals&) = delete;
    BlockedSignals& operator=(const BlockedSignals&) = delete;

   private:
    sigset_t former_{};
};

// Whether start_thread() started this thread.
inline constinit thread_local bool is_library_thread = false;

// `name` has at most 15 characters.
template <class Body>
[[nodiscard]] std::thread start_thread(const char* name, Body&& body) {
    const BlockedSignals inherited;
    std::thread thread([run = std::forward<Body>(body)]() mutable {
        is_library_thread = true;
        run();
    });
    pthread_setname_np(thread.native_handle(), name);
    return thread;
}

}  // namespace tsr
