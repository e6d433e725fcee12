#include "ckpt/command.hpp"

#include <fmt/core.h>

#include <cstdio>
#include <memory>

#include "base/error.hpp"
#include "checkpoint/io/file_system.hpp"
#include "ckpt/print.hpp"

namespace tsr::cli {

namespace {

int exit_code_of(const Error& error, const std::string& path) {
    switch (error.code()) {
        case Code::corrupt:
        case Code::version: return exit_faulty;
        case Code::not_found: {
            FileStatus status;
            return posix_file_system().status(path, status) >= 0 ? exit_faulty : exit_trouble;
        }
        case Code::interrupted: return exit_interrupted;
        default: return exit_trouble;
    }
}

Json error_json(const Error& error) {
    Json fields;
    fields.set("code", code_name(error.code()));
    fields.set("message", error.what());
    Json json;
    json.set("error", std::move(fields));
    return json;
}

}  // namespace

std::string exit_code_help(const std::string& also_faulty) {
    return fmt::format(
        "Exit codes:\n"
        "  0  success; the checkpoints are sound\n"
        "  1  a checkpoint is damaged or has a newer format, or the directory holds none{}\n"
        "  2  wrong usage, or the path does not exist or cannot be read or written\n"
        "  130  interrupted; partial output was removed\n"
        "With --json, standard output is one JSON document: {{\"error\": {{\"code\", \"message\"}}}} if the command "
        "failed.",
        also_faulty);
}

void tell_error(const Error& error, Output output) {
    complain(error.what());
    if (output == Output::json) print_json(error_json(error));
}

Command add_command(Command& ckpt, const char* name, const char* what, const char* path_what,
                    std::function<int(const std::string& path, Output output)> run) {
    struct Arguments {
        std::string path;
        bool json = false;
    };
    const auto arguments = std::make_shared<Arguments>();
    Command command = ckpt.add_command(name, what);
    command.add_option("path", arguments->path, path_what).required();
    command.add_flag("--json", arguments->json, "Print JSON");
    command.footer(exit_code_help());
    command.on_run([arguments, run = std::move(run)] {
        const Output output = arguments->json ? Output::json : Output::text;
        try {
            return run(arguments->path, output);
        } catch (const Error& error) {
            tell_error(error, output);
            return exit_code_of(error, arguments->path);
        }
    });
    return command;
}

}  // namespace tsr::cli
