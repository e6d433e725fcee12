// Shared by the sub-commands of `tessera ckpt`: how one is added, its --json, and the meaning of its exit codes. Each
// sub-command is a file with one add_<name>() that ckpt.cc calls.
#pragma once

#include <functional>
#include <string>

#include "base/error.hpp"
#include "base/json.hpp"
#include "command_line.hpp"

namespace tsr::cli {

enum class Output { text, json };

// Exit codes are documented in exit_code_help() and docs/COMMAND.md; scripts rely on them.
inline constexpr int exit_sound = 0;
inline constexpr int exit_faulty = 1;   // damaged, no checkpoint in the directory, or a part was left out
inline constexpr int exit_trouble = 2;  // wrong usage, or the path is not accessible
inline constexpr int exit_interrupted = 130;

// The meanings of the exit codes for the help; `also_faulty` is what else ends with 1.
[[nodiscard]] std::string exit_code_help(const std::string& also_faulty = "");

// Prints an error; with Output::json also as JSON.
void tell_error(const Error& error, Output output);

// Adds the sub-command `name`, which takes a path and --json. `run` returns the exit code; a tsr::Error that it throws
// is printed and determines the exit code.
Command add_command(Command& ckpt, const char* name, const char* what, const char* path_what,
                    std::function<int(const std::string& path, Output output)> run);

// The accepted forms of a checkpoint's path, for the help.
inline constexpr const char* checkpoint_path_what =
    "A checkpoint directory; a root or its 'latest' for the newest checkpoint; a PyTorch checkpoint (a DCP "
    "directory, a torch.save file or the directory of a model.pt); or safetensors (a file, an index, or a directory "
    "of files)";

void add_cat(Command& ckpt);
void add_convert(Command& ckpt);
void add_diff(Command& ckpt);
void add_gc(Command& ckpt);
void add_latest(Command& ckpt);
void add_ls(Command& ckpt);
void add_info(Command& ckpt);
void add_rename_keys(Command& ckpt);
void add_shards(Command& ckpt);
void add_tree(Command& ckpt);
void add_verify(Command& ckpt);

}  // namespace tsr::cli
