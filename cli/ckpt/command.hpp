// What the sub-commands of `tessera ckpt` share: how one is added, its --json, and what its exit code means. Each
// sub-command is a file with one add_<name>() that ckpt.cc calls.
#pragma once

#include <functional>
#include <string>

#include "base/error.hpp"
#include "base/json.hpp"
#include "command_line.hpp"

namespace tsr::cli {

enum class Output { text, json };

// Exit codes are documented in exit_code_help and docs/COMMAND.md; scripts rely on them.
inline constexpr int exit_sound = 0;
inline constexpr int exit_faulty = 1;   // damaged, no checkpoint where one was looked for, or a part was left out
inline constexpr int exit_trouble = 2;  // wrong usage, or it could not be looked at
inline constexpr int exit_interrupted = 130;

inline constexpr const char* exit_code_help =
    "Exit codes:\n"
    "  0  done; what was looked at is sound\n"
    "  1  a checkpoint is damaged, or of a newer format, or the directory holds none; convert: what cannot be read\n"
    "     was left out, and the rest is written\n"
    "  2  wrong usage, or the path is not there or cannot be read or written\n"
    "  130  interrupted; what was begun has been removed\n"
    "With --json standard output is one JSON document, {\"error\": {\"code\", \"message\"}} if the command failed.";

// Tells of an error, in JSON too if that was asked for.
void tell_error(const Error& error, Output output);

// Adds the sub-command `name`, which takes a path and --json. `run` returns the exit code; a tsr::Error that it throws
// is printed and gives the code that belongs to it.
Command add_command(Command& ckpt, const char* name, const char* what, const char* path_what,
                    std::function<int(const std::string& path, Output output)> run);

// How a checkpoint's path may be written, for the help.
inline constexpr const char* checkpoint_path_what =
    "A checkpoint's directory, a root or its 'latest' for the newest one, what PyTorch wrote (a DCP directory, a "
    "file of torch.save or the directory of a model.pt), or safetensors (a file, an index, or a directory of them)";

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
