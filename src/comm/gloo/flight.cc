#include "comm/gloo/flight.hpp"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <chrono>

#include "base/thread.hpp"

namespace tsr::gloo_transport {

namespace {

// Long enough that Gloo's own timeout never expires.
constexpr auto forever = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::hours{24 * 30});

// After the last wait the thread looks again a few times, so that a rank in the middle of its work need not notify it.
constexpr milliseconds tick{50};
constexpr int idle_ticks = 20;

constexpr std::chrono::microseconds first_look{50};
constexpr auto last_look = 32 * first_look;

}  // namespace

Waker::Waker() : thread_(start_thread("tsr-gloo-waker", [this] { run(); })) {}

Waker::~Waker() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void Waker::end(const Waiting& waiting) {
    if (waiting.direction == Direction::send) {
        waiting.buffer->abortWaitSend();
    } else {
        waiting.buffer->abortWaitRecv();
    }
}

void Waker::run() {
    std::unique_lock lock(mutex_);
    int idle = 0;
    while (!stop_) {
        const auto now = Clock::now();
        auto next = now + tick;
        for (const Waiting& waiting : waiting_) {
            if (waiting.until <= now) end(waiting);
            next = std::min(next, std::max(waiting.until, now + std::chrono::microseconds{20}));
        }
        idle = waiting_.empty() ? idle + 1 : 0;
        awake_at_ = idle > idle_ticks ? Clock::time_point::max() : next;
        if (idle > idle_ticks) {
            changed_.wait(lock);
        } else {
            changed_.wait_until(lock, awake_at_);
        }
    }
}

bool Waker::wait(::gloo::transport::UnboundBuffer& buffer, Direction direction, Clock::time_point until) {
    {
        const std::lock_guard lock(mutex_);
        waiting_.push_back({&buffer, direction, until});
        if (until < awake_at_) changed_.notify_one();
    }
    // Out of the list before the buffer may go.
    struct Leave {
        Waker& waker;
        const ::gloo::transport::UnboundBuffer* buffer;
        ~Leave() {
            const std::lock_guard lock(waker.mutex_);
            std::erase_if(waker.waiting_, [&](const Waiting& w) { return w.buffer == buffer; });
        }
    } const leave{*this, &buffer};
    return direction == Direction::send ? buffer.waitSend(nullptr, forever) : buffer.waitRecv(nullptr, forever);
}

void Waker::wake() {
    const std::lock_guard lock(mutex_);
    for (const Waiting& waiting : waiting_) end(waiting);
}

Flight::Flight(::gloo::transport::Context& context, const std::byte* data, size_t size, int peer, Direction direction)
    : buffer_(context.createUnboundBuffer(const_cast<std::byte*>(data), size)), peer_(peer), direction_(direction) {}

void Flight::post(uint64_t slot) {
    done_ = false;
    if (direction_ == Direction::send) {
        const NoSigpipe guard;
        buffer_->send(peer_, slot, 0, buffer_->size);
    } else {
        const NoSigpipe guard;  // a receive tells the sender that it is ready
        buffer_->recv(peer_, slot, 0, buffer_->size);
    }
}

bool Flight::wait(Waker& waker, std::optional<Clock::time_point> until) {
    if (until) {
        done_ = done_ || waker.wait(*buffer_, direction_, *until);
        return done_;
    }
    for (auto look = first_look; look <= last_look && !done_; look *= 2) {
        done_ = waker.wait(*buffer_, direction_, Clock::now() + look);
    }
    return done_;
}

NoSigpipe::NoSigpipe() {
    sigset_t pipe;
    sigset_t before;
    sigset_t pending;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, &before);
    was_blocked_ = sigismember(&before, SIGPIPE) == 1;
    if (was_blocked_) {
        sigpending(&pending);
        was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    }
}

NoSigpipe::~NoSigpipe() {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    const timespec now{0, 0};
    if (!was_pending_) sigtimedwait(&pipe, nullptr, &now);
    if (!was_blocked_) pthread_sigmask(SIG_UNBLOCK, &pipe, nullptr);
}

}  // namespace tsr::gloo_transport
