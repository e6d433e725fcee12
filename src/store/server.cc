#include "store/server.hpp"

#include <fmt/core.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/log.hpp"
#include "base/thread.hpp"
#include "store/address.hpp"
#include "store/brief_wait.hpp"
#include "store/channel.hpp"
#include "store/handshake.hpp"
#include "store/table.hpp"
#include "store/wire.hpp"

namespace tsr {

namespace {

// One client. Requests come into `in`; replies leave through `out`, whose values are shared with the table.
struct Connection {
    Connection(Fd socket, uint64_t number, const handshake::Party& party)
        : channel(Channel::to_client(std::move(socket), party)), id(number) {}

    Channel channel;
    uint64_t id;
    Clock::time_point since = Clock::now();
    std::string in;
    std::deque<Value> out;
    size_t out_sent = 0;  // bytes of out.front()
    std::string waiting;  // key; empty: no wait is pending
    uint32_t events = 0;  // as registered with epoll
};

class TcpStoreServer final : public StoreServer {
   public:
    TcpStoreServer(const std::string& host, uint16_t port, const StoreOptions& options)
        : address_{host, port},
          party_(handshake::Party::of(options, is_loopback(host), host)),
          listener_(listen_on(address_)),
          epoll_(::epoll_create1(EPOLL_CLOEXEC)),
          stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (!epoll_.valid() || !stop_.valid()) throw os_error("cannot start the store server", errno);
        watch(EPOLL_CTL_ADD, listener_.get(), listener_id, EPOLLIN);
        watch(EPOLL_CTL_ADD, stop_.get(), stop_id, EPOLLIN);
        thread_ = start_thread("tsr-store", [this] { serve(); });
    }

    ~TcpStoreServer() override {
        if (owner_ != ::getpid()) {  // in a forked child the thread does not exist
            thread_.detach();
            return;
        }
        const uint64_t one = 1;
        (void)!::write(stop_.get(), &one, sizeof one);
        thread_.join();
    }

    uint16_t port() const override { return address_.port; }
    std::string uri() const override { return address_.uri(); }

    Census census() const override {
        return {stranger_count_.load(std::memory_order_relaxed), client_count_.load(std::memory_order_relaxed),
                key_count_.load(std::memory_order_relaxed), refused_count_.load(std::memory_order_relaxed)};
    }

   private:
    static constexpr uint64_t listener_id = 0;
    static constexpr uint64_t stop_id = 1;
    static constexpr uint64_t first_connection_id = 2;

    void watch(int operation, int fd, uint64_t id, uint32_t events) {
        epoll_event event{};
        event.events = events;
        event.data.u64 = id;
        if (::epoll_ctl(epoll_.get(), operation, fd, &event) != 0) throw os_error("epoll_ctl", errno);
    }

    // The thread. An error of one connection ends that connection; only memory or epoll failing ends the server.
    void serve() noexcept {
        try {
            for (bool going = true; going;) going = turn();
        } catch (...) {
            log::error("the store server at {} stopped: {}", address_.uri(), current_error().what());
        }
        // Also tells clients whose connection a forked child still holds open.
        for (const auto& [id, connection] : connections_) ::shutdown(connection->channel.fd(), SHUT_RDWR);
        connections_.clear();
        listener_.reset();
    }

    bool turn() {
        std::array<epoll_event, 64> events;
        int count = 0;
        const auto wait = [&](int timeout_ms) {
            count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
            if (count < 0 && errno != EINTR) throw os_error("epoll_wait", errno);
            return count > 0;
        };
        if (!brief_wait_.look([&] { return wait(0); })) wait(next_timeout());
        bool arrivals = false;
        for (int i = 0; i < count; ++i) {
            const epoll_event& event = events[static_cast<size_t>(i)];
            if (event.data.u64 == stop_id) return false;
            if (event.data.u64 == listener_id) {
                arrivals = true;
            } else {
                tend(event.data.u64);
            }
        }
        drop_late_strangers();
        if (arrivals || !listening_) accept_strangers();
        publish_census();
        return true;
    }

    int next_timeout() const {
        if (strangers_.empty()) return listening_ ? -1 : static_cast<int>(poll_slice.count());
        if (!listening_) return static_cast<int>(stranger_grace.count()) / 5;
        const auto oldest = connections_.at(strangers_.front())->since;
        return static_cast<int>(Deadline(oldest + stranger_lifetime).remaining().count()) + 1;
    }

    void set_listening(bool listening) {
        if (listening == listening_) return;
        watch(EPOLL_CTL_MOD, listener_.get(), listener_id, listening ? static_cast<uint32_t>(EPOLLIN) : 0U);
        listening_ = listening;
    }

    void accept_strangers() {
        for (;;) {
            if (strangers_.size() >= max_strangers) {
                // Ranks finish their handshake in a round trip; a connection older than the grace time is idle.
                const uint64_t oldest = strangers_.front();
                if (Clock::now() - connections_.at(oldest)->since < stranger_grace) return set_listening(false);
                drop(oldest);
            }
            Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
            if (!socket.valid()) {
                if (errno == EINTR || errno == ECONNABORTED) continue;
                if (errno == EAGAIN || errno == EWOULDBLOCK) return set_listening(true);
                const int failure = errno;
                if (!std::exchange(told_of_shortage_, true)) {
                    log::warning("the store at {} cannot accept a connection: {}; it keeps trying", address_.uri(),
                                 std::strerror(failure));
                }
                return set_listening(false);  // out of descriptors or memory: tried again a moment later
            }
            const int on = 1;
            (void)::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            const uint64_t id = next_id_++;
            auto connection = std::make_unique<Connection>(std::move(socket), id, party_);
            watch(EPOLL_CTL_ADD, connection->channel.fd(), id, EPOLLIN);
            connection->events = EPOLLIN;
            connections_.emplace(id, std::move(connection));
            strangers_.push_back(id);
        }
    }

    void drop_late_strangers() {
        while (!strangers_.empty()) {
            const uint64_t oldest = strangers_.front();
            if (Clock::now() - connections_.at(oldest)->since < stranger_lifetime) return;
            drop(oldest);
        }
    }

    void drop(uint64_t id) {
        const auto at = connections_.find(id);
        if (at == connections_.end()) return;
        forget_wait(*at->second);
        if (std::erase(strangers_, id) > 0) refused_count_.fetch_add(1, std::memory_order_relaxed);
        connections_.erase(at);
    }

    void tend(uint64_t id) {
        const auto at = connections_.find(id);
        if (at == connections_.end()) return;  // dropped in this same turn
        Connection& connection = *at->second;
        const bool stranger = !connection.channel.is_open();
        try {
            advance(connection);
            tell_epoll(connection);
        } catch (const Error& error) {
            if (stranger) {
                report_refusal(error, connection);
            } else if (error.code() != Code::io) {  // else it has gone
                log::warning("the store at {} dropped a connection: {}", address_.uri(), error.what());
            }
            drop(id);
        }
    }

    // Does what the socket allows. Throws when the connection has ended.
    void advance(Connection& connection) {
        if (!connection.channel.is_open()) {
            if (!connection.channel.shake()) return;
            std::erase(strangers_, connection.id);
        }
        if (!connection.out.empty()) {
            flush(connection);
            if (connection.out.empty()) run_requests(connection);
        }
        // Reads nothing while a reply is pending, so that a client that never reads cannot accumulate replies.
        if (!connection.out.empty()) return;
        // TLS keeps back no byte of a record that fits the chunk, so epoll tells of all that is left.
        const size_t got = connection.channel.read(chunk_.data(), chunk_.size());
        connection.in.append(chunk_.data(), got);
        if (got > 0) run_requests(connection);
    }

    void tell_epoll(Connection& connection) {
        const uint32_t wanted = connection.channel.is_open() && connection.out.empty()
                                    ? EPOLLIN
                                    : static_cast<uint32_t>(connection.channel.wants());
        if (wanted == connection.events) return;
        watch(EPOLL_CTL_MOD, connection.channel.fd(), connection.id, wanted);
        connection.events = wanted;
    }

    // Warns only of the first refusal: a client may retry for ever.
    void report_refusal(const Error& error, const Connection& connection) {
        // Ranks that search for their own store connect here, too, and port scanners to every port.
        if (error.code() != Code::permission && error.code() != Code::version) {
            return log::debug("the store at {} refused a connection: {}", address_.uri(), error.what());
        }
        if (std::exchange(told_of_refusal_, true)) return;
        log::warning("the store at {} refused a connection from {}: {}; further refusals are not logged",
                     address_.uri(), peer_address_of(connection.channel.fd()), error.what());
    }

    // Runs the complete requests received so far, one at a time: the next one after the reply to the previous one is
    // sent.
    void run_requests(Connection& connection) {
        std::string_view rest = connection.in;
        while (connection.out.empty()) {
            const auto frame = wire::take_frame(rest, wire::max_request);
            if (!frame) break;
            execute(connection, wire::decode(*frame));
            flush(connection);
        }
        connection.in.erase(0, connection.in.size() - rest.size());
        if (connection.in.empty() && connection.in.capacity() > keep_capacity) std::string().swap(connection.in);
    }

    void execute(Connection& connection, const wire::Request& request) {
        if (!connection.waiting.empty()) {
            if (request.operation != wire::Operation::cancel) {
                throw Error(Code::corrupt, "a client sent a request while its wait was pending");
            }
            forget_wait(connection);
            return reply(connection, wire::Outcome::cancelled);
        }
        try {
            answer(connection, request);
        } catch (const Error& error) {
            std::string detail(1, static_cast<char>(error.code()));
            reply(connection, wire::Outcome::failed, detail + error.what());
        }
    }

    void answer(Connection& connection, const wire::Request& request) {
        const auto done = [](bool yes) { return yes ? wire::Outcome::ok : wire::Outcome::no; };
        if (request.operation != wire::Operation::cancel) check_key(request.key);
        switch (request.operation) {
            case wire::Operation::set:
                table_.set(request.key, request.value);
                wake(request.key);
                return reply(connection, wire::Outcome::ok);
            case wire::Operation::get: {
                const Value value = table_.find(request.key);
                return value ? reply_value(connection, value) : reply(connection, wire::Outcome::no);
            }
            case wire::Operation::wait: {
                if (const Value value = table_.find(request.key)) return reply_value(connection, value);
                connection.waiting = request.key;
                waiters_.emplace(connection.waiting, connection.id);
                return;
            }
            case wire::Operation::add: {
                std::string sum;
                wire::append(sum, table_.add(request.key, request.delta));
                wake(request.key);
                return reply(connection, wire::Outcome::ok, sum);
            }
            case wire::Operation::compare_set: {
                const bool swapped = table_.compare_set(request.key, request.expected, request.value);
                if (swapped) wake(request.key);
                return reply(connection, done(swapped));
            }
            case wire::Operation::erase: return reply(connection, done(table_.erase(request.key)));
            case wire::Operation::cancel: return;  // its wait was answered already
        }
    }

    // Answers all clients that wait for `key`, which now exists.
    void wake(std::string_view key) {
        const auto [first, last] = waiters_.equal_range(key);
        std::vector<uint64_t> woken;
        for (auto at = first; at != last; ++at) woken.push_back(at->second);
        waiters_.erase(first, last);
        const Value value = table_.find(key);
        for (const uint64_t id : woken) {
            Connection& waiter = *connections_.at(id);
            waiter.waiting.clear();
            reply_value(waiter, value);
            try {
                flush(waiter);
                tell_epoll(waiter);
            } catch (const Error&) {
                drop(id);  // it has gone
            }
        }
    }

    void forget_wait(Connection& connection) {
        if (connection.waiting.empty()) return;
        const auto [first, last] = waiters_.equal_range(connection.waiting);
        const auto own = std::find_if(first, last, [&](const auto& entry) { return entry.second == connection.id; });
        if (own != last) waiters_.erase(own);
        connection.waiting.clear();
    }

    // These two queue a reply; flush() sends it.
    static void reply(Connection& connection, wire::Outcome outcome, std::string_view payload = {}) {
        std::string frame;
        wire::append(frame, static_cast<uint32_t>(1 + payload.size()));
        wire::append(frame, static_cast<uint8_t>(outcome));
        frame += payload;
        connection.out.push_back(std::make_shared<const std::string>(std::move(frame)));
    }

    static void reply_value(Connection& connection, const Value& value) {
        std::string head;
        wire::append(head, static_cast<uint32_t>(1 + value->size()));
        wire::append(head, static_cast<uint8_t>(wire::Outcome::ok));
        connection.out.push_back(std::make_shared<const std::string>(std::move(head)));
        if (!value->empty()) connection.out.push_back(value);
    }

    // Writes what the socket takes. Throws when the connection has ended.
    static void flush(Connection& connection) {
        while (!connection.out.empty()) {
            std::array<iovec, 2> parts{};
            size_t count = 0;
            for (; count < std::min(parts.size(), connection.out.size()); ++count) {
                const size_t skip = count == 0 ? connection.out_sent : 0;
                const Value& value = connection.out[count];
                parts[count] = {const_cast<char*>(value->data()) + skip, value->size() - skip};
            }
            const size_t sent = connection.channel.write(std::span(parts).first(count));
            if (sent == 0) return;
            connection.out_sent += sent;
            while (!connection.out.empty() && connection.out_sent >= connection.out.front()->size()) {
                connection.out_sent -= connection.out.front()->size();
                connection.out.pop_front();
            }
        }
    }

    void publish_census() {
        stranger_count_.store(strangers_.size(), std::memory_order_relaxed);
        client_count_.store(connections_.size() - strangers_.size(), std::memory_order_relaxed);
        key_count_.store(table_.size(), std::memory_order_relaxed);
    }

    static constexpr size_t keep_capacity = 65536;

    Address address_;
    handshake::Party party_;
    Fd listener_;
    Fd epoll_;
    Fd stop_;

    // Owned by the thread.
    bool listening_ = true;
    bool told_of_refusal_ = false;
    bool told_of_shortage_ = false;
    uint64_t next_id_ = first_connection_id;
    BriefWait brief_wait_;
    std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
    std::deque<uint64_t> strangers_;                             // before the handshake's end, oldest first
    std::multimap<std::string, uint64_t, std::less<>> waiters_;  // key -> connection
    Table table_;
    std::array<char, 65536> chunk_{};

    // Relaxed: the counts are only polled for display and tests; no other data depends on them.
    std::atomic<size_t> stranger_count_{0};
    std::atomic<size_t> client_count_{0};
    std::atomic<size_t> key_count_{0};
    std::atomic<uint64_t> refused_count_{0};

    pid_t owner_ = ::getpid();
    std::thread thread_;
};

}  // namespace

std::shared_ptr<StoreServer> StoreServer::start(const std::string& host, uint16_t port, const StoreOptions& options) {
    return std::make_shared<TcpStoreServer>(host, port, options);
}

}  // namespace tsr
