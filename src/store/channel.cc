#include "store/channel.hpp"

#include <fmt/core.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "store/address.hpp"

namespace tsr {

namespace {

// What TLS puts into one record. Several parts are copied together: a record costs more than the copy.
constexpr size_t record_size = 16384;

Error gone(int error) { return os_error("the connection", error); }

}  // namespace

// The state of a handshake: each step waits for `in` or for `out`.
struct Channel::Shaking {
    enum class Step { hello, answer, proof, verdict, tls, binding };

    explicit Shaking(const handshake::Party& of) : party(of) {}

    const handshake::Party& party;
    std::string address;                      // of the server
    std::optional<handshake::Server> server;  // of these two, the one that this end is
    std::optional<handshake::Client> client;
    Step step = Step::hello;
    std::string in;
    std::string out;
    size_t sent = 0;               // bytes of `out`
    std::optional<Error> refusal;  // thrown when `out`, which tells the client, is sent
};

Channel::Channel(Fd socket, std::unique_ptr<Shaking> shaking)
    : socket_(std::move(socket)), shaking_(std::move(shaking)), wants_(POLLIN) {}
Channel::Channel(Channel&&) noexcept = default;
Channel& Channel::operator=(Channel&&) noexcept = default;
Channel::~Channel() = default;

Channel Channel::to_server(Fd socket, const handshake::Party& party, std::string address) {
    auto shaking = std::make_unique<Shaking>(party);
    shaking->address = std::move(address);
    shaking->client.emplace(party, shaking->address);
    shaking->out = shaking->client->hello();
    shaking->step = Shaking::Step::answer;
    return {std::move(socket), std::move(shaking)};
}

Channel Channel::to_client(Fd socket, const handshake::Party& party) {
    auto shaking = std::make_unique<Shaking>(party);
    shaking->server.emplace(party);
    return {std::move(socket), std::move(shaking)};
}

short Channel::wants() const { return tls_ ? tls_->wants() : wants_; }

// Reads until `in` has `size` bytes, and never more.
bool Channel::fill(size_t size) {
    std::string& in = shaking_->in;
    while (in.size() < size) {
        std::array<char, 128> bytes;
        const size_t got = read(bytes.data(), std::min(bytes.size(), size - in.size()));
        if (got == 0) return false;
        in.append(bytes.data(), got);
        if (shaking_->step == Shaking::Step::hello && !handshake::Server::plausible(in)) {
            throw Error(Code::corrupt, "not the protocol of a Tessera store");
        }
    }
    return true;
}

bool Channel::flush() {
    Shaking& s = *shaking_;
    while (s.sent < s.out.size()) {
        const iovec part{s.out.data() + s.sent, s.out.size() - s.sent};
        const size_t sent = write({&part, 1});
        if (sent == 0) return false;
        s.sent += sent;
    }
    s.out.clear();
    s.sent = 0;
    return true;
}

bool Channel::shake() {
    while (shaking_) {
        if (!flush()) return false;
        if (shaking_->refusal) throw *shaking_->refusal;
        if (!(shaking_->server ? step_of_server() : step_of_client())) return false;
    }
    return true;
}

void Channel::start_tls(Tls::End end) {
    const Shaking& s = *shaking_;
    tls_ =
        std::make_unique<Tls>(*s.party.tls, end, socket_.get(),
                              end == Tls::End::client ? "the store at " + s.address : peer_address_of(socket_.get()));
}

// False: it has to wait.
bool Channel::step_of_server() {
    using handshake::Role;
    Shaking& s = *shaking_;
    switch (s.step) {
        case Shaking::Step::hello:
            if (!fill(handshake::hello_size)) return false;
            s.out = s.server->answer(s.in);
            if (!s.server->refusal().empty()) s.refusal = Error(Code::permission, s.server->refusal());
            s.step = Shaking::Step::proof;
            break;
        case Shaking::Step::proof: {
            if (!fill(handshake::proof_size)) return false;
            const handshake::Verdict verdict = s.server->judge(s.in);
            s.out.assign(1, static_cast<char>(verdict));
            if (verdict == handshake::Verdict::wrong_token) s.refusal = Error(Code::permission, "wrong job token");
            if (verdict == handshake::Verdict::other_epoch) s.refusal = Error(Code::permission, "another epoch");
            if (verdict == handshake::Verdict::other_job) s.refusal = Error(Code::mismatch, "another job");
            s.step = Shaking::Step::verdict;
            break;
        }
        case Shaking::Step::verdict:  // which is sent
            if (!s.party.tls) {
                shaking_.reset();
                return true;
            }
            start_tls(Tls::End::server);
            s.step = Shaking::Step::tls;
            break;
        case Shaking::Step::tls:
            if (!tls_->shake()) return false;
            s.out = binding_of(s.party, Role::server, tls_->exported());
            s.step = Shaking::Step::binding;
            break;
        default:
            if (!fill(handshake::binding_size)) return false;
            if (!is_binding_of(s.party, Role::client, tls_->exported(), s.in)) {
                throw Error(Code::permission, "TLS ends at a process without the job token");
            }
            shaking_.reset();
            return true;
    }
    s.in.clear();
    return true;
}

bool Channel::step_of_client() {
    using handshake::Role;
    Shaking& s = *shaking_;
    switch (s.step) {
        case Shaking::Step::answer:
            if (!fill(handshake::answer_size)) return false;
            s.out = s.client->prove(s.in);
            s.step = Shaking::Step::verdict;
            break;
        case Shaking::Step::verdict:
            if (!fill(handshake::verdict_size)) return false;
            s.client->accept(s.in);
            if (!s.party.tls) {
                shaking_.reset();
                return true;
            }
            start_tls(Tls::End::client);
            s.step = Shaking::Step::tls;
            break;
        case Shaking::Step::tls:
            if (!tls_->shake()) return false;
            s.step = Shaking::Step::binding;
            break;
        case Shaking::Step::binding:  // only now does TLS say that the server took this end's certificate
            if (!fill(handshake::binding_size)) return false;
            if (!is_binding_of(s.party, Role::server, tls_->exported(), s.in)) {
                throw Error(
                    Code::permission,
                    fmt::format("TLS with the store at {} ends at a process without the job token: somebody is in "
                                "between, with a certificate of your authority",
                                s.address));
            }
            s.out = binding_of(s.party, Role::client, tls_->exported());
            s.step = Shaking::Step::proof;
            break;
        default:  // all is sent
            shaking_.reset();
            return true;
    }
    s.in.clear();
    return true;
}

size_t Channel::read(char* bytes, size_t size) {
    if (tls_) return tls_->read(bytes, size);
    for (;;) {
        const ssize_t got = ::recv(socket_.get(), bytes, size, 0);
        if (got > 0) return static_cast<size_t>(got);
        if (got == 0) throw gone(ECONNRESET);
        if (errno == EINTR) continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) throw gone(errno);
        wants_ = POLLIN;
        return 0;
    }
}

size_t Channel::write(std::span<const iovec> parts) {
    if (tls_) {
        if (parts.front().iov_len >= record_size || parts.size() == 1) {
            return tls_->write(static_cast<const char*>(parts.front().iov_base), parts.front().iov_len);
        }
        std::array<char, record_size> record;
        size_t size = 0;
        for (const iovec& part : parts) {
            const size_t fits = std::min(part.iov_len, record.size() - size);
            std::memcpy(record.data() + size, part.iov_base, fits);
            size += fits;
        }
        return tls_->write(record.data(), size);
    }
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data());
    message.msg_iovlen = parts.size();
    for (;;) {
        const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
        if (sent >= 0) return static_cast<size_t>(sent);
        if (errno == EINTR) continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) throw gone(errno);
        wants_ = POLLOUT;
        return 0;
    }
}

bool Channel::has_bytes() {
    if (tls_) return tls_->has_bytes();
    wants_ = POLLIN;
    pollfd entry{socket_.get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) > 0;
}

namespace {

// Repeats `attempt` until it is true; false once the deadline has passed.
template <class Attempt>
bool repeat(Channel& channel, Deadline deadline, Attempt&& attempt) {
    while (!attempt()) {
        if (!wait_for(channel.fd(), channel.wants(), deadline)) return false;
    }
    return true;
}

// Reads until `received` is `least`, and at most `size`; false if it has to wait.
bool read_on(Channel& channel, char* bytes, size_t least, size_t size, size_t& received) {
    while (received < least) {
        const size_t got = channel.read(bytes + received, size - received);
        if (got == 0) return false;
        received += got;
    }
    return true;
}

[[noreturn]] void throw_timeout(std::string_view what) {
    throw Error(Code::timeout, fmt::format("{}: no answer before the deadline", what));
}

}  // namespace

void open(Channel& channel, Deadline deadline, std::string_view what) {
    if (!repeat(channel, deadline, [&] { return channel.shake(); })) throw_timeout(what);
}

void send_all(Channel& channel, std::string_view bytes, Deadline deadline, std::string_view what) {
    const auto attempt = [&] {
        while (!bytes.empty()) {
            const iovec part{const_cast<char*>(bytes.data()), bytes.size()};
            const size_t sent = channel.write({&part, 1});
            if (sent == 0) return false;
            bytes.remove_prefix(sent);
        }
        return true;
    };
    if (!repeat(channel, deadline, attempt)) throw_timeout(what);
}

void receive_all(Channel& channel, char* bytes, size_t size, Deadline deadline, std::string_view what) {
    size_t received = 0;
    const auto attempt = [&] { return read_on(channel, bytes, size, size, received); };
    if (!repeat(channel, deadline, attempt)) throw_timeout(what);
}

size_t receive_some(Channel& channel, char* bytes, size_t least, size_t size, Deadline deadline,
                    std::string_view what) {
    size_t received = 0;
    const auto attempt = [&] { return read_on(channel, bytes, least, size, received); };
    if (!channel.brief_wait().look(attempt) && !repeat(channel, deadline, attempt)) throw_timeout(what);
    return received;
}

bool readable(Channel& channel, Deadline deadline) {
    return repeat(channel, deadline, [&] { return channel.has_bytes(); });
}

}  // namespace tsr
