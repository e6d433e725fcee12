#include "ckpt/command.hpp"

#include <fmt/format.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
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

// A checkpoint of 100,000 tensors is some 200 MB of small objects: in pages of 4 KiB a quarter of the time would go into
// faults. So the heap grows at once, and by huge pages where the system gives them when it is asked.
void ask_for_huge_pages() {
#ifdef __GLIBC__
    constexpr int room = 256 << 20;  // of addresses; memory is taken as it is touched
    constexpr int largest_on_heap = 32 << 20;
    if (::mallopt(M_TOP_PAD, room) == 0 || ::mallopt(M_MMAP_THRESHOLD, largest_on_heap) == 0) return;
    const auto begin = reinterpret_cast<uintptr_t>(::sbrk(0));
    void* volatile grown = std::malloc(1 << 20);  // or the compiler would leave out both
    std::free(grown);
    const auto end = reinterpret_cast<uintptr_t>(::sbrk(0));
    constexpr uintptr_t page = 4096;
    const uintptr_t first = (begin + page - 1) / page * page;
    if (end > first) (void)::madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
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

void tell_error(const Error& error, Output output) {
    complain(error.what());
    if (output == Output::json) print_json(error_json(error));
}

CLI::App* add_command(CLI::App& ckpt, const char* name, const char* what, const char* path_what, int& exit_code,
                      std::function<int(const std::string& path, Output output)> run) {
    struct Arguments {
        std::string path;
        bool json = false;
    };
    const auto arguments = std::make_shared<Arguments>();
    CLI::App* command = ckpt.add_subcommand(name, what);
    command->add_option("path", arguments->path, path_what)->required();
    command->add_flag("--json", arguments->json, "Print JSON");
    command->footer(exit_code_help);
    command->callback([arguments, &exit_code, run = std::move(run)] {
        const Output output = arguments->json ? Output::json : Output::text;
        ask_for_huge_pages();
        try {
            exit_code = run(arguments->path, output);
        } catch (const Error& error) {
            tell_error(error, output);
            exit_code = exit_code_of(error, arguments->path);
        }
    });
    return command;
}

}  // namespace tsr::cli
