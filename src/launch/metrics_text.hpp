// A job's status in Prometheus' text format 0.0.4.
#pragma once

#include <string>

#include "launch/job_status.hpp"

namespace tsr {

// Of the ranks on this host alone: every agent has an endpoint.
[[nodiscard]] std::string metrics_text(const JobStatus& job);

}  // namespace tsr
