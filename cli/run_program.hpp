// One program of `tessera run`: how many ranks run it, and how. A job of several programs has these options for each.
#pragma once

#include <string>
#include <vector>

#include "command_line.hpp"
#include "launch/hosts/selection.hpp"
#include "launch/job.hpp"

namespace tsr::cli {

struct ProgramArguments {
    std::string count = "1";
    std::vector<std::string> environment;
    bool module = false;
    bool no_python = false;
    bool run_path = false;
    std::string local_rank_name;  // empty: not passed
    std::string role = "default";
};

void add_program_options(Command& command, ProgramArguments& arguments);

// The interpreter of scripts: PYTHON_EXEC, as torchrun reads it, or the active virtual environment's, or the first of
// the path.
[[nodiscard]] std::string python();

// "4", "3:4", "auto", "cpu", "gpu".
struct Count {
    int least = 0;  // 0: not given
    int ranks = 1;
};
// Throws UsageError.
[[nodiscard]] Count count_of(const std::string& text);

// "4@host-a". Throws UsageError.
[[nodiscard]] RanksAt ranks_at(const std::string& text);

// `words`: what follows the options. Throws UsageError.
[[nodiscard]] Program program_of(const ProgramArguments& arguments, std::vector<std::string> words);

}  // namespace tsr::cli
