// `tessera trace`: what the ranks of a job did last, from their flight records.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.hpp"
#include "base/write_whole.hpp"
#include "commands.hpp"
#include "printable.hpp"
#include "trace/merge.hpp"
#include "trace/why_hung.hpp"

namespace tsr::cli {

namespace {

constexpr const char* exit_code_help =
    "Exit codes:\n"
    "  0  success; why-hung: ranks are waiting\n"
    "  1  why-hung: every started operation has finished\n"
    "  2  wrong usage, or the records cannot be read or the trace cannot be written";

struct Arguments {
    std::string directory;
    std::string job;
    std::string output;
    bool json = false;
};

Json ranks_json(const std::vector<int>& ranks) { return Json(Json::Array(ranks.begin(), ranks.end())); }

void print_line(const std::string& text) { (void)std::fprintf(stdout, "%s\n", text.c_str()); }
void complain(std::string_view message) { fmt::print(stderr, "tessera trace: {}", printable_lines(message)); }

// "2026-11-25 02:03:04 UTC"; in UTC, since records may be from several hosts.
std::string time_text(double us) {
    return fmt::format("{:%Y-%m-%d %H:%M:%S} UTC", fmt::gmtime(static_cast<std::time_t>(us / 1e6)));
}

std::string described(const Job& job) {
    return fmt::format("{} in {} ({} rank{}, written {})", job.id(), job.directory, job.ranks(),
                       job.ranks() == 1 ? "" : "s", time_text(job.last_time()));
}

struct Chosen {
    Job job;
    std::vector<Job> others;
};

// The job that --job names, else the newest. Other jobs in the directory, and the job's directory if it was not given,
// are reported separately from the answer, on standard error.
Chosen choose(const Arguments& arguments) {
    std::vector<Job> jobs = read_jobs(arguments.directory);
    auto found = jobs.begin();
    if (!arguments.job.empty()) {
        const auto named = [&](const Job& job) { return job.has(arguments.job); };
        found = std::ranges::find_if(jobs, named);
        if (std::ranges::count_if(jobs, named) != 1) {
            std::string there;
            for (const Job& job : jobs) there += fmt::format("{}{}", there.empty() ? "" : ", ", described(job));
            throw Error(found == jobs.end() ? Code::not_found : Code::invalid_argument,
                        fmt::format("--job {}: {} in the directory {}; available: {}", arguments.job,
                                    found == jobs.end() ? "no job" : "several jobs",
                                    found == jobs.end() ? "matches" : "match", there));
        }
    }
    Chosen chosen{std::move(*found), {}};
    jobs.erase(found);
    chosen.others = std::move(jobs);
    if (arguments.job.empty() && (!chosen.others.empty() || chosen.job.directory != arguments.directory)) {
        complain(fmt::format("{}job {}", chosen.others.empty() ? "" : "the newest ", described(chosen.job)));
        for (const Job& job : chosen.others) {
            complain(fmt::format("ignored job {}; select it with --job {}", described(job), job.id()));
        }
    }
    return chosen;
}

Json job_json(const Job& job) {
    return Json(Json::Object{{"id", job.id()},
                             {"directory", job.directory},
                             {"ranks", static_cast<uint64_t>(job.ranks())},
                             {"written_us", job.last_time()}});
}

int why_hung(const Arguments& arguments) {
    const Chosen chosen = choose(arguments);
    const std::vector<Hang> hangs = find_hangs(chosen.job.flights);
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
        Json::Array others;
        for (const Job& job : chosen.others) others.push_back(job_json(job));
        print_line(
            Json(Json::Object{{"hangs", std::move(list)}, {"job", job_json(chosen.job)}, {"others", std::move(others)}})
                .dump());
    } else {
        for (const Hang& hang : hangs) print_line(printable(fmt::format("{}: {}", hang.name, hang.sentence)));
        if (hangs.empty()) print_line("nothing hangs: every started operation has finished");
    }
    return hangs.empty() ? 1 : 0;
}

int merge(const Arguments& arguments) {
    const std::string trace = trace_of(choose(arguments).job.flights);
    if (arguments.output.empty()) {
        (void)std::fwrite(trace.data(), 1, trace.size(), stdout);
    } else {
        write_whole_file(arguments.output, trace, 0644);
    }
    return 0;
}

Command add(Command& trace, const char* name, const char* what, const std::shared_ptr<Arguments>& arguments,
            int (*run)(const Arguments&)) {
    Command command = trace.add_command(name, what);
    command.add_option("directory", arguments->directory, "Directory of the ranks' records (--trace-dir)").required();
    command.add_option("--job", arguments->job, "The id of the job if there are several; default: the newest")
        .type_name("ID");
    command.footer(exit_code_help);
    command.on_run([arguments, run] {
        try {
            return run(*arguments);
        } catch (const Error& error) {
            complain(error.what());
            return 2;
        }
    });
    return command;
}

}  // namespace

void add_trace(Command& tessera) {
    Command trace = tessera.add_command("trace", "Explain why a job hung, or draw what its ranks did");
    trace.require_command();
    trace.footer(exit_code_help);
    const auto arguments = std::make_shared<Arguments>();
    add(trace, "why-hung", "Show which rank the others wait for, and in which operation", arguments, why_hung)
        .add_flag("--json", arguments->json, "Print JSON");
    add(trace, "merge", "Merge the records of all ranks into one trace for ui.perfetto.dev or chrome://tracing",
        arguments, merge)
        .add_option("-o,--output", arguments->output, "The file to write; default: standard output");
}

}  // namespace tsr::cli
