// `tessera top`: looks at a running job through its agent. Ranks notice nothing of it.
#include <fmt/format.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/terminal.hpp"
#include "base/write_whole.hpp"
#include "commands.hpp"
#include "launch/job_status.hpp"
#include "launch/process.hpp"
#include "launch/status_server.hpp"
#include "top/screen.hpp"

namespace tsr::cli {

namespace {

constexpr milliseconds patience{3000};     // for an agent's answer
constexpr milliseconds remembered{10000};  // rates are means over this time
constexpr int no_job = 1;
constexpr int several_jobs = 2;
constexpr size_t usual_columns = 80;

JobStatus look(const std::string& agent) {
    return job_status_of(
        Json::parse(ask_agent(agent, "/status", Deadline::in(patience)), "the answer of the job's agent"));
}

struct Found {
    std::string agent;
    JobStatus job;
};

bool is_meant(const JobStatus& job, const std::string& id) {
    const std::string random = job.job.substr(job.job.rfind(' ') + 1);  // behind the name that the user gave
    return id.empty() || random.starts_with(id) || job.job == id || job.run == id || std::to_string(job.launcher) == id;
}

// One agent of each job; if there are several, the one that knows all hosts. `complaints` gets those that do not answer.
std::vector<Found> find_jobs(const std::string& id, std::vector<std::string>& complaints) {
    std::vector<Found> found;
    for (const std::string& agent : agents_of_this_user()) {
        try {
            Found one{agent, look(agent)};
            if (!is_meant(one.job, id)) continue;
            const auto same =
                std::ranges::find_if(found, [&](const Found& other) { return other.job.job == one.job.job; });
            if (same == found.end()) {
                found.push_back(std::move(one));
            } else if (one.job.coordinates) {
                *same = std::move(one);
            }
        } catch (const Error& error) {
            if (error.code() != Code::not_found) complaints.push_back(fmt::format("{}: {}", agent, error.what()));
        }
    }
    return found;
}

Json with_rates(const JobStatus& job, const std::vector<RankRates>& rates) {
    Json json = to_json(job);
    const auto number = [](std::optional<double> value) { return value ? Json(*value) : Json(); };
    Json::Object& fields = json.object();
    Json::Array& ranks = std::ranges::find(fields, "ranks", &Json::Member::key)->value.array();
    for (size_t i = 0; i < ranks.size(); ++i) {
        ranks[i].set("rates", Json::Object{{"steps_per_s", number(rates[i].steps_a_second)},
                                           {"exposed_communication", number(rates[i].exposed)},
                                           {"bytes_per_s", number(rates[i].bytes_a_second)}});
    }
    return json;
}

// The looks of the last seconds, for rates.
class Looks {
   public:
    void add(JobStatus job) {
        if (!looks_.empty() && looks_.back().round != job.round) looks_.clear();
        looks_.push_back(std::move(job));
        while (looks_.size() > 2 &&
               looks_.back().time - looks_[1].time >= std::chrono::duration<double>(remembered).count()) {
            looks_.pop_front();
        }
    }
    [[nodiscard]] const JobStatus& last() const { return looks_.back(); }
    [[nodiscard]] std::vector<RankRates> rates() const { return rates_between(looks_.front(), looks_.back()); }

   private:
    std::deque<JobStatus> looks_;
};

// Shows screens in place of what the terminal has, which comes back at the end.
class FullScreen {
   public:
    FullScreen() {
        if (::tcgetattr(STDIN_FILENO, &former_) != 0) throw os_error("cannot read the terminal's settings", errno);
        termios keys = former_;
        keys.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
        keys.c_cc[VSUSP] = _POSIX_VDISABLE;
        if (::tcsetattr(STDIN_FILENO, TCSANOW, &keys) != 0) throw os_error("cannot set the terminal", errno);
        (void)write_whole(STDOUT_FILENO, "\x1b[?1049h\x1b[?25l");
    }
    ~FullScreen() {
        (void)write_whole(STDOUT_FILENO, "\x1b[?25h\x1b[?1049l");
        (void)::tcsetattr(STDIN_FILENO, TCSANOW, &former_);
    }
    FullScreen(const FullScreen&) = delete;
    FullScreen& operator=(const FullScreen&) = delete;

    // Returns false if nobody can see it any more.
    bool show(const std::vector<std::string>& lines) {
        std::string text = "\x1b[H";
        for (size_t i = 0; i < lines.size(); ++i) text += fmt::format("{}{}\x1b[K", i == 0 ? "" : "\r\n", lines[i]);
        return write_whole(STDOUT_FILENO, text + "\x1b[J");
    }

   private:
    termios former_{};
};

Screen screen_now() {
    winsize size{};
    Screen screen{.columns = usual_columns, .rows = 0, .colours = wants_colours(STDOUT_FILENO)};
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) {
        if (size.ws_col > 0) screen.columns = size.ws_col;
        screen.rows = size.ws_row;
    }
    return screen;
}

// Until `q`, a signal or the end of the job. Returns how it ended.
enum class End { asked, job_ended };
End watch(const std::string& agent, Looks& looks, milliseconds interval) {
    const Fd signals = signal_descriptor({SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH});
    FullScreen terminal;
    std::string trouble;
    for (Deadline next = Deadline::in(interval);;) {
        Screen screen = screen_now();
        if (screen.rows > 0) --screen.rows;  // for the last line
        std::vector<std::string> lines = top_screen(looks.last(), looks.rates(), screen);
        if (screen.rows > lines.size()) lines.emplace_back();
        lines.push_back(trouble.empty() ? "q quits" : trouble);
        if (!terminal.show(lines)) return End::asked;
        pollfd polls[] = {{signals.get(), POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
        const int ready = ::poll(polls, std::size(polls), static_cast<int>(next.remaining().count()));
        if (ready < 0 && errno != EINTR) throw os_error("poll", errno);
        signalfd_siginfo info{};
        while (::read(signals.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
            if (info.ssi_signo != SIGWINCH && info.ssi_signo != SIGCHLD) return End::asked;
        }
        if (ready > 0 && polls[1].revents != 0) {
            char key = 0;
            if (::read(STDIN_FILENO, &key, 1) <= 0 || key == 'q' || key == 'Q') return End::asked;
        }
        if (!next.expired()) continue;
        next = Deadline::in(interval);
        try {
            looks.add(look(agent));
            trouble.clear();
        } catch (const Error& error) {
            if (error.code() == Code::not_found) return End::job_ended;
            if (error.code() != Code::timeout) throw;
            trouble = error.what();
        }
    }
}

struct Arguments {
    std::string job;
    bool json = false;
    bool once = false;
    double interval = 1;
};

int top(const Arguments& arguments) {
    if (!(arguments.interval >= 0.1 && arguments.interval <= 3600)) {
        throw UsageError(fmt::format("--interval {}: expected 0.1 to 3600 seconds", arguments.interval));
    }
    const milliseconds interval{static_cast<int64_t>(arguments.interval * 1000)};
    std::vector<std::string> complaints;
    const std::vector<Found> found = find_jobs(arguments.job, complaints);
    if (found.empty()) {
        for (const std::string& complaint : complaints) fmt::print(stderr, "tessera top: {}\n", complaint);
        fmt::print(stderr, "tessera top: no job of `tessera run`{} runs on this host as this user\n",
                   arguments.job.empty() ? "" : fmt::format(" that is '{}'", arguments.job));
        return no_job;
    }
    if (found.size() > 1) {
        std::vector<JobStatus> jobs;
        for (const Found& one : found) jobs.push_back(one.job);
        fmt::print(stderr, "tessera top: several jobs run here; name one of them:\n");
        for (const std::string& line : job_list(jobs)) fmt::print(stderr, "  {}\n", line);
        return several_jobs;
    }
    const std::string agent = found.front().agent;
    const std::string name = found.front().job.job;
    Looks looks;
    looks.add(found.front().job);
    const auto say_ended = [&] { fmt::print(stderr, "tessera top: job {} has ended\n", name); };
    if (!arguments.json && !arguments.once && ::isatty(STDIN_FILENO) == 1 && ::isatty(STDOUT_FILENO) == 1) {
        if (watch(agent, looks, interval) == End::job_ended) say_ended();
        return 0;
    }
    (void)::poll(nullptr, 0, static_cast<int>(interval.count()));  // rates need two looks
    try {
        looks.add(look(agent));
    } catch (const Error& error) {
        if (error.code() != Code::not_found) throw;
        say_ended();
        return no_job;
    }
    if (arguments.json) {
        fmt::print("{}\n", with_rates(looks.last(), looks.rates()).dump());
    } else {
        Screen screen = screen_now();
        screen.rows = 0;
        for (const std::string& line : top_screen(looks.last(), looks.rates(), screen)) fmt::print("{}\n", line);
    }
    return 0;
}

}  // namespace

void add_top(Command& tessera) {
    Command command = tessera.add_command("top", "Watch a running job of `tessera run`");
    auto arguments = std::make_shared<Arguments>();
    command.add_option("job", arguments->job, "the job's id (or its beginning), --rdzv-id, or the pid of `tessera run`")
        .type_name("JOB")
        .default_text("the only job on this host");
    command.add_flag("--json", arguments->json, "look once and print one JSON object");
    command.add_flag("--once", arguments->once, "look once; the default if standard output is not a terminal");
    command.add_option("--interval", arguments->interval, "seconds between two looks").show_default();
    command.on_run([arguments] { return top(*arguments); });
}

}  // namespace tsr::cli
