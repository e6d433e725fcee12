#include "launch/job.hpp"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.hpp"

namespace tsr {

namespace {

std::vector<int> ranks_left(const std::vector<RankIdentity>& members, const std::vector<int>& lost) {
    std::vector<int> left;
    for (int rank = 0; rank < static_cast<int>(members.size()); ++rank) {
        if (std::ranges::find(lost, rank) == lost.end()) left.push_back(rank);
    }
    return left;
}

}  // namespace

std::string Program::name() const {
    const std::string& path = title.empty() ? command.front() : title;
    return path.substr(path.rfind('/') + 1);  // npos + 1 is 0
}

std::vector<std::string> Program::command_of(int local_rank) const {
    std::vector<std::string> words = command;
    if (!local_rank_argument.empty()) {
        words.insert(words.begin() + static_cast<std::ptrdiff_t>(own_arguments),
                     fmt::format("{}={}", local_rank_argument, local_rank));
    }
    return words;
}

std::string Program::text_for_all_hosts() const {
    size_t first = own_arguments - 1;  // the script, the module or the command itself
    if (first > 0 && command[first - 1] == "-m") --first;
    const auto begin = command.begin() + static_cast<std::ptrdiff_t>(first);
    const std::string words = fmt::format("`{}`", fmt::join(begin, command.end(), " "));
    return host.empty() ? words : fmt::format("{} on {}", words, host);
}

int RunOptions::ranks() const {
    int sum = 0;
    for (const Program& program : programs) sum += program.ranks;
    return sum;
}

void RunOptions::check() const {
    const auto wrong = [](std::string why) { return Error(Code::invalid_argument, std::move(why)); };
    if (programs.empty()) throw wrong("no command to run was given");
    for (const Program& program : programs) {
        if (program.command.empty() || program.command.front().empty()) throw wrong("a program has no command");
        const int least = hosts ? 0 : 1;
        if (program.ranks < least || program.ranks > max_ranks) {
            throw wrong(fmt::format("{} ranks of '{}' are requested; the number must be between {} and {}",
                                    program.ranks, program.command.front(), least, max_ranks));
        }
    }
    if (ranks() == 0) throw wrong("this host would have no rank; each host of a job needs one of some program");
    if (ranks() > max_ranks)
        throw wrong(fmt::format("{} ranks are requested; a job can have at most {}", ranks(), max_ranks));
    if (min_ranks < 0 || min_ranks > (hosts ? max_ranks : ranks())) {
        throw wrong(fmt::format("--min-ranks {} (or -n MIN:MAX) needs at least as many ranks, but the job has {}",
                                min_ranks, ranks()));
    }
    if (max_restarts < 0)
        throw wrong(fmt::format("the number of restarts is {}; it must not be negative", max_restarts));
    output.check(ranks());
}

std::vector<RankIdentity> ranks_of_host(const std::vector<int>& ranks, int node) {
    std::vector<RankIdentity> members;
    for (size_t p = 0; p < ranks.size(); ++p) {
        for (int i = 0; i < ranks[p]; ++i) members.push_back({static_cast<int>(p), i, node});
    }
    return members;
}

std::optional<NextRound> next_round(const RunOptions& options, const std::vector<RankIdentity>& members,
                                    const std::vector<int>& lost, int restarts_left) {
    std::vector<RankIdentity> left;
    for (const int rank : ranks_left(members, lost)) left.push_back(members[static_cast<size_t>(rank)]);
    const int least = options.min_ranks == 0 ? static_cast<int>(members.size()) : options.min_ranks;
    const bool enough = !left.empty() && static_cast<int>(left.size()) >= least;
    const bool again = restarts_left > 0;
    if (enough && (options.on_loss == OnLoss::shrink || !again)) return NextRound{std::move(left), false};
    if (again) return NextRound{members, true};
    return std::nullopt;
}

std::string rank_spans(std::vector<int> ranks) {
    std::ranges::sort(ranks);
    std::vector<std::string> spans;
    for (size_t first = 0; first < ranks.size();) {
        size_t last = first;
        while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
        if (last > first + 1) {
            spans.push_back(fmt::format("{}-{}", ranks[first], ranks[last]));
        } else {
            for (size_t i = first; i <= last; ++i) spans.push_back(std::to_string(ranks[i]));
        }
        first = last + 1;
    }
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < spans.size(); ++i) {
        text += fmt::format("{}{}", i == 0 ? "" : i + 1 == spans.size() ? " and " : ", ", spans[i]);
    }
    return text;
}

std::string why_no_round(const RunOptions& options, const std::vector<RankIdentity>& members,
                         const std::vector<int>& lost, int restarts) {
    std::string why;
    if (options.max_restarts > 0) {
        why = fmt::format("{} of {} restarts used (--max-restarts)", restarts, options.max_restarts);
    }
    if (options.min_ranks > 0) {
        const std::vector<int> left = ranks_left(members, lost);
        why +=
            fmt::format("{}{} of {} ranks left{}, fewer than --min-ranks {}", why.empty() ? "" : "; ", left.size(),
                        members.size(), left.empty() ? "" : fmt::format(" ({})", rank_spans(left)), options.min_ranks);
    }
    return why;
}

}  // namespace tsr
