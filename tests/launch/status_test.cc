// What an agent says of its job while it runs, and to whom: values, Prometheus' text, HTTP.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/meter.hpp"
#include "launch/job_status.hpp"
#include "launch/meter_pages.hpp"
#include "launch/metrics_text.hpp"
#include "launch/node_message.hpp"
#include "launch/status_server.hpp"
#include "metrics_parser.hpp"
#include "processes.hpp"
#include "soon.hpp"

namespace tsr {
namespace {

using ::testing::HasSubstr;
using testing::parse_metrics;
using ::testing::StartsWith;

JobStatus a_job() {
    JobStatus job;
    job.job = "none 0123456789abcdef";
    job.run = "none";
    job.host = "a";
    job.launcher = 77;
    job.state = "running";
    job.time = 1000;
    job.started = 900;
    job.round = 1;
    job.restarts = 1;
    job.max_restarts = 3;
    job.world_size = 3;
    job.programs = {"train.py", "b"};
    job.hosts = {{"a", 2, true}, {"b", 1, false}};
    RankFigures figures{.steps = 10, .step = 110, .step_time = 999, .step_s = 0.5, .exposed_s = 2, .bytes = 4000};
    job.ranks = {{0, "a", "train.py", 100, "running", figures},
                 {1, "a", "train.py", 101, "SIGKILL", figures},
                 {2, "b", "b", 0, "running", std::nullopt}};
    figures.save = {100, 990, 1.5};
    job.ranks[0].figures = figures;
    job.save = newest_save(job.ranks, std::nullopt);
    return job;
}

TEST(JobStatus, ItsJsonKeepsEverything) {
    const std::string text = to_json(a_job()).dump();
    const JobStatus back = job_status_of(Json::parse(text, "status"));
    EXPECT_EQ(to_json(back).dump(), text);
    EXPECT_EQ(back.ranks[0].figures->save.step, 100);
    EXPECT_FALSE(back.ranks[2].figures);
    ASSERT_TRUE(back.save);
    EXPECT_EQ(back.save->duration_s, 1.5);
}

TEST(JobStatus, AgentsSendEachOtherFigures) {
    const Report sent = Figures{4, a_job().ranks};
    const Report got = decode_report(Json::parse(encode(sent), "report"));
    EXPECT_EQ(encode(got), encode(sent));
    EXPECT_EQ(std::get<Figures>(got).ranks.size(), 3U);
    for (const char* wrong :
         {R"({"kind":"figures","round":0,"ranks":[{"rank":4096}]})", R"({"kind":"figures","round":0,"ranks":[1]})",
          R"({"kind":"figures","round":-1,"ranks":[]})", R"({"kind":"figures","round":0})"}) {
        EXPECT_THROW((void)decode_report(Json::parse(wrong, "report")), Error) << wrong;
    }
}

TEST(JobStatus, RatesAreFromStepToStepAndOfOneRoundOnly) {
    const JobStatus before = a_job();
    JobStatus now = before;
    now.time += 10;
    now.ranks[0].figures->steps += 4;
    now.ranks[0].figures->step_time += 8;
    now.ranks[0].figures->exposed_s += 2.5;
    now.ranks[0].figures->bytes += 5000;
    const std::vector<RankRates> rates = rates_between(before, now);
    EXPECT_DOUBLE_EQ(*rates[0].steps_a_second, 0.5);
    EXPECT_DOUBLE_EQ(*rates[0].exposed, 0.25);
    EXPECT_DOUBLE_EQ(*rates[0].bytes_a_second, 500);
    EXPECT_FALSE(rates[1].steps_a_second) << "it has ended";
    EXPECT_FALSE(rates[2].exposed) << "nothing is known of it";
    // Without a step in between, the last one counts.
    now.ranks[0].figures->steps = before.ranks[0].figures->steps;
    EXPECT_DOUBLE_EQ(*rates_between(before, now)[0].steps_a_second, 2);
    now.ranks[0].figures->steps = 1;  // a new process
    EXPECT_FALSE(rates_between(before, now)[0].steps_a_second);
    ++now.round;
    now.ranks = before.ranks;
    EXPECT_FALSE(rates_between(before, now)[0].exposed);
}

// --- counting

TEST(Meters, TheAgentReadsWhatRanksCount) {
    const MeterPages pages(2);
    ASSERT_EQ(testing::in_child({{"TESSERA_METER_FD", std::to_string(pages.fd())},
                                 {"TESSERA_METER_PAGES", "2"},
                                 {"TESSERA_LOCAL_RANK", "1"}},
                                [] {
                                    count_for_agent();
                                    StepCounter loop(StepCounter::Of::loop);
                                    StepCounter model(StepCounter::Of::model);
                                    StepCounter one(StepCounter::Of::optimizer);
                                    StepCounter other(StepCounter::Of::optimizer);
                                    for (int step = 101; step <= 103; ++step) {  // a GAN's
                                        model.count(step - 100);
                                        one.count(step);
                                        other.count(step);
                                        loop.count(7);
                                    }
                                    add_to(meter().bytes, 500);
                                    count_save(102, ticks(), 64);
                                })
                  .wait(),
              0);
    const RankFigures figures = pages.read(1);
    EXPECT_GE(figures.steps, 3);
    EXPECT_LE(figures.steps, 5) << "each optimizer counted for itself";
    EXPECT_EQ(figures.step, 103);
    EXPECT_GT(figures.step_time, 0);
    EXPECT_EQ(figures.bytes, 500);
    EXPECT_EQ(figures.saves, 1);
    EXPECT_EQ(figures.save.step, 102);
    EXPECT_EQ(figures.saved_bytes, 64);
    EXPECT_EQ(pages.read(0).steps, 0);
}

TEST(Meters, APageThatIsNoneIsLeftAlone) {
    const Fd file(::memfd_create("other", MFD_CLOEXEC));
    for (const std::map<std::string, std::string>& variables :
         {std::map<std::string, std::string>{{"TESSERA_METER_FD", std::to_string(file.get())},
                                             {"TESSERA_METER_PAGES", "1"},
                                             {"TESSERA_LOCAL_RANK", "0"}},
          {{"TESSERA_METER_FD", "x"}, {"TESSERA_METER_PAGES", "1"}, {"TESSERA_LOCAL_RANK", "0"}},
          {{"TESSERA_METER_FILE", "/dev/null"}, {"TESSERA_METER_PAGES", "1"}, {"TESSERA_LOCAL_RANK", "0"}}}) {
        EXPECT_EQ(testing::in_child(variables,
                                    [] {
                                        const Meter* own = &meter();
                                        count_for_agent();
                                        if (&meter() != own) throw std::runtime_error("it was mapped");
                                    })
                      .wait(),
                  0);
    }
}

// --- Prometheus

TEST(Metrics, ArePrometheusText) {
    const auto metrics = parse_metrics(metrics_text(a_job()));
    EXPECT_EQ(metrics.at(R"(tessera_rank_steps_total{rank="0",program="train.py"})"), 10);
    EXPECT_EQ(metrics.at(R"(tessera_rank_step{rank="0",program="train.py"})"), 110);
    EXPECT_EQ(metrics.at(R"(tessera_rank_up{rank="1",program="train.py"})"), 0);
    EXPECT_EQ(metrics.at("tessera_job_restarts_total"), 1);
    EXPECT_EQ(metrics.at("tessera_job_checkpoint_time_seconds"), 990);
    EXPECT_FALSE(metrics.contains(R"(tessera_rank_up{rank="2",program="b"})")) << "another host's agent has it";
}

TEST(Metrics, EscapeLabels) {
    JobStatus job = a_job();
    job.run = "a\"b\\c\nd\xff";
    EXPECT_THAT(metrics_text(job), HasSubstr(R"(run="a\"b\\c\nd?",host="a"} 1)"));
    EXPECT_NO_THROW((void)parse_metrics(metrics_text(job)));
}

// --- HTTP

std::optional<StatusPage> pages(std::string_view path) {
    if (path != "/metrics") return std::nullopt;
    return StatusPage{"text/plain", "body\n"};
}

TEST(Http, AnswersWhatIsAsked) {
    const std::vector<std::pair<std::string, std::string>> cases{
        {"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", "HTTP/1.1 200 OK\r\n"},
        {"GET /metrics?x=1 HTTP/1.0\r\n\r\n", "HTTP/1.1 200 OK\r\n"},
        {"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found\r\n"},
        {"GET /metrics/../x HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found\r\n"},
        {"POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed\r\n"},
        {"GET /metrics HTTP/2\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"},
        {"GET metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"},
        {"GET\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"},
        {"\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"},
        {std::string("\x16\x03\x01\0\xff\n\n", 7), "HTTP/1.1 400 Bad Request\r\n"},  // TLS, say
    };
    for (const auto& [request, begin] : cases) EXPECT_THAT(http_answer(request, pages), StartsWith(begin)) << request;
    EXPECT_THAT(http_answer("GET /metrics HTTP/1.1\r\n\r\n", pages),
                ::testing::EndsWith("Content-Length: 5\r\nCache-Control: no-store\r\nConnection: close\r\n\r\nbody\n"));
    EXPECT_THAT(http_answer("HEAD /metrics HTTP/1.1\r\n\r\n", pages), ::testing::EndsWith("\r\n\r\n"));
}

// A server whose poll loop the test runs, and clients.
class Server : public ::testing::Test {
   protected:
    void open(milliseconds lifetime = testing::patience(milliseconds{20000})) {
        server_.emplace("test" + std::to_string(::getpid()), lifetime);
        server_->listen(listen_on(address_));
    }
    [[nodiscard]] Fd client() const { return connect_to(address_, testing::soon()); }
    void turn() {
        std::vector<pollfd> polls;
        server_->append_polls(polls);
        (void)::poll(polls.data(), polls.size(), 20);
        server_->turn(pages);
    }
    // All that the server sends until it closes the connection.
    std::string read_all(const Fd& socket) {
        std::string text;
        bool over = false;
        wait_until(
            [&] {
                turn();
                char bytes[4096];
                ssize_t got = 0;
                while ((got = ::recv(socket.get(), bytes, sizeof bytes, 0)) > 0)
                    text.append(bytes, static_cast<size_t>(got));
                over = got == 0 || errno == ECONNRESET;
                return over;
            },
            testing::soon(), "the end of an answer");
        return text;
    }
    static void send(const Fd& socket, std::string_view text) {
        ASSERT_EQ(::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
    }

    Address address_{"127.0.0.1", 0};
    std::optional<StatusServer> server_;
};

TEST_F(Server, AnswersARequestThatComesInPieces) {
    open();
    const Fd socket = client();
    for (const char c : std::string("GET /metrics HTTP/1.1\r\nA: b\r\n\r")) {
        send(socket, std::string(1, c));
        turn();
    }
    send(socket, "\n");
    EXPECT_THAT(read_all(socket), ::testing::EndsWith("\r\n\r\nbody\n"));
}

TEST_F(Server, RefusesARequestThatDoesNotEnd) {
    open();
    const Fd socket = client();
    send(socket, "GET /" + std::string(StatusServer::max_request, 'a'));
    EXPECT_THAT(read_all(socket), ::testing::AnyOf(StartsWith("HTTP/1.1 431 "), ""));  // a reset may overtake it
}

TEST_F(Server, AcceptsNoMoreThanItsNumberAndGoesOnAfterwards) {
    open();
    std::vector<Fd> idle;
    for (size_t i = 0; i < 2 * StatusServer::max_connections; ++i) idle.push_back(client());
    const Fd last = client();
    send(last, "GET /metrics HTTP/1.1\r\n\r\n");
    for (int i = 0; i < 3; ++i) turn();
    std::vector<pollfd> polls;
    server_->append_polls(polls);
    EXPECT_EQ(polls.size(), 1 + StatusServer::max_connections) << "the unix socket, and no listener";
    idle.clear();
    EXPECT_THAT(read_all(last), HasSubstr("body"));
}

TEST_F(Server, EndsAConnectionThatTakesTooLong) {
    open(milliseconds{1});
    const Fd socket = client();
    send(socket, "GET /");
    EXPECT_EQ(read_all(socket), "");
}

TEST_F(Server, IsFoundByItsUserThroughItsUnixSocket) {
    const std::string id = "test" + std::to_string(::getpid());
    server_.emplace(id);
    const std::vector<std::string> all = agents_of_this_user();
    const auto found = std::ranges::find_if(all, [&](const std::string& name) { return name.ends_with("-" + id); });
    ASSERT_NE(found, all.end());
    std::atomic<bool> over{false};
    std::thread agent([&] {
        while (!over) turn();
    });
    std::string answer;
    try {
        answer = ask_agent(*found, "/metrics", testing::soon());
    } catch (const Error& error) {
        answer = error.what();
    }
    over = true;
    agent.join();
    EXPECT_EQ(answer, "body\n");
    server_.reset();
    try {
        (void)ask_agent(*found, "/metrics", testing::soon());
        FAIL() << "nobody listens";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::not_found);
    }
}

}  // namespace
}  // namespace tsr
