// The connections of an agent that searches for the coordinating one among the store hosts: one to each, begun again when
// it fails. Part of the agent's poll loop; never blocks, except to resolve names.
#pragma once

#include <poll.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/json.hpp"
#include "launch/node_link.hpp"
#include "store/address.hpp"
#include "store/channel.hpp"
#include "store/handshake.hpp"

namespace tsr {

class Contacts {
   public:
    static constexpr milliseconds pause{300};  // between attempts
    static constexpr milliseconds open_deadline{5000};

    // To the store hosts of these seats. `party` outlives it.
    Contacts(std::map<int, Address> seats, const handshake::Party& party, milliseconds silence);

    struct News {
        int seat = 0;
        bool opened = false;  // now
        std::vector<Json> messages;
    };
    void append_polls(std::vector<pollfd>& polls) const;
    [[nodiscard]] std::vector<News> turn();

    void send(int seat, std::string_view message);  // if it is open
    void send_all(std::string_view message);
    [[nodiscard]] int socket(int seat) const;  // of an open one
    void drop(int seat);
    [[nodiscard]] NodeLink take(int seat);  // an open one

    [[nodiscard]] const std::string& why() const { return why_; }  // of the last failure

   private:
    struct Contact {
        std::optional<Channel> opening;
        std::optional<NodeLink> link;
        Clock::time_point since;  // of the attempt
    };
    void fail(Contact& contact, std::string why);

    const std::map<int, Address> seats_;
    const handshake::Party& party_;
    const milliseconds silence_;
    std::map<int, Contact> contacts_;
    std::map<int, size_t> attempts_;  // to open a contact
    std::string why_ = "no answer";
};

}  // namespace tsr
