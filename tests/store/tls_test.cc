// Encrypted stores: who meets whom, what an eavesdropper and somebody in between can do, and hostile peers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "certificates.hpp"
#include "patience.hpp"
#include "seed.hpp"
#include "sockets.hpp"
#include "soon.hpp"
#include "store/channel.hpp"
#include "store/server.hpp"
#include "store/tcp_store.hpp"
#include "store/tls.hpp"
#include "store/wire.hpp"
#include "stores.hpp"
#include "temporary_directory.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using testing::Authority;
using testing::code_of;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::receive_all;
using testing::send_all;
using testing::soon;
using testing::test_store_options;

// What one end has.
struct Side {
    StoreOptions options = test_store_options();
    TlsOptions tls;
};

Side with(TlsOptions tls) { return {test_store_options(), std::move(tls)}; }
Side with_key() { return with({TlsOptions::Kind::token, "", "", ""}); }

std::shared_ptr<Store> connect(const std::string& uri, const Side& side) {
    const testing::TlsSet set(side.tls);
    return connect_tcp_store(Address::parse(uri), side.options, soon());
}

handshake::Party party_of(const Side& side, const std::string& uri) {
    const testing::TlsSet set(side.tls);
    return handshake::Party::of(side.options, true, uri);
}

// One attempt. OK: it was opened, and serves.
Error attempt(const std::string& uri, const Side& side) {
    try {
        const auto store = connect(uri, side);
        return Error(Code::ok, std::to_string(store->add("n", 1, soon())));
    } catch (const Error& error) {
        return error;
    }
}

// Collects what is logged.
class Told {
   public:
    Told() {
        lines().clear();
        log::set_sink(
            [](int32_t, const char* line, void*) {
                const std::lock_guard lock(mutex());
                lines().emplace_back(line);
            },
            nullptr, nullptr);
    }
    ~Told() { log::set_sink(nullptr, nullptr, nullptr); }
    Told(const Told&) = delete;
    Told& operator=(const Told&) = delete;
    static std::string all() {
        const std::lock_guard lock(mutex());
        std::string text;
        for (const std::string& line : lines()) text += line;
        return text;
    }

   private:
    static std::mutex& mutex() {
        static std::mutex instance;
        return instance;
    }
    static std::vector<std::string>& lines() {
        static std::vector<std::string> instance;
        return instance;
    }
};

// Somebody between a client and a server, who sees and may change all bytes of one connection. Ends it when `change` returns
// false.
class Between {
   public:
    enum class Way { to_server, to_client };
    using Change = std::function<bool(Way way, std::string& bytes, size_t offset)>;

    Between(const std::string& server, Change change, size_t most = 65536)
        : server_(Address::parse(server)), listener_(listen_on(address_)), change_(std::move(change)), most_(most) {
        thread_ = std::thread([this] { run(); });
    }
    ~Between() {
        stop_ = true;
        thread_.join();
    }
    Between(const Between&) = delete;
    Between& operator=(const Between&) = delete;

    [[nodiscard]] std::string uri() const { return address_.uri(); }

   private:
    void run() {
        while (!stop_) {
            pollfd entry{listener_.get(), POLLIN, 0};
            if (::poll(&entry, 1, 1) <= 0) continue;
            const Fd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
            try {
                const Fd server = connect_to(server_, soon());
                relay(client, server);
            } catch (const Error&) {  // one of them has gone
            }
        }
    }

    void relay(const Fd& client, const Fd& server) {
        std::array<size_t, 2> offsets{};
        while (!stop_) {
            pollfd entries[] = {{client.get(), POLLIN, 0}, {server.get(), POLLIN, 0}};
            if (::poll(entries, 2, 1) <= 0) continue;
            for (size_t i = 0; i < 2; ++i) {
                if (entries[i].revents == 0) continue;
                std::string bytes(most_, '\0');
                const ssize_t got = ::recv(entries[i].fd, bytes.data(), bytes.size(), 0);
                if (got <= 0) return;
                bytes.resize(static_cast<size_t>(got));
                const bool goes_on = change_(i == 0 ? Way::to_server : Way::to_client, bytes, offsets.at(i));
                send_all(entries[1 - i].fd, bytes, soon(), "relay");
                if (!goes_on) return;
                offsets.at(i) += static_cast<size_t>(got);
            }
        }
    }

    Address address_{"127.0.0.1", 0};
    Address server_;
    Fd listener_;
    Change change_;
    size_t most_;
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

class StoreTls : public ::testing::Test {
   protected:
    StoreTls() { log::set_level(log::Level::off); }
    ~StoreTls() override { log::set_level(log::Level::warning); }

    static std::shared_ptr<StoreServer> serve(const Side& side) {
        const testing::TlsSet set(side.tls);
        return StoreServer::start("127.0.0.1", 0, side.options);
    }

    testing::TemporaryDirectory directory_;
    Authority authority_{directory_.path().string(), "ours"};
};

TEST_F(StoreTls, OnlySidesOfOneModeMeetAndBothSayWhyNot) {
    Side insecure;
    insecure.options.insecure = true;
    const struct {
        const char* name;
        Side side;
        const char* server_says;  // in the client's message
        const char* client_says;  // in the server's
    } sides[] = {
        {"insecure", insecure, "runs insecure", "that process runs insecure"},
        {"token", Side{}, "has a job token and no TLS", "that process has a job token and no TLS"},
        {"psk", with_key(), "requires TLS with the job token", "that process requires TLS with the job token"},
        {"certificates", with(authority_.issue("rank")), "requires TLS with certificates",
         "that process requires TLS with certificates"},
    };
    for (const auto& server : sides) {
        for (const auto& client : sides) {
            SCOPED_TRACE(std::string(server.name) + " server, client: " + client.name);
            const Told told;
            log::set_level(log::Level::warning);
            auto running = serve(server.side);
            const Error met = attempt(running->uri(), client.side);
            running.reset();
            log::set_level(log::Level::off);
            if (&server == &client) {
                EXPECT_EQ(met.code(), Code::ok) << met.what();
                EXPECT_EQ(Told::all(), "");
                continue;
            }
            EXPECT_EQ(met.code(), Code::permission) << met.what();
            EXPECT_THAT(met.what(),
                        HasSubstr(client.side.options.insecure ? "requires a job token" : server.server_says));
            if (client.side.tls.kind != server.side.tls.kind && !client.side.options.insecure &&
                !server.side.options.insecure) {
                EXPECT_THAT(met.what(), HasSubstr("TESSERA_TLS"));  // what to set, and where
                EXPECT_THAT(met.what(), HasSubstr("where the store is served"));
            }
            EXPECT_THAT(Told::all(),
                        AllOf(HasSubstr("refused a connection from 127.0.0.1"), HasSubstr(client.client_says)));
        }
    }
}

TEST_F(StoreTls, WrongTokensJobsAndEpochsAreRefusedAsWithoutIt) {
    const auto server = serve(with_key());
    Side token = with_key();
    token.options.token = std::string(64, 'b');
    Side job = with_key();
    job.options.job_id = "other";
    Side epoch = with_key();
    epoch.options.epoch = 2;
    for (const auto& [side, why] :
         {std::pair{token, "different job token"}, {job, "a job other than 'other'"}, {epoch, "epoch 2"}}) {
        const Error error = attempt(server->uri(), side);
        EXPECT_EQ(error.code(), Code::permission) << why;
        EXPECT_THAT(error.what(), HasSubstr(why));
    }
    EXPECT_EQ(attempt(server->uri(), with_key()).code(), Code::ok);
}

// Two ends of a TLS connection, over sockets between which the test stands.
class Ends {
   public:
    Ends(const TlsContext& client, const TlsContext& server) {
        for (Pair* pair : {&client_, &server_}) {
            int fds[2];
            if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0)
                throw os_error("pair", errno);
            pair->end = Fd(fds[0]);
            pair->middle = Fd(fds[1]);
        }
        tls.emplace_back(std::make_unique<Tls>(client, Tls::End::client, client_.end.get(), "the server"));
        tls.emplace_back(std::make_unique<Tls>(server, Tls::End::server, server_.end.get(), "the client"));
    }

    // Moves what is there to the other end, and returns it.
    std::string carry(bool to_server) {
        std::string all;
        std::array<char, 4096> bytes;
        const int from = (to_server ? client_ : server_).middle.get();
        for (ssize_t got = 0; (got = ::recv(from, bytes.data(), bytes.size(), 0)) > 0;) {
            all.append(bytes.data(), static_cast<size_t>(got));
        }
        send_all((to_server ? server_ : client_).middle.get(), all, soon(), "carry");
        return all;
    }

    // Whether both ends completed the handshake; throws an end's error.
    bool shake() {
        bool done[2] = {};
        for (int turns = 0; turns < 10 && !(done[0] && done[1]); ++turns) {
            for (size_t i = 0; i < 2; ++i) {
                done[i] = tls[i]->shake();
                (void)carry(i == 0);
            }
        }
        return done[0] && done[1];
    }

    std::vector<std::unique_ptr<Tls>> tls;  // of the client and the server

   private:
    struct Pair {
        Fd end;
        Fd middle;
    };
    Pair client_;
    Pair server_;
};

TEST_F(StoreTls, AKeyIsThatOfATokenAJobAndAnEpoch) {
    const Token a = Token::parse(std::string(64, 'a'), "");
    const Token b = Token::parse(std::string(64, 'b'), "");
    const std::array<uint8_t, 32> job{1};
    const std::array<uint8_t, 32> other_job{2};
    TlsOptions options;
    options.kind = TlsOptions::Kind::token;
    const auto server = make_tls(options, a, job, 3);
    EXPECT_TRUE(Ends(*make_tls(options, a, job, 3), *server).shake());
    for (const auto& other : {make_tls(options, b, job, 3), make_tls(options, a, other_job, 3),
                              make_tls(options, a, job, 4), make_tls(authority_.issue("x"), a, job, 3)}) {
        EXPECT_EQ(code_of([&] { (void)Ends(*other, *server).shake(); }), Code::permission);
        EXPECT_EQ(code_of([&] { (void)Ends(*server, *other).shake(); }), Code::permission);
    }
    // Each connection exports something else, the same at both ends.
    Ends one(*server, *server);
    Ends two(*server, *server);
    ASSERT_TRUE(one.shake() && two.shake());
    EXPECT_EQ(one.tls[0]->exported(), one.tls[1]->exported());
    EXPECT_NE(one.tls[0]->exported(), two.tls[0]->exported());
}

TEST_F(StoreTls, KeysChangeAfterSoManyBytes) {
    TlsOptions options;
    options.kind = TlsOptions::Kind::token;
    options.bytes_per_key = 5000;
    const auto context = make_tls(options, Token::parse(testing::test_token, ""), {}, 0);
    Ends ends(*context, *context);
    ASSERT_TRUE(ends.shake());
    int changes = 0;
    for (int i = 0; i < 20; ++i) {
        const bool to_server =
            i % 4 != 0;  // 15 records this way: 3 changes of keys. 5 the other way: 1, after the last
        Tls& from = *ends.tls[to_server ? 0 : 1];
        Tls& to = *ends.tls[to_server ? 1 : 0];
        const std::string sent(1000, static_cast<char>('a' + i));
        ASSERT_EQ(from.write(sent.data(), sent.size()), sent.size());
        std::string records = ends.carry(to_server);
        while (!records.empty()) {
            const size_t size =
                static_cast<size_t>(static_cast<uint8_t>(records[3])) << 8 | static_cast<uint8_t>(records[4]);
            if (size == 22) ++changes;  // the message of 5 bytes, its kind and a tag
            records.erase(0, 5 + size);
        }
        std::string got(2000, '\0');
        size_t size = 0;
        while ((size = to.read(got.data(), got.size())) == 0) {
        }
        EXPECT_EQ(got.substr(0, size), sent);
    }
    EXPECT_EQ(changes, 2);  // the third is sent with the next record
}

TEST_F(StoreTls, CertificatesOfTheAuthorityAreTakenAndNoOthers) {
    const Authority others(directory_.path().string(), "theirs");
    const TlsOptions good = authority_.issue("good");
    TlsOptions foreign = others.issue("foreign");
    foreign.authority = good.authority;
    const TlsOptions expired = authority_.issue("expired", -7200, -3600);
    const TlsOptions future = authority_.issue("future", 3600, 7200);
    EXPECT_EQ(attempt(serve(with(good))->uri(), with(authority_.issue("another"))).code(), Code::ok);
    for (const auto& [bad, why] :
         {std::pair{foreign, "issuer certificate"}, {expired, "expired"}, {future, "not yet valid"}}) {
        SCOPED_TRACE(why);
        {
            const Error error = attempt(serve(with(bad))->uri(), with(good));
            EXPECT_EQ(error.code(), Code::permission) << error.what();
            EXPECT_THAT(error.what(),
                        AllOf(HasSubstr(why), HasSubstr("TESSERA_TLS_CA"), HasSubstr("tcp://127.0.0.1:")));
        }
        const Told told;
        log::set_level(log::Level::warning);
        auto server = serve(with(good));
        const Error error = attempt(server->uri(), with(bad));
        EXPECT_EQ(error.code(), Code::permission) << error.what();
        EXPECT_EQ(attempt(server->uri(), with(good)).code(), Code::ok);
        server.reset();
        log::set_level(log::Level::off);
        EXPECT_THAT(Told::all(), AllOf(HasSubstr("refused a connection from 127.0.0.1"), HasSubstr(why)));
    }
    EXPECT_EQ(ERR_peek_error(), 0UL) << "left for the program's own use of OpenSSL";
}

TEST_F(StoreTls, FilesThatCannotBeUsedAreNamed) {
    const TlsOptions good = authority_.issue("good");
    const auto refusal = [&](const TlsOptions& options) {
        try {
            (void)serve(with(options));
        } catch (const Error& error) {
            return error;
        }
        return Error(Code::ok, "it was taken");
    };
    TlsOptions other_key = good;
    other_key.key = authority_.issue("other").key;
    EXPECT_EQ(refusal(other_key).code(), Code::invalid_argument);
    EXPECT_THAT(refusal(other_key).what(), AllOf(HasSubstr(other_key.key), HasSubstr("mismatch")));
    for (std::string TlsOptions::* const file : {&TlsOptions::authority, &TlsOptions::certificate, &TlsOptions::key}) {
        TlsOptions missing = good;
        missing.*file = "/no/such.pem";
        EXPECT_EQ(refusal(missing).code(), Code::io);
        EXPECT_THAT(refusal(missing).what(), HasSubstr("/no/such.pem"));
        TlsOptions garbage = good;
        garbage.*file = (directory_.path() / "garbage").string();
        std::ofstream(garbage.*file) << "not PEM";
        ::chmod((garbage.*file).c_str(), 0600);
        EXPECT_EQ(refusal(garbage).code(), Code::invalid_argument);
        EXPECT_THAT(refusal(garbage).what(), HasSubstr(garbage.*file));
    }
    ::chmod(good.key.c_str(), 0640);
    EXPECT_EQ(refusal(good).code(), Code::permission);
    EXPECT_THAT(refusal(good).what(), AllOf(HasSubstr("0640"), HasSubstr("chmod 600")));
}

TEST_F(StoreTls, NeedsATokenAndAServer) {
    Side insecure = with_key();
    insecure.options.insecure = true;
    EXPECT_EQ(code_of([&] { (void)serve(insecure); }), Code::invalid_argument);
    const testing::TlsSet set(with_key().tls);
    EXPECT_EQ(code_of([&] { (void)Store::open("file://" + directory_.path().string(), test_store_options()); }),
              Code::unsupported);
}

TEST_F(StoreTls, IsChosenByTheEnvironment) {
    using Kind = TlsOptions::Kind;
    struct Row {
        std::map<std::string, std::string> variables;
        std::optional<Kind> kind;  // nullopt: INVALID_ARGUMENT
    };
    const std::map<std::string, std::string> files = {
        {"TESSERA_TLS_CA", "a"}, {"TESSERA_TLS_CERT", "b"}, {"TESSERA_TLS_KEY", "c"}};
    const auto and_files = [&](const char* value) {
        auto all = files;
        all["TESSERA_TLS"] = value;
        return all;
    };
    const Row rows[] = {{{}, Kind::off},
                        {{{"TESSERA_TLS", "0"}}, Kind::off},
                        {{{"TESSERA_TLS", "1"}}, Kind::token},
                        {{{"TESSERA_TLS", "psk"}}, Kind::token},
                        {files, Kind::certificates},
                        {and_files("1"), Kind::certificates},
                        {and_files("psk"), Kind::token},
                        {and_files("0"), Kind::off},
                        {{{"TESSERA_TLS", "tls"}}, std::nullopt},
                        {{{"TESSERA_TLS_CA", "a"}, {"TESSERA_TLS_KEY", "c"}}, std::nullopt}};
    for (const Row& row : rows) {
        for (const auto& [name, value] : row.variables) ::setenv(name.c_str(), value.c_str(), 1);
        try {
            EXPECT_EQ(TlsOptions::from_environment().kind, row.kind);
        } catch (const Error& error) {
            EXPECT_EQ(row.kind, std::nullopt) << error.what();
            EXPECT_EQ(error.code(), Code::invalid_argument);
        }
        for (const auto& [name, value] : row.variables) ::unsetenv(name.c_str());
    }
}

TEST_F(StoreTls, HidesKeysAndValues) {
    for (const bool encrypted : {false, true}) {
        const Side side = encrypted ? with_key() : Side{};
        const auto server = serve(side);
        std::string seen;
        {
            const Between between(server->uri(), [&](auto, std::string& bytes, size_t) {
                seen += bytes;
                return true;
            });
            const auto store = connect(between.uri(), side);
            store->set("secret key", "secret value", soon());
            EXPECT_EQ(store->get("secret key", soon()), "secret value");
        }
        const auto hidden = [&](const char* text) { return seen.find(text) == std::string::npos; };
        EXPECT_EQ(hidden("secret key"), encrypted);
        EXPECT_EQ(hidden("secret value"), encrypted);
    }
}

// Whether a receiver may not care for a byte, or may wait for more because of it: the version and the length of a TLS record,
// and the length of a message of the TLS handshake. `begin`: where TLS begins.
std::vector<bool> of_no_account(const std::string& stream, size_t begin) {
    std::vector<bool> found(stream.size());
    for (size_t at = begin; at + 9 < stream.size();) {
        for (size_t i = 1; i < 5; ++i) found[at + i] = true;
        for (size_t i = 6; stream[at] == 0x16 && i < 9; ++i) found[at + i] = true;
        at +=
            5 + (static_cast<size_t>(static_cast<uint8_t>(stream[at + 3])) << 8 | static_cast<uint8_t>(stream[at + 4]));
    }
    return found;
}

// A byte changed or cut off anywhere ends the connection, at once and with an error; the server goes on.
TEST_F(StoreTls, ChangedAndTruncatedBytesAreNoticed) {
    const auto server = serve(with_key());
    const auto talk = [&](const Between::Change& change) -> std::optional<Code> {
        const Between between(server->uri(), change);
        return code_of([&] {
            const auto store = connect(between.uri(), with_key());
            store->set("k", std::string(100, 'v'), soon());
            if (store->get("k", soon()) != std::string(100, 'v')) throw Error(Code::ok, "another value");
        });
    };
    std::array<std::string, 2> streams;
    ASSERT_EQ(talk([&](auto way, std::string& bytes, size_t) {
                  streams.at(way == Between::Way::to_server ? 0 : 1) += bytes;
                  return true;
              }),
              std::nullopt);
    const testing::Seed seed;
    std::mt19937 random(seed);
    for (const auto way : {Between::Way::to_server, Between::Way::to_client}) {
        const bool to_server = way == Between::Way::to_server;
        const std::string& stream = streams.at(to_server ? 0 : 1);
        const auto ignored = of_no_account(stream, to_server ? handshake::hello_size + handshake::proof_size
                                                             : handshake::answer_size + handshake::verdict_size);
        for (size_t at = random() % 8; at < stream.size(); at += 1 + random() % 48) {
            for (const bool cut : {false, true}) {
                if (!cut && ignored[at]) continue;
                const auto code = talk([&](auto on, std::string& bytes, size_t offset) {
                    if (on != way || at < offset || at >= offset + bytes.size()) return true;
                    if (!cut) bytes[at - offset] = static_cast<char>(bytes[at - offset] ^ 0x20);
                    if (cut) bytes.resize(at - offset);
                    return !cut;
                });
                EXPECT_TRUE(code == Code::io || code == Code::corrupt || code == Code::permission ||
                            code == Code::version)
                    << (to_server ? "to the server, " : "to the client, ") << "byte " << at << " of " << stream.size()
                    << (cut ? " cut, code " : " changed, code ") << (code ? static_cast<int>(*code) : -1);
            }
        }
    }
    EXPECT_EQ(attempt(server->uri(), with_key()).code(), Code::ok);
}

// With a certificate of the right authority, but without the token.
TEST_F(StoreTls, SomebodyInBetweenIsFoundOut) {
    const Side side = with(authority_.issue("rank"));
    const auto server = serve(side);
    const auto context = make_tls(authority_.issue("in between"), Token::random(), {}, 0);
    Address address{"127.0.0.1", 0};
    const Fd listener = listen_on(address);
    std::thread between([&] {
        ASSERT_TRUE(testing::readable(listener.get(), soon()));
        const Fd client(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        const Fd to_server = connect_to(Address::parse(server->uri()), soon());
        const auto pass = [](const Fd& from, const Fd& to, size_t size) {
            std::string bytes(size, '\0');
            receive_all(from.get(), bytes.data(), size, soon(), "pass");
            send_all(to.get(), bytes, soon(), "pass");
        };
        pass(client, to_server, handshake::hello_size);
        pass(to_server, client, handshake::answer_size);
        pass(client, to_server, handshake::proof_size);
        pass(to_server, client, handshake::verdict_size);
        Tls for_client(*context, Tls::End::server, client.get(), "the client");
        Tls for_server(*context, Tls::End::client, to_server.get(), "the server");
        const auto until = [](const Fd& socket, Tls& tls, const std::function<bool()>& done) {
            while (!done()) ASSERT_TRUE(wait_for(socket.get(), tls.wants(), soon()));
        };
        until(to_server, for_server, [&] { return for_server.shake(); });
        until(client, for_client, [&] { return for_client.shake(); });
        std::string binding(handshake::binding_size, '\0');
        until(to_server, for_server, [&] { return for_server.read(binding.data(), binding.size()) == binding.size(); });
        until(client, for_client, [&] { return for_client.write(binding.data(), binding.size()) == binding.size(); });
    });
    const Error error = attempt(address.uri(), side);
    between.join();
    EXPECT_EQ(error.code(), Code::permission) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("somebody is in between"));
    EXPECT_EQ(attempt(server->uri(), side).code(), Code::ok);
}

// Strangers do not reach TLS at all; a holder of the token who sends garbage ends only its own connection.
TEST_F(StoreTls, HostileBytesEndTheirConnectionAlone) {
    const auto server = serve(with_key());
    const auto party = party_of(with_key(), server->uri());
    const testing::Seed seed;
    std::mt19937 random(seed);
    std::vector<Fd> sockets;
    for (int i = 0; i < 60; ++i) {
        Fd socket = connect_to(Address::parse(server->uri()), soon());
        if (i % 3 != 0) {
            handshake::Client client(party, server->uri());
            send_all(socket.get(), client.hello(), soon(), "hello");
            std::string answer(handshake::answer_size, '\0');
            receive_all(socket.get(), answer.data(), answer.size(), soon(), "answer");
            send_all(socket.get(), client.prove(answer), soon(), "proof");
        }
        std::string garbage(1 + random() % 2000, '\0');
        for (char& c : garbage) c = static_cast<char>(random());
        // Half of them begin like a TLS handshake, of any length.
        if (i % 2 == 0)
            garbage.replace(0, std::min<size_t>(5, garbage.size()),
                            std::string("\x16\x03\x03", 3) + garbage.substr(0, 2));
        (void)::send(socket.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
        ::shutdown(socket.get(), SHUT_WR);
        sockets.push_back(std::move(socket));
    }
    wait_until([&] { return server->census().strangers == 0 && server->census().refused >= 60; }, soon(),
               "all refused");
    EXPECT_EQ(server->census().clients, 0U);
    EXPECT_EQ(attempt(server->uri(), with_key()).code(), Code::ok);
}

// Both ends see records in pieces of one to three bytes.
TEST_F(StoreTls, SlowConnectionsWorkAllTheSame) {
    const Side side = with(authority_.issue("rank"));
    const auto server = serve(side);
    const Between between(server->uri(), [](auto, std::string&, size_t) { return true; }, 3);
    const auto store = connect(between.uri(), side);
    store->set("k", std::string(1000, 'v'), soon());
    EXPECT_EQ(store->get("k", soon()), std::string(1000, 'v'));
    EXPECT_EQ(code_of([&] { (void)store->wait("never", Deadline::in(milliseconds{1})); }), Code::timeout);
    EXPECT_EQ(store->wait("k", soon()), std::string(1000, 'v'));
}

TEST_F(StoreTls, MovesTheLargestValuesAndIsNotHeldUpByTheDeaf) {
    const auto server = serve(with_key());
    const auto store = connect(server->uri(), with_key());
    std::string large(Store::max_value_bytes, 'v');
    large.back() = 'w';
    store->set("large", large, soon());
    EXPECT_EQ(store->get("large", soon()), large);
    const auto party = party_of(with_key(), server->uri());
    std::vector<Channel> deaf;
    const std::string get = wire::encode({.operation = wire::Operation::get, .key = "large"});
    for (int i = 0; i < 4; ++i) {
        deaf.push_back(Channel::to_server(connect_to(Address::parse(server->uri()), soon()), party, server->uri()));
        open(deaf.back(), soon(), "deaf");
        for (int j = 0; j < 16; ++j) tsr::send_all(deaf.back(), get, soon(), "deaf");
    }
    EXPECT_EQ(store->add("responsive", 1, soon()), 1);
    std::string head(wire::length_size + 1, '\0');  // one that reads after all finds what it asked for
    std::string got(large.size(), '\0');
    for (int j = 0; j < 3; ++j) {
        tsr::receive_all(deaf[0], head.data(), head.size(), soon(), "deaf");
        tsr::receive_all(deaf[0], got.data(), got.size(), soon(), "deaf");
        EXPECT_EQ(got, large);
    }
}

TEST_F(StoreTls, ManyConnectionsWaitAtOnce) {
    const auto server = serve(with_key());
    const auto store = connect(server->uri(), with_key());
    constexpr int waiters = 100;
    std::vector<std::thread> threads;
    std::atomic<int> woken{0};
    for (int i = 0; i < waiters; ++i) {
        threads.emplace_back([&] {
            if (store->wait("go", soon()) == "now") ++woken;
        });
    }
    wait_until([&] { return server->census().clients >= waiters; }, soon(), "all waiting");
    store->set("go", "now", soon());
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(woken, waiters);
}

// A forked child that destroys its copies says nothing on its parent's connections.
TEST_F(StoreTls, AForkedChildLeavesConnectionsAlone) {
    const auto server = serve(with_key());
    auto store = connect(server->uri(), with_key());
    store->set("k", "v", soon());
    const pid_t child = ::fork();
    if (child == 0) {
        const bool works = store->get("k", soon()) == "v";  // over one of its own
        store.reset();
        ::_exit(works ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    EXPECT_EQ(store->get("k", soon()), "v");
}

}  // namespace
}  // namespace tsr
