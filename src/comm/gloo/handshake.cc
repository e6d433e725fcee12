#include "comm/gloo/handshake.hpp"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <list>
#include <optional>
#include <system_error>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"

namespace tsr::gloo_transport {

namespace {

constexpr milliseconds retry_pause{100};
// Limit of unidentified connections, besides one per rank. Beyond it the oldest is closed: a rank connects again.
constexpr size_t most_unknown = 64;

// The first bytes of a connection, from either side.
struct Greeting {
    static constexpr uint64_t current_magic = 0x3130'4554'4545'5247;  // "GREETE01"
    uint64_t magic = current_magic;
    Nonce nonce{};  // of the rank that is greeted
    int32_t from = 0;
    int32_t to = 0;
};
static_assert(std::is_trivially_copyable_v<Greeting>);

socklen_t size_of(const sockaddr_storage& address) {
    return address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

std::string text_of(const sockaddr_storage& address) {
    std::array<char, INET6_ADDRSTRLEN> text{};
    const void* plain = &address;
    if (address.ss_family == AF_INET6) {
        const auto* v6 = static_cast<const sockaddr_in6*>(plain);
        (void)::inet_ntop(AF_INET6, &v6->sin6_addr, text.data(), text.size());
        return fmt::format("[{}]:{}", text.data(), ntohs(v6->sin6_port));
    }
    const auto* v4 = static_cast<const sockaddr_in*>(plain);
    (void)::inet_ntop(AF_INET, &v4->sin_addr, text.data(), text.size());
    return fmt::format("{}:{}", text.data(), ntohs(v4->sin_port));
}

std::string reason(int error) { return std::generic_category().message(error); }

// A connection on which a greeting is awaited.
struct Guest {
    Fd socket;
    sockaddr_storage address{};  // of the other end
    std::array<char, sizeof(Greeting)> bytes{};
    size_t got = 0;

    // The state so far: complete, the reason why it never will be, or neither.
    struct Heard {
        bool whole = false;
        std::string failure;
    };
    Heard hear() {
        while (got < bytes.size()) {
            const ssize_t n = ::recv(socket.get(), bytes.data() + got, bytes.size() - got, 0);
            if (n == 0) return {false, "it closed the connection"};
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
            if (n < 0) return {false, reason(errno)};
            got += static_cast<size_t>(n);
            // Stop reading at a wrong magic number.
            if (got >= sizeof(uint64_t) && greeting().magic != Greeting::current_magic) break;
        }
        return {true, ""};
    }
    [[nodiscard]] Greeting greeting() const {
        Greeting greeting;
        std::memcpy(&greeting, bytes.data(), sizeof greeting);
        return greeting;
    }
    // A greeting fits into the empty send buffer of a new connection.
    [[nodiscard]] bool say(const Greeting& greeting) const {
        return ::send(socket.get(), &greeting, sizeof greeting, MSG_NOSIGNAL) == sizeof greeting;
    }
};

// One rank's part in it. A rank connects to those before it, and is connected to by those after it.
class Handshakes {
   public:
    Handshakes(int own, const std::vector<Door>& doors, const Fd& listener, const std::function<void()>& check)
        : own_(own),
          doors_(doors),
          listener_(listener),
          check_(check),
          known_(doors.size()),
          calls_(static_cast<size_t>(own)) {}

    std::vector<Fd> run(Deadline deadline) {
        for (std::optional<int> missing; (missing = first_missing());) {
            check_();
            if (deadline.expired()) throw failure(*missing, why_missing(*missing));
            turn(deadline.slice());
        }
        for (const Guest& guest : unknown_) refuse(guest, "it sent nothing");
        return std::move(known_);
    }

   private:
    struct Call {
        std::optional<Guest> guest;  // none: not yet connected, or failed and to be retried at `again`
        bool connected = false;
        Clock::time_point again{};
        std::string failure;
    };

    [[nodiscard]] std::optional<int> first_missing() const {
        for (int peer = 0; peer < static_cast<int>(known_.size()); ++peer) {
            if (peer != own_ && !known_[static_cast<size_t>(peer)].valid()) return peer;
        }
        return std::nullopt;
    }
    [[nodiscard]] std::string why_missing(int peer) const {
        const std::string why = peer < own_ ? calls_[static_cast<size_t>(peer)].failure : "";
        return why.empty() ? "it does not answer" : why;
    }
    [[nodiscard]] const Door& door(int peer) const { return doors_[static_cast<size_t>(peer)]; }

    // check_() reports a dead peer, which explains more.
    [[noreturn]] void fail(int peer, const std::string& why) const {
        check_();
        throw failure(peer, why);
    }

    [[nodiscard]] Error failure(int peer, const std::string& why) const {
        std::string text = fmt::format("rank {}: no Gloo connection to rank {} at {}: {}", own_, peer,
                                       text_of(door(peer).address), why);
        if (strangers_ > 0) {
            text += fmt::format("; {} unknown connections to {} were refused meanwhile, the last from {}", strangers_,
                                text_of(door(own_).address), last_stranger_);
        }
        return Error(Code::timeout, text).with_rank(own_).with_peer(peer).with_operation("create");
    }

    void turn(milliseconds slice) {
        std::vector<pollfd> polls{{listener_.get(), POLLIN, 0}};
        std::vector<int> called;
        const auto now = Clock::now();
        for (int peer = 0; peer < own_; ++peer) {
            Call& call = calls_[static_cast<size_t>(peer)];
            if (known_[static_cast<size_t>(peer)].valid()) continue;
            if (!call.guest && now >= call.again) this->call(peer);
            if (!call.guest) {
                slice = std::min(slice, retry_pause);
                continue;
            }
            polls.push_back({call.guest->socket.get(), static_cast<short>(call.connected ? POLLIN : POLLOUT), 0});
            called.push_back(peer);
        }
        const size_t first_unknown = polls.size();
        for (const Guest& guest : unknown_) polls.push_back({guest.socket.get(), POLLIN, 0});
        if (::poll(polls.data(), polls.size(), static_cast<int>(slice.count())) < 0 && errno != EINTR) {
            throw os_error(fmt::format("rank {}: cannot wait for Gloo connections", own_), errno);
        }
        for (size_t i = 0; i < called.size(); ++i) {
            if (polls[1 + i].revents != 0) go_on_with(called[i]);
        }
        size_t at = first_unknown;
        for (auto guest = unknown_.begin(); guest != unknown_.end();) {
            const bool done = polls[at++].revents != 0 && !go_on_with(*guest);
            guest = done ? unknown_.erase(guest) : std::next(guest);
        }
        if (polls[0].revents != 0) accept_guests();
    }

    // --- those before this rank

    void call(int peer) {
        const sockaddr_storage& address = door(peer).address;
        Guest guest;
        guest.socket = Fd(::socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
        guest.address = address;
        if (!guest.socket.valid())
            throw os_error(fmt::format("rank {}: cannot create a socket to rank {}", own_, peer), errno);
        const auto* plain = reinterpret_cast<const sockaddr*>(&address);
        if (::connect(guest.socket.get(), plain, size_of(address)) != 0 && errno != EINPROGRESS) {
            fail(peer, reason(errno));
        }
        Call& made = calls_[static_cast<size_t>(peer)];
        made.guest = std::move(guest);
        made.connected = false;
    }

    void go_on_with(int peer) {
        Call& call = calls_[static_cast<size_t>(peer)];
        if (!call.connected) {
            int error = 0;
            socklen_t size = sizeof error;
            (void)::getsockopt(call.guest->socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
            // A rank listens until all have connected, so where nobody listens there is no rank.
            if (error != 0) fail(peer, reason(error));
            call.connected = true;
            if (!call.guest->say({Greeting::current_magic, door(peer).nonce, own_, peer}))
                call_again(peer, reason(errno));
            return;
        }
        const Guest::Heard heard = call.guest->hear();
        if (!heard.failure.empty()) return call_again(peer, heard.failure);
        if (!heard.whole) return;
        const Greeting greeting = call.guest->greeting();
        if (greeting.magic != Greeting::current_magic || greeting.nonce != door(own_).nonce || greeting.from != peer ||
            greeting.to != own_) {
            fail(peer, "another process answers at that address");
        }
        known_[static_cast<size_t>(peer)] = std::move(call.guest->socket);
    }

    // The peer had no room left for unidentified connections.
    void call_again(int peer, const std::string& why) {
        calls_[static_cast<size_t>(peer)] = Call{std::nullopt, false, Clock::now() + retry_pause, why};
    }

    // --- those after it, and strangers

    void accept_guests() {
        for (size_t i = 0; i < most_unknown; ++i) {
            Guest guest;
            socklen_t size = sizeof guest.address;
            guest.socket = Fd(::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&guest.address), &size,
                                        SOCK_NONBLOCK | SOCK_CLOEXEC));
            if (!guest.socket.valid()) {
                if (errno == EINTR || errno == ECONNABORTED) continue;
                if (errno == EAGAIN || errno == EWOULDBLOCK) return;
                throw os_error(fmt::format("rank {}: cannot accept Gloo connections", own_), errno);
            }
            if (unknown_.size() >= most_unknown + doors_.size()) {
                refuse(unknown_.front(), "it sent nothing");
                unknown_.pop_front();
            }
            unknown_.push_back(std::move(guest));
        }
    }

    // False: it is identified or refused.
    bool go_on_with(Guest& guest) {
        const Guest::Heard heard = guest.hear();
        if (!heard.whole && heard.failure.empty()) return true;
        const Greeting greeting = guest.greeting();
        const bool is_rank = heard.whole && greeting.magic == Greeting::current_magic &&
                             greeting.nonce == door(own_).nonce && greeting.to == own_ && greeting.from > own_ &&
                             greeting.from < static_cast<int>(doors_.size());
        if (!is_rank) {
            refuse(guest, heard.whole ? "it is not a rank of this job" : heard.failure);
        } else if (guest.say({Greeting::current_magic, door(greeting.from).nonce, own_, greeting.from})) {
            known_[static_cast<size_t>(greeting.from)] = std::move(guest.socket);
        }
        return false;
    }

    void refuse(const Guest& guest, const std::string& why) {
        last_stranger_ = text_of(guest.address);
        if (++strangers_ > 1) return;  // logs only the first
        log::warning(
            "rank {}: refused a connection from {} to {}, a port reserved for ranks of this job: {}. It may be a port "
            "scanner or a health check; the job continues",
            own_, last_stranger_, text_of(door(own_).address), why);
    }

    const int own_;
    const std::vector<Door>& doors_;
    const Fd& listener_;
    const std::function<void()>& check_;
    std::vector<Fd> known_;    // by rank
    std::vector<Call> calls_;  // to those before this rank
    std::list<Guest> unknown_;
    int strangers_ = 0;
    std::string last_stranger_;
};

}  // namespace

Fd listen_at(sockaddr_storage& address) {
    auto* plain = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = size_of(address);
    Fd listener(::socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!listener.valid() || ::bind(listener.get(), plain, size) != 0 || ::listen(listener.get(), SOMAXCONN) != 0 ||
        ::getsockname(listener.get(), plain, &size) != 0) {
        throw os_error(fmt::format("cannot listen at {}", text_of(address)), errno);
    }
    return listener;
}

std::vector<Fd> shake_hands(int own, const std::vector<Door>& doors, const Fd& listener, Deadline deadline,
                            const std::function<void()>& check) {
    return Handshakes(own, doors, listener, check).run(deadline);
}

}  // namespace tsr::gloo_transport
