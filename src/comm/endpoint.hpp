// A unix socket in the abstract namespace over which ranks of one host pass file descriptors. Its name is random and
// published only through the authenticated store; SO_PEERCRED checks the peer's user and process. It has no file and
// ends with its process.
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

// Called once per slice of a wait; throws to end the wait.
using SliceCheck = std::function<void()>;

// A connection to a peer process of this user. Messages are small and fixed-size; each may carry a descriptor.
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

// A listening socket. It listens from construction on, so that a peer that knows the name can connect at once.
class Endpoint {
   public:
    Endpoint();

    [[nodiscard]] const std::array<uint64_t, 2>& name() const { return name_; }
    // Returns an empty link if no connection arrives within the slice.
    [[nodiscard]] Link accept(milliseconds slice) const;
    [[nodiscard]] static Link connect(const std::array<uint64_t, 2>& name);
    void close() { socket_.reset(); }

   private:
    std::array<uint64_t, 2> name_{};
    Fd socket_;
};

}  // namespace tsr
