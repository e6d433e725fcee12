#include "launch/status_server.hpp"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "store/address.hpp"

namespace tsr {

namespace {

constexpr milliseconds rest{1000};  // after the descriptors ran out
constexpr size_t most_answered = size_t{16} << 20;

std::string prefix() { return fmt::format("tessera-agent-{}-", ::geteuid()); }

// An abstract address: a zero byte, then a name that is not in any directory.
struct UnixAddress {
    sockaddr_un raw{};
    socklen_t size = 0;

    explicit UnixAddress(const std::string& name) {
        raw.sun_family = AF_UNIX;
        const size_t length = std::min(name.size(), sizeof raw.sun_path - 1);
        std::memcpy(raw.sun_path + 1, name.data(), length);
        size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
    }
    [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&raw); }
};

Fd unix_socket() { return Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

// The user at the other end; nullopt if unknown.
std::optional<uid_t> user_of(int socket) {
    ucred credentials{};
    socklen_t size = sizeof credentials;
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return std::nullopt;
    return credentials.uid;
}

std::string answer(std::string_view status, const StatusPage& page, bool with_body) {
    return fmt::format(
        "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nCache-Control: no-store\r\nConnection: "
        "close\r\n\r\n{}",
        status, page.type, page.body.size(), with_body ? page.body : "");
}

std::string refusal(std::string_view status, std::string_view why) {
    return answer(status, {"text/plain; charset=utf-8", fmt::format("{}\n", why)}, true);
}

std::string_view cut_word(std::string_view& line) {
    const size_t end = line.find(' ');
    const std::string_view word = line.substr(0, end);
    line = end == std::string_view::npos ? "" : line.substr(end + 1);
    return word;
}

}  // namespace

std::string http_answer(std::string_view request, const StatusPages& pages) {
    std::string_view line = request.substr(0, request.find_first_of("\r\n"));
    const std::string_view method = cut_word(line);
    std::string_view path = cut_word(line);
    if (!line.starts_with("HTTP/1.") || line.size() != std::string_view("HTTP/1.1").size() || !path.starts_with('/')) {
        return refusal("400 Bad Request", "this is not an HTTP/1.1 request");
    }
    if (method != "GET" && method != "HEAD") return refusal("405 Method Not Allowed", "only GET and HEAD are allowed");
    path = path.substr(0, path.find('?'));
    const auto page = pages(path);
    if (!page) return refusal("404 Not Found", "there are /metrics (Prometheus) and /status (JSON)");
    return answer("200 OK", *page, method == "GET");
}

StatusServer::StatusServer(const std::string& agent, milliseconds lifetime) : lifetime_(lifetime) {
    const UnixAddress address(prefix() + agent);
    Fd socket = unix_socket();
    if (!socket.valid() || ::bind(socket.get(), address.get(), address.size) != 0 ||
        ::listen(socket.get(), static_cast<int>(max_connections)) != 0) {
        log::info("`tessera top` will not find this job: {}", os_error("cannot listen on a unix socket", errno).what());
        return;
    }
    doors_.push_back({std::move(socket), true});
}

void StatusServer::listen(Fd listener) { doors_.push_back({std::move(listener), false}); }

void StatusServer::append_polls(std::vector<pollfd>& polls) const {
    for (const Door& door : doors_) {
        const bool open = door.connections.size() < max_connections && !door.closed;
        if (open) polls.push_back({door.listener.get(), POLLIN, 0});
        for (const Connection& one : door.connections) {
            polls.push_back({one.socket.get(), static_cast<short>(one.out.empty() ? POLLIN : POLLOUT), 0});
        }
    }
}

Deadline StatusServer::next_deadline() const {
    Deadline next = Deadline::in(no_timeout);
    for (const Door& door : doors_) {
        if (door.closed) next = next.earlier(*door.closed);
        for (const Connection& one : door.connections) next = next.earlier(one.end);
    }
    return next;
}

void StatusServer::accept(Door& door) const {
    if (door.closed && door.closed->expired()) door.closed.reset();
    // Other users cannot keep the agent here.
    for (size_t tries = 0; tries < max_connections && door.connections.size() < max_connections; ++tries) {
        if (door.closed) return;
        Fd socket(::accept4(door.listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!socket.valid()) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
                door.closed = Deadline::in(rest);
            return;
        }
        if (door.own_user) {
            const auto user = user_of(socket.get());
            if (user != ::geteuid() && user != uid_t{0}) continue;
        }
        door.connections.push_back({std::move(socket), Deadline::in(lifetime_)});
    }
}

bool StatusServer::Connection::proceed(const StatusPages& pages) {
    std::array<char, 1024> bytes;
    while (out.empty()) {
        const ssize_t got = ::recv(socket.get(), bytes.data(), std::min(bytes.size(), max_request - in.size()), 0);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return end.expired();
        if (got <= 0) return true;
        in.append(bytes.data(), static_cast<size_t>(got));
        if (in.find("\r\n\r\n") != std::string::npos || in.find("\n\n") != std::string::npos) {
            out = http_answer(in, pages);
        } else if (in.size() >= max_request) {
            out = refusal("431 Request Header Fields Too Large", "the request is too long");
        }
    }
    while (sent < out.size()) {
        const ssize_t written = ::send(socket.get(), out.data() + sent, out.size() - sent, MSG_NOSIGNAL);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno != EAGAIN || end.expired();
        sent += static_cast<size_t>(written);
    }
    return true;
}

void StatusServer::turn(const StatusPages& pages) {
    for (Door& door : doors_) {
        accept(door);
        door.connections.remove_if([&](Connection& one) { return one.proceed(pages); });
    }
}

// --- the other end

std::vector<std::string> agents_of_this_user() {
    std::vector<std::string> names;
    std::ifstream sockets("/proc/net/unix");
    const std::string wanted = "@" + prefix();
    for (std::string line; std::getline(sockets, line);) {
        const size_t at = line.rfind(' ');
        if (at == std::string::npos || line.compare(at + 1, wanted.size(), wanted) != 0) continue;
        names.push_back(line.substr(at + 2));
    }
    std::ranges::sort(names);
    names.erase(std::unique(names.begin(), names.end()), names.end());  // its connections have the same name
    return names;
}

std::string ask_agent(const std::string& name, std::string_view path, Deadline deadline) {
    const UnixAddress address(name);
    const Fd socket = unix_socket();
    if (!socket.valid()) throw os_error("cannot open a unix socket", errno);
    const auto late = [] { return Error(Code::timeout, "the job's agent does not answer; it may be stopped"); };
    while (::connect(socket.get(), address.get(), address.size) != 0) {
        if (errno == ECONNREFUSED || errno == ENOENT) throw Error(Code::not_found, "the job's agent has ended");
        if (errno != EAGAIN && errno != EINTR) throw os_error("cannot connect to the job's agent", errno);
        if (deadline.expired()) throw late();  // its queue is full
        (void)::poll(nullptr, 0, 20);
    }
    if (const auto user = user_of(socket.get()); user != ::geteuid()) {
        throw Error(Code::permission, fmt::format("the socket {} is another user's", name));
    }
    const std::string request = fmt::format("GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n", path);
    std::string_view unsent = request;
    std::string text;
    for (;;) {
        if (!unsent.empty()) {
            const ssize_t sent = ::send(socket.get(), unsent.data(), unsent.size(), MSG_NOSIGNAL);
            if (sent > 0) unsent.remove_prefix(static_cast<size_t>(sent));
        }
        std::array<char, 16384> bytes;
        const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
        if (got == 0 || (got < 0 && errno == ECONNRESET)) break;
        if (got < 0 && errno != EAGAIN && errno != EINTR) throw os_error("cannot read from the job's agent", errno);
        if (got > 0) text.append(bytes.data(), static_cast<size_t>(got));
        if (text.size() > most_answered) throw Error(Code::corrupt, "the job's agent answers without end");
        if (got < 0 && !wait_for(socket.get(), unsent.empty() ? POLLIN : POLLIN | POLLOUT, deadline)) throw late();
    }
    const size_t body = text.find("\r\n\r\n");
    if (text.empty()) throw Error(Code::not_found, "the job's agent has ended");
    if (body == std::string::npos || !text.starts_with("HTTP/1.1 200 ")) {
        throw Error(Code::corrupt, fmt::format("the job's agent answers: {}", text.substr(0, text.find('\r'))));
    }
    return text.substr(body + 4);
}

}  // namespace tsr
