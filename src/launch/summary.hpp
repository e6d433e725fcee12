// Why a round failed: which ranks failed on their own, in order from the root cause. report.hpp turns it into text.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/error_file.hpp"

namespace tsr {

// How a rank ended, and what it reported.
struct RankEnd {
    int rank = 0;
    std::string host;
    pid_t pid = 0;
    int wait_status = 0;
    double time = 0;                            // seconds since 1970, when the agent noticed
    int order = 0;                              // equal for ranks noticed in the same turn
    bool by_agent = false;                      // the agent was already stopping the ranks
    std::string log_file;                       // empty: none
    std::optional<RecordedError> error;         // recorded by the trainer
    std::vector<std::string> last_lines;        // of its standard error
    std::optional<RecordedError> failure = {};  // of its communicators, the first
    bool survived = false;                      // it was killed, and the others continued without it
    std::string gone = {};                      // its host was lost with it; why
    std::vector<int> missed = {};  // set by failures_of(): ranks that did not join PyTorch's store, in order
    std::string late = {};         // set by failures_of(): the report of a rank that timed out waiting for this one

    [[nodiscard]] double when() const;  // of the error, if the rank recorded one
    // The first line of the recorded error, with the second if it ends with a colon; else "last stderr line: ..."; else
    // the communicator's failure; else empty.
    [[nodiscard]] std::string message() const;
    // "rank 2 was killed by SIGKILL (its usual meaning)"
    [[nodiscard]] std::string cause() const;
};

// The failed ranks of a round, root cause first; empty if none failed.
//
// A rank failed if it ended with an error before the agent stopped the ranks. The root cause is the earliest failure:
// the one noticed earlier; among those noticed together, one killed by a signal, since a process does not die of a
// signal because its peer is gone; then the earlier time. But a rank whose error names a peer is that peer's victim and
// comes after it; the error is the recorded one or, if none was recorded, its communicator's failure, and counts by
// code and peer. Therefore the list may include, even first, a rank that ended with exit code 0 while its peers still
// needed it, and one that was slow to end after it failed or left, so that it ended after its victims or was stopped
// together with them. For a TIMEOUT the late rank is the cause, whatever happened to it after the others failed; for
// init_process_group, PyTorch's own messages are parsed. Last come ranks that the agent stopped after one of these
// ranks was lost to them. If several ranks report the same error, the one on which it occurred comes first; all of them
// may report an error of one, and the agent may have stopped that one.
[[nodiscard]] std::vector<RankEnd> failures_of(const std::vector<RankEnd>& given);

// Whether two ranks report the same error, apart from the rank with which the message begins or a cut list.
[[nodiscard]] bool say_the_same(const RankEnd& one, const RankEnd& other);
// Whether `victim` failed because `end` died, failed, left or was late.
[[nodiscard]] bool blames(const RankEnd& victim, const RankEnd& end);
// The code of its error, such as "PEER_LOST"; empty if unknown.
[[nodiscard]] std::string_view code_of(const RankEnd& end);

// The exit code of the job: that of the first rank that failed on its own.
[[nodiscard]] int exit_code_of(const std::vector<RankEnd>& failures);

}  // namespace tsr
