// A collective's deadline is over: who is missed, in words that are the same on every transport.
#pragma once

#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"

namespace tsr {

struct Late {
    int rank;
    std::string name;   // with its process, "rank 3 (pid 17)"
    std::string where;  // what it does instead, "never entered it; ..."
    bool stopped;       // its process is
};

// The TIMEOUT of rank `rank` about the collective of this headline, with the first of `late` as the peer. Stopped ranks come
// first: the others may wait for them.
[[nodiscard]] Error timed_out(int rank, const std::string& headline, milliseconds timeout, std::vector<Late> late);

}  // namespace tsr
