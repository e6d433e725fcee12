// The TCP server and its client beyond what every store does: tokens, epochs, death, and hostile peers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <future>
#include <iterator>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "new_threads.hpp"
#include "patience.hpp"
#include "seed.hpp"
#include "sockets.hpp"
#include "soon.hpp"
#include "store/address.hpp"
#include "store/channel.hpp"
#include "store/handshake.hpp"
#include "store/server.hpp"
#include "store/wire.hpp"
#include "stores.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::readable;
using testing::receive_all;
using testing::send_all;
using testing::test_store_options;

Deadline soon() { return testing::soon(); }

class StoreServerTest : public ::testing::Test {
   protected:
    StoreServerTest() { log::set_level(log::Level::off); }  // what it says of hostile peers would fill the report
    ~StoreServerTest() override { log::set_level(log::Level::warning); }

    // A plain connection, for talking past the client.
    [[nodiscard]] Fd stranger() const { return connect_to(Address::parse(server_->uri()), soon()); }

    // Through the handshake by hand.
    [[nodiscard]] Fd authenticated() const {
        const auto party = handshake::Party::of(test_store_options(), true, server_->uri());
        handshake::Client client(party, server_->uri());
        Fd socket = stranger();
        send_all(socket.get(), client.hello(), soon(), "hello");
        send_all(socket.get(), client.prove(received(socket, handshake::answer_size)), soon(), "proof");
        client.accept(received(socket, handshake::verdict_size));
        return socket;
    }

    static std::string received(const Fd& socket, size_t size) {
        std::string bytes(size, '\0');
        receive_all(socket.get(), bytes.data(), size, soon(), "test");
        return bytes;
    }

    // Waits until the server has closed the connection; whatever it still sends is dropped.
    static void expect_closed(const Fd& socket) {
        char byte;
        for (;;) {
            ASSERT_TRUE(readable(socket.get(), soon())) << "the server keeps the connection open";
            const ssize_t got = ::recv(socket.get(), &byte, 1, 0);
            if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return;
        }
    }

    void expect_responsive() const {
        const auto store = Store::open(server_->uri(), test_store_options());
        EXPECT_GE(store->add("responsive", 1, soon()), 1);
    }

    static Error refusal(const std::string& uri, const StoreOptions& options) {
        try {
            (void)Store::open(uri, options);
        } catch (const Error& error) {
            return error;
        }
        return Error(Code::ok, "the store was opened");
    }

    std::shared_ptr<StoreServer> server_ = StoreServer::start("127.0.0.1", 0, test_store_options());
};

TEST(StoreServer, ItsThreadTakesNoSignals) {
    const testing::NewThreads threads;
    const auto server = StoreServer::start("127.0.0.1", 0, test_store_options());
    threads.expect_no_signals_taken("tsr-store");
}

TEST_F(StoreServerTest, RefusesAWrongToken) {
    StoreOptions options = test_store_options();
    options.token = std::string(64, 'b');
    const Error error = refusal(server_->uri(), options);
    EXPECT_EQ(error.code(), Code::permission);
    EXPECT_THAT(error.what(), AllOf(HasSubstr(server_->uri()), HasSubstr("token")));
    expect_responsive();
}

TEST_F(StoreServerTest, RefusesAnotherEpochAndNamesBoth) {
    StoreOptions options = test_store_options();
    options.epoch = 2;
    const Error error = refusal(server_->uri(), options);
    EXPECT_EQ(error.code(), Code::permission);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("epoch 3"), HasSubstr("epoch 2")));
}

TEST_F(StoreServerTest, RefusesAnotherJob) {
    StoreOptions options = test_store_options();
    options.job_id = "other";
    const Error error = refusal(server_->uri(), options);
    EXPECT_EQ(error.code(), Code::permission);
    EXPECT_THAT(error.what(), HasSubstr("a job other than 'other'"));
}

TEST_F(StoreServerTest, SecureServerRefusesInsecureClient) {
    StoreOptions options = test_store_options();
    options.insecure = true;
    const Error error = refusal(server_->uri(), options);
    EXPECT_EQ(error.code(), Code::permission);
    EXPECT_THAT(error.what(), HasSubstr("requires a job token"));
}

TEST_F(StoreServerTest, InsecureServerIsRefusedBySecureClient) {
    StoreOptions options = test_store_options();
    options.insecure = true;
    const auto insecure = StoreServer::start("127.0.0.1", 0, options);
    const Error error = refusal(insecure->uri(), test_store_options());
    EXPECT_EQ(error.code(), Code::permission);
    EXPECT_THAT(error.what(), HasSubstr("runs insecure"));
}

TEST_F(StoreServerTest, ListensOnTheNamedAddressOnly) {
    const Address elsewhere{"127.0.0.2", server_->port()};
    EXPECT_EQ(testing::code_of([&] { (void)connect_to(elsewhere, soon()); }), Code::io);
    EXPECT_EQ(testing::code_of([] { (void)StoreServer::start("", 0, test_store_options()); }), Code::invalid_argument);
}

TEST_F(StoreServerTest, ServesIPv6) {
    std::shared_ptr<StoreServer> v6;
    try {
        v6 = StoreServer::start("::1", 0, test_store_options());
    } catch (const Error& error) {
        GTEST_SKIP() << "no IPv6 on this machine: " << error.what();
    }
    EXPECT_THAT(v6->uri(), ::testing::StartsWith("tcp://[::1]:"));
    EXPECT_EQ(Store::open(v6->uri(), test_store_options())->add("n", 1, soon()), 1);
}

TEST_F(StoreServerTest, TakenPortIsAnErrorThatNamesIt) {
    try {
        (void)StoreServer::start("127.0.0.1", server_->port(), test_store_options());
        FAIL() << "two servers on one port";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::io);
        EXPECT_EQ(error.record()->native_code, EADDRINUSE);
        EXPECT_THAT(error.what(), HasSubstr(std::to_string(server_->port())));
    }
}

TEST_F(StoreServerTest, ClientWaitsForAServerThatStartsLater) {
    const uint16_t port = server_->port();
    server_.reset();
    std::thread client([&] {
        const auto store = Store::open("tcp://127.0.0.1:" + std::to_string(port), test_store_options());
        EXPECT_EQ(store->add("n", 1, soon()), 1);
    });
    server_ = StoreServer::start("127.0.0.1", port, test_store_options());
    client.join();
}

TEST_F(StoreServerTest, NobodyThereIsATimeoutThatNamesTheAddress) {
    const std::string uri = server_->uri();
    server_.reset();
    StoreOptions options = test_store_options();
    options.timeout = milliseconds{50};
    const Error error = refusal(uri, options);
    EXPECT_EQ(error.code(), Code::timeout);
    EXPECT_THAT(error.what(), HasSubstr(uri));
}

TEST_F(StoreServerTest, DeathOfTheServerEndsEveryWaitAtOnce) {
    const std::string uri = server_->uri();
    const auto store = Store::open(uri, test_store_options());
    std::vector<std::thread> waiters;
    std::atomic<int> lost{0};
    for (int i = 0; i < 4; ++i) {
        waiters.emplace_back([&] {
            try {
                (void)store->wait("never", Deadline::in(testing::patience(milliseconds{600000})));
            } catch (const Error& error) {
                if (error.code() == Code::io && std::string(error.what()).find(uri) != std::string::npos) ++lost;
            }
        });
    }
    wait_until([&] { return server_->census().clients >= 4; }, soon(), "four waiting connections");
    server_.reset();
    for (std::thread& waiter : waiters) waiter.join();
    EXPECT_EQ(lost, 4);
    EXPECT_EQ(testing::code_of([&] { store->set("k", "v", soon()); }), Code::io);
}

TEST_F(StoreServerTest, WaitThatTimesOutKeepsItsConnection) {
    const auto store = Store::open(server_->uri(), test_store_options());
    for (int i = 0; i < 20; ++i) {
        EXPECT_EQ(testing::code_of([&] { (void)store->wait("k", Deadline::in(milliseconds{1})); }), Code::timeout);
    }
    EXPECT_EQ(store->add("n", 1, soon()), 1);
    wait_until([&] { return server_->census().clients == 1; }, soon(), "one connection");
}

TEST_F(StoreServerTest, WaitAndSetRaceGivesTheValueOrATimeoutAndNothingElse) {
    const auto waiting = Store::open(server_->uri(), test_store_options());
    const auto setting = Store::open(server_->uri(), test_store_options());
    for (int i = 0; i < 100; ++i) {
        const std::string key = "race" + std::to_string(i);
        std::thread setter([&] { setting->set(key, key, soon()); });
        try {
            EXPECT_EQ(waiting->wait(key, Deadline::in(milliseconds{i % 3})), key);
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::timeout) << error.what();
        }
        setter.join();
        EXPECT_EQ(waiting->get(key, soon()), key);
    }
}

TEST(StoreClient, AReplyThatIsNotOneIsCorrupt) {
    Address address{"127.0.0.1", 0};
    const Fd listener = listen_on(address);
    const auto party = handshake::Party::of(test_store_options(), true, address.uri());
    const std::string replies[] = {std::string("\0\0\0\0\1", 5), "\xff\xff\xff\xff\1",
                                   std::string("\1\0\0\0\1more", 9)};
    std::thread server([&] {
        try {
            for (const std::string& reply : replies) {
                if (!wait_for(listener.get(), POLLIN, soon())) throw Error(Code::timeout, "nobody connects");
                Channel channel = Channel::to_client(
                    Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)), party);
                open(channel, soon(), "test");
                std::string request = wire::encode({.operation = wire::Operation::erase, .key = "k"});
                receive_all(channel, request.data(), request.size(), soon(), "test");
                send_all(channel, reply, soon(), "test");
                (void)readable(channel, soon());  // the client has gone
            }
        } catch (const Error& error) {
            if (error.code() != Code::io) ADD_FAILURE() << error.what();
        }
    });
    for (size_t i = 0; i < std::size(replies); ++i) {
        const auto store = Store::open(address.uri(), test_store_options());
        EXPECT_EQ(testing::code_of([&] { (void)store->erase("k", soon()); }), Code::corrupt) << i;
    }
    server.join();
}

// All that a server reads of somebody who has not proved himself; it asks the system for no byte more.
static_assert(handshake::hello_size + handshake::proof_size <= 256);

TEST_F(StoreServerTest, GarbageIsClosedAndCostsNothing) {
    std::mt19937 random(20240601);
    for (int i = 0; i < 50; ++i) {
        const Fd socket = stranger();
        std::string garbage(1 + random() % 4096, '\0');
        for (char& c : garbage) c = static_cast<char>(random());
        garbage[0] = 'X';  // never the magic
        (void)::send(socket.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
        expect_closed(socket);
    }
    const Fd web = stranger();
    send_all(web.get(), "GET / HTTP/1.1\r\n\r\n", soon(), "http");
    expect_closed(web);
    wait_until([&] { return server_->census().strangers == 0; }, soon(), "no strangers");
    expect_responsive();
}

TEST_F(StoreServerTest, CorruptedHandshakesAreRefused) {
    const auto party = handshake::Party::of(test_store_options(), true, server_->uri());
    for (size_t position = 8; position < handshake::hello_size; position += 5) {
        handshake::Client client(party, server_->uri());
        std::string hello = client.hello();
        hello[position] = static_cast<char>(hello[position] ^ 0x40);
        const Fd socket = stranger();
        send_all(socket.get(), hello, soon(), "hello");
        // The answer's mac is over what the server saw, so that the client notices; version and mode end it.
        EXPECT_THROW((void)client.prove(received(socket, handshake::answer_size)), Error) << position;
    }
    handshake::Client client(party, server_->uri());
    const Fd socket = stranger();
    send_all(socket.get(), client.hello(), soon(), "hello");
    std::string proof = client.prove(received(socket, handshake::answer_size));
    proof[31] = static_cast<char>(proof[31] ^ 1);
    send_all(socket.get(), proof, soon(), "proof");
    const std::string verdict = received(socket, handshake::verdict_size);
    EXPECT_EQ(static_cast<handshake::Verdict>(verdict[0]), handshake::Verdict::wrong_token);
    expect_closed(socket);
}

// A stranger may try for ever.
TEST_F(StoreServerTest, TellsOnceWhomItRefused) {
    static std::mutex mutex;  // guards what follows
    static std::vector<std::string> told;
    told.clear();
    log::set_sink(
        [](int32_t, const char* line, void*) {
            const std::lock_guard lock(mutex);
            told.emplace_back(line);
        },
        nullptr, nullptr);
    log::set_level(log::Level::warning);
    const auto party = handshake::Party::of(test_store_options(), true, server_->uri());
    for (int i = 0; i < 3; ++i) {
        const handshake::Client client(party, server_->uri());
        const Fd socket = stranger();
        send_all(socket.get(), client.hello(), soon(), "hello");
        (void)received(socket, handshake::answer_size);
        send_all(socket.get(), std::string(handshake::proof_size, 'x'), soon(), "proof");
        expect_closed(socket);
    }
    server_.reset();  // its thread has told what it tells
    log::set_sink(nullptr, nullptr, nullptr);
    ASSERT_EQ(told.size(), 1U);
    EXPECT_THAT(told[0], AllOf(HasSubstr("refused a connection from 127.0.0.1 (port "), HasSubstr("wrong job token")));
}

TEST_F(StoreServerTest, ReplayedHandshakeIsRefused) {
    const auto party = handshake::Party::of(test_store_options(), true, server_->uri());
    handshake::Client client(party, server_->uri());
    const std::string hello = client.hello();
    std::string proof;
    {
        const Fd socket = stranger();
        send_all(socket.get(), hello, soon(), "hello");
        proof = client.prove(received(socket, handshake::answer_size));
        send_all(socket.get(), proof, soon(), "proof");
        client.accept(received(socket, handshake::verdict_size));
    }
    const Fd replay = stranger();
    send_all(replay.get(), hello, soon(), "hello");
    (void)received(replay, handshake::answer_size);
    send_all(replay.get(), proof, soon(), "proof");
    EXPECT_EQ(static_cast<handshake::Verdict>(received(replay, 1)[0]), handshake::Verdict::wrong_token);
    expect_closed(replay);
}

TEST_F(StoreServerTest, ReflectedProofIsRefused) {
    const auto party = handshake::Party::of(test_store_options(), true, server_->uri());
    const handshake::Client client(party, server_->uri());
    const Fd socket = stranger();
    send_all(socket.get(), client.hello(), soon(), "hello");
    const std::string answer = received(socket, handshake::answer_size);
    send_all(socket.get(), answer.substr(answer.size() - handshake::proof_size), soon(), "proof");
    EXPECT_EQ(static_cast<handshake::Verdict>(received(socket, 1)[0]), handshake::Verdict::wrong_token);
}

TEST_F(StoreServerTest, IdleStrangersCannotKeepRanksOut) {
    std::vector<Fd> strangers;
    for (int i = 0; i < 200; ++i) strangers.push_back(stranger());
    for (size_t i = 0; i < strangers.size(); i += 2) (void)::send(strangers[i].get(), "TSR", 3, MSG_NOSIGNAL);
    StoreOptions options = test_store_options();
    options.timeout = testing::patience(milliseconds{15000});
    const auto store = Store::open(server_->uri(), options);
    EXPECT_EQ(store->add("n", 1, soon()), 1);
    EXPECT_LE(server_->census().strangers, StoreServer::max_strangers);
}

// The second connection of a client, whose first one waits.
TEST(StoreClient, CallsAgainOverAnotherConnectionThanTheOneThatAFullServerDropped) {
    Address address{"127.0.0.1", 0};
    const Fd listener = listen_on(address);
    const auto party = handshake::Party::of(test_store_options(), true, address.host);
    const auto accepted = [&] {
        EXPECT_TRUE(readable(listener.get(), soon()));
        return Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    };
    const auto opened = [&] {
        Channel channel = Channel::to_client(accepted(), party);
        open(channel, soon(), "a client");
        return channel;
    };
    std::atomic<bool> waits{false};
    std::promise<void> done;
    std::thread server([&] {
        Channel first = opened();
        char byte;
        receive_all(first, &byte, 1, soon(), "the wait");
        waits = true;
        for (int i = 0; i < 3; ++i) accepted();
        for (int i = 0; i < 3; ++i) opened();  // the client believes that these are open
        Channel channel = opened();
        receive_all(channel, &byte, 1, soon(), "the request");
        std::string reply;
        wire::append(reply, uint32_t{1});
        wire::append(reply, static_cast<uint8_t>(wire::Outcome::no));
        send_all(channel, reply, soon(), "the reply");
        done.get_future().wait();
    });
    const auto store = Store::open(address.uri(), test_store_options());
    std::thread waiter([&] { EXPECT_THROW((void)store->wait("x", soon()), Error); });
    wait_until([&] { return waits.load(); }, soon(), "the first connection");
    EXPECT_FALSE(store->get("y", soon()));
    done.set_value();
    server.join();
    waiter.join();
}

TEST_F(StoreServerTest, SlowHandshakeEndsAfterItsTime) {
    const Fd socket = stranger();
    const auto begin = Clock::now();
    std::thread drip([&] {  // one byte at a time: each is progress, none makes the deadline later
        const std::string hello = "TSRSTORE" + std::string(handshake::hello_size - 9, '\0');
        for (const char c : hello) {
            if (::send(socket.get(), &c, 1, MSG_NOSIGNAL) != 1) return;
            if (readable(socket.get(), Deadline::in(milliseconds{100}))) return;
        }
    });
    drip.join();
    expect_closed(socket);
    EXPECT_LT(Clock::now() - begin, StoreServer::stranger_lifetime + testing::patience(milliseconds{10000}));
    expect_responsive();
}

TEST_F(StoreServerTest, OversizeAndMalformedFramesEndOnlyTheirConnection) {
    const auto store = Store::open(server_->uri(), test_store_options());
    store->set("kept", "value", soon());
    std::vector<std::string> bad = {
        std::string("\xff\xff\xff\xff", 4),                            // a length of 4 GiB
        std::string("\0\0\0\0", 4),                                    // no operation
        std::string("\x01\0\0\0\x63", 5),                              // an unknown operation
        std::string("\x03\0\0\0\x02\xff\xff", 7),                      // a key longer than its frame
        std::string("\x04\0\0\0\x04\x01\0k", 8),                       // an add without a number
        std::string("\x05\0\0\0\x02\x01\0kk", 9),                      // a get that goes on after its key
        std::string("\x09\0\0\0\x05\x01\0k\x01\xff\xff\xff\xff", 13),  // expected value longer than its frame
    };
    for (const std::string& frame : bad) {
        const Fd socket = authenticated();
        send_all(socket.get(), frame, soon(), "frame");
        expect_closed(socket);
    }
    EXPECT_EQ(store->get("kept", soon()), "value");
}

TEST_F(StoreServerTest, RandomFramesNeverBreakTheServer) {
    const testing::Seed seed;
    std::mt19937 random(seed);
    for (int i = 0; i < 200; ++i) {
        const Fd socket = authenticated();
        std::string frame;
        std::string body(random() % 64, '\0');
        for (char& c : body) c = static_cast<char>(random() % 8);
        wire::append(frame, static_cast<uint32_t>(body.size() + (random() % 4 == 0 ? random() % 8 : 0)));
        frame += body;
        (void)::send(socket.get(), frame.data(), frame.size(), MSG_NOSIGNAL);
    }
    expect_responsive();
    wait_until([&] { return server_->census().clients == 0; }, soon(), "all connections closed");
}

TEST_F(StoreServerTest, PartialFrameHoldsUpNobody) {
    const Fd slow = authenticated();
    send_all(slow.get(), std::string("\x10\0\0\0\x01", 5), soon(), "part of a frame");
    expect_responsive();
}

TEST_F(StoreServerTest, ClientThatNeverReadsDoesNotBlockOthers) {
    const auto store = Store::open(server_->uri(), test_store_options());
    store->set("large", std::string(Store::max_value_bytes, 'v'), soon());
    const std::string get = wire::encode({.operation = wire::Operation::get, .key = "large"});
    std::vector<Fd> deaf;
    for (int i = 0; i < 8; ++i) {
        deaf.push_back(authenticated());
        for (int j = 0; j < 16; ++j) send_all(deaf.back().get(), get, soon(), "get");
    }
    expect_responsive();
}

TEST_F(StoreServerTest, TheTableIsBounded) {
    const auto store = Store::open(server_->uri(), test_store_options());
    const std::string large(Store::max_value_bytes, 'v');
    store->set("same", large, soon());
    store->set("same", large, soon());  // replacing counts once
    EXPECT_TRUE(store->erase("same", soon()));
    EXPECT_EQ(store->get("same", soon()), std::nullopt);
}

TEST(Address, IsParsedOrRefusedWithAReason) {
    EXPECT_EQ(Address::parse("tcp://host:12").host, "host");
    EXPECT_EQ(Address::parse("tcp://[::1]:12").host, "::1");
    EXPECT_EQ(Address::parse("tcp://[::1]:12").uri(), "tcp://[::1]:12");
    for (const char* bad : {"", "host:1", "tcp://", "tcp://host", "tcp://:5", "tcp://h:0", "tcp://h:65536", "tcp://h:x",
                            "tcp://h:1x", "tcp://::1:80", "udp://h:1"}) {
        EXPECT_EQ(testing::code_of([&] { (void)Address::parse(bad); }), Code::invalid_argument) << bad;
    }
}

}  // namespace
}  // namespace tsr
