// `tessera ckpt latest`: where the newest committed checkpoint of a root is, for scripts.
#include <fmt/core.h>

#include "ckpt/command.hpp"
#include "ckpt/print.hpp"

namespace tsr::cli {

namespace {

int show_latest(const std::string& path, Output output) {
    const auto checkpoint = Checkpoint::open(path);
    if (output == Output::json) {
        print_json(summary_json(*checkpoint));
    } else {
        fmt::print("{}\n", checkpoint->path());
    }
    return exit_sound;
}

}  // namespace

void add_latest(Command& ckpt) {
    add_command(ckpt, "latest", "Print the path of the newest committed checkpoint", "The root directory", show_latest);
}

}  // namespace tsr::cli
