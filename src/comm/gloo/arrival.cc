#include "comm/gloo/arrival.hpp"

#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/address.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

namespace tsr::gloo_transport {

namespace {

// Gloo does not expose its sockets; this finds the process's sockets with the local address of a connection.
std::vector<int> sockets_at(const std::vector<sockaddr_storage>& addresses) {
    std::vector<int> sockets;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        const std::string name = entry.path().filename();
        int fd = -1;
        std::from_chars(name.data(), name.data() + name.size(), fd);
        sockaddr_storage own{};
        socklen_t size = sizeof own;
        if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0) continue;
        const auto is_own = [&](const sockaddr_storage& address) { return std::memcmp(&address, &own, size) == 0; };
        if (std::ranges::any_of(addresses, is_own)) sockets.push_back(fd);
    }
    return sockets;
}

bool has_arrived(int socket) {
    int pending = 0;
    return ::ioctl(socket, SIOCOUTQ, &pending) != 0 || pending == 0;
}

}  // namespace

void await_arrival(::gloo::transport::Context& context, Clock::time_point until) noexcept {
    try {
        std::vector<sockaddr_storage> addresses;
        for (int peer = 0; peer < context.size; ++peer) {
            if (peer == context.rank) continue;
            addresses.push_back(
                ::gloo::transport::tcp::Address(context.getPair(peer)->address().bytes()).getSockaddr());
        }
        for (const int socket : sockets_at(addresses)) {
            while (!has_arrived(socket) && Clock::now() < until) std::this_thread::sleep_for(milliseconds{1});
        }
    } catch (const std::exception&) {
        // Without information, do not wait.
    }
}

}  // namespace tsr::gloo_transport
