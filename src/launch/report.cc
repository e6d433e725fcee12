#include "launch/report.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <regex>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "launch/job.hpp"
#include "launch/process.hpp"

namespace tsr {

namespace {

constexpr size_t shown_lines = 10;
constexpr size_t most_message_lines = 40;

using Lines = std::vector<std::string_view>;

Lines lines_of(std::string_view text) {
    Lines lines;
    while (!text.empty()) {
        const size_t end = text.find('\n');
        lines.push_back(text.substr(0, end));
        text = end == std::string_view::npos ? "" : text.substr(end + 1);
    }
    return lines;
}

std::string clock_time(double seconds) {
    const auto whole = static_cast<std::time_t>(std::floor(seconds));
    const int millis = static_cast<int>((seconds - std::floor(seconds)) * 1000);
    return fmt::format("{:%H:%M:%S}.{:03}", fmt::localtime(whole), millis);
}

std::string ending(const RankEnd& end) {
    if (!end.gone.empty()) return "(lost)";
    if (end.by_agent) return "(ended)";
    return WIFSIGNALED(end.wait_status) ? signal_name(WTERMSIG(end.wait_status))
                                        : fmt::format("exit {}", WEXITSTATUS(end.wait_status));
}

// --- the root cause

// The beginning is enough, and matching a line of some 100,000 characters would overflow the stack.
constexpr size_t looked_at = 200;

// Whether `line` is a frame of a Rust backtrace above the panic or below the program's main function.
bool is_runtime_frame(std::string_view line) {
    static const std::regex pattern(
        R"(\s*\d+: (<?(std|core|alloc)::|<(alloc|core|std)|tessera::launch::|rust_begin_unwind|__|_start|main$|clone).*)");
    line = line.substr(0, looked_at);
    return std::regex_match(line.begin(), line.end(), pattern);
}

Lines without_runtime_frames(const Lines& lines) {
    static const std::regex place(R"(\s+at .*)");
    Lines kept;
    bool dropping = false;
    for (const std::string_view line : lines) {
        const std::string_view head = line.substr(0, looked_at);
        const bool belongs = dropping && std::regex_match(head.begin(), head.end(), place);
        dropping = belongs || is_runtime_frame(line);
        if (!dropping) kept.push_back(line);
    }
    return kept;
}

// Whether `trace` has the message at line `at`; something may stand before it.
bool repeats(const Lines& trace, size_t at, const Lines& message) {
    if (message.empty() || message.front().empty() || trace.size() < at + message.size()) return false;
    const auto begin = trace.begin() + static_cast<std::ptrdiff_t>(at);
    return begin->ends_with(message.front()) && std::equal(message.begin() + 1, message.end(), begin + 1);
}

// Removes the message that a traceback repeats: Python's after the frames, Java's and Rust's before them.
Lines without_message(Lines trace, const Lines& message) {
    size_t at = 0;
    if (!repeats(trace, 0, message)) {
        for (at = trace.size(); at > 0 && !repeats(trace, at, message);) --at;
        if (at == 0) return trace;
    }
    const auto begin = trace.begin() + static_cast<std::ptrdiff_t>(at);
    trace.erase(begin, begin + static_cast<std::ptrdiff_t>(message.size()));
    return trace;
}

// What a traceback that begins with the message has before it, such as the error's code in Rust: "MISMATCH: ".
std::string_view kind_of(const RankEnd& root) {
    if (!root.error || !root.late.empty()) return "";
    const Lines trace = lines_of(root.error->traceback);
    const Lines message = lines_of(root.error->message);
    if (!repeats(trace, 0, message)) return "";
    return trace.front().substr(0, trace.front().size() - message.front().size());
}

std::string quoted(const Lines& lines) {
    std::string text;
    for (const std::string_view line : lines) text += fmt::format("    {}\n", line);
    return text;
}

// Details that are not in the headline.
std::string details_of(const RankEnd& root) {
    std::string text;
    if (root.error) {
        const Lines message = lines_of(root.error->message);
        if (message.size() > 1) {
            const size_t shown = std::min(message.size(), most_message_lines);
            const Lines further(message.begin() + 1, message.begin() + static_cast<std::ptrdiff_t>(shown));
            text += fmt::format("\n{}", quoted(further));
            if (shown < message.size()) text += fmt::format("    ... {} more lines\n", message.size() - shown);
        }
        Lines trace = without_runtime_frames(lines_of(root.error->traceback));
        if (root.late.empty()) trace = without_message(std::move(trace), message);  // otherwise only here
        if (!trace.empty()) text += fmt::format("\n  rank {}'s traceback:\n{}", root.rank, quoted(trace));
    } else if (root.last_lines.size() > 1) {
        Lines last = without_runtime_frames(Lines(root.last_lines.begin(), root.last_lines.end()));
        last.erase(last.begin(), last.end() - static_cast<std::ptrdiff_t>(std::min(last.size(), shown_lines)));
        text += fmt::format("\n  the last lines of rank {}'s standard error:\n{}", root.rank, quoted(last));
    }
    if (!root.log_file.empty()) text += fmt::format("\n  its output: {}\n", root.log_file);
    return text;
}

// --- the others

std::string told_briefly(const RankEnd& failure, const RankEnd& root, const std::vector<RankEnd>& failures) {
    for (const RankEnd& culprit : failures) {
        if (!blames(failure, culprit)) continue;
        const std::string status(code_of(failure));
        const char* fate = !culprit.late.empty()              ? "was late"
                           : culprit.by_agent                 ? "failed or left"
                           : culprit.wait_status == 0         ? "left"
                           : WIFSIGNALED(culprit.wait_status) ? "died"
                                                              : "failed";
        return fmt::format("{}because rank {} {}", status.empty() ? "" : status + " ", culprit.rank, fate);
    }
    const std::string message = failure.message();
    if (message.empty()) return "-";
    if (say_the_same(failure, root)) return fmt::format("the same as rank {}", root.rank);
    return message;
}

struct Row {
    std::vector<int> ranks;
    double time;
    std::string ending;
    std::string text;
};

std::vector<Row> rows_of(const RankEnd& root, const std::vector<RankEnd>& failures) {
    std::vector<Row> rows;
    for (const RankEnd& failure : failures) {
        if (&failure == &root) continue;
        const std::string text = told_briefly(failure, root, failures);
        const std::string end = ending(failure);
        const auto same = [&](const Row& row) { return row.text == text && row.ending == end; };
        auto row = std::ranges::find_if(rows, same);
        if (row == rows.end()) row = rows.insert(rows.end(), Row{{}, failure.when(), end, text});
        row->ranks.push_back(failure.rank);
        row->time = std::min(row->time, failure.when());
    }
    return rows;
}

// Cuts to `width` characters, never inside a multi-byte character.
std::string cut(std::string line, size_t width) {
    size_t columns = 0;
    for (size_t at = 0; width != 0 && at < line.size(); ++at) {
        const bool begins = (static_cast<unsigned char>(line[at]) & 0xc0) != 0x80;
        if (!begins || ++columns < width) continue;
        const auto goes_on = [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; };
        if (std::none_of(line.begin() + static_cast<std::ptrdiff_t>(at) + 1, line.end(), goes_on)) return line;  // fits
        return line.substr(0, at) + "…";
    }
    return line;
}

std::string others_of(const RankEnd& root, const std::vector<RankEnd>& failures, const std::vector<RankEnd>& ends,
                      size_t width) {
    std::string text;
    const std::vector<Row> rows = rows_of(root, failures);
    size_t widest = 0;
    for (const Row& row : rows) widest = std::max(widest, rank_spans(row.ranks).size());
    if (!rows.empty()) text += "\n  then:\n";
    for (const Row& row : rows) {
        text += cut(fmt::format("    {}  {:<{}}  {:<8}  {}", clock_time(row.time), rank_spans(row.ranks), widest,
                                row.ending, row.text),
                    width) +
                "\n";
    }
    for (const RankEnd& end : ends) {
        const auto same = [&](const RankEnd& f) { return f.rank == end.rank; };
        if (end.by_agent || end.wait_status != 0 || end.time > failures.front().time ||
            std::ranges::any_of(failures, same)) {
            continue;
        }
        text += fmt::format("\n  rank {} had already ended with exit code 0 at {}\n", end.rank, clock_time(end.time));
    }
    return text;
}

}  // namespace

std::string report_of(const std::vector<RankEnd>& failures, const std::vector<RankEnd>& ends, size_t width) {
    const RankEnd& root = failures.front();
    std::string text = fmt::format("the job failed: {}", root.cause());
    if (!root.message().empty()) text += fmt::format(": {}{}", kind_of(root), root.message());
    const std::string pid = root.pid != 0 ? fmt::format("pid {} ", root.pid) : "";
    text +=
        fmt::format("\n\n  root cause: rank {} ({}on {}) at {}\n", root.rank, pid, root.host, clock_time(root.when()));
    text += details_of(root);
    text += others_of(root, failures, ends, width);
    text.pop_back();  // the caller ends the line
    return text;
}

namespace {

Json text_or_null(std::string_view text) { return text.empty() ? Json() : Json(readable_utf8(text)); }

Json number_or_null(int64_t number, bool known) { return known ? Json(number) : Json(); }

// A rank that failed, and because of whom.
Json failure_json(const RankEnd& end, const std::vector<RankEnd>& failures) {
    const bool signaled = WIFSIGNALED(end.wait_status);
    const auto culprit = std::ranges::find_if(failures, [&](const RankEnd& other) { return blames(end, other); });
    const auto& told = end.error ? end.error : end.failure;
    Json::Array last_lines;
    for (const std::string& line : end.last_lines) last_lines.emplace_back(readable_utf8(line));
    return Json::Object{
        {"rank", end.rank},
        {"host", readable_utf8(end.host)},
        {"pid", number_or_null(end.pid, end.pid != 0)},
        {"time", end.when()},
        {"cause", readable_utf8(end.cause())},
        {"message", text_or_null(end.message())},
        {"exit_code", number_or_null(WEXITSTATUS(end.wait_status), !signaled && end.gone.empty())},
        {"signal", signaled ? Json(signal_name(WTERMSIG(end.wait_status))) : Json()},
        {"core_dumped", signaled && WCOREDUMP(end.wait_status)},
        {"ended_by_launcher", end.by_agent},
        {"host_lost", text_or_null(end.gone)},
        {"code", text_or_null(code_of(end))},
        {"because_of_rank", number_or_null(culprit != failures.end() ? culprit->rank : -1, culprit != failures.end())},
        {"error", told ? text_or_null(told->message) : Json()},
        {"traceback", end.error ? text_or_null(end.error->traceback) : Json()},
        {"last_stderr_lines", std::move(last_lines)},
        {"log", text_or_null(end.log_file)}};
}

}  // namespace

Json report_json(const std::vector<RankEnd>& failures, const std::vector<RankEnd>& ends) {
    Json::Array others;
    for (size_t i = 1; i < failures.size(); ++i) others.push_back(failure_json(failures[i], failures));
    Json::Array well;
    for (const RankEnd& end : ends) {
        if (end.wait_status == 0 && !end.by_agent) well.emplace_back(end.rank);
    }
    return Json::Object{{"tessera_report", 1},
                        {"root_cause", failures.empty() ? Json() : failure_json(failures.front(), failures)},
                        {"then", std::move(others)},
                        {"exited_with_0", std::move(well)}};
}

}  // namespace tsr
