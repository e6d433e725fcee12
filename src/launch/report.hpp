// What the launcher says at the end of a job that failed: the root cause once and in full, each other failure in a line.
#pragma once

#include <string>
#include <vector>

#include "launch/summary.hpp"

namespace tsr {

// `failures` are not empty, and come from failures_of(ends). Lines about other failures are cut to `width` columns; 0: none
// is. The last line has no end.
[[nodiscard]] std::string report_of(const std::vector<RankEnd>& failures, const std::vector<RankEnd>& ends,
                                    size_t width = 0);

}  // namespace tsr
