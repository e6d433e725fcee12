// `tessera top`, the metrics and the report's file of real jobs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <termios.h>

#include <optional>
#include <string>
#include <vector>

#include "agents.hpp"
#include "base/json.hpp"
#include "metrics_parser.hpp"
#include "run_fixture.hpp"
#include "store/address.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using testing::Child;
using ::testing::HasSubstr;
using testing::parse_metrics;
using testing::Result;
using testing::soon;
using ::testing::StartsWith;
using testing::tessera;

class Top : public testing::Agents {
   protected:
    [[nodiscard]] static Result top(const std::string& arguments) {
        const std::string command = tessera + " top " + arguments + " 2>&1 </dev/null";
        Result result;
        FILE* pipe = ::popen(command.c_str(), "r");
        if (pipe == nullptr) throw std::runtime_error("popen");
        char buffer[4096];
        size_t n = 0;
        while ((n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0) result.out.append(buffer, n);
        const int status = ::pclose(pipe);
        result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        return result;
    }
    // Of the job that `launcher` runs, once `ready`.
    static Json look(pid_t launcher, const std::function<bool(const Json&)>& ready) {
        std::optional<Json> job;
        wait_until(
            [&] {
                const Result result = top(fmt::format("{} --json --interval 0.1", launcher));
                if (result.code != 0) return false;
                job = Json::parse(result.out, "top");
                return ready(*job);
            },
            soon(), "what top says of the job");
        return *job;
    }
    static int64_t steps_of(const Json& job, size_t rank) {
        const Json& figures = job.at("ranks").as_array()[rank].at("figures");
        return figures.is(Json::Kind::null) ? 0 : figures.at("steps").as_int();
    }
    std::vector<std::string> trainer() const { return {trains_, (directory_.path() / "root").string()}; }
    Child start_trainer(std::vector<std::string> options) {
        for (const std::string& word : trainer()) options.push_back(word);
        return start(options);
    }
    [[nodiscard]] std::string said_by_launcher() const { return testing::read_file(directory_.path() / "err"); }
    // The body that the agent answers.
    static std::string get(uint16_t port, const std::string& path) {
        const Fd socket = connect_to({"127.0.0.1", port}, soon());
        const std::string request = fmt::format("GET {} HTTP/1.1\r\nHost: a\r\n\r\n", path);
        EXPECT_EQ(::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL),
                  static_cast<ssize_t>(request.size()));
        std::string text;
        char buffer[4096];
        for (;;) {
            if (!wait_for(socket.get(), POLLIN, soon())) throw std::runtime_error("no answer");
            const ssize_t got = ::recv(socket.get(), buffer, sizeof buffer, 0);
            if (got <= 0) break;
            text.append(buffer, static_cast<size_t>(got));
        }
        EXPECT_THAT(text, StartsWith("HTTP/1.1 200 OK\r\n"));
        return text.substr(text.find("\r\n\r\n") + 4);
    }

    const std::string trains_ = testing::binary_dir() + "/tests/trains";
};

TEST_F(Top, ShowsAJobThatTrainsAndPrometheusSeesItGrow) {
    const std::string report = (directory_.path() / "report.json").string();
    Child job = start_trainer({"-n", "2", "--metrics-port", "0", "--report", report});
    const Json first = look(job.pid(), [](const Json& json) {
        return steps_of(json, 1) > 0 && !json.at("checkpoint").is(Json::Kind::null);
    });
    EXPECT_EQ(first.at("state").as_string(), "running");
    EXPECT_EQ(first.at("launcher_pid").as_int(), job.pid());
    EXPECT_EQ(first.at("world_size").as_int(), 2);
    EXPECT_EQ(first.at("checkpoint").at("step").as_int() % 50, 0);
    const Json later = look(job.pid(), [&](const Json& json) { return steps_of(json, 0) > steps_of(first, 0); });
    const Json& rank = later.at("ranks").as_array()[0];
    EXPECT_EQ(rank.at("program").as_string(), "trains");
    EXPECT_GT(rank.at("pid").as_int(), 0);
    EXPECT_GT(rank.at("rates").at("steps_per_s").as_double(), 0);
    EXPECT_GT(rank.at("rates").at("bytes_per_s").as_double(), 0);
    EXPECT_GT(rank.at("figures").at("exposed_communication_s").as_double(), 0);
    EXPECT_NEAR(static_cast<double>(rank.at("figures").at("step").as_int()),
                static_cast<double>(rank.at("figures").at("steps").as_int()), 2);
    EXPECT_GT(rank.at("figures").at("checkpoint_bytes").as_int(), 0);
    const std::string id = later.at("job").as_string().substr(0, 8);
    const Result text = top("--once --interval 0.1 " + id);
    EXPECT_EQ(text.code, 0) << text.out;
    EXPECT_THAT(text.out, AllOf(HasSubstr("trains: running for 00:0"), HasSubstr("2 ranks on 1 host"),
                                HasSubstr("checkpoint of step"), ::testing::Not(HasSubstr("\x1b"))));

    const std::string said = said_by_launcher();
    const std::string begin = "metrics are at http://127.0.0.1:";
    const size_t at = said.find(begin);
    ASSERT_NE(at, std::string::npos) << said;
    const auto port = static_cast<uint16_t>(std::stoul(said.substr(at + begin.size())));
    const auto one = parse_metrics(get(port, "/metrics"));
    const std::string counter = R"(tessera_rank_steps_total{rank="1",program="trains"})";
    std::map<std::string, double> two;
    wait_until(
        [&] {
            two = parse_metrics(get(port, "/metrics"));
            return two.at(counter) > one.at(counter);
        },
        soon(), "more steps");
    for (const auto& [name, value] : one) {
        if (name.find("_total") != std::string::npos) EXPECT_GE(two.at(name), value) << name;
    }
    EXPECT_EQ(two.at(R"(tessera_rank_up{rank="0",program="trains"})"), 1);

    ::kill(job.pid(), SIGTERM);
    EXPECT_EQ(finish(job).code, 0);
    EXPECT_GE(std::stod(file("steps1")), two.at(counter) - 1);
    const Json told = Json::parse(testing::read_file(report), "report");
    EXPECT_EQ(told.at("exit_code").as_int(), 0);
    EXPECT_TRUE(told.at("root_cause").is(Json::Kind::null));
    const Result gone = top(std::to_string(first.at("launcher_pid").as_int()));
    EXPECT_EQ(gone.code, 1);
    EXPECT_THAT(gone.out, HasSubstr("no job of `tessera run` that is '"));
}

// A terminal in which `tessera top` runs.
class Terminal {
   public:
    Terminal(const std::string& job, int columns) {
        const winsize size{
            .ws_row = 24, .ws_col = static_cast<unsigned short>(columns), .ws_xpixel = 0, .ws_ypixel = 0};
        const pid_t pid = ::forkpty(&fd_, nullptr, nullptr, &size);
        if (pid < 0) throw std::runtime_error("forkpty");
        if (pid > 0) {
            shell_.emplace(pid);
            ::fcntl(fd_, F_SETFL, O_NONBLOCK);
            return;
        }
        // The terminal is compared before and after by who started the command.
        ::execl("/bin/sh", "sh", "-c",
                "trap : INT; stty -a > $D/before; \"$0\" top --interval 0.1 $1; echo code $?; stty -a > $D/after",
                tessera.c_str(), job.c_str(), nullptr);
        ::_exit(126);
    }
    ~Terminal() { ::close(fd_); }
    Terminal(const Terminal&) = delete;
    Terminal& operator=(const Terminal&) = delete;

    void await(const std::function<bool(const std::string&)>& seen) {
        wait_until(
            [&] {
                char buffer[4096];
                ssize_t got = 0;
                while ((got = ::read(fd_, buffer, sizeof buffer)) > 0) text_.append(buffer, static_cast<size_t>(got));
                return seen(text_);
            },
            soon(), "what the terminal shows");
    }
    void type(const char* keys) const {
        EXPECT_EQ(::write(fd_, keys, std::strlen(keys)), static_cast<ssize_t>(std::strlen(keys)));
    }
    void end() { EXPECT_EQ(shell_->wait(), 0); }
    [[nodiscard]] const std::string& text() const { return text_; }
    // The steps that the summary has shown, in order.
    [[nodiscard]] std::vector<int64_t> steps() const {
        std::vector<int64_t> steps;
        for (size_t at = 0; (at = text_.find("\nstep ", at)) != std::string::npos; ++at) {
            steps.push_back(std::stoll(text_.substr(at + 6)));
        }
        return steps;
    }

   private:
    int fd_ = -1;
    std::optional<Child> shell_;
    std::string text_;
};

TEST_F(Top, InATerminalTheStepRisesAndTheTerminalComesBack) {
    Child job = start_trainer({"-n", "2"});
    (void)look(job.pid(), [](const Json& json) { return steps_of(json, 1) > 0; });
    ::setenv("D", scratch().c_str(), 1);
    const auto is_over = [](const std::string& text) { return text.find("code ") != std::string::npos; };
    for (const char* const way : {"q", "\x03"}) {
        Terminal terminal(std::to_string(job.pid()), 80);
        terminal.await([&](const std::string&) {
            const std::vector<int64_t> steps = terminal.steps();
            return steps.size() > 2 && steps.back() > steps.front();
        });
        terminal.type(way);
        terminal.await(is_over);
        EXPECT_THAT(terminal.text(),
                    AllOf(StartsWith("\x1b[?1049h\x1b[?25l"), HasSubstr("\x1b[?25h\x1b[?1049l"), HasSubstr("code 0")));
        terminal.end();
        EXPECT_EQ(file("before"), file("after"));
        ASSERT_EQ(::unlink((scratch() + "/after").c_str()), 0);
    }
    Terminal terminal(std::to_string(job.pid()), 120);
    terminal.await([&](const std::string& text) { return text.find("WRITTEN") != std::string::npos; });
    ::kill(job.pid(), SIGTERM);
    EXPECT_EQ(finish(job).code, 0);
    terminal.await(is_over);
    EXPECT_THAT(terminal.text(), AllOf(HasSubstr(" has ended\r\n"), HasSubstr("code 0")));
}

TEST_F(Top, TheCoordinatingAgentShowsTheRanksOfAllHosts) {
    const std::vector<std::string> options{"--nnodes", "2", "-n", "1", "--grace-s", "20"};
    Child a = start_on("a", options, trainer());
    Child b = start_on("b", options, trainer());
    const auto both_step = [](const Json& json) {
        return json.at("ranks").as_array().size() == 2 && steps_of(json, 0) > 0 && steps_of(json, 1) > 0;
    };
    // Either agent may coordinate; each is asked for by its own launcher.
    std::optional<Json> whole;
    std::optional<Json> part;
    wait_until(
        [&] {
            for (const pid_t pid : {a.pid(), b.pid()}) {
                const Result result = top(fmt::format("{} --json --interval 0.1", pid));
                if (result.code != 0) continue;
                const Json job = Json::parse(result.out, "top");
                if (!job.at("coordinates").as_bool() && !job.at("ranks").as_array().empty()) part = job;
                if (job.at("coordinates").as_bool() && both_step(job)) whole = job;
            }
            return whole && part;
        },
        soon(), "the ranks of both hosts");
    EXPECT_EQ(whole->at("hosts").as_array().size(), 2U);
    EXPECT_GT(whole->at("ranks").as_array()[1].at("pid").as_int(), 0);
    EXPECT_EQ(part->at("world_size").as_int(), 2);
    EXPECT_EQ(part->at("ranks").as_array().size(), 1U);
    ::kill(a.pid(), SIGTERM);
    EXPECT_EQ(a.wait(), 0);
    EXPECT_EQ(b.wait(), 0);
}

TEST_F(Top, TheReportsFileSaysWhyTheJobFailed) {
    const std::string path = (directory_.path() / "report.json").string();
    const Result result =
        run_shell({"-n", "2", "--report", path},
                  "if [ $RANK = 1 ]; then echo first >&2; echo \"no '\\\"file\\\"'\" >&2; exit 7; fi; exec sleep 600");
    EXPECT_EQ(result.code, 7);
    const Json report = Json::parse(testing::read_file(path), "report");
    EXPECT_EQ(report.at("tessera_report").as_int(), 1);
    EXPECT_EQ(report.at("exit_code").as_int(), 7);
    const Json& root = report.at("root_cause");
    EXPECT_EQ(root.at("rank").as_int(), 1);
    EXPECT_EQ(root.at("exit_code").as_int(), 7);
    EXPECT_TRUE(root.at("signal").is(Json::Kind::null));
    EXPECT_EQ(root.at("last_stderr_lines").as_array().back().as_string(), "no '\"file\"'");
    EXPECT_THAT(root.at("cause").as_string(), HasSubstr("rank 1 ended with exit code 7"));
}

TEST_F(Top, WrongPlacesForMetricsAndReportsAreRefused) {
    EXPECT_THAT(run({"--metrics-port", "x", "true"}).err, HasSubstr("--metrics-port x: expected a port"));
    EXPECT_THAT(run({"--metrics-port", ":1", "true"}).err, HasSubstr("--metrics-port :1: expected a port"));
    EXPECT_THAT(run({"--metrics-port", "70000", "true"}).err, HasSubstr("expected a port from 0 to 65535"));
    const Result elsewhere = run({"--metrics-port", "192.0.2.1:0", "true"});
    EXPECT_EQ(elsewhere.code, 1);
    EXPECT_THAT(elsewhere.err,
                AllOf(HasSubstr("cannot listen on tcp://192.0.2.1:0"), HasSubstr("--metrics-port needs an address")));
    const Result nowhere = run({"--report", scratch() + "/none/report", "true"});
    EXPECT_EQ(nowhere.code, 1);
    EXPECT_THAT(nowhere.err, HasSubstr("cannot open the report's file " + scratch() + "/none/report"));
}

}  // namespace
}  // namespace tsr
