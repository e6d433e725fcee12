// One message in flight over Gloo, and how to wait for it in slices. Gloo's own wait, when it times out, closes every
// connection of the group, so the Waker ends it from outside instead: it asks Gloo to abandon the one wait, which leaves
// message and connection as they are.
#pragma once

#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/clock.hpp"

namespace tsr::gloo_transport {

inline constexpr std::nullopt_t by_now = std::nullopt;

enum class Direction { send, receive };

// A thread that ends waits at their time. It sleeps while nobody waits.
class Waker {
   public:
    Waker();
    ~Waker();
    Waker(const Waker&) = delete;
    Waker& operator=(const Waker&) = delete;

    // True when the buffer's operation is done, false when `until` has passed or wake() was called. May return false
    // early. Throws what Gloo throws when the connection is broken.
    [[nodiscard]] bool wait(::gloo::transport::UnboundBuffer& buffer, Direction direction, Clock::time_point until);
    // Ends all waits now.
    void wake();

   private:
    struct Waiting {
        ::gloo::transport::UnboundBuffer* buffer;
        Direction direction;
        Clock::time_point until;
    };
    static void end(const Waiting& waiting);
    void run();

    std::mutex mutex_;  // guards all below
    std::condition_variable changed_;
    std::vector<Waiting> waiting_;
    Clock::time_point awake_at_ = Clock::time_point::max();
    bool stop_ = false;
    std::thread thread_;
};

class Flight {
   public:
    Flight(::gloo::transport::Context& context, const std::byte* data, size_t size, int peer, Direction direction);

    [[nodiscard]] int peer() const { return peer_; }
    [[nodiscard]] Direction direction() const { return direction_; }
    [[nodiscard]] bool done() const { return done_; }

    // Posts the operation; again only after it was done. Throws what Gloo throws when the connection is broken.
    void post(uint64_t slot);
    // Whether it is done, waiting for that until `until` at most. A short wait may end before this thread gets to look, so
    // where the answer decides, `by_now` looks several times.
    [[nodiscard]] bool wait(Waker& waker, std::optional<Clock::time_point> until);

   private:
    std::unique_ptr<::gloo::transport::UnboundBuffer> buffer_;
    int peer_;
    Direction direction_;
    bool done_ = false;
};

// Keeps SIGPIPE from the calling thread while it lives, and swallows one that came meanwhile: Gloo writes to sockets
// whose peer may be gone, and this library installs no signal handlers.
class NoSigpipe {
   public:
    NoSigpipe();
    ~NoSigpipe();
    NoSigpipe(const NoSigpipe&) = delete;
    NoSigpipe& operator=(const NoSigpipe&) = delete;

   private:
    bool was_blocked_ = false;
    bool was_pending_ = false;
};

}  // namespace tsr::gloo_transport
