// PyTorch's two CSV formats of a schedule: of computations only, and with communication between them.
#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>

#include "base/error.hpp"
#include "parallel/pipeline/schedule.hpp"

namespace tsr::pipeline {

namespace {

struct Cell {
    int rank;
    size_t column;
    std::string_view text;

    [[noreturn]] void refuse(const std::string& why) const {
        constexpr size_t shown = 40;
        std::string readable(text.substr(0, shown));
        for (char& c : readable) {
            if (c < ' ' || c > '~') c = '?';
        }
        throw Error(Code::invalid_argument, fmt::format("line {}, cell {}: '{}{}' {}", rank + 1, column + 1, readable,
                                                        text.size() > shown ? "..." : "", why));
    }
};

std::string_view trimmed(std::string_view text) {
    constexpr std::string_view blank = " \t\r\"";
    const size_t first = text.find_first_not_of(blank);
    if (first == std::string_view::npos) return {};
    return text.substr(first, text.find_last_not_of(blank) - first + 1);
}

int number(const Cell& cell, std::string_view& text, int limit) {
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || value < 0 || value > limit) {
        cell.refuse(fmt::format("needs a number from 0 to {}: expected an action like 2F0", limit));
    }
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    return value;
}

std::optional<Work> work_of(std::string_view word) {
    for (const Work work : {Work::forward, Work::backward, Work::backward_input, Work::backward_weight}) {
        if (word.size() == 1 && word[0] == letter_of(work)) return work;
    }
    return std::nullopt;
}

bool is_communication(std::string_view word) {
    constexpr std::string_view words[]{"SEND_F",      "RECV_F",  "SEND_B",  "RECV_B",      "WAIT_SEND_F",
                                       "WAIT_SEND_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"};
    return std::ranges::find(words, word) != std::end(words);
}

// One action, or nothing for communication.
std::optional<Action> action_of(const Cell& cell, std::string_view text) {
    const int stage = number(cell, text, max_stages - 1);
    const size_t length = std::min(text.find_first_of("0123456789"), text.size());
    const std::string_view word = text.substr(0, length);
    text.remove_prefix(length);
    const std::optional<Work> work = work_of(word);
    if (!work) {
        if (!is_communication(word)) cell.refuse("has an unknown action: expected F, B, I or W, as in 2F0");
        return std::nullopt;
    }
    const int microbatch = number(cell, text, max_microbatches - 1);
    if (!text.empty()) cell.refuse("has more text after the action");
    return Action{*work, false, static_cast<uint16_t>(stage), static_cast<uint32_t>(microbatch)};
}

void read_cell(const Cell& cell, std::vector<Action>& order) {
    std::string_view text = cell.text;
    constexpr std::string_view overlap = ")OVERLAP_F_B";
    if (!text.starts_with('(')) {
        if (const auto action = action_of(cell, text)) order.push_back(*action);
        return;
    }
    const size_t middle = text.find(';');
    if (!text.ends_with(overlap) || middle == std::string_view::npos) {
        cell.refuse("is not a pair: expected (2F0;3B1)OVERLAP_F_B");
    }
    auto first = action_of(cell, text.substr(1, middle - 1));
    const auto second = action_of(cell, text.substr(middle + 1, text.size() - overlap.size() - middle - 1));
    if (!first || !second) cell.refuse("overlaps communication; only computations can overlap");
    if (first->work != Work::forward || second->work == Work::forward ||
        (first->stage == second->stage && first->microbatch == second->microbatch)) {
        cell.refuse("cannot overlap: expected a forward and the backward of something else");
    }
    first->overlaps_next = true;
    order.push_back(*first);
    order.push_back(*second);
}

// The sizes and the placement follow from the actions.
void complete(Schedule& schedule) {
    size_t stages = 0;
    for (const auto& order : schedule.orders) {
        for (const Action& action : order) {
            stages = std::max(stages, size_t{action.stage} + 1);
            schedule.microbatches = std::max(schedule.microbatches, static_cast<int>(action.microbatch) + 1);
        }
    }
    const size_t actions = schedule.actions();
    if (actions == 0) throw Error(Code::invalid_argument, "the schedule has no actions");
    // Before anything of that size is allocated.
    if (stages * static_cast<size_t>(schedule.microbatches) > actions) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} actions are too few for the {} stages and {} micro-batches that they name", actions,
                                stages, schedule.microbatches));
    }
    schedule.rank_of_stage.assign(stages, -1);
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
        for (const Action& action : schedule.orders[static_cast<size_t>(rank)]) {
            int& place = schedule.rank_of_stage[action.stage];
            if (place >= 0 && place != rank) {
                throw Error(Code::invalid_argument,
                            fmt::format("stage {} is on rank {} and on rank {}", action.stage, place, rank));
            }
            place = rank;
        }
    }
    const auto unplaced = std::ranges::find(schedule.rank_of_stage, -1);
    if (unplaced != schedule.rank_of_stage.end()) {
        throw Error(Code::invalid_argument,
                    fmt::format("stage {} of {} has no actions", unplaced - schedule.rank_of_stage.begin(), stages));
    }
}

// The computations of an order with what a trainer sends and gathers around them.
std::vector<std::string> with_communication(const Schedule& schedule, int rank) {
    const auto& order = schedule.orders[static_cast<size_t>(rank)];
    const int last = schedule.stages() - 1;
    const auto is_here = [&](int stage) { return schedule.rank_of_stage[static_cast<size_t>(stage)] == rank; };
    std::map<int, int> left;  // actions of each stage
    for (const Action& action : order) ++left[action.stage];
    std::set<int> begun;
    std::vector<std::string> cells;
    std::vector<std::string> waits;  // for sends: a message leaves while the rank goes on
    for (const Action& action : order) {
        const int stage = action.stage;
        const auto say = [&](std::string_view what) {
            cells.push_back(fmt::format("{}{}{}", stage, what, action.microbatch));
        };
        const auto send = [&](std::string_view what) {
            say(what);
            waits.push_back(fmt::format("{}WAIT_{}{}", stage, what, action.microbatch));
        };
        const bool forward = action.work == Work::forward;
        const bool gives_input = action.work == Work::backward || action.work == Work::backward_input;
        if (begun.insert(stage).second) cells.push_back(fmt::format("{}UNSHARD", stage));
        if (forward && stage > 0 && !is_here(stage - 1)) say("RECV_F");
        if (gives_input && stage < last && !is_here(stage + 1)) say("RECV_B");
        cells.push_back(text_of(action));
        if (forward && stage < last && !is_here(stage + 1)) send("SEND_F");
        if (gives_input && stage > 0 && !is_here(stage - 1)) send("SEND_B");
        if (--left[action.stage] == 0) {
            cells.push_back(fmt::format("{}RESHARD", stage));
            cells.push_back(fmt::format("{}REDUCE_GRAD", stage));
        }
    }
    cells.insert(cells.end(), waits.begin(), waits.end());
    return cells;
}

std::vector<std::string> computations(const Schedule& schedule, int rank) {
    const auto& order = schedule.orders[static_cast<size_t>(rank)];
    std::vector<std::string> cells;
    for (size_t i = 0; i < order.size(); ++i) {
        if (order[i].overlaps_next) {
            cells.push_back(fmt::format("({};{})OVERLAP_F_B", text_of(order[i]), text_of(order[i + 1])));
            ++i;
        } else {
            cells.push_back(text_of(order[i]));
        }
    }
    return cells;
}

}  // namespace

Schedule from_csv(std::string_view text) {
    if (text.size() > max_csv_bytes) {
        throw Error(Code::invalid_argument,
                    fmt::format("a schedule of {} bytes; at most {} are allowed", text.size(), max_csv_bytes));
    }
    Schedule schedule;
    while (!text.empty()) {
        const size_t line_end = std::min(text.find('\n'), text.size());
        std::string_view line = text.substr(0, line_end);
        text.remove_prefix(std::min(line_end + 1, text.size()));
        if (text.empty() && trimmed(line).empty()) break;  // after the last line break
        if (schedule.ranks() >= max_stages) throw Error(Code::invalid_argument, "more ranks than stages are allowed");
        std::vector<Action>& order = schedule.orders.emplace_back();
        for (size_t column = 0;; ++column) {
            const size_t cell_end = std::min(line.find(','), line.size());
            const Cell cell{schedule.ranks() - 1, column, trimmed(line.substr(0, cell_end))};
            if (!cell.text.empty()) read_cell(cell, order);
            if (cell_end == line.size()) break;
            line.remove_prefix(cell_end + 1);
        }
    }
    complete(schedule);
    validate(schedule);
    return schedule;
}

std::string to_csv(const Schedule& schedule, Csv format) {
    std::string text;
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
        const std::vector<std::string> cells =
            format == Csv::compute_only ? computations(schedule, rank) : with_communication(schedule, rank);
        for (size_t i = 0; i < cells.size(); ++i) text += fmt::format("{}{}", i == 0 ? "" : ",", cells[i]);
        text += '\n';
    }
    return text;
}

}  // namespace tsr::pipeline
