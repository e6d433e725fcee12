// How the ranks get a TCP connection each to each, and nobody else gets one of them: every rank listens at one port, and who
// connects there says first, in a greeting, which rank it is and the number that this rank has told in the store. A stranger
// (a port scanner, a health check, another job) cannot: it is turned away, and the ranks go on. What follows on a connection
// is neither encrypted nor authenticated.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/fd.hpp"
#include "comm/rendezvous.hpp"

namespace tsr::gloo_transport {

// Where a rank listens, as the others learn it from the store: plain bytes.
struct Door {
    sockaddr_storage address{};
    Nonce nonce{};
};

// Listens at a free port of `address`, and writes the port into it.
[[nodiscard]] Fd listen_at(sockaddr_storage& address);

// Collective. Connections to all peers, by rank; that of `own` stays empty. `doors` are all ranks', in order; `listener` is at
// this rank's. `check` is called every now and then, and may throw. Throws TIMEOUT naming a peer that could not be reached, IO.
[[nodiscard]] std::vector<Fd> shake_hands(int own, const std::vector<Door>& doors, const Fd& listener,
                                          Deadline deadline, const std::function<void()>& check);

}  // namespace tsr::gloo_transport
