#include "pipeline/drawing.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.hpp"
#include "base/json.hpp"
#include "printable.hpp"
#include "trace_events.hpp"

namespace tsr::cli {

namespace {

using pipeline::Action;
using pipeline::Work;

struct Look {
    const char* terminal;             // the SGR code of the colour
    std::array<const char*, 2> fill;  // of even and odd stages of a rank
};

const Look& look_of(Work work) {
    static constexpr std::array<Look, 4> looks{{{"34", {"#4e79a7", "#86a8c9"}},
                                                {"32", {"#59a14f", "#93c58c"}},
                                                {"36", {"#76b7b2", "#a9d4d0"}},
                                                {"33", {"#f28e2b", "#f8bb80"}}}};
    return looks[static_cast<size_t>(work)];
}

bool has_several_stages(const Drawn& drawn) { return drawn.schedule.stages() > drawn.schedule.ranks(); }

// Which of its rank's stages it is, from 0.
std::vector<int> turns_of(const pipeline::Schedule& schedule) {
    std::vector<int> count(static_cast<size_t>(schedule.ranks()));
    std::vector<int> turns;
    for (const int rank : schedule.rank_of_stage) turns.push_back(count[static_cast<size_t>(rank)]++);
    return turns;
}

std::string label_of(const Drawn& drawn, const Action& action) {
    return has_several_stages(drawn) ? text_of(action) : fmt::format("{}{}", letter_of(action.work), action.microbatch);
}

// The time that one cell stands for.
double unit_of(const pipeline::Costs& costs) {
    constexpr double least = 1e-300;  // what is shorter is drawn as a point
    double unit = 0;
    for (const double time : {costs.forward, costs.input, costs.weight}) {
        if (time > least) unit = unit > 0 ? std::min(unit, time) : time;
    }
    return unit > 0 ? unit : 1;
}

struct Cell {
    const Action* action = nullptr;
    bool first = false;
};

// For each rank, what it does in each unit of time.
std::vector<std::vector<Cell>> grid_of(const Drawn& drawn) {
    const double unit = unit_of(drawn.costs);
    const double length = std::ceil(drawn.result.makespan / unit - 1e-9);
    constexpr double most_cells = 1e7;
    if (length * static_cast<double>(drawn.spans.size()) > most_cells) {
        throw Error(
            Code::invalid_argument,
            fmt::format("the makespan is {:g} times the shortest action, too long to draw to scale; print --json "
                        "or --svg",
                        length));
    }
    const auto columns = static_cast<size_t>(length);
    std::vector<std::vector<Cell>> grid(drawn.spans.size(), std::vector<Cell>(columns));
    for (size_t rank = 0; rank < grid.size(); ++rank) {
        for (size_t i = 0; i < drawn.spans[rank].size(); ++i) {
            const Drawn::Span& span = drawn.spans[rank][i];
            const auto begin = static_cast<size_t>(std::lround(span.begin / unit));
            const auto end = std::min(std::max(static_cast<size_t>(std::lround(span.end / unit)), begin + 1), columns);
            for (size_t at = begin; at < end; ++at) grid[rank][at] = {&drawn.schedule.orders[rank][i], at == begin};
        }
    }
    return grid;
}

std::string cell_text(const Drawn& drawn, const Cell& cell, size_t width, bool colours) {
    if (cell.action == nullptr) return fmt::format("{:<{}}", ".", width);
    const std::string text = fmt::format("{:<{}}", cell.first ? label_of(drawn, *cell.action) : "-", width);
    return colours ? fmt::format("\x1b[{}m{}\x1b[0m", look_of(cell.action->work).terminal, text) : text;
}

std::string xml_text(const std::string& text) {
    std::string escaped;
    for (const char c : readable_utf8(text)) {
        if (c == '<' || c == '>' || c == '&') {
            escaped += c == '<' ? "&lt;" : c == '>' ? "&gt;" : "&amp;";
        } else {
            escaped += static_cast<unsigned char>(c) < ' ' ? '?' : c;
        }
    }
    return escaped;
}

}  // namespace

Drawn drawn(std::string name, pipeline::Schedule schedule, const pipeline::Costs& costs) {
    Drawn drawn{std::move(name), std::move(schedule), costs, {}, {}};
    drawn.spans.resize(drawn.schedule.orders.size());
    for (size_t rank = 0; rank < drawn.spans.size(); ++rank) {
        drawn.spans[rank].resize(drawn.schedule.orders[rank].size());
    }
    drawn.result = simulate(drawn.schedule, costs, [&](int rank, size_t index, double begin, double end) {
        drawn.spans[static_cast<size_t>(rank)][index] = {begin, end};
    });
    return drawn;
}

std::string summary_of(const Drawn& drawn) {
    const double makespan = drawn.result.makespan;
    const double idle = drawn.result.idle();
    return fmt::format("makespan {:g}, idle {:g} ({:.1f} %), peak {} activations", makespan, idle,
                       makespan > 0 ? 100 * idle / makespan : 0, drawn.result.peak());
}

std::string text_of(const Drawn& drawn, const TextStyle& style) {
    const std::vector<std::vector<Cell>> grid = grid_of(drawn);
    size_t cell_width = 1;
    for (const auto& order : drawn.schedule.orders) {
        for (const Action& action : order) cell_width = std::max(cell_width, label_of(drawn, action).size() + 1);
    }
    const size_t head = fmt::format("rank {}  ", grid.size() - 1).size();
    const size_t room = std::max(style.width, head + cell_width) - head;
    const size_t per_row = room / cell_width;
    std::string text = fmt::format("{}: {} ranks, {} stages, {} micro-batches\n", printable(drawn.name),
                                   drawn.schedule.ranks(), drawn.schedule.stages(), drawn.schedule.microbatches);
    for (size_t first = 0; first < grid.front().size(); first += per_row) {
        if (first > 0) text += "\n";
        for (size_t rank = 0; rank < grid.size(); ++rank) {
            std::string row = fmt::format("{:<{}}", fmt::format("rank {}", rank), head);
            for (size_t at = first; at < std::min(first + per_row, grid[rank].size()); ++at) {
                row += cell_text(drawn, grid[rank][at], cell_width, style.colours);
            }
            row.erase(row.find_last_not_of(' ') + 1);
            text += row + "\n";
        }
    }
    return text + summary_of(drawn) + "\n";
}

std::string svg_of(const Drawn& drawn) {
    constexpr int row_height = 26;
    constexpr int left = 64;
    constexpr int top = 44;
    const double scale = 24 / unit_of(drawn.costs);
    const std::vector<int> turns = turns_of(drawn.schedule);
    const double width = left + drawn.result.makespan * scale + 12;
    const int height = top + row_height * drawn.schedule.ranks() + 36;
    std::string svg = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:g} {1}\" width=\"{0:g}\" height=\"{1}\" "
        "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        "<text x=\"8\" y=\"18\" font-size=\"13\">{2}: {3} ranks, {4} stages, {5} micro-batches; {6}</text>\n",
        width, height, xml_text(drawn.name), drawn.schedule.ranks(), drawn.schedule.stages(),
        drawn.schedule.microbatches, summary_of(drawn));
    for (size_t rank = 0; rank < drawn.spans.size(); ++rank) {
        const int y = top + row_height * static_cast<int>(rank);
        svg += fmt::format("<text x=\"8\" y=\"{}\">rank {}</text>\n", y + 16, rank);
        for (size_t i = 0; i < drawn.spans[rank].size(); ++i) {
            const Action& action = drawn.schedule.orders[rank][i];
            const Drawn::Span& span = drawn.spans[rank][i];
            const double x = left + span.begin * scale;
            const double length = (span.end - span.begin) * scale;
            const auto shade = static_cast<size_t>(turns[action.stage] % 2);
            svg += fmt::format(
                "<rect x=\"{:g}\" y=\"{}\" width=\"{:g}\" height=\"{}\" fill=\"{}\" stroke=\"white\">"
                "<title>{}: {:g} to {:g}</title></rect>\n",
                x, y, length, row_height - 4, look_of(action.work).fill[shade], text_of(action), span.begin, span.end);
            svg += fmt::format("<text x=\"{:g}\" y=\"{}\" text-anchor=\"middle\" fill=\"{}\">{}</text>\n",
                               x + length / 2, y + 15, shade == 0 ? "white" : "black", action.microbatch);
        }
    }
    double x = left;
    const int y = height - 22;
    constexpr std::array legend{std::pair{Work::forward, "F: forward"}, std::pair{Work::backward, "B: backward"},
                                std::pair{Work::backward_input, "I: gradient of the input"},
                                std::pair{Work::backward_weight, "W: gradients of the weights"}};
    for (const auto& [work, what] : legend) {
        svg += fmt::format("<rect x=\"{:g}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{}\"/>", x, y,
                           look_of(work).fill[0]);
        svg += fmt::format("<text x=\"{:g}\" y=\"{}\">{}</text>\n", x + 16, y + 10, what);
        x += 40 + 6.2 * static_cast<double>(std::string_view(what).size());
    }
    return svg + "</svg>\n";
}

std::string trace_of(const Drawn& drawn) {
    constexpr double microseconds = 1000;
    Json::Array events;
    for (size_t rank = 0; rank < drawn.spans.size(); ++rank) {
        const auto process = static_cast<int>(rank);
        events.push_back(trace_name("process_name", process, 0, fmt::format("rank {}", rank)));
        for (size_t i = 0; i < drawn.spans[rank].size(); ++i) {
            const Action& action = drawn.schedule.orders[rank][i];
            const Drawn::Span& span = drawn.spans[rank][i];
            Json::Object of = trace_event("X", process, action.stage, text_of(action));
            of.push_back({"ts", span.begin * microseconds});
            of.push_back({"dur", (span.end - span.begin) * microseconds});
            events.emplace_back(std::move(of));
        }
    }
    return trace_text(std::move(events));
}

std::string json_of(const Drawn& drawn) {
    Json::Array ranks;
    for (size_t rank = 0; rank < drawn.spans.size(); ++rank) {
        const pipeline::RankTimes& times = drawn.result.ranks[rank];
        Json::Array actions;
        for (size_t i = 0; i < drawn.spans[rank].size(); ++i) {
            const Action& action = drawn.schedule.orders[rank][i];
            actions.emplace_back(Json::Array{text_of(action), drawn.spans[rank][i].begin, drawn.spans[rank][i].end});
        }
        ranks.emplace_back(Json::Object{{"busy", times.busy},
                                        {"idle", drawn.result.makespan - times.busy},
                                        {"first", times.first},
                                        {"last", times.last},
                                        {"peak", times.peak},
                                        {"actions", std::move(actions)}});
    }
    Json::Array places;
    for (const int rank : drawn.schedule.rank_of_stage) places.emplace_back(rank);
    return Json(Json::Object{{"schedule", readable_utf8(drawn.name)},
                             {"microbatches", drawn.schedule.microbatches},
                             {"rank_of_stage", std::move(places)},
                             {"makespan", drawn.result.makespan},
                             {"idle", drawn.result.idle()},
                             {"peak", drawn.result.peak()},
                             {"ranks", std::move(ranks)}})
               .dump() +
           "\n";
}

}  // namespace tsr::cli
