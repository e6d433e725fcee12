#include "comm/endpoint.hpp"

#include <fmt/core.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "comm/rendezvous.hpp"

namespace tsr {

namespace {

// An abstract address: a zero byte, then a name that is not in any directory.
struct Address {
    sockaddr_un raw{};
    socklen_t size = 0;

    explicit Address(const Nonce& name) {
        const std::string text = "tessera-" + hex(name);
        raw.sun_family = AF_UNIX;
        std::memcpy(raw.sun_path + 1, text.data(), text.size());
        size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
    }
    [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&raw); }
};

Fd open_socket() {
    Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd.valid()) throw os_error("cannot open a unix socket", errno);
    return fd;
}

// Waits until the socket is ready; throws TIMEOUT or what `check` throws.
void await(int fd, short events, Deadline deadline, const SliceCheck& check) {
    while (true) {
        pollfd entry{fd, events, 0};
        const int ready = ::poll(&entry, 1, static_cast<int>(deadline.slice().count()));
        if (ready > 0) return;
        if (ready < 0 && errno != EINTR) throw os_error("cannot poll a unix socket", errno);
        check();
        poll_interrupt();
        if (deadline.expired()) throw Error(Code::timeout, "timed out waiting for a peer on a unix socket");
    }
}

}  // namespace

pid_t Link::peer_pid() const {
    ucred credentials{};
    socklen_t size = sizeof credentials;
    if (::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
        throw os_error("cannot read the credentials of a peer on a unix socket", errno);
    }
    if (credentials.uid != ::geteuid()) {
        throw Error(Code::permission,
                    fmt::format("a process of user {} connected to the unix socket of a rank of user {}",
                                credentials.uid, ::geteuid()));
    }
    return credentials.pid;
}

void Link::send(std::span<const std::byte> message, int fd, Deadline deadline, const SliceCheck& check) const {
    iovec part{const_cast<std::byte*>(message.data()), message.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (fd >= 0) {
        header.msg_control = control.data();
        header.msg_controllen = control.size();
        cmsghdr* rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    while (::sendmsg(socket_.get(), &header, MSG_NOSIGNAL) < 0) {
        if (errno == EPIPE || errno == ECONNRESET) throw Error(Code::peer_lost, "a peer closed its unix socket");
        if (errno != EAGAIN && errno != EINTR) throw os_error("cannot send on a unix socket", errno);
        await(socket_.get(), POLLOUT, deadline, check);
    }
}

Fd Link::receive(std::span<std::byte> message, Deadline deadline, const SliceCheck& check) const {
    while (true) {
        iovec part{message.data(), message.size()};
        alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
        msghdr header{};
        header.msg_iov = &part;
        header.msg_iovlen = 1;
        header.msg_control = control.data();
        header.msg_controllen = control.size();
        const ssize_t got = ::recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
            await(socket_.get(), POLLIN, deadline, check);
            continue;
        }
        if (got == 0 || (got < 0 && errno == ECONNRESET)) {
            throw Error(Code::peer_lost, "a peer closed its unix socket");
        }
        if (got < 0) throw os_error("cannot receive on a unix socket", errno);
        Fd fd;
        for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
            int raw = -1;
            std::memcpy(&raw, CMSG_DATA(c), sizeof raw);
            fd = Fd(raw);
        }
        if (static_cast<size_t>(got) != message.size() || (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
            throw Error(Code::internal, fmt::format("received a message of {} bytes on a unix socket; expected {}", got,
                                                    message.size()));
        }
        return fd;
    }
}

Endpoint::Endpoint() : name_(random_nonce()), socket_(open_socket()) {
    const Address address(name_);
    if (::bind(socket_.get(), address.get(), address.size) != 0) throw os_error("cannot bind a unix socket", errno);
    if (::listen(socket_.get(), SOMAXCONN) != 0) throw os_error("cannot listen on a unix socket", errno);
}

Link Endpoint::accept(milliseconds slice) const {
    pollfd entry{socket_.get(), POLLIN, 0};
    if (::poll(&entry, 1, static_cast<int>(slice.count())) <= 0) return {};
    Fd connection(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection.valid()) {
        if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return {};
        throw os_error("cannot accept on a unix socket", errno);
    }
    return Link(std::move(connection));
}

Link Endpoint::connect(const Nonce& name) {
    Fd fd = open_socket();
    const Address address(name);
    // The backlog may be full for a moment when hundreds of ranks come at once; the caller retries on an empty link.
    if (::connect(fd.get(), address.get(), address.size) != 0) {
        if (errno == EAGAIN || errno == EINTR) return {};
        throw os_error("cannot connect to a peer's unix socket", errno);
    }
    return Link(std::move(fd));
}

}  // namespace tsr
