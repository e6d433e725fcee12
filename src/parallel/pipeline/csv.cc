// PyTorch's two CSV formats of a schedule: of computations only, and with communication between them.
#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

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

// The computations of all ranks with what a trainer sends and gathers around them. Ranks take turns, and where one
// sends, the receive goes to the end of what the other rank has by then: so two ranks agree on the order of all their
// messages, which NCCL needs.
class WithCommunication {
   public:
    explicit WithCommunication(const Schedule& schedule)
        : schedule_(schedule),
          lines_(schedule.orders.size()),
          next_(schedule.orders.size()),
          left_(schedule.rank_of_stage.size()),
          has_forward_(schedule.cells()),
          has_grads_(schedule.cells()) {
        for (const auto& order : schedule_.orders) {
            for (const Action& action : order) ++left_[action.stage];
        }
        actions_of_stage_ = left_;
    }

    std::vector<std::string> lines() {
        for (size_t rank = 0; rank < lines_.size(); ++rank) this_round_.insert(rank);
        while (!this_round_.empty()) {
            while (!this_round_.empty()) {
                turn_ = this_round_.extract(this_round_.begin()).value();
                const auto& order = schedule_.orders[turn_];
                if (next_[turn_] == order.size() || !is_ready(order[next_[turn_]])) continue;
                perform(order[next_[turn_]++]);
                next_round_.insert(turn_);
            }
            this_round_.swap(next_round_);
        }
        for (const auto& order : schedule_.orders) {
            for (const Action& action : order) {
                if (sends_grads(action)) say(action, "WAIT_SEND_B");
            }
        }
        return std::move(lines_);
    }

   private:
    [[nodiscard]] bool is_ready(const Action& action) const {
        if (action.work == Work::forward) return action.stage == 0 || has_forward_[cell(action, -1)];
        return !gives_grads(action) || is_last(action) || has_grads_[cell(action, 1)];
    }

    void perform(const Action& action) {
        const size_t stage = action.stage;
        if (left_[stage] == actions_of_stage_[stage]) say(action, "UNSHARD", false);
        add(action.stage, text_of(action));
        if (action.work == Work::forward) {
            has_forward_[cell(action, 0)] = true;
            if (sends_activations(action)) exchange(action, "SEND_F", 1, "RECV_F");
        } else if (gives_grads(action)) {
            has_grads_[cell(action, 0)] = true;
            if (sends_activations(action)) say(action, "WAIT_SEND_F");  // its receiver has sent what came of it
            if (sends_grads(action)) exchange(action, "SEND_B", -1, "RECV_B");
        }
        if (--left_[stage] == 0) {
            for (const char* what : {"REDUCE_GRAD", "WAIT_REDUCE_GRAD", "RESHARD"}) say(action, what, false);
        }
    }

    void exchange(const Action& action, const char* send, int step, const char* receive) {
        say(action, send);
        Action other = action;
        other.stage = static_cast<uint16_t>(action.stage + step);
        say(other, receive);
        const auto receiver = static_cast<size_t>(schedule_.rank_of_stage[other.stage]);
        (receiver > turn_ ? this_round_ : next_round_).insert(receiver);
    }

    void say(const Action& action, const char* what, bool of_microbatch = true) {
        const std::string microbatch = of_microbatch ? std::to_string(action.microbatch) : "";
        add(action.stage, fmt::format("{}{}{}", action.stage, what, microbatch));
    }

    void add(size_t stage, const std::string& cell) {
        std::string& line = lines_[static_cast<size_t>(schedule_.rank_of_stage[stage])];
        if (!line.empty()) line += ',';
        line += cell;
    }

    [[nodiscard]] static bool gives_grads(const Action& action) {
        return action.work == Work::backward || action.work == Work::backward_input;
    }
    [[nodiscard]] bool is_last(const Action& action) const { return action.stage + 1 == schedule_.stages(); }
    [[nodiscard]] bool sends_activations(const Action& action) const {
        return !is_last(action) && !together(action.stage, action.stage + size_t{1});
    }
    [[nodiscard]] bool sends_grads(const Action& action) const {
        return gives_grads(action) && action.stage > 0 && !together(action.stage, action.stage - size_t{1});
    }
    [[nodiscard]] bool together(size_t stage, size_t other) const {
        return schedule_.rank_of_stage[stage] == schedule_.rank_of_stage[other];
    }
    [[nodiscard]] size_t cell(const Action& action, int step) const {
        return schedule_.cell(static_cast<size_t>(int64_t{action.stage} + step), action.microbatch);
    }

    const Schedule& schedule_;
    std::vector<std::string> lines_;
    std::vector<size_t> next_;           // of each rank
    std::vector<int> left_;              // actions of each stage
    std::vector<int> actions_of_stage_;  // all of them
    std::vector<bool> has_forward_;      // cells whose activations are there
    std::vector<bool> has_grads_;        // cells whose gradients of the input are there
    size_t turn_ = 0;                    // the rank whose turn it is
    std::set<size_t> this_round_;        // ranks that may be ready
    std::set<size_t> next_round_;
};

std::vector<std::string> computations(const Schedule& schedule) {
    std::vector<std::string> lines;
    for (const auto& order : schedule.orders) {
        std::string& line = lines.emplace_back();
        for (size_t i = 0; i < order.size(); ++i) {
            if (i > 0) line += ',';
            if (order[i].overlaps_next) {
                line += fmt::format("({};{})OVERLAP_F_B", text_of(order[i]), text_of(order[i + 1]));
                ++i;
            } else {
                line += text_of(order[i]);
            }
        }
    }
    return lines;
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
    for (const std::string& line :
         format == Csv::compute_only ? computations(schedule) : WithCommunication(schedule).lines()) {
        text += line;
        text += '\n';
    }
    return text;
}

}  // namespace tsr::pipeline
