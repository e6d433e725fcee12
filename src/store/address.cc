#include "store/address.hpp"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <memory>

#include "base/error.hpp"

namespace tsr {

namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const Address& address, int flags) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    addrinfo* list = nullptr;
    const int failure = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &list);
    if (failure != 0) {
        throw Error(Code::io, fmt::format("cannot resolve host name '{}': {}", address.host, gai_strerror(failure)))
            .retry_may_help();
    }
    return {list, &freeaddrinfo};
}

void set_option(int socket, int level, int option, int value) {
    // A failure costs only speed or the early detection of a dead host, not correctness.
    (void)setsockopt(socket, level, option, &value, sizeof value);
}

void tune(const Fd& socket) {
    set_option(socket.get(), IPPROTO_TCP, TCP_NODELAY, 1);
    // The death of a process closes its socket; these probes detect the death of a host in about 20 seconds.
    set_option(socket.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, 5);
    set_option(socket.get(), IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set_option(socket.get(), IPPROTO_TCP, TCP_KEEPCNT, 3);
}

bool loopback(const sockaddr* address) {
    if (address->sa_family == AF_INET) {
        const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
        return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
    }
    if (address->sa_family != AF_INET6) return false;
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

std::string numeric(const sockaddr* address, socklen_t size) {
    std::array<char, NI_MAXHOST> text{};
    const int failure = getnameinfo(address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
    return failure == 0 ? text.data() : "";
}

std::string numeric_end_of(int socket, int (*name)(int, sockaddr*, socklen_t*)) {
    sockaddr_storage end{};
    socklen_t size = sizeof end;
    auto* address = reinterpret_cast<sockaddr*>(&end);
    return name(socket, address, &size) == 0 ? numeric(address, size) : "";
}

}  // namespace

Address Address::parse(std::string_view uri) {
    constexpr std::string_view scheme = "tcp://";
    const auto wrong = [&](const char* why) {
        return Error(Code::invalid_argument, fmt::format("the store address '{}' {}; write tcp://host:port", uri, why));
    };
    if (!uri.starts_with(scheme)) throw wrong("does not begin with tcp://");
    const std::string_view rest = uri.substr(scheme.size());
    const size_t colon = rest.rfind(':');
    if (colon == std::string_view::npos) throw wrong("has no port");
    std::string_view host = rest.substr(0, colon);
    if (host.starts_with('[') && host.ends_with(']')) {
        host = host.substr(1, host.size() - 2);
    } else if (host.find(':') != std::string_view::npos) {
        throw wrong("has an IPv6 address without brackets");
    }
    if (host.empty()) throw wrong("has no host");
    const std::string_view digits = rest.substr(colon + 1);
    Address address{std::string(host), 0};
    const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), address.port);
    if (failure != std::errc{} || end != digits.data() + digits.size() || address.port == 0) {
        throw wrong("has no port from 1 to 65535");
    }
    return address;
}

std::string Address::uri() const {
    const bool v6 = host.find(':') != std::string::npos;
    return v6 ? fmt::format("tcp://[{}]:{}", host, port) : fmt::format("tcp://{}:{}", host, port);
}

bool is_loopback(const std::string& host) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
    const AddressList list(found, &freeaddrinfo);
    for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
        if (!loopback(entry->ai_addr)) return false;
    }
    return true;
}

void check_host(const std::string& host) { (void)resolve({host, 0}, 0); }

std::vector<std::string> numeric_addresses(const std::string& host) {
    const AddressList list = resolve({host, 0}, 0);
    std::vector<std::string> addresses;
    for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
        addresses.push_back(numeric(entry->ai_addr, entry->ai_addrlen));
    }
    return addresses;
}

Fd listen_on(Address& address) {
    if (address.host.empty()) {
        throw Error(Code::invalid_argument, "the store server needs an address to listen on, such as 127.0.0.1");
    }
    const AddressList list = resolve(address, 0);
    int failure = 0;
    for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
        Fd socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (!socket.valid()) {
            failure = errno;
            continue;
        }
        set_option(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
        if (entry->ai_family == AF_INET6) set_option(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
        if (::bind(socket.get(), entry->ai_addr, entry->ai_addrlen) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) {
            failure = errno;
            continue;
        }
        sockaddr_storage bound{};
        socklen_t size = sizeof bound;
        if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
            throw os_error("getsockname", errno);
        }
        address.port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                                         : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
        return socket;
    }
    throw os_error(fmt::format("cannot listen on {}", address.uri()), failure);
}

std::string local_address_of(int socket) { return numeric_end_of(socket, ::getsockname); }

std::string remote_address_of(int socket) { return numeric_end_of(socket, ::getpeername); }

std::string peer_address_of(int socket) {
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    std::array<char, NI_MAXHOST> host{};
    std::array<char, NI_MAXSERV> port{};
    if (::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &size) != 0 ||
        getnameinfo(reinterpret_cast<sockaddr*>(&peer), size, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return "a peer that has disconnected";
    }
    return fmt::format("{} (port {})", host.data(), port.data());
}

Fd begin_connecting(const Address& address, size_t attempt) {
    const AddressList list = resolve(address, 0);
    size_t count = 0;
    for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) ++count;
    const addrinfo* to = list.get();
    for (size_t skip = attempt % count; skip > 0; --skip) to = to->ai_next;
    const std::string what = fmt::format("cannot connect to the store at {}", address.uri());
    Fd socket(::socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.valid()) throw os_error(what, errno);
    tune(socket);
    if (::connect(socket.get(), to->ai_addr, to->ai_addrlen) != 0 && errno != EINPROGRESS) {
        throw os_error(what, errno).retry_may_help();
    }
    return socket;
}

Fd connect_to(const Address& address, Deadline deadline) {
    const AddressList list = resolve(address, 0);
    const std::string what = fmt::format("cannot connect to the store at {}", address.uri());
    int failure = 0;
    for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
        Fd socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (!socket.valid()) throw os_error(what, errno);
        if (::connect(socket.get(), entry->ai_addr, entry->ai_addrlen) != 0) {
            failure = errno;
            if (failure != EINPROGRESS) continue;
            if (!wait_for(socket.get(), POLLOUT, deadline)) {
                throw Error(Code::timeout, what + ": no answer").retry_may_help();
            }
            socklen_t size = sizeof failure;
            if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &failure, &size) != 0) throw os_error(what, errno);
            if (failure != 0) continue;
        }
        tune(socket);
        return socket;
    }
    throw os_error(what, failure).retry_may_help();
}

bool wait_for(int socket, short events, Deadline deadline) {
    for (;;) {
        pollfd entry{socket, events, 0};
        const int ready = ::poll(&entry, 1, static_cast<int>(deadline.slice().count()));
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) throw os_error("poll", errno);
        poll_interrupt();
        if (deadline.expired()) return false;
    }
}

}  // namespace tsr
