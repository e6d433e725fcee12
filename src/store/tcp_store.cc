#include "store/tcp_store.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "store/channel.hpp"
#include "store/handshake.hpp"
#include "store/server.hpp"
#include "store/table.hpp"
#include "store/wire.hpp"

namespace tsr {

namespace {

class TcpStore final : public Store {
   public:
    TcpStore(const Address& address, const StoreOptions& options)
        : Store(options.timeout),
          address_(address),
          uri_(address.uri()),
          party_(handshake::Party::of(options, is_loopback(address.host), uri_)) {}

    // The first connection: the server may start later than this process.
    void connect_first() {
        const Deadline deadline = default_deadline();
        milliseconds pause{5};
        for (;;) {
            try {
                return connect_now(deadline);
            } catch (const Error& error) {
                if (!error.record()->retriable && error.code() != Code::timeout) throw;
                if (Deadline::in(pause).at() >= deadline.at()) {
                    throw Error(Code::timeout,
                                fmt::format("no store at {} after {} ms: the process that serves it (the launcher's "
                                            "agent, or rank 0) has not started, has ended, or cannot be reached",
                                            uri_, timeout().count()))
                        .caused_by(error);
                }
            }
            poll_interrupt();
            std::this_thread::sleep_for(pause);
            pause = std::min(pause * 2, poll_slice);
        }
    }

    void connect_now(Deadline deadline) {
        Channel channel = connect(deadline);
        local_address_ = local_address_of(channel.fd());
        give_back(std::move(channel));
    }

    std::string local_address() const override { return local_address_; }

    void set(std::string_view key, std::string_view value, Deadline deadline) override {
        check_value(key, value);
        (void)call({.operation = wire::Operation::set, .key = key, .value = value}, deadline, "set");
    }

    std::optional<std::string> get(std::string_view key, Deadline deadline) override {
        Reply reply = call({.operation = wire::Operation::get, .key = key}, deadline, "get");
        if (reply.outcome == wire::Outcome::no) return std::nullopt;
        return std::move(reply.payload);
    }

    std::string wait(std::string_view key, Deadline deadline) override {
        Reply reply = call({.operation = wire::Operation::wait, .key = key}, deadline, "wait");
        if (reply.outcome == wire::Outcome::cancelled) {
            throw Error(Code::timeout, fmt::format("timed out waiting for key '{}' of the store at {}", key, uri_));
        }
        return std::move(reply.payload);
    }

    int64_t add(std::string_view key, int64_t delta, Deadline deadline) override {
        const Reply reply = call({.operation = wire::Operation::add, .key = key, .delta = delta}, deadline, "add");
        std::string_view number = reply.payload;
        return wire::take_number<int64_t>(number);
    }

    bool compare_set(std::string_view key, std::optional<std::string_view> expected, std::string_view desired,
                     Deadline deadline) override {
        check_value(key, desired);
        if (expected) check_value(key, *expected);
        const Reply reply =
            call({.operation = wire::Operation::compare_set, .key = key, .value = desired, .expected = expected},
                 deadline, "compare_set");
        return reply.outcome == wire::Outcome::ok;
    }

    bool erase(std::string_view key, Deadline deadline) override {
        return call({.operation = wire::Operation::erase, .key = key}, deadline, "delete").outcome == wire::Outcome::ok;
    }

   private:
    struct Reply {
        wire::Outcome outcome;
        std::string payload;
    };

    Channel connect(Deadline deadline) { return connect_with_handshake(address_, party_, deadline); }

    std::optional<Channel> take_idle() {
        const std::lock_guard lock(mutex_);
        if (owner_ != ::getpid()) {  // a forked child must not use its parent's connections
            idle_.clear();
            owner_ = ::getpid();
        }
        if (idle_.empty()) return std::nullopt;
        Channel channel = std::move(idle_.back());
        idle_.pop_back();
        return channel;
    }

    void give_back(Channel channel) {
        const std::lock_guard lock(mutex_);
        if (owner_ == ::getpid() && idle_.size() < max_idle) idle_.push_back(std::move(channel));
    }

    // The server, if it is full, drops handshakes that take long; this end may notice that only with its first request, as
    // it sends the last message of the handshake. Such a request was not executed. A server that has ended refuses the next
    // connection.
    static bool was_dropped(const Error& error) {
        const int native = error.record()->native_code;
        return error.code() == Code::io && (native == ECONNRESET || native == EPIPE);
    }

    Reply call(const wire::Request& request, Deadline deadline, const char* verb) {
        check_key(request.key);
        const std::string what = fmt::format("{} of '{}' in the store at {}", verb, request.key, uri_);
        const Deadline patience = deadline.earlier(Deadline::in(StoreServer::stranger_lifetime));
        try {
            for (milliseconds pause{5};; pause = std::min(pause * 2, poll_slice)) {
                std::optional<Channel> idle = take_idle();
                const bool is_new = !idle;
                try {
                    return call_over(idle ? std::move(*idle) : connect(deadline), request, deadline, what);
                } catch (const Error& error) {
                    if (!is_new || !was_dropped(error) || patience.expired()) throw;
                }
                poll_interrupt();
                std::this_thread::sleep_for(pause);
            }
        } catch (const Error& error) {
            if (error.code() != Code::io || error.record()->native_code == 0) throw;
            throw Error(Code::io, fmt::format("lost the store at {} during {} of '{}': the process that serves it (the "
                                              "launcher's agent, or rank 0) has ended",
                                              uri_, verb, request.key))
                .with_native(NativeDomain::os, error.record()->native_code)
                .caused_by(error);
        }
    }

    Reply call_over(Channel channel, const wire::Request& request, Deadline deadline, const std::string& what) {
        send_all(channel, wire::encode(request), deadline, what);
        if (request.operation == wire::Operation::wait && !readable(channel, deadline)) {
            deadline = Deadline::in(cancel_grace);
            send_all(channel, wire::encode({.operation = wire::Operation::cancel}), deadline, what);
        }
        Reply reply = read_reply(channel, deadline, what);
        give_back(std::move(channel));
        return checked(std::move(reply), what);
    }

    static Reply read_reply(Channel& channel, Deadline deadline, const std::string& what) {
        std::array<char, 1024> begin;  // most replies are shorter
        std::string_view bytes(
            begin.data(), receive_some(channel, begin.data(), wire::length_size + 1, begin.size(), deadline, what));
        const auto length = wire::take_number<uint32_t>(bytes);
        if (length < 1 || length > wire::max_reply || bytes.size() > length) {
            throw Error(Code::corrupt,
                        fmt::format("{}: the reply claims {} bytes; {} came", what, length, bytes.size()));
        }
        Reply reply{static_cast<wire::Outcome>(bytes[0]), std::string(bytes.substr(1))};
        const size_t there = reply.payload.size();
        reply.payload.resize(length - 1);
        receive_all(channel, reply.payload.data() + there, reply.payload.size() - there, deadline, what);
        return reply;
    }

    // Throws the server's error if the call failed there.
    static Reply checked(Reply reply, const std::string& what) {
        if (reply.outcome != wire::Outcome::failed) return reply;
        if (reply.payload.empty()) throw Error(Code::corrupt, what + ": the server sent an empty error");
        throw Error(static_cast<Code>(reply.payload[0]), reply.payload.substr(1));
    }

    static constexpr size_t max_idle = 64;
    static constexpr milliseconds cancel_grace{2000};

    const Address address_;
    const std::string uri_;
    std::string local_address_;  // set before the store is shared
    const handshake::Party party_;
    std::mutex mutex_;  // guards what follows
    std::vector<Channel> idle_;
    pid_t owner_ = ::getpid();
};

}  // namespace

std::shared_ptr<Store> open_tcp_store(const Address& address, const StoreOptions& options) {
    auto store = std::make_shared<TcpStore>(address, options);
    store->connect_first();
    return store;
}

Channel connect_with_handshake(const Address& address, const handshake::Party& party, Deadline deadline) {
    const std::string uri = address.uri();
    Channel channel = Channel::to_server(connect_to(address, deadline), party, uri);
    const std::string what = fmt::format("handshake with the store at {}", uri);
    try {
        open(channel, deadline, what);
    } catch (const Error& error) {
        if (error.code() != Code::io) throw;
        // A full server dropped this connection for others.
        throw os_error(what, error.record()->native_code).retry_may_help();
    }
    return channel;
}

std::shared_ptr<Store> connect_tcp_store(const Address& address, const StoreOptions& options, Deadline deadline) {
    auto store = std::make_shared<TcpStore>(address, options);
    store->connect_now(deadline);
    return store;
}

}  // namespace tsr
