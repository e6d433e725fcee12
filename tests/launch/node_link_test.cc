// The connections between agents: frames, messages, strangers.
#include "launch/node_link.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <random>
#include <thread>

#include "base/error.hpp"
#include "launch/node_message.hpp"
#include "seed.hpp"
#include "soon.hpp"
#include "store/address.hpp"
#include "store/tcp_store.hpp"
#include "store/wire.hpp"

namespace tsr {
namespace {

using ::testing::HasSubstr;

// Two ends of an open connection.
std::pair<Channel, Channel> channels() {
    static const handshake::Party party = [] {
        StoreOptions options;
        options.insecure = true;
        options.job_id = "j";
        return handshake::Party::of(options, true, "");
    }();
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0)
        throw os_error("socketpair", errno);
    Channel client = Channel::to_server(Fd(ends[0]), party, "here");
    Channel server = Channel::to_client(Fd(ends[1]), party);
    wait_until(
        [&] {
            const bool one = client.shake();
            return server.shake() && one;
        },
        testing::soon(), "a handshake");
    return {std::move(client), std::move(server)};
}

std::string frame(std::string_view text) {
    std::string bytes;
    wire::append(bytes, static_cast<uint32_t>(text.size()));
    return bytes.append(text);
}

void put(Channel& channel, std::string_view bytes) { send_all(channel, bytes, testing::soon(), "a test's bytes"); }

TEST(NodeLink, MessagesArriveInOrderAndWhole) {
    auto [one, other] = channels();
    NodeLink a(std::move(one));
    NodeLink b(std::move(other));
    const std::string big(1 << 20, 'x');
    for (int i = 0; i < 5; ++i) a.send(encode(Report(NodeFailed{std::to_string(i), 1})));
    a.send(Json(Json::Object{{"kind", "beat"}, {"time", 0.5}, {"more", big}}).dump());
    std::vector<Json> got;
    wait_until(
        [&] {
            a.write_some();
            for (Json& message : b.receive()) got.push_back(std::move(message));
            return got.size() == 6;
        },
        testing::soon(), "messages");
    for (int i = 0; i < 5; ++i) {
        EXPECT_EQ(std::get<NodeFailed>(decode_report(got[static_cast<size_t>(i)])).message, std::to_string(i));
    }
    EXPECT_EQ(got[5].at("more").as_string(), big);
    a.end("done");
    EXPECT_TRUE(b.receive().empty());
    EXPECT_EQ(b.why(), "its agent has ended");
}

TEST(NodeLink, WhatIsNoMessageEndsIt) {
    const auto told = [](const std::string& bytes, const std::string& part) {
        auto [one, other] = channels();
        NodeLink link(std::move(one));
        put(other, bytes);
        EXPECT_TRUE(link.receive().empty());
        EXPECT_THAT(link.why(), HasSubstr(part));
    };
    told(std::string("\xff\xff\xff\xff", 4), "4294967295 bytes; at most");
    told(frame("{\"kind\""), "a message between agents");
    told(frame(std::string(1000, '[')), "a message between agents");
    told(frame(""), "a message between agents");
    told(frame("{\"a\":1,\"a\":2}"), "a message between agents");
}

TEST(NodeLink, AReaderThatReadsNothingIsGivenUp) {
    auto [one, other] = channels();
    NodeLink link(std::move(one));
    const std::string megabyte(1 << 20, 'x');
    for (int i = 0; i < 80 && !link.ended(); ++i) link.send(megabyte);
    EXPECT_THAT(link.why(), HasSubstr("reads nothing"));
}

RankEnd an_end() {
    RankEnd end;
    end.rank = 3;
    end.host = "h\xff";
    end.pid = 9;
    end.wait_status = 137;
    end.time = 1.5;
    end.order = 4;
    end.by_agent = true;
    end.log_file = "/l";
    end.error = RecordedError{"m", "t", 2.5, "PEER_LOST", 1, 2, 3};
    end.last_lines = {"x", "y"};
    return end;
}

TEST(NodeMessage, SurvivesTheJourney) {
    const auto again = [](const Report& report) { return decode_report(Json::parse(encode(report), "report")); };
    const auto order_again = [](const Order& order) { return decode_order(Json::parse(encode(order), "order")); };
    const RankEnd end = std::get<RankDetails>(again(RankDetails{2, an_end()})).end;
    EXPECT_EQ(end.host, "h?");
    EXPECT_EQ(end.error->message, "m");
    EXPECT_EQ(end.error->code, "PEER_LOST");
    EXPECT_EQ(end.error->job_rank, 3);
    EXPECT_FALSE(end.failure);
    EXPECT_EQ(end.last_lines, an_end().last_lines);
    EXPECT_EQ(std::tie(end.rank, end.wait_status, end.order, end.by_agent), std::tuple(3, 137, 4, true));
    Hello hello;
    hello.host = "a";
    hello.agreed = {"one", "two"};
    hello.ranks = {1, 2};
    hello.node_rank = 5;
    hello.job = "j";
    hello.seat = 2;
    hello.ballot = "b";
    hello.term = 4;
    const Hello same = std::get<Hello>(again(hello));
    EXPECT_EQ(same.agreed, hello.agreed);
    EXPECT_EQ(same.ranks, hello.ranks);
    EXPECT_EQ(same.node_rank, 5);
    EXPECT_EQ(std::tie(same.job, same.seat, same.ballot, same.term), std::tuple("j", 2, "b", 4));
    EXPECT_EQ(std::get<Stand>(again(Stand{7, true})), (Stand{7, true}));
    const Welcome welcome = std::get<Welcome>(order_again(Welcome{"j", "r", "h", 3, true}));
    EXPECT_EQ(std::tie(welcome.job, welcome.run, welcome.host), std::tuple("j", "r", "h"));
    EXPECT_EQ(std::tie(welcome.term, welcome.votes), std::tuple(3, true));
    const Vote vote = std::get<Vote>(order_again(Vote{7, true, true, 9}));
    EXPECT_EQ(std::tie(vote.term, vote.binding, vote.yes, vote.highest), std::tuple(7, true, true, 9));
    StartRound start;
    start.world_size = 4;
    start.group_size = 2;
    start.group_rank = 1;
    start.seats = {{2, 0, 0, 1, 3}, {3, 1, 0, 0, 1}};
    start.restarts = 2;
    start.store_port = 77;
    EXPECT_EQ(std::get<StartRound>(order_again(start)).seats, start.seats);
    EXPECT_EQ(std::get<StartRound>(order_again(start)).store_port, 77);
    EXPECT_EQ(std::get<StartRound>(order_again(start)).restarts, 2);
    const ReplaceRank replace = std::get<ReplaceRank>(order_again(ReplaceRank{3, 5}));
    EXPECT_EQ(std::tie(replace.round, replace.rank), std::tuple(3, 5));
    EXPECT_EQ(std::get<Say>(order_again(Say{"t", "restart", {{"round", 3}}})).fields.at(0).value.as_int(), 3);
}

// A rank can print and record anything; its report must still fit into a frame.
TEST(NodeMessage, FitsIntoAFrame) {
    RankEnd end = an_end();
    const std::string long_text(1 << 20, '\x01');
    end.error->message = end.error->traceback = long_text;
    end.failure = end.error;
    end.last_lines.assign(1000, long_text);
    EXPECT_LT(encode(Report(RankDetails{0, end})).size(), NodeLink::max_frame);
    EXPECT_LT(encode(Order(Say{long_text, "", {}})).size(), NodeLink::max_frame);
}

// Each change of a message is refused as corrupt, or is another message.
TEST(NodeMessage, HostileOnesAreRefused) {
    const testing::Seed seed;
    std::mt19937 random(seed);
    StartRound start;
    start.seats = {{0, 0, 0}};
    const std::string texts[] = {encode(Report(RankDetails{2, an_end()})),
                                 encode(Report(Hello{})),
                                 encode(Order(start)),
                                 encode(Order(EndRanks{})),
                                 encode(Report(Stand{})),
                                 encode(Order(Vote{})),
                                 encode(Order(Welcome{}))};
    const std::string_view bits[] = {"-1", "null", "[]", "{}", "1e99", "99999999999", "\"x\"", "true"};
    for (int i = 0; i < 3000; ++i) {
        std::string text = texts[random() % std::size(texts)];
        const size_t at = random() % text.size();
        if (random() % 2 == 0) {
            text[at] = static_cast<char>(random());
        } else {
            const size_t colon = text.find(':', at);
            if (colon != std::string::npos) {
                const size_t end = text.find_first_of(",}", colon);
                text.replace(colon + 1, end - colon - 1, bits[random() % std::size(bits)]);
            }
        }
        for (const auto decode : {+[](const Json& json) { (void)decode_report(json); },
                                  +[](const Json& json) { (void)decode_order(json); }}) {
            try {
                decode(Json::parse(text, "message", 16));
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), Code::corrupt) << text;
            }
        }
    }
}

TEST(NodeListener, AdmitsHoldersOfTheTokenAndDropsOthers) {
    StoreOptions options;
    options.token = std::string(64, 'a');
    options.job_id = "j";
    Address address{"127.0.0.1", 0};
    Fd socket = listen_on(address);
    NodeListener listener(std::move(socket), handshake::Party::of(options, true, ""));
    std::vector<std::string> refusals;
    const auto attempt = [&](const StoreOptions& theirs) {
        const handshake::Party party = handshake::Party::of(theirs, true, "");
        std::string failure;
        std::atomic<bool> done = false;
        std::thread client([&] {
            try {
                (void)connect_with_handshake(address, party, testing::soon());
            } catch (const Error& error) {
                failure = code_name(error.code());
            }
            done = true;
        });
        size_t admitted = 0;
        wait_until(
            [&] {
                admitted += listener.turn(refusals).size();
                return done.load();
            },
            testing::soon(), "a handshake");
        client.join();
        return fmt::format("{} {}", admitted, failure);
    };
    EXPECT_EQ(attempt(options), "1 ");
    StoreOptions wrong = options;
    wrong.token = std::string(64, 'b');
    EXPECT_EQ(attempt(wrong), "0 PERMISSION");
    wrong = options;
    wrong.job_id = "other";
    EXPECT_EQ(attempt(wrong), "0 PERMISSION");
    EXPECT_THAT(refusals.back(), HasSubstr("--rdzv-id"));
    wrong = options;
    wrong.insecure = true;
    EXPECT_EQ(attempt(wrong), "0 PERMISSION");
    const Fd noise = connect_to(address, testing::soon());
    constexpr std::string_view request = "GET / HTTP/1.0\r\n\r\n";
    ASSERT_EQ(::send(noise.get(), request.data(), request.size(), MSG_NOSIGNAL), std::ssize(request));
    wait_until(
        [&] {
            EXPECT_TRUE(listener.turn(refusals).empty());
            return wait_for(noise.get(), POLLIN, Deadline::in(milliseconds{0}));
        },
        testing::soon(), "the end of the connection");
}

}  // namespace
}  // namespace tsr
