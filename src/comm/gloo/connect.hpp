// How the ranks get a Gloo connection each to each: every rank listens, tells through the store where, and they connect and shake
// hands (handshake.hpp). What follows is neither encrypted nor authenticated: Gloo is for trusted networks.
#pragma once

#include <gloo/transport/context.h>
#include <sys/socket.h>

#include <memory>
#include <vector>

#include "base/fd.hpp"
#include "comm/rendezvous.hpp"

namespace tsr::gloo_transport {

// The address that this rank listens on: of the interface TESSERA_SOCKET_IFNAME; else the one by which the store is
// reached; else loopback if all ranks are on one host; else of the first interface that is up.
struct Binding {
    std::string interface;  // empty: `host` counts
    std::string host;
    [[nodiscard]] std::string str() const { return interface.empty() ? host : "interface " + interface; }
};
[[nodiscard]] Binding choose_binding(const Bootstrap& bootstrap);

struct Connections {
    std::shared_ptr<::gloo::transport::Context> context;
    // A port that each rank holds for as long as it is there, and at which nobody listens: its kernel refuses connections, as
    // a sign of life (host_probe.hpp), and no other program gets them. Where they listen is closed once all are connected.
    std::vector<sockaddr_storage> held_ports;
    Fd own_port;
};
// Throws TIMEOUT naming a rank that could not be reached, PEER_LOST, IO, INVALID_ARGUMENT (no such interface), INTERRUPTED.
[[nodiscard]] Connections connect_all(const Bootstrap& bootstrap);

// Erases what connect_all left in the store; called when all ranks are connected.
void forget_addresses(const Bootstrap& bootstrap) noexcept;

}  // namespace tsr::gloo_transport
