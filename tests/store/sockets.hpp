// Plain sockets with deadlines, for talking past the client of a store.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "store/address.hpp"

namespace tsr::testing {

[[nodiscard]] inline bool readable(int socket, Deadline deadline) { return wait_for(socket, POLLIN, deadline); }

inline void send_all(int socket, std::string_view bytes, Deadline deadline, std::string_view what) {
    while (!bytes.empty()) {
        const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (sent >= 0) {
            bytes.remove_prefix(static_cast<size_t>(sent));
        } else if (errno != EAGAIN) {
            throw os_error(std::string(what), errno);
        } else if (!wait_for(socket, POLLOUT, deadline)) {
            throw Error(Code::timeout, std::string(what));
        }
    }
}

inline void receive_all(int socket, char* bytes, size_t size, Deadline deadline, std::string_view what) {
    while (size > 0) {
        const ssize_t got = ::recv(socket, bytes, size, 0);
        if (got == 0) throw os_error(std::string(what), ECONNRESET);
        if (got > 0) {
            bytes += got;
            size -= static_cast<size_t>(got);
        } else if (errno != EAGAIN) {
            throw os_error(std::string(what), errno);
        } else if (!readable(socket, deadline)) {
            throw Error(Code::timeout, std::string(what));
        }
    }
}

}  // namespace tsr::testing
