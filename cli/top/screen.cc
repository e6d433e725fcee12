#include "top/screen.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>

#include "printable.hpp"

namespace tsr::cli {

namespace {

constexpr std::string_view none = "-";
constexpr size_t wide = 110;  // columns from which on more is shown

// Of a text without control characters; a character of several bytes counts as one column.
size_t columns_of(std::string_view text) {
    return static_cast<size_t>(
        std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

std::string fit(std::string_view text, size_t width) {
    if (columns_of(text) <= width) return std::string(text);
    std::string cut;
    size_t columns = 0;
    for (const char c : text) {
        const bool begins = (static_cast<unsigned char>(c) & 0xc0) != 0x80;
        if (begins && ++columns >= width) break;
        cut += c;
    }
    return width == 0 ? "" : cut + "…";
}

std::string padded(std::string_view text, size_t width, bool right) {
    std::string cell = fit(text, width);
    const std::string space(width - columns_of(cell), ' ');
    return right ? space + cell : cell + space;
}

std::string plural(size_t count, std::string_view noun) {
    return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string span_text(double seconds) {
    if (seconds < 0.9995) return fmt::format("{:.0f} ms", seconds * 1000);
    if (seconds < 99.95) return fmt::format("{:.1f} s", seconds);
    return age_text(seconds);
}

std::string rate_text(std::optional<double> rate) {
    if (!rate) return std::string(none);
    return *rate < 10     ? fmt::format("{:.2f}", *rate)
           : *rate < 1000 ? fmt::format("{:.1f}", *rate)
                          : fmt::format("{:.0f}", *rate);
}

std::string share_text(std::optional<double> share) {
    return share ? fmt::format("{:.1f} %", *share * 100) : std::string(none);
}

std::string clock_text(double seconds) {
    const auto whole = static_cast<int64_t>(std::max(seconds, 0.0));
    const int64_t days = whole / 86400;
    return fmt::format("{}{:02}:{:02}:{:02}", days > 0 ? fmt::format("{} d ", days) : "", whole / 3600 % 24,
                       whole / 60 % 60, whole % 60);
}

struct Column {
    std::string title;
    size_t width;
    bool right;
    std::string (*cell)(const JobStatus& job, const RankStatus& rank, const RankRates& rates);
};

const std::vector<Column>& all_columns() {
    static const std::vector<Column> columns{
        {"RANK", 4, true, [](auto&, auto& rank, auto&) { return std::to_string(rank.rank); }},
        {"HOST", 9, false, [](auto&, auto& rank, auto&) { return printable(rank.host); }},
        {"PROGRAM", 14, false, [](auto&, auto& rank, auto&) { return printable(rank.program); }},
        {"PID", 7, true,
         [](auto&, auto& rank, auto&) { return rank.pid > 0 ? std::to_string(rank.pid) : std::string(none); }},
        {"STATE", 8, false, [](auto&, auto& rank, auto&) { return printable(rank.state); }},
        {"STEP", 8, true,
         [](auto&, auto& rank, auto&) {
             return rank.figures && rank.figures->steps > 0 ? std::to_string(rank.figures->step) : std::string(none);
         }},
        {"STEPS/S", 7, true, [](auto&, auto&, auto& rates) { return rate_text(rates.steps_a_second); }},
        {"AGO", 6, true,
         [](auto& job, auto& rank, auto&) {
             if (!rank.figures || rank.figures->step_time <= 0) return std::string(none);
             return age_text(job.time - rank.figures->step_time);
         }},
        {"COMM", 7, true, [](auto&, auto&, auto& rates) { return share_text(rates.exposed); }},
        {"BYTES/S", 8, true,
         [](auto&, auto&, auto& rates) {
             return rates.bytes_a_second ? bytes_text(*rates.bytes_a_second) : std::string(none);
         }},
        {"SAVED", 6, true,
         [](auto& job, auto& rank, auto&) {
             if (!rank.figures || rank.figures->save.time <= 0) return std::string(none);
             return age_text(job.time - rank.figures->save.time);
         }},
        {"TOOK", 7, true,
         [](auto&, auto& rank, auto&) {
             if (!rank.figures || rank.figures->save.time <= 0) return std::string(none);
             return span_text(rank.figures->save.duration_s);
         }},
        {"WRITTEN", 8, true,
         [](auto&, auto& rank, auto&) {
             if (!rank.figures || rank.figures->saves == 0) return std::string(none);
             return bytes_text(static_cast<double>(rank.figures->saved_bytes));
         }},
    };
    return columns;
}

// What fits; the names of hosts get the room that is left.
std::vector<Column> columns_for(const JobStatus& job, size_t width) {
    std::vector<Column> columns;
    size_t used = 0;
    for (const Column& column : all_columns()) {
        const bool is_extra = column.title == "PROGRAM" || column.title == "TOOK" || column.title == "WRITTEN";
        if (is_extra && width < wide) continue;
        const size_t more = column.width + (columns.empty() ? 0 : 1);
        if (used + more > width) break;
        used += more;
        columns.push_back(column);
    }
    size_t longest = 0;
    for (const RankStatus& rank : job.ranks) longest = std::max(longest, columns_of(printable(rank.host)));
    for (Column& column : columns) {
        if (column.title == "HOST") column.width += std::min(width - used, longest - std::min(longest, column.width));
    }
    return columns;
}

// Of the job as a whole: it is as fast as its slowest rank.
std::string summary(const JobStatus& job, const std::vector<RankRates>& rates) {
    std::optional<int64_t> step;
    std::optional<double> slowest;
    double exposed = 0;
    double bytes = 0;
    size_t measured = 0;
    for (size_t i = 0; i < job.ranks.size(); ++i) {
        const auto& figures = job.ranks[i].figures;
        if (figures && figures->steps > 0) step = std::min(step.value_or(figures->step), figures->step);
        const RankRates& one = rates[i];
        if (one.steps_a_second) slowest = std::min(slowest.value_or(*one.steps_a_second), *one.steps_a_second);
        if (!one.exposed) continue;
        ++measured;
        exposed += *one.exposed;
        bytes += *one.bytes_a_second;
    }
    std::string text = step ? fmt::format("step {}", *step) : "no step yet";
    if (slowest) text += fmt::format(", {} steps/s", rate_text(slowest));
    if (measured > 0) {
        text += fmt::format(", exposed communication {:.1f} %, {}/s", exposed * 100 / static_cast<double>(measured),
                            bytes_text(bytes));
    }
    return text;
}

std::string of_save(const JobStatus& job) {
    if (!job.save) return "no checkpoint yet";
    return fmt::format("checkpoint of step {}, {} ago, took {}", job.save->step, age_text(job.time - job.save->time),
                       span_text(job.save->duration_s));
}

std::string painted(std::string text, const char* code, bool colours) {
    return colours ? fmt::format("\x1b[{}m{}\x1b[0m", code, text) : text;
}

}  // namespace

std::string age_text(double seconds) {
    seconds = std::max(seconds, 0.0);
    if (seconds < 100) return fmt::format("{:.0f} s", seconds);
    if (seconds < 100 * 60) return fmt::format("{:.0f} min", seconds / 60);
    if (seconds < 48 * 3600) return fmt::format("{:.0f} h", seconds / 3600);
    return fmt::format("{:.0f} d", seconds / 86400);
}

std::string bytes_text(double bytes) {
    constexpr std::array<const char*, 6> units{"B", "kB", "MB", "GB", "TB", "PB"};
    size_t unit = 0;
    while (bytes >= 999.5 && unit + 1 < units.size()) {
        bytes /= 1000;
        ++unit;
    }
    const int digits = unit == 0 || bytes >= 99.95 ? 0 : 1;
    return fmt::format("{:.{}f} {}", bytes, digits, units.at(unit));
}

std::vector<std::string> top_screen(const JobStatus& job, const std::vector<RankRates>& rates, const Screen& screen) {
    std::vector<std::string> lines;
    const auto add = [&](const std::string& text, const char* code = nullptr) {
        std::string line = fit(text, screen.columns);
        lines.push_back(code != nullptr ? painted(std::move(line), code, screen.colours) : std::move(line));
    };
    add(fmt::format("{}: {} for {}, {} on {}, job {}", printable(fmt::format("{}", fmt::join(job.programs, " : "))),
                    job.state, clock_text(job.time - job.started), plural(static_cast<size_t>(job.world_size), "rank"),
                    job.coordinates ? plural(job.hosts.size(), "host") : "several hosts", printable(job.job)),
        "1");
    add(summary(job, rates));
    add(fmt::format("{}; round {}, {} of {} restarts", of_save(job), job.round, job.restarts, job.max_restarts));
    if (!job.coordinates) {
        add(fmt::format("only the ranks of this host, {}: its agent does not coordinate the job", printable(job.host)));
    }
    if (job.hosts.size() > 1) {
        std::string hosts;
        for (const HostStatus& host : job.hosts) {
            hosts +=
                fmt::format("{}{} {}{}", hosts.empty() ? "" : ", ", printable(host.host),
                            plural(static_cast<size_t>(host.ranks), "rank"), host.coordinates ? " (coordinates)" : "");
        }
        add("hosts: " + hosts);
    }
    add("");
    const std::vector<Column> columns = columns_for(job, screen.columns);
    const auto row = [&](const auto& cell) {
        std::string line;
        for (const Column& column : columns) {
            line += fmt::format("{}{}", line.empty() ? "" : " ", padded(cell(column), column.width, column.right));
        }
        return line;
    };
    add(row([](const Column& column) { return column.title; }), "7");
    size_t shown = job.ranks.size();
    if (screen.rows > 0 && lines.size() + shown > screen.rows) {
        shown = screen.rows > lines.size() + 1 ? screen.rows - lines.size() - 1 : 0;
    }
    for (size_t i = 0; i < shown; ++i) {
        const RankStatus& rank = job.ranks[i];
        const bool ended_badly = rank.state != "running" && rank.state != "exit 0";
        add(row([&](const Column& column) { return column.cell(job, rank, rates[i]); }), ended_badly ? "31" : nullptr);
    }
    if (shown < job.ranks.size()) {
        add(fmt::format("and {}; --json shows all", plural(job.ranks.size() - shown, "more rank")));
    }
    if (screen.rows > 0 && lines.size() > screen.rows) lines.resize(screen.rows);
    return lines;
}

std::vector<std::string> job_list(const std::vector<JobStatus>& jobs) {
    std::vector<std::string> lines;
    for (const JobStatus& job : jobs) {
        lines.push_back(fmt::format("{}  pid {}  {}  {}  {}", printable(job.job), job.launcher,
                                    plural(static_cast<size_t>(job.world_size), "rank"),
                                    clock_text(job.time - job.started),
                                    printable(fmt::format("{}", fmt::join(job.programs, " : ")))));
    }
    return lines;
}

}  // namespace tsr::cli
