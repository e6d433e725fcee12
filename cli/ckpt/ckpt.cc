// `tessera ckpt`: inspect, verify, compare, convert and remove checkpoints.
#include "ckpt/command.hpp"
#include "commands.hpp"

namespace tsr::cli {

void add_ckpt(Command& tessera) {
    Command ckpt = tessera.add_command("ckpt", "Inspect, verify, compare, convert and remove checkpoints");
    ckpt.require_command();
    ckpt.footer(exit_code_help());
    add_ls(ckpt);
    add_info(ckpt);
    add_tree(ckpt);
    add_cat(ckpt);
    add_shards(ckpt);
    add_diff(ckpt);
    add_latest(ckpt);
    add_gc(ckpt);
    add_convert(ckpt);
    add_rename_keys(ckpt);
    add_verify(ckpt);
}

}  // namespace tsr::cli
