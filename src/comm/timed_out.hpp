// The error when a collective times out: names the late ranks, with the same text on every transport.
#pragma once

#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"

namespace tsr {

struct Late {
    int rank;
    std::string name;   // with its process: "rank 3 (pid 17)"
    std::string where;  // what it does instead: "never entered it; ..."
    bool stopped;       // its process is stopped
};

// The TIMEOUT of rank `rank` in the collective with this headline; its peer is the first late rank. Stopped ranks come
// first, since the others may wait for them.
[[nodiscard]] Error timed_out(int rank, const std::string& headline, milliseconds timeout, std::vector<Late> late);

}  // namespace tsr
