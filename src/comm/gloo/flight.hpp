// One message in flight over Gloo, and waiting for it in slices. Gloo's own wait closes every connection of the group
// when it times out, so the Waker ends the wait from another thread instead: Gloo abandons that wait and keeps the
// message and the connection intact.
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

// A thread that ends waits at their deadlines. It sleeps while nobody waits.
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

    // Posts the operation; may be called again only once it is done. Throws what Gloo throws when the connection is
    // broken.
    void post(uint64_t slot);
    // Waits until `until` at most; returns whether the operation is done. A short wait may end before this thread gets
    // to check, so `by_now` checks several times, for when the answer is final.
    [[nodiscard]] bool wait(Waker& waker, std::optional<Clock::time_point> until);

   private:
    std::unique_ptr<::gloo::transport::UnboundBuffer> buffer_;
    int peer_;
    Direction direction_;
    bool done_ = false;
};

// Blocks SIGPIPE in the calling thread during its lifetime, and discards one that arrived meanwhile: Gloo writes to
// sockets whose peer may be gone, and this library installs no signal handlers.
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
