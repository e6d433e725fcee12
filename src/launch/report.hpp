// The launcher's report at the end of a failed job: the root cause once and in full, every other failure in one line.
#pragma once

#include <string>
#include <vector>

#include "base/json.hpp"
#include "launch/summary.hpp"

namespace tsr {

// `failures` must not be empty, and come from failures_of(ends). Lines about other failures are cut to `width` columns;
// 0: not cut. The last line has no newline.
[[nodiscard]] std::string report_of(const std::vector<RankEnd>& failures, const std::vector<RankEnd>& ends,
                                    size_t width = 0);

// The same as JSON (docs/COMMAND.md), without cuts and whether or not a rank has failed.
[[nodiscard]] Json report_json(const std::vector<RankEnd>& failures, const std::vector<RankEnd>& ends);

}  // namespace tsr
