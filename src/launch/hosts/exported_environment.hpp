// The variables that a launcher carries to the ranks of a job besides its own: those with DeepSpeed's prefixes, and those
// of .deepspeed_env. They are names and values, which no shell ever reads.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tsr {

using Assignments = std::vector<std::pair<std::string, std::string>>;  // of different names, sorted

// "NAME=VALUE" a line, cut at the first '='; empty lines and lines that begin with '#' are skipped. A later line wins.
// Throws INVALID_ARGUMENT naming `path` and the line if a line has no '=', or no name of letters, digits and '_'.
[[nodiscard]] Assignments parse_environment_file(std::string_view text, const std::string& path);

// The files that exist of ~/.deepspeed_env and ./.deepspeed_env; DS_ENV_FILE has another name, or the absolute path of
// the only one. The later one wins.
[[nodiscard]] Assignments deepspeed_environment_files(const std::string& home, const std::string& directory);

// Whether a job over several hosts exports a variable: the name begins with MLFLOW, PYTHON, MV2, UCX or NCCL.
[[nodiscard]] bool is_exported(std::string_view name);

}  // namespace tsr
