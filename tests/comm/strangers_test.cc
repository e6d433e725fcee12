// Strangers at the ports at which ranks wait for each other over Gloo: port scanners, health checks, other jobs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/log.hpp"
#include "comm/gloo/handshake.hpp"
#include "ranks.hpp"
#include "requests.hpp"

namespace tsr {
namespace {

using gloo_transport::Door;
using gloo_transport::listen_at;
using gloo_transport::shake_hands;
using testing::all_reduce;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using testing::expect_all_well;
using ::testing::HasSubstr;
using testing::join_job;
using testing::over;
using testing::patience;
using testing::run_threads;
using ::testing::SizeIs;
using testing::test_options;

Fd connect_to(const sockaddr_storage& address) {
    Fd socket(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto* plain = reinterpret_cast<const sockaddr*>(&address);
    EXPECT_EQ(::connect(socket.get(), plain, sizeof(sockaddr_in)), 0) << std::strerror(errno);
    return socket;
}

Door door_at(Fd& listener) {
    Door door;
    auto* plain = reinterpret_cast<sockaddr_in*>(&door.address);
    plain->sin_family = AF_INET;
    plain->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = listen_at(door.address);
    door.nonce = random_nonce();
    return door;
}

std::string name_of(const Fd& socket) {
    sockaddr_in own{};
    socklen_t size = sizeof own;
    EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size), 0);
    return "127.0.0.1:" + std::to_string(ntohs(own.sin_port));
}

// A memory store that shows what a rank tells of its port before the others see it.
class ShowingStore final : public Store {
   public:
    using Look = std::function<void(const sockaddr_storage&)>;
    ShowingStore(std::shared_ptr<Store> inner, Look look)
        : Store(inner->timeout()), inner_(std::move(inner)), look_(std::move(look)) {}

    void set(std::string_view key, std::string_view value, Deadline deadline) override {
        sockaddr_storage address{};
        if (key.find("gloo/") != std::string_view::npos && value.size() >= sizeof address) {
            std::memcpy(&address, value.data(), sizeof address);
            look_(address);
        }
        inner_->set(key, value, deadline);
    }
    std::optional<std::string> get(std::string_view key, Deadline deadline) override {
        return inner_->get(key, deadline);
    }
    std::string wait(std::string_view key, Deadline deadline) override { return inner_->wait(key, deadline); }
    int64_t add(std::string_view key, int64_t delta, Deadline deadline) override {
        return inner_->add(key, delta, deadline);
    }
    bool compare_set(std::string_view key, std::optional<std::string_view> expected, std::string_view desired,
                     Deadline deadline) override {
        return inner_->compare_set(key, expected, desired, deadline);
    }
    bool erase(std::string_view key, Deadline deadline) override { return inner_->erase(key, deadline); }

   private:
    std::shared_ptr<Store> inner_;
    Look look_;
};

// Three ranks over Gloo, to each of which a stranger comes before any other rank can.
void meet_with(const std::function<void(const sockaddr_storage&)>& stranger) {
    std::mutex mutex;
    const auto store = std::make_shared<ShowingStore>(make_memory_store(patience(milliseconds{30000})),
                                                      [&](const sockaddr_storage& address) {
                                                          const std::lock_guard lock(mutex);
                                                          stranger(address);
                                                      });
    expect_all_well(run_threads(3, [&](int rank) {
        const auto comm = join_job(store, rank, 3, test_options("gloo"));
        std::vector<float> sum{static_cast<float>(rank)};
        const Tensor tensor = over(sum);
        comm->run(all_reduce(tensor));
        EXPECT_EQ(sum[0], 3);
        comm->finalize();
    }));
}

class Strangers : public ::testing::Test {
   protected:
    Strangers() {
        log::set_sink(
            [](int32_t, const char* line, void* self) {
                auto* test = static_cast<Strangers*>(self);
                const std::lock_guard lock(test->mutex_);
                test->told_.emplace_back(line);
            },
            this, nullptr);
    }
    ~Strangers() override { log::set_sink(nullptr, nullptr, nullptr); }
    // A rank tells of the first. The last rank may not have come to look: nobody else connects to it.
    void expect_each_rank_tells_once(const std::string& why) const {
        EXPECT_THAT(told_,
                    AllOf(SizeIs(AnyOf(2, 3)), Each(AllOf(HasSubstr(": refused a connection from 127.0.0.1:"),
                                                          HasSubstr("reserved for ranks of this job: " + why)))));
    }

    void say(const sockaddr_storage& address, std::string_view words) {
        const Fd& socket = stay(address);
        EXPECT_EQ(::send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL), static_cast<ssize_t>(words.size()));
    }
    const Fd& stay(const sockaddr_storage& address) { return there_.emplace_back(connect_to(address)); }

   private:
    std::vector<Fd> there_;
    std::mutex mutex_;
    std::vector<std::string> told_;
};

TEST_F(Strangers, WhoStaysAndSaysNothingTakesNoPlace) {
    meet_with([&](const sockaddr_storage& address) { (void)stay(address); });
    expect_each_rank_tells_once("it sent nothing");
}

TEST_F(Strangers, WhoClosesAtOnceTakesNoPlace) {
    meet_with([&](const sockaddr_storage& address) { (void)connect_to(address); });
}

TEST_F(Strangers, WhoSpeaksAnotherLanguageTakesNoPlace) {
    meet_with([&](const sockaddr_storage& address) {
        say(address, "GET /healthz HTTP/1.1\r\nHost: localhost\r\nUser-Agent: probe\r\nAccept: */*\r\n\r\n");
        say(address, "\n");
        say(address, std::string(1 << 16, '\0'));
    });
    expect_each_rank_tells_once("it is not a rank of this job");
}

TEST_F(Strangers, ACrowdOfThemTakesNoPlace) {
    meet_with([&](const sockaddr_storage& address) {
        for (int i = 0; i < 100; ++i) (void)stay(address);
    });
}

TEST_F(Strangers, WhoKnowsTheWordsButNotTheNumberTakesNoPlace) {
    Fd listener;
    Fd at_other;
    const Door host = door_at(listener);
    const Door other = door_at(at_other);
    // Another job's rank, which takes this one for its own.
    Door of_other = host;
    of_other.nonce = random_nonce();
    const auto soon = Deadline::in(milliseconds{300});
    const auto met = run_threads(2, [&](int rank) {
        const std::vector<Door> doors{rank == 0 ? host : of_other, other};
        (void)shake_hands(rank, doors, rank == 0 ? listener : at_other, soon, [] {});
    });
    for (const auto& error : met) {
        ASSERT_TRUE(error);
        EXPECT_EQ(error->code(), Code::timeout);
    }
    EXPECT_EQ(met[0]->record()->peer, 1);
    EXPECT_THAT(met[0]->what(), HasSubstr("unknown connections"));
}

TEST_F(Strangers, AreNamedWhereTheRankDoesNotCome) {
    Fd listener;
    Fd of_nobody;
    const std::vector<Door> doors{door_at(listener), door_at(of_nobody)};
    const Fd stranger = connect_to(doors[0].address);
    ASSERT_EQ(::send(stranger.get(), "HELO stranger\r\n", 15, MSG_NOSIGNAL), 15);
    try {
        (void)shake_hands(0, doors, listener, Deadline::in(milliseconds{200}), [] {});
        FAIL() << "nobody came";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::timeout);
        EXPECT_EQ(error.record()->peer, 1);
        EXPECT_THAT(error.what(), AllOf(HasSubstr("no Gloo connection to rank 1"), HasSubstr(name_of(stranger))));
    }
}

}  // namespace
}  // namespace tsr
