// The connections between the agents of a job: channels like the store's (its handshake, TLS if the job has it), with
// frames of a length (4 bytes, little-endian) and a JSON object. Both ends are part of an agent's poll loop, and never
// block.
#pragma once

#include <poll.h>

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/json.hpp"
#include "store/channel.hpp"
#include "store/handshake.hpp"

namespace tsr {

class NodeLink {
   public:
    static constexpr size_t max_frame = size_t{4} << 20;
    static constexpr size_t max_unsent = size_t{64} << 20;  // then the peer counts as gone: it reads nothing

    explicit NodeLink(Channel channel);  // an open one

    void send(std::string_view message);
    // What has arrived, as complete messages. A message that is not one ends the link.
    [[nodiscard]] std::vector<Json> receive();
    void write_some();
    // Writes what is queued, unless the peer does not take it in time.
    void write_all(Deadline deadline);

    [[nodiscard]] bool ended() const { return !why_.empty(); }
    [[nodiscard]] const std::string& why() const { return why_; }  // it ended
    void end(std::string why);
    [[nodiscard]] Clock::time_point heard() const { return heard_; }  // when bytes came last
    [[nodiscard]] pollfd poll_entry() const;
    [[nodiscard]] int socket() const { return channel_ ? channel_->fd() : -1; }

   private:
    void end(const Error& error);  // of the connection

    std::optional<Channel> channel_;  // until it ended
    std::string in_;
    std::string out_;
    size_t sent_ = 0;  // of out_
    std::string why_;
    Clock::time_point heard_ = Clock::now();
};

// Accepts agents. Until its handshake is complete, a connection may live 5 seconds.
class NodeListener {
   public:
    static constexpr size_t max_strangers = 64;
    static constexpr milliseconds stranger_lifetime{5000};

    // Of a socket made by listen_on().
    NodeListener(Fd listener, handshake::Party party);

    void append_polls(std::vector<pollfd>& polls) const;
    // Accepts and reads; returns the open channels, which need this listener. Adds a line to `refusals` for each peer
    // whose token, job or version is wrong.
    [[nodiscard]] std::vector<Channel> turn(std::vector<std::string>& refusals);

   private:
    struct Stranger {
        Channel channel;
        Clock::time_point since = Clock::now();
    };

    void accept_strangers();

    Fd listener_;
    const handshake::Party party_;
    std::list<Stranger> strangers_;  // oldest first
};

}  // namespace tsr
