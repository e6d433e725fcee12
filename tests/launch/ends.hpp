// How ranks ended, for tests of what is concluded from it and said of it.
#pragma once

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/summary.hpp"

namespace tsr::testing {

constexpr int exit_1 = 1 << 8;  // a wait status
using Ranks = std::vector<int>;

inline RankEnd end_of(int rank, int status, double time, int order, std::optional<double> recorded = std::nullopt) {
    RankEnd end{rank, "host", 100 + rank, status, time, order, false, "", std::nullopt, {}};
    if (recorded) end.error = RecordedError{"boom", "", *recorded};
    return end;
}

inline RankEnd end_with(RankEnd end, std::vector<std::string> last_lines) {
    end.last_lines = std::move(last_lines);
    return end;
}

inline RankEnd end_saying(int rank, std::string message, std::string traceback = "") {
    RankEnd end = end_of(rank, exit_1, 1, 1);
    end.error = RecordedError{std::move(message), std::move(traceback), 0};
    return end;
}

// Its communicator failed so; it has recorded nothing.
inline RankEnd with_failure(RankEnd end, Code code, int peer) {
    end.failure =
        RecordedError{fmt::format("the communicator of rank {}", end.rank), "", 0, std::string(code_name(code)), peer};
    return end;
}

// It recorded an error of Tessera's.
inline RankEnd with_code(RankEnd end, Code code, int peer) {
    end.error->code = code_name(code);
    end.error->peer = peer;
    return end;
}

// The error that it recorded occurred on that rank of the job, which has the number `rank` in the communicator.
inline RankEnd with_error_of(RankEnd end, int job_rank, int rank) {
    end.error->rank = rank;
    end.error->job_rank = job_rank;
    return end;
}

inline RankEnd ended_by_agent(RankEnd end) {
    end.by_agent = true;
    return end;
}

inline Ranks ranks_of(const std::vector<RankEnd>& ends) {
    Ranks ranks;
    for (const RankEnd& end : ends) ranks.push_back(end.rank);
    return ranks;
}

}  // namespace tsr::testing
