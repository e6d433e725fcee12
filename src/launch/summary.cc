#include "launch/summary.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <tuple>

#include "launch/process.hpp"

namespace tsr {

namespace {

std::string clock_time(double seconds) {
    const auto whole = static_cast<std::time_t>(std::floor(seconds));
    const int millis = static_cast<int>((seconds - std::floor(seconds)) * 1000);
    return fmt::format("{:%H:%M:%S}.{:03}", fmt::localtime(whole), millis);
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string ending(const Failure& failure) {
    return WIFSIGNALED(failure.wait_status) ? signal_name(WTERMSIG(failure.wait_status))
                                            : fmt::format("exit {}", WEXITSTATUS(failure.wait_status));
}

}  // namespace

double Failure::when() const {
    return error && error->timestamp > 0 && error->timestamp < time ? error->timestamp : time;
}

void order_failures(std::vector<Failure>& failures) {
    const auto key = [](const Failure& f) {
        return std::make_tuple(f.order, WIFSIGNALED(f.wait_status) ? 0 : 1, f.when(), f.rank);
    };
    std::sort(failures.begin(), failures.end(), [&](const Failure& a, const Failure& b) { return key(a) < key(b); });
}

std::string summary_of(const std::vector<Failure>& failures) {
    if (failures.empty()) return "";
    const Failure& root = failures.front();
    std::string out = fmt::format("the job failed: rank {} {}", root.rank, describe_status(root.wait_status));
    if (root.error) out += ": " + first_line(root.error->message);
    size_t host_width = 4;
    for (const Failure& failure : failures) host_width = std::max(host_width, failure.host.size());
    out += fmt::format("\n\n  {:<12}  {:>4}  {:<{}}  {:>8}  {:<9}  {}\n", "time", "rank", "host", host_width, "pid",
                       "end", "message");
    for (const Failure& failure : failures) {
        const std::string message = failure.error ? first_line(failure.error->message) : "-";
        out += fmt::format("  {:<12}  {:>4}  {:<{}}  {:>8}  {:<9}  {}{}\n", clock_time(failure.when()), failure.rank,
                           failure.host, host_width, failure.pid, ending(failure), message,
                           &failure == &root ? "   <- root cause" : "");
    }
    if (root.error && !root.error->traceback.empty()) {
        out += fmt::format("\n  rank {}'s traceback:\n", root.rank);
        std::string_view rest = root.error->traceback;
        while (!rest.empty()) {
            const size_t end = rest.find('\n');
            out += fmt::format("    {}\n", rest.substr(0, end));
            rest = end == std::string_view::npos ? "" : rest.substr(end + 1);
        }
    }
    if (!root.log_file.empty()) out += fmt::format("\n  its output: {}\n", root.log_file);
    out.pop_back();  // the caller ends the line
    return out;
}

}  // namespace tsr
