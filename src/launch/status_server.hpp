// Answers questions about the job over HTTP, from the agent's poll loop: `tessera top` through a unix socket of this user's
// alone, Prometheus through TCP. Never blocks. Every connection gets one answer; what a client may send, how long it may
// take and how many there are is bounded, for each of the two apart.
#pragma once

#include <poll.h>

#include <functional>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/fd.hpp"

namespace tsr {

struct StatusPage {
    std::string type;  // Content-Type
    std::string body;
};
// The page at a path, if there is one.
using StatusPages = std::function<std::optional<StatusPage>(std::string_view path)>;

// The complete answer to a request, of which the lines up to the empty one are given.
[[nodiscard]] std::string http_answer(std::string_view request, const StatusPages& pages);

// The names of the unix sockets of this user's agents, in this network namespace.
[[nodiscard]] std::vector<std::string> agents_of_this_user();
// What the agent answers; throws IO, NOT_FOUND if it has ended, PERMISSION if the socket is another user's, TIMEOUT.
[[nodiscard]] std::string ask_agent(const std::string& name, std::string_view path, Deadline deadline);

class StatusServer {
   public:
    static constexpr size_t max_connections = 32;
    static constexpr size_t max_request = 4096;

    // `agent`: a random id. Where the socket cannot be made, `tessera top` does not find this agent. `lifetime`: of a
    // connection.
    explicit StatusServer(const std::string& agent, milliseconds lifetime = milliseconds{5000});
    // Answers there too. A socket made by listen_on().
    void listen(Fd listener);

    void append_polls(std::vector<pollfd>& polls) const;
    void turn(const StatusPages& pages);
    [[nodiscard]] Deadline next_deadline() const;

   private:
    struct Connection {
        Fd socket;
        Deadline end;
        std::string in;
        std::string out;
        size_t sent = 0;

        // Returns whether it is over.
        bool proceed(const StatusPages& pages);
    };
    struct Door {
        Fd listener;
        bool own_user = false;  // a unix socket
        std::list<Connection> connections{};
        std::optional<Deadline> closed{};  // until then nobody is accepted: out of descriptors
    };

    void accept(Door& door) const;

    const milliseconds lifetime_;
    std::list<Door> doors_;
};

}  // namespace tsr
