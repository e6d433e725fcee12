#include "parallel/pipeline/schedule.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "base/error.hpp"
#include "parallel/pipeline/orders.hpp"
#include "parallel/pipeline/simulate.hpp"

namespace tsr::pipeline {

namespace {

enum class Placement : uint8_t { one, loop, v };  // one stage a rank; stage i on rank i mod P; there and back

// The least number of micro-batches that a schedule takes, as a function of the ranks.
enum class Least : uint8_t { one, ranks, twice_ranks, rounds };

struct Kind {
    Name name;
    Placement placement;
    Least least;
    Order (*order)(const Seat&);
};

constexpr std::array kinds{
    Kind{{"gpipe", "GPipe", "all forwards, then all backwards"}, Placement::one, Least::one, gpipe},
    Kind{{"1f1b", "1F1B", "one forward, one backward: fewer activations"}, Placement::one, Least::ranks, one_f_one_b},
    Kind{{"looped_bfs", "LoopedBFS", "GPipe with several stages per rank"}, Placement::loop, Least::one, looped_bfs},
    Kind{{"interleaved_1f1b", "Interleaved1F1B", "1F1B with several stages per rank: shorter bubbles"},
         Placement::loop,
         Least::rounds,
         interleaved},
    Kind{{"interleaved_zero_bubble", "InterleavedZeroBubble",
          "weight gradients fill bubbles; with one stage per rank, ZB-H1"},
         Placement::loop,
         Least::rounds,
         interleaved_zero_bubble},
    Kind{{"zb_h2", "", "no bubble between a rank's first and last action, twice the activations of 1F1B"},
         Placement::one,
         Least::one,
         zb_h2},
    Kind{{"zbv", "ZBVZeroBubble", "two stages per rank in a V: no bubble, the activations of 1F1B"},
         Placement::v,
         Least::one,
         zbv},
    Kind{{"dualpipev", "DualPipeV", "two stages per rank in a V, forwards overlap backwards"},
         Placement::v,
         Least::twice_ranks,
         dual_pipe_v},
};

constexpr auto names = [] {
    std::array<Name, kinds.size()> all{};
    for (size_t i = 0; i < kinds.size(); ++i) all[i] = kinds[i].name;
    return all;
}();

// Lower case, without what separates words.
std::string key_of(std::string_view name) {
    std::string key;
    for (const char c : name) {
        if (c != '_' && c != '-' && c != ' ') key += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    return key;
}

const Kind& kind_of(std::string_view name) {
    const std::string key = key_of(name);
    for (const Kind& kind : kinds) {
        if (key == key_of(kind.name.name) || (!kind.name.torch_name.empty() && key == key_of(kind.name.torch_name)))
            return kind;
    }
    std::string known;
    for (const Name& one : names) known += fmt::format("{}{}", known.empty() ? "" : ", ", one.name);
    throw Error(Code::invalid_argument, fmt::format("'{}' is not a pipeline schedule; known are {}", name, known));
}

// The smallest number of micro-batches, from `microbatches` up, that the schedule takes.
int next_that_works(Least least, int ranks, int microbatches) {
    switch (least) {
        case Least::one: return std::max(microbatches, 1);
        case Least::ranks: return std::max(microbatches, ranks);
        case Least::twice_ranks: return std::max(microbatches, 2 * ranks);
        case Least::rounds:
            while (round_of(ranks, std::max(microbatches, 1)) == 0) ++microbatches;
            return std::max(microbatches, 1);
    }
    return 1;
}

int checked_stages_per_rank(const Kind& kind, int asked) {
    const int fixed = kind.placement == Placement::one ? 1 : kind.placement == Placement::v ? 2 : 0;
    const int given = asked == 0 ? std::max(fixed, 1) : asked;
    if (fixed != 0 && given != fixed) {
        throw Error(Code::invalid_argument, fmt::format("schedule {} has {} per rank, got {}", kind.name.name,
                                                        fixed == 1 ? "one stage" : "two stages", given));
    }
    return given;
}

void check_sizes(const Kind& kind, int ranks, int stages_per_rank, int microbatches) {
    if (ranks < 1 || stages_per_rank < 1 || ranks > max_stages / stages_per_rank) {
        throw Error(Code::invalid_argument,
                    fmt::format("a pipeline of {} ranks with {} stages each: there must be 1 to {} stages in all",
                                ranks, stages_per_rank, max_stages));
    }
    if (microbatches > max_microbatches || int64_t{ranks} * stages_per_rank * microbatches > max_computations) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} micro-batches of {} stages are too many: at most {} micro-batches, and {} times "
                                "stages, are allowed",
                                microbatches, int64_t{ranks} * stages_per_rank, max_microbatches, max_computations));
    }
    const int works = next_that_works(kind.least, ranks, microbatches);
    if (works != microbatches) {
        throw Error(Code::invalid_argument, fmt::format("schedule {} cannot run {} micro-batches on {} ranks; the next "
                                                        "number that works is {}",
                                                        kind.name.name, microbatches, ranks, works));
    }
}

// What has become of one stage's micro-batch.
struct Computed {
    bool forward : 1 = false;
    bool input : 1 = false;
    bool weight : 1 = false;
};

[[noreturn]] void refuse(int rank, const std::string& what) {
    throw Error(Code::invalid_argument, fmt::format("the order of rank {}: {}", rank, what));
}

void check_action(const Schedule& schedule, int rank, const Action& action, std::vector<Computed>& computed) {
    if (action.stage >= schedule.stages() || action.microbatch >= static_cast<uint32_t>(schedule.microbatches)) {
        refuse(rank, fmt::format("{}: there are {} stages and {} micro-batches", text_of(action), schedule.stages(),
                                 schedule.microbatches));
    }
    if (schedule.rank_of_stage[action.stage] != rank) {
        refuse(rank, fmt::format("{}: stage {} is on rank {}", text_of(action), action.stage,
                                 schedule.rank_of_stage[action.stage]));
    }
    Computed& one = computed[schedule.cell(action.stage, action.microbatch)];
    const auto need = [&](bool before, char letter) {
        if (!before)
            refuse(rank, fmt::format("{} without {}{}{} before it", text_of(action), action.stage, letter,
                                     action.microbatch));
    };
    const auto once = [&](bool already) {
        if (already) refuse(rank, fmt::format("{}: already computed before", text_of(action)));
    };
    switch (action.work) {
        case Work::forward:
            once(one.forward);
            one.forward = true;
            break;
        case Work::backward:
        case Work::backward_input:
            need(one.forward, 'F');
            once(one.input);
            one.input = true;
            one.weight = action.work == Work::backward;
            break;
        case Work::backward_weight:
            need(one.input, 'I');
            once(one.weight);
            one.weight = true;
            break;
    }
}

void check_complete(const Schedule& schedule, const std::vector<Computed>& computed) {
    for (int stage = 0; stage < schedule.stages(); ++stage) {
        for (int i = 0; i < schedule.microbatches; ++i) {
            const Computed& one = computed[schedule.cell(static_cast<size_t>(stage), static_cast<size_t>(i))];
            if (one.forward && one.input && one.weight) continue;
            const char missing = !one.forward ? 'F' : !one.input ? 'B' : 'W';
            refuse(schedule.rank_of_stage[static_cast<size_t>(stage)],
                   fmt::format("{}{}{} is missing", stage, missing, i));
        }
    }
}

// The ranks that wait, each with the action at which it does.
void check_progress(const Schedule& schedule) {
    const std::vector<size_t> done = walk(schedule, {}, [](int, size_t, double, double) {});
    std::string waiting;
    size_t count = 0;
    for (size_t rank = 0; rank < done.size(); ++rank) {
        if (done[rank] == schedule.orders[rank].size()) continue;
        if (++count > 4) continue;
        const Action& action = schedule.orders[rank][done[rank]];
        const int of = action.work == Work::forward ? action.stage - 1 : action.stage + 1;
        waiting += fmt::format("{}rank {} waits at {} for stage {} of rank {}", waiting.empty() ? "" : ", ", rank,
                               text_of(action), of, schedule.rank_of_stage[static_cast<size_t>(of)]);
    }
    if (count == 0) return;
    if (count > 4) waiting += fmt::format(", and {} more ranks wait", count - 4);
    throw Error(Code::invalid_argument, fmt::format("the ranks of this schedule wait for each other: {}", waiting));
}

}  // namespace

char letter_of(Work work) {
    switch (work) {
        case Work::forward: return 'F';
        case Work::backward: return 'B';
        case Work::backward_input: return 'I';
        case Work::backward_weight: return 'W';
    }
    return '?';
}

std::string text_of(const Action& action) {
    return fmt::format("{}{}{}", action.stage, letter_of(action.work), action.microbatch);
}

size_t Schedule::actions() const {
    size_t count = 0;
    for (const auto& order : orders) count += order.size();
    return count;
}

std::span<const Name> schedule_names() { return names; }

Schedule make_schedule(std::string_view name, int ranks, int stages_per_rank, int microbatches) {
    const Kind& kind = kind_of(name);
    const int per_rank = checked_stages_per_rank(kind, stages_per_rank);
    check_sizes(kind, ranks, per_rank, microbatches);
    Schedule schedule;
    schedule.microbatches = microbatches;
    for (int stage = 0; stage < ranks * per_rank; ++stage) {
        const bool back = kind.placement == Placement::v && stage >= ranks;
        schedule.rank_of_stage.push_back(back ? 2 * ranks - 1 - stage : stage % ranks);
    }
    schedule.orders.reserve(static_cast<size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank)
        schedule.orders.push_back(kind.order({ranks, rank, per_rank, microbatches}));
    return schedule;
}

void validate(const Schedule& schedule) {
    for (size_t stage = 0; stage < schedule.rank_of_stage.size(); ++stage) {
        const int rank = schedule.rank_of_stage[stage];
        if (rank < 0 || rank >= schedule.ranks()) {
            throw Error(Code::invalid_argument,
                        fmt::format("stage {} is on rank {}; there are {} ranks", stage, rank, schedule.ranks()));
        }
    }
    std::vector<Computed> computed(schedule.cells());
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
        const auto& order = schedule.orders[static_cast<size_t>(rank)];
        for (const Action& action : order) check_action(schedule, rank, action, computed);
        if (!order.empty() && order.back().overlaps_next) refuse(rank, "its last action overlaps with the next one");
    }
    check_complete(schedule, computed);
    check_progress(schedule);
}

}  // namespace tsr::pipeline
