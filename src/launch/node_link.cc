#include "launch/node_link.hpp"

#include <fmt/core.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <utility>

#include "base/error.hpp"
#include "store/address.hpp"
#include "store/wire.hpp"

namespace tsr {

namespace {

constexpr size_t length_size = 4;
constexpr int message_depth = 16;

}  // namespace

// --- NodeLink

NodeLink::NodeLink(Channel channel) : channel_(std::move(channel)) {
    const int on = 1;
    (void)::setsockopt(channel_->fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void NodeLink::end(std::string why) {
    if (ended()) return;
    why_ = std::move(why);
    channel_.reset();
}

void NodeLink::end(const Error& error) {
    const int failure = error.record()->native_code;
    const bool is_gone = error.code() == Code::io && (failure == ECONNRESET || failure == EPIPE);
    end(is_gone ? "its agent has ended" : fmt::format("its connection failed: {}", error.what()));
}

void NodeLink::send(std::string_view message) {
    if (ended()) return;
    wire::append(out_, static_cast<uint32_t>(message.size()));
    out_ += message;
    write_some();
    if (out_.size() - sent_ > max_unsent) end("it reads nothing");
}

void NodeLink::write_some() {
    while (!ended() && sent_ < out_.size()) {
        try {
            const iovec part{out_.data() + sent_, out_.size() - sent_};
            const size_t sent = channel_->write({&part, 1});
            if (sent == 0) break;
            sent_ += sent;
        } catch (const Error& error) {
            return end(error);
        }
    }
    if (sent_ == out_.size() || sent_ > max_frame) {
        out_.erase(0, sent_);
        sent_ = 0;
    }
}

void NodeLink::write_all(Deadline deadline) {
    for (write_some(); !ended() && sent_ < out_.size() && !deadline.expired(); write_some()) {
        pollfd entry{channel_->fd(), channel_->wants(), 0};
        (void)::poll(&entry, 1, static_cast<int>(deadline.slice().count()));
    }
}

std::vector<Json> NodeLink::receive() {
    std::vector<Json> messages;
    std::array<char, 65536> chunk;
    while (!ended()) {
        size_t got = 0;
        try {
            got = channel_->read(chunk.data(), chunk.size());
        } catch (const Error& error) {
            end(error);
        }
        if (got == 0) break;
        heard_ = Clock::now();
        in_.append(chunk.data(), got);
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

pollfd NodeLink::poll_entry() const {
    const bool unsent = sent_ < out_.size();
    return {socket(), static_cast<short>(unsent ? POLLIN | POLLOUT : POLLIN), 0};
}

// --- NodeListener

NodeListener::NodeListener(Fd listener, handshake::Party party)
    : listener_(std::move(listener)), party_(std::move(party)) {}

void NodeListener::append_polls(std::vector<pollfd>& polls) const {
    if (strangers_.size() < max_strangers) polls.push_back({listener_.get(), POLLIN, 0});
    for (const Stranger& stranger : strangers_) {
        polls.push_back({stranger.channel.fd(), stranger.channel.wants(), 0});
    }
}

void NodeListener::accept_strangers() {
    while (strangers_.size() < max_strangers) {
        Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!socket.valid()) return;  // none, or out of descriptors: tried again at the next turn
        strangers_.push_back({Channel::to_client(std::move(socket), party_)});
    }
}

std::vector<Channel> NodeListener::turn(std::vector<std::string>& refusals) {
    accept_strangers();
    std::vector<Channel> open;
    for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
        bool over = false;
        try {
            if (stranger->channel.shake()) {
                open.push_back(std::move(stranger->channel));
                over = true;
            }
        } catch (const Error& error) {
            over = true;
            if (error.code() == Code::permission || error.code() == Code::mismatch) {
                refusals.push_back(fmt::format(
                    "refused an agent from {}: {}", peer_address_of(stranger->channel.fd()),
                    error.code() == Code::mismatch ? "it belongs to another job (--rdzv-id)" : error.what()));
            }
        }
        over = over || Clock::now() - stranger->since > stranger_lifetime;
        stranger = over ? strangers_.erase(stranger) : std::next(stranger);
    }
    return open;
}

}  // namespace tsr
