#include "launch/node_link.hpp"

#include <fmt/core.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "store/address.hpp"
#include "store/wire.hpp"

namespace tsr {

namespace {

constexpr size_t length_size = 4;
constexpr int message_depth = 16;

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

std::string why_lost(int error) {
    if (error == ECONNRESET || error == EPIPE) return "its agent has ended";
    return fmt::format("its connection failed: {}", std::strerror(error));
}

}  // namespace

// --- Channel

Channel::Channel(Fd socket) : socket_(std::move(socket)) {
    const int on = 1;
    (void)::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void Channel::end(std::string why) {
    if (ended()) return;
    why_ = std::move(why);
    socket_.reset();
}

void Channel::send(std::string_view message) {
    if (ended()) return;
    wire::append(out_, static_cast<uint32_t>(message.size()));
    out_ += message;
    write_some();
    if (out_.size() - sent_ > max_unsent) end("it reads nothing");
}

void Channel::write_some() {
    while (!ended() && sent_ < out_.size()) {
        const ssize_t sent = ::send(socket_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
        if (sent < 0) {
            if (would_block(errno)) break;
            return end(why_lost(errno));
        }
        sent_ += static_cast<size_t>(sent);
    }
    if (sent_ == out_.size() || sent_ > max_frame) {
        out_.erase(0, sent_);
        sent_ = 0;
    }
}

void Channel::write_all(Deadline deadline) {
    for (write_some(); !ended() && sent_ < out_.size() && !deadline.expired(); write_some()) {
        pollfd entry{socket_.get(), POLLOUT, 0};
        (void)::poll(&entry, 1, static_cast<int>(deadline.slice().count()));
    }
}

std::vector<Json> Channel::receive() {
    std::vector<Json> messages;
    std::array<char, 65536> chunk;
    while (!ended()) {
        const ssize_t got = ::recv(socket_.get(), chunk.data(), chunk.size(), 0);
        if (got < 0 && would_block(errno)) break;
        if (got <= 0) {
            end(why_lost(got == 0 ? ECONNRESET : errno));
            break;
        }
        heard_ = Clock::now();
        in_.append(chunk.data(), static_cast<size_t>(got));
        std::string_view rest = in_;
        while (rest.size() >= length_size) {
            std::string_view peek = rest;
            const auto length = wire::take_number<uint32_t>(peek);
            if (length > max_frame) {
                end(fmt::format("it sent a message of {} bytes; at most {} are allowed", length, max_frame));
                return messages;
            }
            if (peek.size() < length) break;
            try {
                messages.push_back(Json::parse(peek.substr(0, length), "a message between agents", message_depth));
            } catch (const Error& error) {
                end(error.what());
                return messages;
            }
            rest = peek.substr(length);
        }
        in_.erase(0, in_.size() - rest.size());
        if (messages.size() > 1000) break;  // others have their turn
    }
    return messages;
}

pollfd Channel::poll_entry() const {
    const bool unsent = sent_ < out_.size();
    return {socket_.get(), static_cast<short>(unsent ? POLLIN | POLLOUT : POLLIN), 0};
}

// --- NodeListener

NodeListener::NodeListener(Fd listener, handshake::Party party)
    : listener_(std::move(listener)), party_(std::move(party)) {}

void NodeListener::append_polls(std::vector<pollfd>& polls) const {
    if (strangers_.size() < max_strangers) polls.push_back({listener_.get(), POLLIN, 0});
    for (const Stranger& stranger : strangers_) polls.push_back({stranger.socket.get(), POLLIN, 0});
}

void NodeListener::accept_strangers() {
    while (strangers_.size() < max_strangers) {
        Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!socket.valid()) return;  // none, or out of descriptors: tried again at the next turn
        strangers_.emplace_back(std::move(socket), party_);
    }
}

std::vector<Fd> NodeListener::turn(std::vector<std::string>& refusals) {
    accept_strangers();
    std::vector<Fd> done;
    for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
        Progress progress = advance(*stranger, refusals);
        if (progress == Progress::waits && Clock::now() - stranger->since > stranger_lifetime)
            progress = Progress::over;
        if (progress == Progress::done) done.push_back(std::move(stranger->socket));
        stranger = progress == Progress::waits ? std::next(stranger) : strangers_.erase(stranger);
    }
    return done;
}

NodeListener::Progress NodeListener::advance(Stranger& stranger, std::vector<std::string>& refusals) {
    const int socket = stranger.socket.get();
    const size_t wanted = stranger.answered ? handshake::proof_size : handshake::hello_size;
    std::array<char, handshake::hello_size> bytes;
    const ssize_t got = ::recv(socket, bytes.data(), wanted - stranger.in.size(), 0);
    if (got < 0 && would_block(errno)) return Progress::waits;
    if (got <= 0) return Progress::over;
    stranger.in.append(bytes.data(), static_cast<size_t>(got));
    // Answer and verdict fit into an empty socket's buffer.
    const auto sends = [&](std::string_view text) {
        return ::send(socket, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
    };
    const auto refuse = [&](const char* why) {
        refusals.push_back(fmt::format("refused an agent from {}: {}", peer_address_of(socket), why));
        return Progress::over;
    };
    if (!stranger.answered) {
        if (!handshake::Server::plausible(stranger.in)) return Progress::over;
        if (stranger.in.size() < wanted) return Progress::waits;
        const std::string answer = stranger.handshake.answer(stranger.in);
        stranger.in.clear();
        stranger.answered = true;
        if (!sends(answer)) return Progress::over;
        return stranger.handshake.refused() ? refuse("another version, or one of both sides runs without a token")
                                            : Progress::waits;
    }
    if (stranger.in.size() < wanted) return Progress::waits;
    const handshake::Verdict verdict = stranger.handshake.judge(stranger.in);
    if (!sends(std::string(1, static_cast<char>(verdict)))) return Progress::over;
    if (verdict == handshake::Verdict::accepted) return Progress::done;
    return refuse(verdict == handshake::Verdict::wrong_token ? "its job token is different"
                                                             : "it belongs to another job (--rdzv-id)");
}

}  // namespace tsr
