// Bubbles and peaks against their formulas.
#include "parallel/pipeline/simulate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace tsr::pipeline {
namespace {

// All are in units of F = I = W.
struct Row {
    const char* name;
    int stages_per_rank;
    int microbatches;
    double makespan;
    double idle;
};

class Bubbles : public ::testing::TestWithParam<Row> {};

TEST_P(Bubbles, OfFourRanks) {
    const Row& row = GetParam();
    const Simulation result = simulate(make_schedule(row.name, 4, row.stages_per_rank, row.microbatches));
    EXPECT_EQ(result.makespan, row.makespan);
    EXPECT_EQ(result.idle(), row.idle);
}

INSTANTIATE_TEST_SUITE_P(Known, Bubbles,
                         ::testing::Values(Row{"gpipe", 1, 8, 33, 9}, Row{"1f1b", 1, 8, 33, 9},
                                           Row{"looped_bfs", 2, 8, 57, 9}, Row{"interleaved_1f1b", 2, 8, 57, 9},
                                           Row{"interleaved_zero_bubble", 1, 8, 27, 3},
                                           Row{"interleaved_zero_bubble", 2, 8, 51, 3}, Row{"zb_h2", 1, 8, 27, 3},
                                           Row{"zbv", 2, 8, 51, 3}, Row{"zbv", 2, 5, 34, 4},
                                           Row{"dualpipev", 2, 8, 51, 3}),
                         [](const auto& row) {
                             return std::string(row.param.name) + "_" + std::to_string(row.param.stages_per_rank) +
                                    "_" + std::to_string(row.param.microbatches);
                         });

struct Shape {
    int ranks;
    int per_rank;  // stages
    int microbatches;

    // Of an interleaved schedule: the micro-batches of a stage until the next stage's turn.
    [[nodiscard]] int round() const { return microbatches / std::max(1, microbatches / ranks); }
    [[nodiscard]] int missing() const { return std::max(0, ranks - microbatches); }  // to one for each rank
};

// What is known of a schedule for every shape that it takes, in units of F = I = W.
struct Known {
    const char* name;
    std::pair<int, int> per_rank;
    bool (*takes)(const Shape& of);
    int (*idle)(const Shape& of);  // until the end of the pipeline; every rank's
    int (*peak)(const Shape& of, int rank);
    int (*inside)(const Shape& of, int rank);  // idle between its first and its last action; unknown if negative
};

constexpr int unknown = -1;

bool takes_any(const Shape& /*of*/) { return true; }
bool takes_rounds(const Shape& of) { return of.microbatches % std::max(1, of.microbatches / of.ranks) == 0; }
int idle_of_loops(const Shape& of) { return 3 * (of.ranks - 1 + (of.per_rank - 1) * of.missing()); }
// Forwards arrive rank by rank; the gradients that a rank sends on last leave it before the pipeline ends.
int inside_of_loops(const Shape& of, int rank) { return idle_of_loops(of) - 3 * rank; }

const std::vector<Known> table{
    {"gpipe", {1, 1}, takes_any, idle_of_loops, [](const Shape& of, int) { return of.microbatches; }, inside_of_loops},
    {"1f1b",
     {1, 1},
     [](const Shape& of) { return of.microbatches >= of.ranks; },
     idle_of_loops,
     [](const Shape& of, int rank) { return of.ranks - rank; },
     inside_of_loops},
    {"looped_bfs",
     {1, 4},
     takes_any,
     idle_of_loops,
     [](const Shape& of, int) { return of.per_rank * of.microbatches; },
     inside_of_loops},
    {"interleaved_1f1b",
     {1, 4},
     takes_rounds,
     idle_of_loops,
     [](const Shape& of, int rank) {
         return std::min(of.microbatches * of.per_rank, (of.per_rank - 1) * of.round() + 2 * (of.ranks - 1 - rank) + 1);
     },
     inside_of_loops},
    {"interleaved_zero_bubble",
     {1, 4},
     takes_rounds,
     [](const Shape& of) {
         return of.ranks - 1 + of.per_rank * of.missing() +
                (of.per_rank - 1) * std::max(0, of.missing() - of.microbatches);
     },
     [](const Shape& of, int) {
         return std::min(of.microbatches * of.per_rank, (of.per_rank - 1) * of.round() + of.ranks);
     },
     [](const Shape& of, int rank) { return of.missing() > 0 ? unknown : of.ranks - 1 - rank; }},
    {"zb_h2",
     {1, 1},
     takes_any,
     [](const Shape& of) { return std::max(of.ranks - 1, 2 * (of.ranks - 1) - of.microbatches / 2); },
     [](const Shape& of, int) { return std::min(of.microbatches, 2 * of.ranks - 1); },
     [](const Shape& of, int) { return of.microbatches < 2 * of.ranks - 1 ? unknown : 0; }},
    {"zbv",
     {2, 2},
     takes_any,
     [](const Shape& of) { return std::max(of.ranks - 1, 2 * (2 * of.ranks - 1 - of.microbatches)); },
     [](const Shape& of, int rank) {
         return std::min({2 * of.ranks, of.microbatches + 1 + rank, 2 * of.microbatches});
     },
     [](const Shape& of, int) { return of.microbatches < 2 * of.ranks - 1 ? unknown : 0; }},
    {"dualpipev",
     {2, 2},
     [](const Shape& of) { return of.microbatches >= 2 * of.ranks; },
     [](const Shape& of) { return of.ranks - 1; },
     [](const Shape& of, int) { return 2 * of.ranks + 1; },
     [](const Shape& of, int rank) { return of.ranks - 1 - rank; }},
};

void expect_known(const Known& known, const Shape& of) {
    SCOPED_TRACE(::testing::Message() << of.ranks << " ranks, " << of.per_rank << " stages each, " << of.microbatches
                                      << " micro-batches");
    if (!known.takes(of)) {
        EXPECT_THROW((void)make_schedule(known.name, of.ranks, of.per_rank, of.microbatches), Error);
        return;
    }
    const Simulation result = simulate(make_schedule(known.name, of.ranks, of.per_rank, of.microbatches));
    const int busy = 3 * of.per_rank * of.microbatches;
    EXPECT_EQ(result.makespan, busy + known.idle(of));
    for (int rank = 0; rank < of.ranks; ++rank) {
        const RankTimes& times = result.ranks[static_cast<size_t>(rank)];
        EXPECT_EQ(times.busy, busy);
        EXPECT_EQ(times.peak, known.peak(of, rank)) << "rank " << rank;
        const int inside = known.inside(of, rank);
        if (inside != unknown) {
            EXPECT_EQ(times.last - times.first - times.busy, inside) << "rank " << rank;
        }
    }
}

class EveryShape : public ::testing::TestWithParam<Known> {};

TEST_P(EveryShape, HasTheKnownBubblesAndPeaks) {
    const Known& known = GetParam();
    for (int per_rank = known.per_rank.first; per_rank <= known.per_rank.second; ++per_rank) {
        for (int ranks = 1; ranks <= 8; ++ranks) {
            for (int m = 1; m <= 16; ++m) expect_known(known, {ranks, per_rank, m});
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Of, EveryShape, ::testing::ValuesIn(table),
                         [](const auto& known) { return std::string(known.param.name); });

TEST(Simulation, TheTableHasAllSchedules) {
    std::vector<std::string_view> names;
    for (const Known& known : table) names.emplace_back(known.name);
    for (const Name& one : schedule_names()) EXPECT_EQ(std::ranges::count(names, one.name), 1) << one.name;
}

TEST(Simulation, MessagesTakeTheirTimeAndQueueUpOnALink) {
    // Two ranks, one micro-batch: F, message, F, B, message, B.
    Costs costs{.latency = 10, .transfer = 5};
    EXPECT_EQ(simulate(make_schedule("gpipe", 2, 1, 1), costs).makespan, 1 + 15 + 1 + 2 + 15 + 2);
    // Activations are there at 16, 21 and 26. Rank 1 computes gradients from 27 on; the first is on the link from 29,
    // and the third, behind the two others, arrives at 29 + 3 * 5 + 10.
    EXPECT_EQ(simulate(make_schedule("gpipe", 2, 1, 3), costs).makespan, 54 + 2);
    // Stages of one rank hand over at once.
    EXPECT_EQ(simulate(make_schedule("zbv", 1, 2, 4), costs).makespan, 24);
}

TEST(Simulation, LargePipelinesTakeLinearTime) {
    const Schedule schedule = make_schedule("zbv", 512, 2, 4096);
    validate(schedule);
    EXPECT_EQ(simulate(schedule).idle(), 511);
}

}  // namespace
}  // namespace tsr::pipeline
