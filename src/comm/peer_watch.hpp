// Detects the death of peer processes: one pidfd per peer, opened when the ranks meet and checked against the start
// time that the peer published, so that a reused process id is not mistaken for the peer. Thread-safe.
#pragma once

#include <vector>

#include "base/fd.hpp"
#include "comm/rendezvous.hpp"

namespace tsr {

class PeerWatch {
   public:
    PeerWatch(const std::vector<Peer>& peers, int own_place);

    // Peers whose processes have ended, as indices into `peers`. Ranks of this process are never dead.
    [[nodiscard]] std::vector<int> dead() const;
    [[nodiscard]] bool is_dead(int place) const;

   private:
    struct Watched {
        int place;
        int64_t pid;
        uint64_t start_time;
        Fd pidfd;           // empty if the system has no pidfds: then the process table is read
        bool gone = false;  // ended before it could be watched
    };
    [[nodiscard]] static bool has_ended(const Watched& watched);
    [[nodiscard]] static bool dead(const Watched& watched);

    std::vector<Watched> watched_;
};

}  // namespace tsr
