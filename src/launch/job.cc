#include "launch/job.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"

namespace tsr {

namespace {

constexpr int max_ranks = 4096;

}  // namespace

std::string Program::name() const {
    const std::string& path = command.front();
    return path.substr(path.rfind('/') + 1);  // npos + 1 is 0
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
        if (program.ranks < 1 || program.ranks > max_ranks) {
            throw wrong(fmt::format("{} ranks of '{}'; 1 to {} are possible", program.ranks, program.command.front(),
                                    max_ranks));
        }
    }
    if (ranks() > max_ranks) throw wrong(fmt::format("{} ranks; a job has at most {}", ranks(), max_ranks));
    if (min_ranks < 0 || min_ranks > ranks()) {
        throw wrong(fmt::format("at least {} ranks are wanted, but the job has {}", min_ranks, ranks()));
    }
    if (max_restarts < 0) throw wrong(fmt::format("{} restarts; write 0 or more", max_restarts));
}

std::vector<Member> first_round(const RunOptions& options) {
    std::vector<Member> members;
    for (size_t p = 0; p < options.programs.size(); ++p) {
        for (int i = 0; i < options.programs[p].ranks; ++i) members.push_back({static_cast<int>(p), i});
    }
    return members;
}

std::optional<NextRound> next_round(const RunOptions& options, const std::vector<Member>& members,
                                    const std::vector<int>& lost, int restarts_left) {
    std::vector<Member> left;
    for (size_t rank = 0; rank < members.size(); ++rank) {
        if (std::find(lost.begin(), lost.end(), static_cast<int>(rank)) == lost.end()) left.push_back(members[rank]);
    }
    const int least = options.min_ranks == 0 ? options.ranks() : options.min_ranks;
    const bool enough = !left.empty() && static_cast<int>(left.size()) >= least;
    const bool again = restarts_left > 0;
    if (enough && (options.on_loss == OnLoss::shrink || !again)) return NextRound{std::move(left), false};
    if (again) return NextRound{members, true};
    return std::nullopt;
}

}  // namespace tsr
