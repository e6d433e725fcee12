#include "launch/summary.hpp"

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <initializer_list>
#include <regex>
#include <string_view>
#include <tuple>

#include "base/cut_list.hpp"
#include "base/error.hpp"
#include "launch/job.hpp"
#include "launch/process.hpp"

namespace tsr {

namespace {

constexpr size_t searched_bytes = 4096;  // of a message, for PyTorch's words

std::string_view trimmed(std::string_view line) {
    const size_t begin = line.find_first_not_of(" \t");
    return begin == std::string_view::npos ? "" : line.substr(begin);
}

// Matches what Java and Rust print after the line that states the error.
bool is_of_a_trace(std::string_view line) {
    static const std::regex pattern(R"(\s+(at .*|\.\.\. .*|\d+: .*)|stack backtrace:|note: .*RUST_BACKTRACE.*)");
    return std::regex_match(line.begin(), line.end(), pattern);
}

// The line that states the error: the last one, except for those.
std::string_view last_line(const std::vector<std::string>& lines) {
    for (auto line = lines.rbegin(); line != lines.rend(); ++line) {
        if (!trimmed(*line).empty() && !is_of_a_trace(*line)) return trimmed(*line);
    }
    return "";
}

// A line that ends with a colon is meaningless without the next.
std::string first_words(std::string_view text) {
    const size_t end = text.find('\n');
    const std::string_view first = text.substr(0, end);
    if (end == std::string_view::npos || !first.ends_with(':')) return std::string(first);
    const std::string_view rest = text.substr(end + 1);
    return fmt::format("{} {}", first, trimmed(rest.substr(0, rest.find('\n'))));
}

std::string meaning_of_signal(int signal) {
    switch (signal) {
        case SIGKILL: return "sent by a user, or by the kernel when out of memory; see dmesg";
        case SIGSEGV: return "invalid memory access";
        case SIGBUS: return "mapped memory is gone: a truncated file, or a full disk or /dev/shm";
        case SIGABRT: return "a failed assertion or an uncaught exception";
        case SIGILL: return "an instruction that this processor does not support";
        case SIGFPE: return "usually an integer division by zero";
        case SIGTERM: return "something asked it to stop";
        case SIGXFSZ: return "a file or shared memory exceeded the limit of `ulimit -f`";
        case SIGXCPU: return "it exceeded the processor time of `ulimit -t`";
        case SIGPIPE: return "it wrote to a pipe or socket without a reader";
        default: return "";
    }
}

std::string meaning_of(int wait_status) {
    if (WIFSIGNALED(wait_status)) return meaning_of_signal(WTERMSIG(wait_status));
    const int code = WEXITSTATUS(wait_status);
    if (code == 0) return "its peers still needed it: it had not joined, or not finalized, its communicator";
    if (code == 126) return "usually from a shell: a program is not executable";
    if (code == 127) return "usually from a shell: a program was not found";
    if (code <= 128 || ::sigabbrev_np(code - 128) == nullptr) return "";
    const std::string meaning = meaning_of_signal(code - 128);
    return fmt::format("how a shell or a JVM reports {}{}", signal_name(code - 128),
                       meaning.empty() ? "" : ": " + meaning);
}

// --- who failed because of whom

// An uncaught exception ends some programs by SIGABRT, which does not count as a crash here.
bool crashed(const RankEnd& end) {
    return !end.by_agent && WIFSIGNALED(end.wait_status) && WTERMSIG(end.wait_status) != SIGABRT;
}

// The error of a rank: the one that it recorded, else its communicator's failure, unless it crashed.
const RecordedError* reason_of(const RankEnd& end) {
    if (end.error) return &*end.error;
    return end.failure && !crashed(end) ? &*end.failure : nullptr;
}

bool failed_with(const RankEnd& victim, const RankEnd& end, std::initializer_list<Code> codes) {
    const RecordedError* reason = reason_of(victim);
    if (reason == nullptr || reason->peer != end.rank || victim.rank == end.rank) return false;
    return std::ranges::any_of(codes, [&](Code code) { return reason->code == code_name(code); });
}

bool waited_for(const RankEnd& victim, const RankEnd& end) {
    return failed_with(victim, end, {Code::timeout}) || (!victim.missed.empty() && victim.missed[0] == end.rank);
}

bool was_lost_to(const RankEnd& victim, const RankEnd& end) {
    return waited_for(victim, end) || failed_with(victim, end, {Code::peer_lost, Code::aborted});
}

std::string all_text(const RankEnd& end) {
    return fmt::format("{}\n{}", end.error ? end.error->message.substr(0, searched_bytes) : "",
                       fmt::join(end.last_lines, "\n"));
}

bool failed_by_itself(const RankEnd& end) { return !end.by_agent && end.wait_status != 0; }

// The ranks that were missing when PyTorch created its store, in init_process_group. Rank 0, which serves it, reports
// only how many joined; those fail with it, so the missing ones are those that did not report. The others report only
// that nobody serves the store.
std::vector<int> missed_by_torch(const RankEnd& victim, const std::vector<int>& silent, size_t world_size) {
    static const std::regex no_store(R"(client socket has timed out after \d+ms while trying to connect to)");
    static const std::regex too_few(R"(waiting for clients\. (\d{1,9})/(\d{1,9}) clients joined)");
    if (!failed_by_itself(victim) || silent.empty()) return {};
    const std::string text = all_text(victim);
    if (std::regex_search(text, no_store)) return silent.front() == 0 ? std::vector<int>{0} : std::vector<int>{};
    std::smatch counts;
    if (!std::regex_search(text, counts, too_few)) return {};
    const size_t came = std::stoul(counts[1]);
    return std::stoul(counts[2]) == world_size && came + silent.size() == world_size ? silent : std::vector<int>{};
}

std::vector<RankEnd> with_missed(std::vector<RankEnd> ends) {
    std::vector<int> silent;
    for (const RankEnd& end : ends) {
        if (!failed_by_itself(end) && !end.error) silent.push_back(end.rank);
    }
    std::ranges::sort(silent);
    for (RankEnd& end : ends) end.missed = missed_by_torch(end, silent, ends.size());
    return ends;
}

// Not a failure by its status, but others failed because of it.
bool failed_by_evidence(const RankEnd& end, const std::vector<RankEnd>& ends) {
    if (failed_by_itself(end)) return false;
    return std::ranges::any_of(
        ends, [&](const RankEnd& victim) { return failed_by_itself(victim) && was_lost_to(victim, end); });
}

bool is_victim_of(const RankEnd& victim, const RankEnd& end) {
    if (waited_for(end, victim)) return waited_for(victim, end);  // it is the one that was late
    return was_lost_to(victim, end);
}

// The report of a rank that waited, about the ranks that were missing.
std::string words_of(const RankEnd& waiting) {
    if (waiting.missed.empty()) return first_words(reason_of(waiting)->message);
    return fmt::format("rank {} reported: {} ({} reported nothing)", waiting.rank,
                       waiting.error ? first_words(waiting.error->message) : last_line(waiting.last_lines),
                       rank_spans(waiting.missed));
}

// --- ranks that report the same

std::string whole_message(const RankEnd& end) { return end.error ? end.error->message : end.message(); }

// All ranks may report the error of one.
bool is_of_this_rank(const RankEnd& end) { return end.error && end.error->job_rank == end.rank; }

// Ranks often report the same error, each prefixed with its own rank or with that of the one that failed.
std::string without_number(const RankEnd& end) {
    std::string text = whole_message(end);
    const int number = end.error && end.error->rank >= 0 ? end.error->rank : end.rank;
    const std::string own = fmt::format("rank {}: ", number);
    const size_t at = text.find(own);
    return at == std::string::npos ? text : text.erase(at, own.size());
}

// Of the ranks that say the same as the first failure, the one whose own error it is or that has the full list, even if
// the agent stopped it; nullptr if there is none.
const RankEnd* told_by(const RankEnd& first, const std::vector<RankEnd>& ends) {
    if (!first.late.empty() || crashed(first)) return nullptr;  // its message is another rank's, or not the cause
    const auto tells_all = [](const RankEnd& end) { return shown_of(whole_message(end)) == whole_message(end); };
    const bool is_cut = !tells_all(first);
    const auto fits = [&](const RankEnd& end) {
        if (!failed_by_itself(end) && !(end.by_agent && end.error)) return false;
        return (is_cut ? tells_all(end) : is_of_this_rank(end)) && say_the_same(end, first);
    };
    const auto found = std::ranges::find_if(ends, fits);
    return found != ends.end() ? &*found : nullptr;
}

// The agent stopped it after its peer was lost.
bool was_ended_as_victim(const RankEnd& victim, const RankEnd& end) {
    return victim.by_agent && !end.survived && was_lost_to(victim, end);
}

}  // namespace

double RankEnd::when() const {
    return error && error->timestamp > 0 && error->timestamp < time ? error->timestamp : time;
}

std::string RankEnd::message() const {
    if (!late.empty()) return late;
    if (error) return first_words(error->message);
    const std::string_view line = last_line(last_lines);
    if (!line.empty()) return fmt::format("last stderr line: {}", line);
    const RecordedError* reason = reason_of(*this);
    return reason != nullptr ? first_words(reason->message) : "";
}

std::string RankEnd::cause() const {
    if (!late.empty()) return fmt::format("rank {} was late and other ranks timed out waiting for it", rank);
    if (!gone.empty()) return fmt::format("rank {} was lost with its host {}: {}", rank, host, gone);
    if (by_agent) return fmt::format("rank {} failed or left first, and was stopped with the others", rank);
    const std::string meaning = meaning_of(wait_status);
    return fmt::format("rank {} {}{}", rank, describe_status(wait_status),
                       meaning.empty() ? "" : fmt::format(" ({})", meaning));
}

std::vector<RankEnd> failures_of(const std::vector<RankEnd>& given) {
    const std::vector<RankEnd> ends = with_missed(given);
    std::vector<RankEnd> failures;
    std::ranges::copy_if(ends, std::back_inserter(failures),
                         [&](const RankEnd& end) { return failed_by_itself(end) || failed_by_evidence(end, ends); });
    std::vector<int> victims;
    for (const RankEnd& failure : failures) {
        const bool victim =
            std::ranges::any_of(failures, [&](const RankEnd& other) { return is_victim_of(failure, other); });
        if (victim) victims.push_back(failure.rank);
    }
    const auto key = [&](const RankEnd& f) {
        const bool victim = std::ranges::find(victims, f.rank) != victims.end();
        return std::make_tuple(victim, f.order, !WIFSIGNALED(f.wait_status), f.when(), f.rank);
    };
    std::ranges::sort(failures, [&](const RankEnd& a, const RankEnd& b) { return key(a) < key(b); });
    // A rank that arrived after the others had failed reports only their failure.
    for (RankEnd& failure : failures) {
        const auto waiting =
            std::ranges::find_if(failures, [&](const RankEnd& other) { return waited_for(other, failure); });
        if (waiting == failures.end() || waited_for(failure, *waiting)) continue;
        if (!failure.by_agent && !was_lost_to(failure, *waiting)) continue;
        failure.late = words_of(*waiting);
    }
    const size_t by_themselves = failures.size();
    for (const RankEnd& end : ends) {
        const auto known = failures.begin() + static_cast<std::ptrdiff_t>(by_themselves);
        if (std::any_of(failures.begin(), known, [&](const RankEnd& f) { return f.rank == end.rank; })) continue;
        if (std::any_of(failures.begin(), known, [&](const RankEnd& f) { return was_ended_as_victim(end, f); })) {
            failures.push_back(end);
        }
    }
    if (failures.empty()) return failures;
    std::vector<RankEnd> all = failures;
    all.insert(all.end(), ends.begin(), ends.end());
    if (const RankEnd* root = told_by(failures.front(), all); root != nullptr && root != all.data()) {
        std::erase_if(failures, [&](const RankEnd& failure) { return failure.rank == root->rank; });
        failures.insert(failures.begin(), *root);
    }
    return failures;
}

bool say_the_same(const RankEnd& one, const RankEnd& other) {
    const auto begins = [](std::string_view part, std::string_view text) {
        return shown_of(part) != part && text.starts_with(shown_of(part));
    };
    const auto same = [&](std::string_view a, std::string_view b) { return a == b || begins(a, b) || begins(b, a); };
    return same(whole_message(one), whole_message(other)) || same(without_number(one), without_number(other));
}

int exit_code_of(const std::vector<RankEnd>& failures) {
    const auto own = std::ranges::find_if(failures, failed_by_itself);
    return own == failures.end() ? 0 : exit_code_of(own->wait_status);
}

bool blames(const RankEnd& victim, const RankEnd& end) {
    return is_victim_of(victim, end) || was_ended_as_victim(victim, end);
}

std::string_view code_of(const RankEnd& end) {
    const RecordedError* reason = reason_of(end);
    return reason != nullptr ? std::string_view(reason->code) : "";
}

}  // namespace tsr
