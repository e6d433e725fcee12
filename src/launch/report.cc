#include "launch/report.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <regex>
#include <string_view>

#include "base/cut_list.hpp"
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

// Removes the message that a traceback repeats: Python's after the frames, Java's before them, with the exception's
// full name. If the traceback is nothing else, its first line stays: Rust's has the error's code before the message.
Lines without_message(Lines trace, const Lines& message) {
    if (message.empty() || message.front().empty() || trace.size() < message.size()) return trace;
    for (size_t at = trace.size() - message.size() + 1; at-- > 0;) {
        const auto begin = trace.begin() + static_cast<std::ptrdiff_t>(at);
        if (!begin->ends_with(message.front()) || !std::equal(message.begin() + 1, message.end(), begin + 1)) continue;
        const std::ptrdiff_t kept = trace.size() == message.size() ? 1 : 0;
        trace.erase(begin + kept, begin + static_cast<std::ptrdiff_t>(message.size()));
        break;
    }
    return trace;
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
        const Lines trace = without_message(without_runtime_frames(lines_of(root.error->traceback)), message);
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

std::string whole_message(const RankEnd& end) { return end.error ? end.error->message : end.message(); }

// Ranks often report the same error, each prefixed with its own rank.
std::string without_own_number(const RankEnd& end) {
    std::string text = whole_message(end);
    const std::string own = fmt::format("rank {}: ", end.rank);
    const size_t at = text.find(own);
    return at == std::string::npos ? text : text.erase(at, own.size());
}

bool say_the_same(const RankEnd& one, const RankEnd& other) {
    const auto begins = [](std::string_view part, std::string_view text) {
        return shown_of(part) != part && text.starts_with(shown_of(part));
    };
    const auto same = [&](std::string_view a, std::string_view b) { return a == b || begins(a, b) || begins(b, a); };
    return same(whole_message(one), whole_message(other)) || same(without_own_number(one), without_own_number(other));
}

// The first failure or, if its list is cut, another failure with the same list in full.
const RankEnd& root_of(const std::vector<RankEnd>& failures) {
    const std::string first = whole_message(failures.front());
    if (shown_of(first) == first) return failures.front();
    const auto tells_all = [&](const RankEnd& failure) {
        const std::string text = whole_message(failure);
        return shown_of(text) == text && say_the_same(failure, failures.front());
    };
    const auto root = std::ranges::find_if(failures, tells_all);
    return root != failures.end() ? *root : failures.front();
}

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
    const RankEnd& root = root_of(failures);
    std::string text = fmt::format("the job failed: {}", root.cause());
    if (!root.message().empty()) text += ": " + root.message();
    text += fmt::format("\n\n  root cause: rank {} (pid {} on {}) at {}\n", root.rank, root.pid, root.host,
                        clock_time(root.when()));
    text += details_of(root);
    text += others_of(root, failures, ends, width);
    text.pop_back();  // the caller ends the line
    return text;
}

}  // namespace tsr
