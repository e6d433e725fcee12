// `tessera bench`: a table of one operation's time and bandwidth over sizes. Without a launcher it starts its own
// ranks, as `tessera run` would: each is this command again, inside the job.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/json.hpp"
#include "bench/cases.hpp"
#include "comm/host.hpp"
#include "commands.hpp"
#include "launch/environment.hpp"
#include "launch/from_environment.hpp"
#include "launch/job.hpp"
#include "launch/job_agent.hpp"
#include "launch/process.hpp"

namespace tsr::cli {

namespace {

struct Arguments {
    std::string bench;
    int ranks = 0;  // 0: not given
    uint64_t begin = 8;
    uint64_t end = uint64_t{64} << 20;
    int factor = 2;
    std::string dtype = "f32";
    std::string op = "sum";
    bool json = false;
    BenchOptions options;
};

template <class Enum>
Enum named(const std::string& name, int last, std::string_view option, std::string_view known) {
    for (int i = 1; i <= last; ++i) {
        if (name_of(static_cast<Enum>(i)) == name) return static_cast<Enum>(i);
    }
    throw UsageError(fmt::format("{} {}: expected one of {}", option, name, known));
}

BenchOptions options_of(const Arguments& arguments) {
    BenchOptions options = arguments.options;
    const auto bench = bench_from(arguments.bench);
    if (!bench) {
        throw UsageError(
            fmt::format("unknown operation '{}'; available: {}", arguments.bench, fmt::join(bench_names(), ", ")));
    }
    options.bench = *bench;
    options.dtype =
        named<DType>(arguments.dtype, static_cast<int>(DType::i64), "--dtype", "f16, bf16, f32, f64, i8, u8, i32, i64");
    options.op = named<ReduceOp>(arguments.op, static_cast<int>(ReduceOp::prod), "--op", "sum, avg, min, max, prod");
    if (arguments.end < arguments.begin) {
        throw UsageError(fmt::format("--max-bytes {} is less than --min-bytes {}", arguments.end, arguments.begin));
    }
    return options;
}

// The number of elements of each row; equal sizes are measured once.
std::vector<uint64_t> counts_of(const Arguments& arguments, const BenchOptions& options, int ranks) {
    std::vector<uint64_t> counts;
    for (uint64_t bytes = arguments.begin;; bytes *= static_cast<uint64_t>(arguments.factor)) {
        const uint64_t count = bench_count(options, ranks, bytes);
        if (counts.empty() || counts.back() != count) counts.push_back(count);
        if (bytes > arguments.end / static_cast<uint64_t>(arguments.factor)) return counts;
    }
}

Json row_json(const BenchRow& row) {
    return Json::Object{{"bytes", row.bytes},     {"count", row.count},      {"iterations", row.iterations},
                        {"time_us", row.time_us}, {"algbw_gb_s", row.algbw}, {"busbw_gb_s", row.busbw},
                        {"wrong", row.wrong}};
}

void print_heading(const BenchOptions& options, const Communicator& comm) {
    std::string what(name_of(options.bench));
    if (has_op(options.bench)) what += fmt::format(" ({})", tsr::name_of(options.op));
    if (options.bench != Bench::barrier) what += fmt::format(" of {}", tsr::name_of(options.dtype));
    if (has_root(options.bench)) what += fmt::format(", root {},", options.root);
    fmt::print("{} over {} via {}, {} memory; median of {} rounds, each timed by the slowest rank\n", what,
               comm.world_size() == 1 ? "1 rank" : fmt::format("{} ranks", comm.world_size()), comm.transport(),
               options.foreign ? "foreign" : "library", bench_rounds);
    fmt::print("{:>12} {:>12} {:>6} {:>12} {:>11} {:>11} {:>8}\n", "bytes", "count", "calls", "us/call", "algbw GB/s",
               "busbw GB/s", "wrong");
}

void print_row(const BenchRow& row) {
    fmt::print("{:>12} {:>12} {:>6} {:>12.2f} {:>11.3f} {:>11.3f} {:>8}\n", row.bytes, row.count, row.iterations,
               row.time_us, row.algbw, row.busbw, row.wrong);
    std::fflush(stdout);  // show each row as soon as it is measured, even through the launcher's pipe
}

void check_ranks(const BenchOptions& options, int ranks) {
    if (options.bench == Bench::send_recv && ranks == 1) {
        throw UsageError("send_recv needs at least 2 ranks: a rank cannot be its own peer");
    }
    if (has_root(options.bench) && (options.root < 0 || options.root >= ranks)) {
        throw UsageError(fmt::format("--root {} is not a rank; there are {} ranks", options.root, ranks));
    }
}

int run_rank(const Arguments& arguments, const BenchOptions& options) {
    const auto comm = communicator_from_environment(CommOptions::from_environment());
    const int ranks = comm->world_size();
    const std::vector<uint64_t> counts = counts_of(arguments, options, ranks);
    BenchMemory memory(comm, options, counts.back());
    const bool tells = comm->rank() == 0;
    Json::Array rows;
    bool sound = true;
    if (tells && !arguments.json) print_heading(options, *comm);
    for (const uint64_t count : counts) {
        const BenchRow row = memory.run(count);
        sound = sound && row.wrong == 0;
        if (tells && !arguments.json) print_row(row);
        if (tells) rows.push_back(row_json(row));
    }
    if (tells && arguments.json) {
        Json::Object document{{"operation", name_of(options.bench)},
                              {"dtype", tsr::name_of(options.dtype)},
                              {"op", has_op(options.bench) ? Json(tsr::name_of(options.op)) : Json()},
                              {"root", has_root(options.bench) ? Json(options.root) : Json()},
                              {"ranks", ranks},
                              {"transport", comm->transport()},
                              {"memory", options.foreign ? "foreign" : "library"},
                              {"rounds", bench_rounds},
                              {"rows", std::move(rows)}};
        fmt::print("{}\n", Json(std::move(document)).dump());
    }
    comm->finalize();
    return sound ? 0 : 1;
}

// This process's command line, with the path of its executable.
std::vector<std::string> own_command() {
    std::vector<std::string> words;
    std::ifstream file("/proc/self/cmdline", std::ios::binary);
    for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
    if (words.empty()) throw Error(Code::io, "cannot read /proc/self/cmdline");
    words.front() = std::filesystem::read_symlink("/proc/self/exe").string();
    return words;
}

int start_ranks(const Arguments& arguments, const BenchOptions& options) {
    RunOptions job;
    Program program;
    program.command = own_command();
    program.ranks = arguments.ranks > 0 ? arguments.ranks : usable_cores();
    check_ranks(options, program.ranks);
    job.programs.push_back(std::move(program));
    job.prefix = false;
    job.check();
    return run_guarded(
        [&](int guardian, const sigset_t& signal_mask) { return JobAgent(job, guardian, signal_mask).run(); });
}

}  // namespace

void add_bench(Command& tessera) {
    auto arguments = std::make_shared<Arguments>();
    Command bench = tessera.add_command("bench", "Measure a collective over a range of sizes, and check its results");
    bench.footer(
        "\n  tessera bench all_reduce -b 8 -e 64M -n 4             starts four ranks on this host\n"
        "  tessera run -n 4 tessera bench all_gather             inside a job: uses its ranks\n"
        "  TESSERA_BACKEND=gloo tessera bench broadcast -n 2     over another transport");
    bench.add_option("operation", arguments->bench, fmt::format("{}", fmt::join(bench_names(), ", ")))
        .type_name("OPERATION")
        .required();
    bench.add_option("-n,--ranks", arguments->ranks, "ranks to start; inside a job, the number of its ranks")
        .type_name("N")
        .default_text("usable cores")
        .in_range(1, 4096);
    bench.add_option("-b,--min-bytes", arguments->begin, "the first size; 1K is 1024")
        .size_with_unit(Option::Kilo::is_1024)
        .default_text("8");
    bench.add_option("-e,--max-bytes", arguments->end, "the last size")
        .size_with_unit(Option::Kilo::is_1024)
        .default_text("64M");
    bench.add_option("-f,--factor", arguments->factor, "factor from one size to the next")
        .in_range(2, 1 << 20)
        .show_default();
    bench.add_option("-d,--dtype", arguments->dtype, "f16, bf16, f32, f64, i8, u8, i32, i64").show_default();
    bench.add_option("-o,--op", arguments->op, "reduction: sum, avg, min, max, prod").show_default();
    bench.add_option("-r,--root", arguments->options.root, "root of broadcast, reduce, gather and scatter")
        .show_default();
    bench.add_option("-i,--iters", arguments->options.iterations, "calls per round")
        .in_range(1, 1 << 30)
        .default_text("100 up to 64 KiB, 20 up to 1 MiB, 3 above");
    bench.add_option("-w,--warmup", arguments->options.warmup, "calls before the first round")
        .in_range(0, 1 << 30)
        .show_default();
    bench.add_flag("--foreign", arguments->options.foreign, "use memory that the communicator did not allocate");
    bench.add_flag("--json", arguments->json, "print one JSON document");
    bench.on_run([arguments] {
        const BenchOptions options = options_of(*arguments);
        const JobEnvironment job = JobEnvironment::detect();
        if (job.launcher == Launcher::none) return start_ranks(*arguments, options);
        if (arguments->ranks > 0 && arguments->ranks != job.world_size) {
            throw UsageError(
                fmt::format("-n {} does not match the {} ranks of the job", arguments->ranks, job.world_size));
        }
        check_ranks(options, job.world_size);
        return run_rank(*arguments, options);
    });
}

}  // namespace tsr::cli
