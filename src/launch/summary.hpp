// Why a round failed: which of its ranks failed by themselves, in order from the root cause. report.hpp says it in words.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/error_file.hpp"

namespace tsr {

// How a rank ended, and what it said.
struct RankEnd {
    int rank = 0;
    std::string host;
    pid_t pid = 0;
    int wait_status = 0;
    double time = 0;                            // seconds since 1970, when the agent noticed
    int order = 0;                              // noticed in the same turn: the same number
    bool by_agent = false;                      // the agent was ending the ranks by then
    std::string log_file;                       // empty: none
    std::optional<RecordedError> error;         // that the trainer recorded
    std::vector<std::string> last_lines;        // of its standard error
    std::optional<RecordedError> failure = {};  // of its communicators, the first
    bool survived = false;                      // it was killed, and the others went on without it
    std::vector<int> missed = {};  // failures_of() sets it: those that did not come to PyTorch's store, in order
    std::string late = {};         // failures_of() sets it: what one said that waited for this rank until its deadline

    [[nodiscard]] double when() const;  // of the error, if the rank recorded one
    // The first line of the recorded error, with the second if it ends in a colon; else "last stderr line: ..."; else the
    // communicator's failure; else empty.
    [[nodiscard]] std::string message() const;
    // "rank 2 was killed by SIGKILL (what that mostly means)"
    [[nodiscard]] std::string cause() const;
};

// Those of a round that failed, the root cause first; empty if none did.
//
// A rank failed if it ended with an error before the agent ended the ranks. The first in time is the root cause: what was
// noticed earlier; of those noticed together one killed by a signal, since a process does not die of a signal because
// its peer has gone; then the earlier time. But a rank that was lost to a peer is that peer's victim and comes after it: by
// the code and the peer of the error that it recorded, or, where it recorded none, of its communicator's failure. So can come
// in, and first, a rank that ended with exit code 0 while its peers still needed it, and one that was slow to end after it had
// failed or left, so that it ended after its victims, or the agent ended it together with them. Of a TIMEOUT the rank that did
// not come is the cause, whatever became of it when the others had failed; PyTorch's own words, of init_process_group, are
// read for it. Last come ranks that the agent ended after one of these had been lost to them.
[[nodiscard]] std::vector<RankEnd> failures_of(const std::vector<RankEnd>& given);

// Whether `victim` failed because `end` died, failed, left or did not come.
[[nodiscard]] bool blames(const RankEnd& victim, const RankEnd& end);
// The code of what it failed with, "PEER_LOST"; empty: not known.
[[nodiscard]] std::string_view code_of(const RankEnd& end);

// A shell's exit code for the job: of the first failure that was a rank's own.
[[nodiscard]] int exit_code_of(const std::vector<RankEnd>& failures);

}  // namespace tsr
