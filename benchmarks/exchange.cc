// What the line between two hosts gives: each of two ranks sends SIZE bytes to the other at once, through one plain TCP
// connection. An all_reduce over two hosts cannot move less.
// usage: BENCH_HOSTS=2 exchange SIZE,SIZE,...
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <vector>

#include "fork_ranks.hpp"
#include "measure.hpp"

namespace {

constexpr uint16_t port = 4711;

void check(bool condition, const char* what) {
    if (condition) return;
    std::perror(what);
    _exit(1);
}

int meet(int rank) {
    const int one = 1;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    check(inet_pton(AF_INET, tsr::testing::host_address(0).c_str(), &address.sin_addr) == 1, "inet_pton");
    const auto* raw = reinterpret_cast<const sockaddr*>(&address);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (rank == 0) {
        check(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0, "setsockopt");
        check(bind(fd, raw, sizeof address) == 0 && listen(fd, 1) == 0, "listen");
        fd = accept(fd, nullptr, nullptr);
        check(fd >= 0, "accept");
    } else {
        for (int attempt = 0; connect(fd, raw, sizeof address) != 0; ++attempt) {
            check(attempt < 200, "connect");
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            close(fd);
            fd = socket(AF_INET, SOCK_STREAM, 0);
        }
    }
    check(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0, "setsockopt");
    return fd;
}

void send_all(int fd, const char* data, size_t size) {
    while (size > 0) {
        const ssize_t n = send(fd, data, size, MSG_NOSIGNAL);
        check(n > 0, "send");
        data += n;
        size -= static_cast<size_t>(n);
    }
}

void receive_all(int fd, char* data, size_t size) {
    while (size > 0) {
        const ssize_t n = recv(fd, data, size, 0);
        check(n > 0, "recv");
        data += n;
        size -= static_cast<size_t>(n);
    }
}

int run(int rank, const std::vector<size_t>& sizes) {
    const int fd = meet(rank);
    const size_t largest = *std::max_element(sizes.begin(), sizes.end());
    std::vector<char> out(largest, 'x');
    std::vector<char> in(largest);
    const auto exchange = [&](size_t bytes) {
        std::thread sender([&] { send_all(fd, out.data(), bytes); });
        receive_all(fd, in.data(), bytes);
        sender.join();
    };
    for (const size_t bytes : sizes) {
        const bench::Timing taken = bench::timing(bytes, 2, [&] { exchange(bytes); }, [&] { exchange(1); });
        if (rank == 0) bench::report("tcp", "exchange", 2, bytes, taken, in[bytes - 1] == 'x');
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2 || std::getenv("BENCH_HOSTS") == nullptr) {
        std::fprintf(stderr, "usage: BENCH_HOSTS=2 %s SIZE,SIZE,...\n", argv[0]);
        return 2;
    }
    const auto sizes = bench::parse_sizes(argv[1]);
    return bench::fork_ranks(2, [&](int rank, const std::string&) { return run(rank, sizes); });
}
