// The `tessera` command: one subcommand per file.
#include <fcntl.h>

#include <cerrno>
#include <cstdio>

#include "base/error.hpp"
#include "commands.hpp"
#include "launch/process.hpp"

namespace {

// If a standard descriptor were closed, the next opened file would get its number, and output would be written to it.
void open_standard_descriptors() {
    for (int fd = 0; fd <= 2; ++fd) {
        if (::fcntl(fd, F_GETFD) < 0) (void)!::open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY);  // takes the lowest
    }
}

int run_command(int argc, char** argv) {
    open_standard_descriptors();
    const auto add_commands = [](tsr::cli::Command& tessera) {
        tsr::cli::add_run(tessera);
        tsr::cli::add_env(tessera);
        tsr::cli::add_ckpt(tessera);
        tsr::cli::add_trace(tessera);
        tsr::cli::add_top(tessera);
        tsr::cli::add_bench(tessera);
        tsr::cli::add_pipeline(tessera);
        tsr::cli::add_deepspeed(tessera);
        tsr::cli::add_agent_from_stdin(tessera);
    };
    const int code =
        tsr::cli::run_command_line("tessera", "Tessera: distributed training for C, Python, Java and Rust in one job",
                                   TESSERA_VERSION, argc, argv, add_commands);
    // A command's output is its result, so failing to write it is an error. A reader that stops early is fine.
    if ((std::fflush(stdout) != 0 || std::ferror(stdout) != 0) && errno != EPIPE) {
        (void)std::fprintf(stderr, "tessera: %s\n", tsr::os_error("cannot write standard output", errno).what());
        return code == 0 ? 2 : code;
    }
    return code;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run_command(argc, argv);
    } catch (...) {
        const tsr::Error error = tsr::current_error();
        (void)std::fprintf(stderr, "tessera: %s\n", error.what());
        return tsr::exit_code_of(error);
    }
}
