// Addresses of TCP stores, and connecting to them with deadlines.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

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

// Whether `host` is a loopback address. Names are resolved; one that cannot be resolved is not loopback.
[[nodiscard]] bool is_loopback(const std::string& host);
// Throws IO if the name cannot be resolved.
void check_host(const std::string& host);

// The numeric addresses of a host, in the order in which to try them. Throws IO if the name cannot be resolved.
[[nodiscard]] std::vector<std::string> numeric_addresses(const std::string& host);

// A listening, non-blocking socket on exactly this address. If address.port is 0, sets it to the chosen port.
[[nodiscard]] Fd listen_on(Address& address);

// Makes one connection attempt; returns a non-blocking socket. Throws IO (refused, unreachable, unknown name) or
// TIMEOUT.
[[nodiscard]] Fd connect_to(const Address& address, Deadline deadline);

// Begins one; the socket is writable once it is over, and the first write says how it ended. Each attempt takes the next
// of the addresses that the host's name means. Throws IO.
[[nodiscard]] Fd begin_connecting(const Address& address, size_t attempt);

// The numeric local address of a connected socket; empty if unknown.
[[nodiscard]] std::string local_address_of(int socket);

// The numeric address of its peer; empty if unknown.
[[nodiscard]] std::string remote_address_of(int socket);

// The address of its peer, for messages: "10.0.0.7 (port 40112)".
[[nodiscard]] std::string peer_address_of(int socket);

// Waits for one of `events` (POLLIN, POLLOUT); returns false if the deadline passes first. Throws INTERRUPTED.
[[nodiscard]] bool wait_for(int socket, short events, Deadline deadline);

}  // namespace tsr
