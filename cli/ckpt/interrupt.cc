#include "ckpt/interrupt.hpp"

#include <csignal>

#include <array>

#include "base/clock.hpp"

namespace tsr::cli {

namespace {

volatile std::sig_atomic_t asked = 0;  // the one thing that a signal handler may set

constexpr std::array signals{SIGINT, SIGTERM, SIGHUP};

}  // namespace

Interruptible::Interruptible() {
    asked = 0;
    struct sigaction action{};
    action.sa_handler = [](int) { asked = 1; };
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
    for (const int signal : signals) {
        struct sigaction standing{};
        // Keeps SIGINT ignored under nohup.
        if (::sigaction(signal, nullptr, &standing) == 0 && standing.sa_handler != SIG_IGN) {
            (void)::sigaction(signal, &action, nullptr);
        }
    }
    set_interrupt([](void*) -> int32_t { return asked; }, nullptr);
}

Interruptible::~Interruptible() { set_interrupt(nullptr, nullptr); }

}  // namespace tsr::cli
