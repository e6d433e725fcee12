// What the agent tells at the end of a job that failed: every rank that failed, the root cause first.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/error_file.hpp"

namespace tsr {

struct Failure {
    int rank = 0;
    std::string host;
    pid_t pid = 0;
    int wait_status = 0;
    double time = 0;       // seconds since 1970, when the agent noticed
    int order = 0;         // noticed in the same turn: the same number
    std::string log_file;  // empty: none
    std::optional<RecordedError> error;

    [[nodiscard]] double when() const;  // of the error, if the rank recorded one
};

// The root cause comes first: what was noticed earlier; of those noticed together one killed by a signal, since a process
// does not die of a signal because its peer has gone; then the earlier time.
void order_failures(std::vector<Failure>& failures);

// A table and the root cause's traceback. `failures` are ordered.
[[nodiscard]] std::string summary_of(const std::vector<Failure>& failures);

}  // namespace tsr
