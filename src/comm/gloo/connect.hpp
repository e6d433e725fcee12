// Connects all pairs of ranks through Gloo: every rank listens and publishes its address in the store; then they
// connect and shake hands (handshake.hpp). Later traffic is neither encrypted nor authenticated: Gloo is for trusted
// networks.
#pragma once

#include <gloo/transport/context.h>
#include <sys/socket.h>

#include <memory>
#include <vector>

#include "base/fd.hpp"
#include "comm/rendezvous.hpp"

namespace tsr::gloo_transport {

// The address that this rank listens on: that of interface TESSERA_SOCKET_IFNAME; else the one used to reach the store;
// else loopback if all ranks are on one host; else that of the first interface that is up.
struct Binding {
    std::string interface;  // empty: use `host`
    std::string host;
    [[nodiscard]] std::string str() const { return interface.empty() ? host : "interface " + interface; }
};
[[nodiscard]] Binding choose_binding(const Bootstrap& bootstrap);

struct Connections {
    std::shared_ptr<::gloo::transport::Context> context;
    // A port that each rank reserves during its lifetime without listening on it: its kernel refuses connections, which
    // proves that the host is alive (host_probe.hpp). The listening port is closed once all ranks are connected.
    std::vector<sockaddr_storage> held_ports;
    Fd own_port;
};
// Throws TIMEOUT naming a rank that could not be reached, PEER_LOST, IO, INVALID_ARGUMENT (no such interface),
// INTERRUPTED.
[[nodiscard]] Connections connect_all(const Bootstrap& bootstrap);

// Erases the keys of connect_all from the store. Call it once all ranks are connected.
void forget_addresses(const Bootstrap& bootstrap) noexcept;

}  // namespace tsr::gloo_transport
