// The options of `tessera run` that have torchrun's names and meaning, except those about programs (run_program.hpp).
#pragma once

#include <optional>
#include <string>

#include "command_line.hpp"
#include "launch/job.hpp"

namespace tsr::cli {

struct TorchrunArguments {
    std::string redirects = "0";
    std::string tee = "0";
    std::string shown_ranks;
    std::string out_filters;
    std::string err_filters;
    std::string prefix_template;
    std::string signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
    std::string bind;
    bool virtual_local_rank = false;
    std::optional<double> monitor_interval;
    std::string start_method = "spawn";
    std::string event_log_handler = "null";
    std::string logs_specs = "default";
};

void add_torchrun_output(Command& group, TorchrunArguments& arguments);
void add_signals(Command& group, TorchrunArguments& arguments);
void add_placement(Command& group, TorchrunArguments& arguments);
void add_without_effect(Command& group, TorchrunArguments& arguments);

// Throws UsageError.
void take(const TorchrunArguments& arguments, RunOptions& options);

// A script for a shell (bash, zsh or tcsh) that completes the options of `tessera run`.
[[nodiscard]] std::string completion_script(const std::string& shell, const std::vector<std::string>& option_names);

}  // namespace tsr::cli
