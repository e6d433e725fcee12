// A unix socket in the abstract name space on which ranks of one host hand each other file descriptors. Its name is
// random and told only through the authenticated store; the peer's user and process are checked by SO_PEERCRED.
// Nothing of it is in the file system, and it ends with its process.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "base/clock.hpp"
#include "base/fd.hpp"

namespace tsr {

// Called in each slice of a wait; throws to end it.
using SliceCheck = std::function<void()>;

// A connection to a peer process of this user. Messages are small and fixed-size; a descriptor may go with each.
class Link {
   public:
    explicit Link(Fd socket) : socket_(std::move(socket)) {}
    Link() = default;

    [[nodiscard]] explicit operator bool() const { return socket_.valid(); }
    [[nodiscard]] pid_t peer_pid() const;  // throws PERMISSION if the peer is another user's

    void send(std::span<const std::byte> message, int fd, Deadline deadline, const SliceCheck& check) const;
    // Fills `message`; returns the descriptor that came with it, if any. Throws PEER_LOST at end of file.
    [[nodiscard]] Fd receive(std::span<std::byte> message, Deadline deadline, const SliceCheck& check) const;

   private:
    Fd socket_;
};

// A listening socket. Listens from its construction, so that a peer that knows the name can connect at once.
class Endpoint {
   public:
    Endpoint();

    [[nodiscard]] const std::array<uint64_t, 2>& name() const { return name_; }
    // Returns an empty link when the slice has passed without a connection.
    [[nodiscard]] Link accept(milliseconds slice) const;
    [[nodiscard]] static Link connect(const std::array<uint64_t, 2>& name);
    void close() { socket_.reset(); }

   private:
    std::array<uint64_t, 2> name_{};
    Fd socket_;
};

}  // namespace tsr
