#include "comm/peer_watch.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "comm/host.hpp"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace tsr {

PeerWatch::PeerWatch(const std::vector<Peer>& peers, int own_rank) {
    const Peer& own = peers[static_cast<size_t>(own_rank)];
    for (const Peer& peer : peers) {
        if (peer.rank == own_rank || peer.same_process(own)) continue;
        if (peer.pid_namespace != own.pid_namespace) continue;  // its number means nothing here; deadlines must do
        Watched watched{peer.rank, peer.pid, peer.start_time, {}, false};
        watched.pidfd = Fd(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(peer.pid), 0)));
        if (!watched.pidfd.valid() && errno == ESRCH) watched.gone = true;
        // The peer published its record while alive; if the number now has another start time, it has died since.
        if (peer.start_time != 0 && process_start_time(peer.pid) != peer.start_time) watched.gone = true;
        watched_.push_back(std::move(watched));
    }
}

bool PeerWatch::dead(const Watched& watched) {
    if (watched.gone) return true;
    if (!watched.pidfd.valid()) {
        return watched.start_time != 0 && process_start_time(watched.pid) != watched.start_time;
    }
    pollfd entry{watched.pidfd.get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) > 0;
}

std::vector<int> PeerWatch::dead_ranks() const {
    std::vector<int> ranks;
    for (const Watched& watched : watched_) {
        if (dead(watched)) ranks.push_back(watched.rank);
    }
    return ranks;
}

bool PeerWatch::is_dead(int rank) const {
    for (const Watched& watched : watched_) {
        if (watched.rank == rank) return dead(watched);
    }
    return false;
}

}  // namespace tsr
