#include "launch/summary.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <csignal>
#include <ctime>
#include <regex>
#include <string_view>
#include <tuple>

#include "launch/process.hpp"

namespace tsr {

namespace {

constexpr size_t shown_lines = 10;
constexpr size_t searched_bytes = 4096;  // of a message, for the peers that it names

std::string clock_time(double seconds) {
    const auto whole = static_cast<std::time_t>(std::floor(seconds));
    const int millis = static_cast<int>((seconds - std::floor(seconds)) * 1000);
    return fmt::format("{:%H:%M:%S}.{:03}", fmt::localtime(whole), millis);
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string_view trimmed(std::string_view line) {
    const size_t begin = line.find_first_not_of(" \t");
    return begin == std::string_view::npos ? "" : line.substr(begin);
}

// The line that says what went wrong is the last one, but for what Java and Rust print after it.
std::string_view last_line(const std::vector<std::string>& lines) {
    for (auto line = lines.rbegin(); line != lines.rend(); ++line) {
        const std::string_view text = trimmed(*line);
        const bool indented = text.size() < line->size();
        const bool frame = indented && (text.starts_with("at ") || text.starts_with("... "));
        if (!text.empty() && !frame && !text.starts_with("note: run with `RUST_BACKTRACE")) return text;
    }
    return "";
}

std::string meaning_of_signal(int signal) {
    switch (signal) {
        case SIGKILL: return "somebody killed it, or the kernel did for want of memory: see dmesg";
        case SIGSEGV: return "it touched memory that it does not have";
        case SIGBUS: return "memory behind a mapping is gone: a file cut short, or a full disk or /dev/shm";
        case SIGABRT: return "it gave up: a failed assertion, or an exception that nothing caught";
        case SIGILL: return "an instruction that this processor does not know";
        case SIGFPE: return "mostly a division of integers by zero";
        case SIGTERM: return "somebody asked it to end";
        case SIGXFSZ: return "a file, or shared memory, grew beyond the limit of `ulimit -f`";
        case SIGXCPU: return "it used up the processor time of `ulimit -t`";
        case SIGPIPE: return "it wrote where nobody reads any more";
        default: return "";
    }
}

std::string meaning_of(int wait_status) {
    if (WIFSIGNALED(wait_status)) return meaning_of_signal(WTERMSIG(wait_status));
    const int code = WEXITSTATUS(wait_status);
    if (code == 0) return "its peers still needed it: it had not finalized its communicator";
    if (code == 126) return "mostly a shell's: a program may not be executed";
    if (code == 127) return "mostly a shell's: a program was not found";
    if (code <= 128 || ::sigabbrev_np(code - 128) == nullptr) return "";
    const std::string meaning = meaning_of_signal(code - 128);
    return fmt::format("a shell or a JVM says so of {}{}", signal_name(code - 128),
                       meaning.empty() ? "" : ": " + meaning);
}

std::string ending(const RankEnd& end) {
    if (end.by_agent) return "(ended)";
    return WIFSIGNALED(end.wait_status) ? signal_name(WTERMSIG(end.wait_status))
                                        : fmt::format("exit {}", WEXITSTATUS(end.wait_status));
}

// --- who names whom

struct Named {
    int rank = 0;
    pid_t pid = 0;  // 0: not told
};

// The peers that died, failed or left, as the messages of Tessera's transports tell of them.
std::vector<Named> lost_peers_in(std::string_view text) {
    static const std::regex pattern(
        R"(rank (\d{1,9})(?: \(pid (\d{1,9})[^)]{0,300}\))? (?:died|left the communicator|failed: ))");
    const std::string searched(text.substr(0, searched_bytes));
    const auto number = [](const std::ssub_match& match) {
        const std::string digits = match.str();
        int value = 0;
        std::from_chars(digits.data(), digits.data() + digits.size(), value);
        return value;
    };
    std::vector<Named> named;
    for (std::sregex_iterator at(searched.begin(), searched.end(), pattern), none; at != none; ++at) {
        named.push_back({number((*at)[1]), number((*at)[2])});
    }
    return named;
}

// By the process if it is a rank's own (a rank may be a shell that started the trainer), else by the number.
bool names(const Named& named, const RankEnd& end, const std::vector<RankEnd>& ends) {
    const bool known = std::ranges::any_of(ends, [&](const RankEnd& e) { return e.pid == named.pid; });
    return known ? named.pid == end.pid : named.rank == end.rank;
}

bool told_of(std::string_view text, const RankEnd& victim, const RankEnd& end, const std::vector<RankEnd>& ends) {
    if (victim.rank == end.rank) return false;
    // An uncaught exception ends some programs by SIGABRT; the other signals are not of a peer's making.
    if (WIFSIGNALED(victim.wait_status) && WTERMSIG(victim.wait_status) != SIGABRT) return false;
    return std::ranges::any_of(lost_peers_in(text), [&](const Named& named) { return names(named, end, ends); });
}

std::string all_text(const RankEnd& end) {
    return fmt::format("{}\n{}", end.error ? end.error->message.substr(0, searched_bytes) : "",
                       fmt::join(end.last_lines, "\n"));
}

bool failed_by_itself(const RankEnd& end) { return !end.by_agent && end.wait_status != 0; }

// Not a failure by its status, but by what those say that failed.
bool failed_by_evidence(const RankEnd& end, const std::vector<RankEnd>& ends) {
    return std::ranges::any_of(ends, [&](const RankEnd& victim) {
        if (!failed_by_itself(victim)) return false;
        if (end.by_agent) return told_of(victim.message(), victim, end, ends);
        return end.wait_status == 0 && end.order <= victim.order && told_of(all_text(victim), victim, end, ends);
    });
}

}  // namespace

double RankEnd::when() const {
    return error && error->timestamp > 0 && error->timestamp < time ? error->timestamp : time;
}

std::string RankEnd::message() const {
    if (error) return first_line(error->message);
    const std::string_view line = last_line(last_lines);
    return line.empty() ? "" : fmt::format("last stderr line: {}", line);
}

std::string RankEnd::cause() const {
    if (by_agent)
        return fmt::format("rank {} failed or left its communicator first, and was ended with the others", rank);
    const std::string meaning = meaning_of(wait_status);
    return fmt::format("rank {} {}{}", rank, describe_status(wait_status),
                       meaning.empty() ? "" : fmt::format(" ({})", meaning));
}

std::vector<RankEnd> failures_of(const std::vector<RankEnd>& ends) {
    std::vector<RankEnd> failures;
    std::ranges::copy_if(ends, std::back_inserter(failures),
                         [&](const RankEnd& end) { return failed_by_itself(end) || failed_by_evidence(end, ends); });
    std::vector<int> victims;
    for (const RankEnd& failure : failures) {
        const bool victim = std::ranges::any_of(failures, [&](const RankEnd& other) {
            return told_of(other.wait_status == 0 && !other.by_agent ? all_text(failure) : failure.message(), failure,
                           other, ends);
        });
        if (victim) victims.push_back(failure.rank);
    }
    const auto key = [&](const RankEnd& f) {
        const bool victim = std::ranges::find(victims, f.rank) != victims.end();
        return std::make_tuple(victim, f.order, !WIFSIGNALED(f.wait_status), f.when(), f.rank);
    };
    std::ranges::sort(failures, [&](const RankEnd& a, const RankEnd& b) { return key(a) < key(b); });
    return failures;
}

int exit_code_of(const std::vector<RankEnd>& failures) {
    const auto own = std::ranges::find_if(failures, failed_by_itself);
    return own == failures.end() ? 0 : exit_code_of(own->wait_status);
}

std::string summary_of(const std::vector<RankEnd>& failures, const std::vector<RankEnd>& ends) {
    const RankEnd& root = failures.front();
    std::string out = fmt::format("the job failed: {}", root.cause());
    if (!root.message().empty()) out += ": " + root.message();
    size_t host_width = 4;
    for (const RankEnd& failure : failures) host_width = std::max(host_width, failure.host.size());
    out += fmt::format("\n\n  {:<12}  {:>4}  {:<{}}  {:>8}  {:<9}  {}\n", "time", "rank", "host", host_width, "pid",
                       "end", "message");
    for (const RankEnd& failure : failures) {
        const std::string message = failure.message();
        out += fmt::format("  {:<12}  {:>4}  {:<{}}  {:>8}  {:<9}  {}{}\n", clock_time(failure.when()), failure.rank,
                           failure.host, host_width, failure.pid, ending(failure), message.empty() ? "-" : message,
                           &failure == &root ? "   <- root cause" : "");
    }
    for (const RankEnd& end : ends) {
        const auto same = [&](const RankEnd& f) { return f.rank == end.rank; };
        if (end.by_agent || end.wait_status != 0 || end.time > root.time || std::ranges::any_of(failures, same))
            continue;
        out += fmt::format("\n  rank {} had ended before, with exit code 0, at {}\n", end.rank, clock_time(end.time));
    }
    const auto quote = [&](std::string_view line) { out += fmt::format("    {}\n", line); };
    if (root.error && !root.error->traceback.empty()) {
        out += fmt::format("\n  rank {}'s traceback:\n", root.rank);
        std::string_view rest = root.error->traceback;
        while (!rest.empty()) {
            const size_t end = rest.find('\n');
            quote(rest.substr(0, end));
            rest = end == std::string_view::npos ? "" : rest.substr(end + 1);
        }
    } else if (root.last_lines.size() > 1) {
        const size_t first = root.last_lines.size() - std::min(root.last_lines.size(), shown_lines);
        out += fmt::format("\n  the last lines of rank {}'s standard error:\n", root.rank);
        for (size_t i = first; i < root.last_lines.size(); ++i) quote(root.last_lines[i]);
    }
    if (!root.log_file.empty()) out += fmt::format("\n  its output: {}\n", root.log_file);
    out.pop_back();  // the caller ends the line
    return out;
}

}  // namespace tsr
