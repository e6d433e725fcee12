#include "launch/port.hpp"

#include <fmt/core.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.hpp"
#include "base/random_id.hpp"

namespace tsr {

namespace {

constexpr uint16_t first_port = 12000;
constexpr uint16_t last_port = 31999;

// Holds "tessera-port-<n>" among the local sockets that have no file; invalid if another agent has it.
Fd claim(uint16_t port) {
    Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket.valid()) throw os_error("socket", errno);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string name = fmt::format("tessera-port-{}", port);
    std::copy(name.begin(), name.end(), address.sun_path + 1);  // the leading zero: no file
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) return Fd();
    return socket;
}

bool is_free(uint16_t port) {
    const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket.valid()) throw os_error("socket", errno);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_ANY);  // torch's store listens on all addresses; never listened on here
    return ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

}  // namespace

PortReservation::PortReservation() {
    uint32_t random = 0;
    random_bytes(reinterpret_cast<uint8_t*>(&random), sizeof random);
    constexpr uint32_t count = last_port - first_port + 1;
    for (uint32_t i = 0; i < count; ++i) {
        const auto port = static_cast<uint16_t>(first_port + (random + i) % count);
        Fd held = claim(port);
        if (!held.valid() || !is_free(port)) continue;
        claim_ = std::move(held);
        port_ = port;
        return;
    }
    throw Error(Code::io, fmt::format("no TCP port from {} to {} is free for MASTER_PORT", first_port, last_port));
}

}  // namespace tsr
