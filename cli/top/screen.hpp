// What `tessera top` shows of a job: pure functions from a status to lines.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "launch/job_status.hpp"

namespace tsr::cli {

struct Screen {
    size_t columns = 80;
    size_t rows = 0;  // 0: as many as needed
    bool colours = false;
};

// `rates`: of job.ranks, as rates_between() gives them. No line is wider than the screen.
[[nodiscard]] std::vector<std::string> top_screen(const JobStatus& job, const std::vector<RankRates>& rates,
                                                  const Screen& screen);
// A line for each job, for those who have to choose one.
[[nodiscard]] std::vector<std::string> job_list(const std::vector<JobStatus>& jobs);

// "8 s", "3 min", "2 h", "5 d"
[[nodiscard]] std::string age_text(double seconds);
// "512 B", "1.2 MB": powers of 1000
[[nodiscard]] std::string bytes_text(double bytes);

}  // namespace tsr::cli
