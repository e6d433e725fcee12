// Signs of life of a host: of ports on this one that answer, refuse, or are too full to answer.
#include "comm/gloo/host_probe.hpp"

#include <gtest/gtest.h>
#include <netinet/in.h>

#include <array>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#include "comm/gloo/connect.hpp"
#include "patience.hpp"
#include "ranks.hpp"
#include "soon.hpp"

namespace tsr::gloo_transport {
namespace {

constexpr milliseconds limit{400};

enum class Answers { none, all };

// A socket on loopback with a port of its own.
class Port {
   public:
    Port() {
        if (!socket_.valid()) throw std::runtime_error("no socket");
        auto* loopback = reinterpret_cast<sockaddr_in*>(&address_);
        loopback->sin_family = AF_INET;
        loopback->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        EXPECT_EQ(::bind(socket_.get(), plain(), sizeof *loopback), 0);
        socklen_t size = sizeof address_;
        EXPECT_EQ(::getsockname(socket_.get(), plain(), &size), 0);
    }

    void listen(int backlog) { EXPECT_EQ(::listen(socket_.get(), backlog), 0); }
    // No more connections are answered: what listens takes none, and as many as may wait do.
    void fill() {
        listen(0);
        for (int i = 0; i < 3; ++i) {
            waiting_.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
            (void)::connect(waiting_.back().get(), plain(), sizeof(sockaddr_in));
        }
    }
    void take_all() {
        listen(100);
        for (int i = 0; i < 2; ++i) Fd(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
    }
    [[nodiscard]] const sockaddr_storage& address() const { return address_; }

   private:
    sockaddr* plain() { return reinterpret_cast<sockaddr*>(&address_); }

    Fd socket_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    sockaddr_storage address_{};
    std::vector<Fd> waiting_;
};

// A probe under a clock of the test's own, asked as a rank that waits asks it.
class Watched {
   public:
    explicit Watched(milliseconds patient) : probe_(patient) {}

    [[nodiscard]] bool is_silent(const Port& port) { return probe_.is_silent(port.address(), now_); }
    void pass(milliseconds time) { now_ += time; }
    // Whether it says within `time` that the host is silent. The clock stands still until a host that answers has done so.
    [[nodiscard]] bool silent_within(const Port& port, milliseconds time, Answers answers = Answers::none) {
        for (const auto end = now_ + time; now_ < end; pass(milliseconds{10})) {
            if (is_silent(port)) return true;
            if (answers == Answers::all) {
                wait_until([&] { return is_silent(port) || !probe_.is_asking(); }, testing::soon(), "an answer");
            }
        }
        return false;
    }

   private:
    HostProbe probe_;
    Clock::time_point now_ = Clock::now();
};

TEST(HostProbe, AHostThatTakesOrRefusesConnectionsLives) {
    Port listening;
    listening.listen(100);
    Port closed;
    for (const Port* port : {&listening, &closed}) {
        Watched probe(limit);
        EXPECT_FALSE(probe.silent_within(*port, limit * 3, Answers::all));
    }
}

TEST(HostProbe, AHostThatDoesNotAnswerIsSilentWhenThePatienceIsOver) {
    Port full;
    full.fill();
    Watched probe(limit);
    EXPECT_FALSE(probe.silent_within(full, limit / 2));
    EXPECT_TRUE(probe.silent_within(full, limit * 5));
}

TEST(HostProbe, AHostThatComesBackInTimeIsNotSilent) {
    Port full;
    full.fill();
    Watched probe(limit * 3);
    EXPECT_FALSE(probe.silent_within(full, limit));
    full.take_all();
    EXPECT_FALSE(probe.silent_within(full, limit * 5, Answers::all));
}

TEST(HostProbe, TimeInWhichNobodyWaitedDoesNotCount) {
    Port full;
    full.fill();
    Watched probe(limit);
    EXPECT_FALSE(probe.is_silent(full));
    probe.pass(milliseconds{2100});
    EXPECT_FALSE(probe.is_silent(full));
    EXPECT_TRUE(probe.silent_within(full, limit * 5));
}

// A port that another program may get would hand it a connection that it does not expect: one of a job that starts takes it
// for its peer's.
TEST(HostProbe, WhereItAsksNobodyElseCanListenWhileTheRankIsThere) {
    const auto store = make_memory_store(testing::patience(milliseconds{10000}));
    std::array<Endpoint, 2> endpoints;
    std::vector<Peer> peers;
    CommOptions options;
    for (int rank = 0; rank < 2; ++rank) peers.push_back(make_peer(rank, 2, options, endpoints.at(rank)));
    std::array<Connections, 2> ranks;
    testing::expect_all_well(testing::run_threads(2, [&](int rank) {
        const size_t place = rank == 0 ? 0 : 1;
        ranks.at(place) = connect_all({rank, peers, std::move(endpoints.at(place)), store, options, testing::soon()});
    }));
    const sockaddr_storage& first = ranks[1].held_ports[0];
    EXPECT_EQ(std::memcmp(&first, &ranks[0].held_ports[0], sizeof first), 0);
    const auto* address = reinterpret_cast<const sockaddr*>(&first);
    const auto take = [&] {
        const Fd other(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        const int yes = 1;
        EXPECT_EQ(::setsockopt(other.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes), 0);
        return ::bind(other.get(), address, sizeof(sockaddr_in)) == 0 ? 0 : errno;
    };
    EXPECT_EQ(take(), EADDRINUSE);
    const Fd asking(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(asking.get(), address, sizeof(sockaddr_in)), -1);
    EXPECT_EQ(errno, ECONNREFUSED);
    ranks[0].own_port.reset();
    EXPECT_EQ(take(), 0);
}

}  // namespace
}  // namespace tsr::gloo_transport
