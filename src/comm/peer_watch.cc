#include "comm/peer_watch.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "base/proc.hpp"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace tsr {

PeerWatch::PeerWatch(const std::vector<Peer>& peers, int own_place) {
    const Peer& own = peers[static_cast<size_t>(own_place)];
    for (size_t place = 0; place < peers.size(); ++place) {
        const Peer& peer = peers[place];
        if (peer.same_process(own)) continue;
        if (peer.pid_namespace != own.pid_namespace) continue;  // its pid has no meaning here; only deadlines apply
        Watched watched{static_cast<int>(place), peer.pid, peer.start_time, {}, false};
        watched.pidfd = Fd(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(peer.pid), 0)));
        if (!watched.pidfd.valid() && errno == ESRCH) watched.gone = true;
        // The peer published its record while alive; if the number now has another start time, it has died since.
        if (has_ended(watched)) watched.gone = true;
        watched_.push_back(std::move(watched));
    }
}

// A peer that cannot be observed counts as alive.
bool PeerWatch::has_ended(const Watched& watched) {
    if (watched.start_time == 0) return false;
    const auto now = process_start_time(watched.pid);
    return now ? *now != watched.start_time : process_is_gone(watched.pid);
}

bool PeerWatch::dead(const Watched& watched) {
    if (watched.gone) return true;
    if (!watched.pidfd.valid()) return has_ended(watched);
    pollfd entry{watched.pidfd.get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) > 0;
}

std::vector<int> PeerWatch::dead() const {
    std::vector<int> places;
    for (const Watched& watched : watched_) {
        if (dead(watched)) places.push_back(watched.place);
    }
    return places;
}

bool PeerWatch::is_dead(int place) const {
    for (const Watched& watched : watched_) {
        if (watched.place == place) return dead(watched);
    }
    return false;
}

}  // namespace tsr
