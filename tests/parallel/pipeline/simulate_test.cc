// Bubbles and peaks against their formulas.
#include "parallel/pipeline/simulate.hpp"

#include <gtest/gtest.h>

#include <algorithm>

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

void for_all(const char* name, int stages_per_rank, int least_per_rank, auto&& check) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
        for (int m = std::max(1, least_per_rank * ranks); m <= 16; ++m) {
            const Schedule schedule = make_schedule(name, ranks, stages_per_rank, m);
            check(ranks, m, simulate(schedule));
        }
    }
}

TEST(Simulation, GPipeAndOneFOneB) {
    for_all("gpipe", 1, 0, [](int ranks, int m, const Simulation& result) {
        EXPECT_EQ(result.makespan, 3 * (m + ranks - 1));
        for (const RankTimes& rank : result.ranks) EXPECT_EQ(rank.peak, m);
    });
    for_all("1f1b", 1, 1, [](int ranks, int m, const Simulation& result) {
        EXPECT_EQ(result.makespan, 3 * (m + ranks - 1));
        for (int rank = 0; rank < ranks; ++rank) {
            const RankTimes& times = result.ranks[static_cast<size_t>(rank)];
            EXPECT_EQ(times.peak, ranks - rank);
            EXPECT_EQ(times.last - times.first - times.busy, 3 * (ranks - 1 - rank));
        }
    });
}

TEST(Simulation, SeveralStagesPerRank) {
    for (int stages = 1; stages <= 4; ++stages) {
        for_all("looped_bfs", stages, 1, [&](int ranks, int m, const Simulation& result) {
            EXPECT_EQ(result.makespan, 3 * (stages * m + ranks - 1));
            EXPECT_EQ(result.peak(), stages * m);
        });
        for (int ranks = 1; ranks <= 8; ++ranks) {
            for (int m = ranks; m <= 16; m += ranks) {
                const Simulation result = simulate(make_schedule("interleaved_1f1b", ranks, stages, m));
                EXPECT_EQ(result.makespan, 3 * (stages * m + ranks - 1));
                for (int rank = 0; rank < ranks; ++rank) {
                    EXPECT_EQ(result.ranks[static_cast<size_t>(rank)].peak,
                              std::min(m * stages, (stages - 1) * ranks + 2 * (ranks - 1 - rank) + 1));
                }
                const Simulation zero = simulate(make_schedule("interleaved_zero_bubble", ranks, stages, m));
                EXPECT_EQ(zero.idle(), ranks - 1) << ranks << " " << stages << " " << m;
                for (const RankTimes& rank : zero.ranks) {
                    EXPECT_EQ(rank.peak, std::min(m * stages, (stages - 1) * ranks + ranks));
                }
            }
        }
    }
}

TEST(Simulation, NoRankWaitsInZbH2) {
    for_all("zb_h2", 1, 2, [](int ranks, int m, const Simulation& result) {
        EXPECT_EQ(result.makespan, 3 * m + ranks - 1);
        for (const RankTimes& times : result.ranks) {
            EXPECT_EQ(times.last - times.first, times.busy);
            EXPECT_EQ(times.peak, 2 * ranks - 1);
        }
    });
}

TEST(Simulation, StagesInAV) {
    for_all("zbv", 2, 2, [](int ranks, int, const Simulation& result) {
        EXPECT_EQ(result.idle(), ranks - 1);
        for (const RankTimes& rank : result.ranks) {
            EXPECT_EQ(rank.last - rank.first, rank.busy);
            EXPECT_EQ(rank.peak, 2 * ranks);
        }
    });
    for_all("dualpipev", 2, 2,
            [](int ranks, int, const Simulation& result) { EXPECT_EQ(result.peak(), 2 * ranks + 1); });
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
