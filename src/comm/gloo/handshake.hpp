// Connects all pairs of ranks by TCP and keeps others out: every rank listens on one port, and a connecting rank first
// sends a greeting with its rank and the nonce that the listening rank published in the store. Others (a port scanner,
// a health check, another job) cannot know the nonce: they are refused, and the ranks continue. Later traffic on a
// connection is neither encrypted nor authenticated.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/fd.hpp"
#include "comm/rendezvous.hpp"

namespace tsr::gloo_transport {

// Where a rank listens, as published in the store: plain bytes.
struct Door {
    sockaddr_storage address{};
    Nonce nonce{};
};

// Listens on a free port of `address`, and stores the port in it.
[[nodiscard]] Fd listen_at(sockaddr_storage& address);

// Collective. Returns connections to all peers, by rank; the entry of `own` is empty. `doors` are those of all ranks,
// in order; `listener` is this rank's. `check` is called periodically and may throw. Throws TIMEOUT naming a peer that
// could not be reached, IO.
[[nodiscard]] std::vector<Fd> shake_hands(int own, const std::vector<Door>& doors, const Fd& listener,
                                          Deadline deadline, const std::function<void()>& check);

}  // namespace tsr::gloo_transport
