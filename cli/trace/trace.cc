// `tessera trace`: what the ranks of a job did last, from their flight records.
#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "base/json.hpp"
#include "base/write_whole.hpp"
#include "commands.hpp"
#include "trace/merge.hpp"
#include "trace/why_hung.hpp"

namespace tsr::cli {

namespace {

constexpr const char* exit_code_help =
    "Exit codes:\n"
    "  0  done; why-hung: a rank is waited for\n"
    "  1  why-hung: every operation that was begun has finished\n"
    "  2  wrong usage, or the records cannot be read or the trace not be written";

struct Arguments {
    std::string directory;
    std::string output;
    bool json = false;
};

Json ranks_json(const std::vector<int>& ranks) { return Json(Json::Array(ranks.begin(), ranks.end())); }

void print_line(const std::string& text) { (void)std::fprintf(stdout, "%s\n", text.c_str()); }

int why_hung(const Arguments& arguments) {
    const Flights flights = read_flights(arguments.directory);
    const std::vector<Hang> hangs = find_hangs(flights);
    if (arguments.json) {
        Json::Array list;
        for (const Hang& hang : hangs) {
            list.emplace_back(Json::Object{{"communicator", hang.name},
                                           {"id", hang.id},
                                           {"operation", hang.operation},
                                           {"waiting", ranks_json(hang.waiting)},
                                           {"absent", ranks_json(hang.absent)},
                                           {"since_us", hang.since},
                                           {"sentence", hang.sentence}});
        }
        print_line(Json(Json::Object{{"hangs", std::move(list)}}).dump());
    } else {
        for (const Hang& hang : hangs) print_line(fmt::format("{}: {}", hang.name, hang.sentence));
        if (hangs.empty()) print_line("nothing hangs: every operation that was begun has finished");
    }
    return hangs.empty() ? 1 : 0;
}

int merge(const Arguments& arguments) {
    const std::string trace = trace_of(read_flights(arguments.directory));
    if (arguments.output.empty()) {
        (void)std::fwrite(trace.data(), 1, trace.size(), stdout);
    } else {
        write_whole_file(arguments.output, trace, 0644);
    }
    return 0;
}

CLI::App* add(CLI::App& trace, const char* name, const char* what, const std::shared_ptr<Arguments>& arguments,
              int& exit_code, int (*run)(const Arguments&)) {
    CLI::App* command = trace.add_subcommand(name, what);
    command->add_option("directory", arguments->directory, "Where the ranks left their records (--trace-dir)")
        ->required();
    command->footer(exit_code_help);
    command->callback([arguments, &exit_code, run] {
        try {
            exit_code = run(*arguments);
        } catch (const Error& error) {
            (void)std::fprintf(stderr, "tessera trace: %s\n", error.what());
            exit_code = 2;
        }
    });
    return command;
}

}  // namespace

void add_trace(CLI::App& app, int& exit_code) {
    CLI::App* trace = app.add_subcommand("trace", "Say why a job hung, or draw what its ranks did");
    trace->require_subcommand(1);
    trace->footer(exit_code_help);
    const auto arguments = std::make_shared<Arguments>();
    add(*trace, "why-hung", "Say which rank is waited for, and in which operation", arguments, exit_code, why_hung)
        ->add_flag("--json", arguments->json, "Print JSON");
    add(*trace, "merge", "One trace of all ranks for ui.perfetto.dev or chrome://tracing", arguments, exit_code, merge)
        ->add_option("-o,--output", arguments->output, "The file to write; default: standard output");
}

}  // namespace tsr::cli
