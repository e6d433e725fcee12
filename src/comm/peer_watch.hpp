// Evidence of life of the peers' processes: a pidfd each, opened when the ranks meet and checked against the start time
// that the peer told, so that a process id used again is not taken for it. Any thread may ask.
#pragma once

#include <vector>

#include "base/fd.hpp"
#include "comm/rendezvous.hpp"

namespace tsr {

class PeerWatch {
   public:
    PeerWatch(const std::vector<Peer>& peers, int own_place);

    // Those whose processes have ended, by their places among the peers. Ranks of this process are never dead.
    [[nodiscard]] std::vector<int> dead() const;
    [[nodiscard]] bool is_dead(int place) const;

   private:
    struct Watched {
        int place;
        int64_t pid;
        uint64_t start_time;
        Fd pidfd;           // empty if the system has none: then the process table is read
        bool gone = false;  // was gone before it could be watched
    };
    [[nodiscard]] static bool has_ended(const Watched& watched);
    [[nodiscard]] static bool dead(const Watched& watched);

    std::vector<Watched> watched_;
};

}  // namespace tsr
