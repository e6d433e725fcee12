// `tessera ckpt`: look at checkpoints, check, compare, convert and remove them.
#include "ckpt/command.hpp"
#include "commands.hpp"

namespace tsr::cli {

void add_ckpt(CLI::App& app, int& exit_code) {
    CLI::App* ckpt = app.add_subcommand("ckpt", "Look at checkpoints, check, compare, convert and remove them");
    ckpt->require_subcommand(1);
    ckpt->footer(exit_code_help);
    add_ls(*ckpt, exit_code);
    add_info(*ckpt, exit_code);
    add_tree(*ckpt, exit_code);
    add_cat(*ckpt, exit_code);
    add_shards(*ckpt, exit_code);
    add_diff(*ckpt, exit_code);
    add_latest(*ckpt, exit_code);
    add_gc(*ckpt, exit_code);
    add_convert(*ckpt, exit_code);
    add_rename_keys(*ckpt, exit_code);
    add_verify(*ckpt, exit_code);
}

}  // namespace tsr::cli
