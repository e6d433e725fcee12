// The sub-commands of `tessera`. Each function adds its own to `app`; when the command line names it, its callback runs
// and stores the exit code.
#pragma once

#include <CLI/CLI.hpp>

namespace tsr::cli {

void add_run(CLI::App& app, int& exit_code);
void add_env(CLI::App& app, int& exit_code);
void add_ckpt(CLI::App& app, int& exit_code);
void add_trace(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);

}  // namespace tsr::cli
