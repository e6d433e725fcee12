// `tessera pipeline`: draws pipeline schedules and says how much time and memory they cost.
#include <fmt/core.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "base/terminal.hpp"
#include "commands.hpp"
#include "pipeline/drawing.hpp"

namespace tsr::cli {

namespace {

struct Arguments {
    std::string schedule = "1f1b";
    std::string file;
    int ranks = 4;
    int stages_per_rank = 0;
    int microbatches = 8;
    pipeline::Costs costs;
    bool csv = false;
    bool csv_comms = false;
    bool svg = false;
    bool json = false;
    bool trace = false;
};

constexpr size_t most_drawn = 1'000'000;  // actions

pipeline::Schedule read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw os_error(fmt::format("cannot open {}", path), errno);
    std::string text;
    std::vector<char> block(size_t{1} << 16);
    errno = 0;
    while (in.read(block.data(), static_cast<std::streamsize>(block.size())) || in.gcount() > 0) {
        text.append(block.data(), static_cast<size_t>(in.gcount()));
        if (text.size() > pipeline::max_csv_bytes) {
            throw Error(Code::invalid_argument,
                        fmt::format("{}: a schedule may have at most {} bytes", path, pipeline::max_csv_bytes));
        }
    }
    if (in.bad()) throw os_error(fmt::format("cannot read {}", path), errno);
    try {
        return pipeline::from_csv(text);
    } catch (const Error& error) {
        throw Error(error.code(), fmt::format("{}: {}", path, error.what()));
    }
}

std::string output_of(const Arguments& arguments, pipeline::Schedule schedule) {
    if (arguments.csv || arguments.csv_comms) {
        return to_csv(schedule, arguments.csv ? pipeline::Csv::compute_only : pipeline::Csv::compute_comms);
    }
    const size_t actions = schedule.actions();
    if (!arguments.json && actions > most_drawn) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} actions are too many to draw (at most {}); --json and --csv "
                                "have no limit",
                                actions, most_drawn));
    }
    const std::string name = arguments.file.empty() ? arguments.schedule : arguments.file;
    const Drawn result = drawn(name, std::move(schedule), arguments.costs);
    if (arguments.svg) return svg_of(result);
    if (arguments.json) return json_of(result);
    if (arguments.trace) return trace_of(result);
    TextStyle style;
    if (const size_t width = terminal_width(STDOUT_FILENO); width > 0) style.width = width;
    style.colours = wants_colours(STDOUT_FILENO);
    return text_of(result, style);
}

int show(const Arguments& arguments) {
    if (arguments.csv + arguments.csv_comms + arguments.svg + arguments.json + arguments.trace > 1) {
        throw UsageError("--csv, --csv-comms, --svg, --json and --trace exclude each other");
    }
    for (const double time : {arguments.costs.forward, arguments.costs.input, arguments.costs.weight,
                              arguments.costs.latency, arguments.costs.transfer}) {
        if (!std::isfinite(time)) throw UsageError("a time must be a number");
    }
    pipeline::Schedule schedule = arguments.file.empty()
                                      ? pipeline::make_schedule(arguments.schedule, arguments.ranks,
                                                                arguments.stages_per_rank, arguments.microbatches)
                                      : read(arguments.file);
    const std::string text = output_of(arguments, std::move(schedule));
    (void)std::fwrite(text.data(), 1, text.size(), stdout);
    return 0;
}

std::string schedules_help() {
    std::string text = "Schedules (PyTorch's names work too):\n";
    for (const pipeline::Name& one : pipeline::schedule_names()) {
        text += fmt::format("  {:<24} {}\n", one.name, one.summary);
    }
    return text +
           "\nIn the drawing, F is a forward, B a backward, I the gradient of the input, W the gradients of the "
           "weights; the number\nbehind it is the micro-batch, and the number before it the stage if a rank has "
           "several. '-' continues an action, '.' is\nidle.\n\nExit codes:\n  0  success\n  2  wrong usage, or "
           "the schedule does not work";
}

}  // namespace

void add_pipeline(Command& tessera) {
    Command group = tessera.add_command("pipeline", "Draw pipeline schedules, and compute their bubbles");
    group.require_command();
    Command command = group.add_command("show", "Draw a schedule, simulated with the given times");
    const auto arguments = std::make_shared<Arguments>();
    command.add_option("--schedule", arguments->schedule, "A schedule of the list below").show_default();
    command.add_option("--file", arguments->file, "Read the schedule from PyTorch's CSV instead").type_name("CSV");
    command.add_option("--ranks", arguments->ranks, "Ranks of the pipeline").show_default();
    command.add_option("--stages-per-rank", arguments->stages_per_rank, "Stages on each rank")
        .default_text("2 for zbv and dualpipev, else 1");
    command.add_option("--microbatches", arguments->microbatches, "Micro-batches of a step").show_default();
    command.add_option("--forward", arguments->costs.forward, "Time of F, for one micro-batch and stage")
        .not_negative()
        .show_default();
    command.add_option("--input", arguments->costs.input, "Time of I; B takes I + W").not_negative().show_default();
    command.add_option("--weight", arguments->costs.weight, "Time of W").not_negative().show_default();
    command.add_option("--latency", arguments->costs.latency, "Delay of a message between ranks")
        .not_negative()
        .show_default();
    command.add_option("--transfer", arguments->costs.transfer, "Time that a message occupies its link")
        .not_negative()
        .show_default();
    command.add_flag("--csv", arguments->csv, "Print PyTorch's CSV of computations");
    command.add_flag("--csv-comms", arguments->csv_comms, "Print PyTorch's CSV with communication");
    command.add_flag("--svg", arguments->svg, "Print a picture");
    command.add_flag("--json", arguments->json, "Print all times as JSON");
    command.add_flag("--trace", arguments->trace, "Print a trace for ui.perfetto.dev; a unit of time is 1 ms");
    command.footer(schedules_help());
    command.on_run([arguments] { return show(*arguments); });
}

}  // namespace tsr::cli
