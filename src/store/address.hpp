// Addresses of TCP stores, and sockets that every wait of which has a deadline.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.hpp"
#include "base/fd.hpp"

namespace tsr {

struct Address {
    std::string host;
    uint16_t port = 0;

    // "tcp://host:port", "tcp://[::1]:port"; throws INVALID_ARGUMENT.
    [[nodiscard]] static Address parse(std::string_view uri);
    [[nodiscard]] std::string uri() const;

    bool operator==(const Address&) const = default;
};

// Whether `host` means this machine alone. A name is resolved; one that cannot be is not loopback.
[[nodiscard]] bool is_loopback(const std::string& host);
// Throws IO if the name cannot be resolved.
void check_host(const std::string& host);

// A listening, non-blocking socket on exactly that address; its port replaces address.port if that is 0.
[[nodiscard]] Fd listen_on(Address& address);

// One attempt, non-blocking socket. Throws IO (refused, unreachable, unknown name) or TIMEOUT.
[[nodiscard]] Fd connect_to(const Address& address, Deadline deadline);

// The numeric address of this end of a connected socket; empty if the system does not tell.
[[nodiscard]] std::string local_address_of(int socket);

// Who is at the other end of it, for people: "10.0.0.7 (port 40112)".
[[nodiscard]] std::string peer_address_of(int socket);

// All of it, or: IO when the peer has gone, TIMEOUT, INTERRUPTED. `what` begins the message.
void send_all(int socket, std::string_view bytes, Deadline deadline, std::string_view what);
void receive_all(int socket, char* bytes, size_t size, Deadline deadline, std::string_view what);
// Returns false when the deadline passes first.
[[nodiscard]] bool readable(int socket, Deadline deadline);

}  // namespace tsr
