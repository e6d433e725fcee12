// The subcommands of `tessera`. Each function adds its own to the top-level command.
#pragma once

#include "command_line.hpp"

namespace tsr::cli {

void add_run(Command& tessera);
void add_env(Command& tessera);
void add_ckpt(Command& tessera);
void add_trace(Command& tessera);
void add_top(Command& tessera);
void add_bench(Command& tessera);
void add_pipeline(Command& tessera);
void add_deepspeed(Command& tessera);
void add_agent_from_stdin(Command& tessera);

}  // namespace tsr::cli
