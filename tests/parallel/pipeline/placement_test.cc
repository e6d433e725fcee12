// Which stages a rank may have, and what the ranks must agree on. Every rank fails with the same words.
#include "parallel/pipeline/placement.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "toy.hpp"

namespace tsr::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

using Places = std::vector<std::vector<int>>;  // by rank

// What all ranks say when they make a pipeline, but for the number of the rank that refuses, which that rank leaves
// out.
std::string refused(const Places& stages, const std::function<PipelineOptions(int rank)>& options, Code code) {
    const Outcomes outcomes = run_ranks(static_cast<int>(stages.size()), test_options(), [&](Communicator& comm) {
        Trainer trainer(std::vector<int>{});
        trainer.join(comm, stages[static_cast<size_t>(comm.rank())], options(comm.rank()));
    });
    std::vector<std::string> texts;
    for (const auto& error : outcomes) {
        EXPECT_TRUE(error);
        if (!error) return "";
        EXPECT_EQ(error->code(), code) << error->what();
        texts.emplace_back(error->what());
    }
    const std::string shortest = *std::ranges::min_element(texts, {}, &std::string::size);
    for (const std::string& text : texts) EXPECT_THAT(text, EndsWith(shortest));
    return shortest;
}

std::string refused(const Places& stages, const std::string& schedule, int m) {
    return refused(stages, [&](int) { return options_of(schedule, m); }, Code::invalid_argument);
}

TEST(PipelinePlacement, NamesMissingAndDoubledStages) {
    EXPECT_EQ(
        refused({{0}, {0}}, "gpipe", 2),
        "schedule gpipe has the stages 0 to 1, each on one rank: stage 1 is missing; it belongs to rank 1; stage 0 is "
        "on rank 0 and on rank 1");
    EXPECT_EQ(refused({{0, 2}, {1, 4}}, "looped_bfs", 2),
              "schedule looped_bfs has the stages 0 to 3, each on one rank: stage 3 is missing; it belongs to rank 1; "
              "stage 4 "
              "of rank 1 does not exist");
    EXPECT_THAT(refused({{0, 1}, {0, 1}, {0, 1}}, "looped_bfs", 2),
                EndsWith("; stage 5 is missing; it belongs to rank 2; and 2 more"));
}

TEST(PipelinePlacement, NamesStagesOnTheWrongRank) {
    EXPECT_EQ(
        refused({{1}, {0}}, "1f1b", 2),
        "schedule 1f1b has the stages 0 to 1, each on one rank: stage 0 is on rank 1; it belongs to rank 0; stage 1 is "
        "on rank 0; it belongs to rank 1");
    EXPECT_THAT(refused({{0, 2}, {1, 3}}, "zbv", 4), HasSubstr("stage 2 is on rank 0; it belongs to rank 1"));
    EXPECT_THAT(refused({{0, 3}, {1, 2}}, "looped_bfs", 4), HasSubstr("stage 2 is on rank 1; it belongs to rank 0"));
}

TEST(PipelinePlacement, RefusesNumbersThatTheScheduleCannotTake) {
    EXPECT_THAT(refused({{0}, {1}}, "1f1b", 1),
                HasSubstr("schedule 1f1b cannot run 1 micro-batches on 2 ranks; the next "
                          "number that works is 2"));
    EXPECT_THAT(refused({{0}, {1}}, "gpipe", 0), HasSubstr("microbatches is 0; it must be at least 1"));
    EXPECT_THAT(refused({{0, 1}, {2}}, "1f1b", 4), HasSubstr("schedule 1f1b has one stage per rank, got 2"));
    EXPECT_THAT(refused({{0}, {}}, "gpipe", 4), HasSubstr("this rank has no stage; each rank needs one"));
    EXPECT_THAT(refused({{0}, {-1}}, "gpipe", 4), HasSubstr("stage -1 is negative"));
    EXPECT_THAT(refused({{0}, {1}}, "2f2b", 4), HasSubstr("'2f2b' is not a pipeline schedule"));
}

TEST(PipelinePlacement, MustBeDescribedAlikeByAllRanks) {
    const auto mismatch = [](const std::function<void(PipelineOptions&)>& other) {
        return refused(
            {{0}, {1}},
            [&](int rank) {
                PipelineOptions options = options_of("gpipe", 4);
                if (rank == 1) other(options);
                return options;
            },
            Code::mismatch);
    };
    EXPECT_THAT(mismatch([](auto& o) { o.schedule = "1f1b"; }),
                HasSubstr("the pipeline: rank 1 has schedule 1f1b, rank 0 has schedule gpipe"));
    EXPECT_THAT(mismatch([](auto& o) { o.microbatches = 5; }), HasSubstr("rank 1 has 5 micro-batches, rank 0 has 4"));
    EXPECT_THAT(mismatch([](auto& o) { o.max_message_bytes = 9; }), HasSubstr("rank 1 has max_message_bytes 9"));
    EXPECT_THAT(mismatch([](auto& o) { o.edges = {{0, 2, 1}}; }),
                HasSubstr("rank 1 has an edge for output 2 of stage 0 to stage 1, rank 0 has nothing"));
    EXPECT_THAT(refused(
                    {{0, 2}, {1}}, [&](int) { return options_of("looped_bfs", 4); }, Code::mismatch),
                HasSubstr("rank 1 has 2 stages, rank 0 has 4 stages"));
}

TEST(PipelinePlacement, OfACsvFollowsTheCsv) {
    const std::string csv = "0F0,0B0\n1F0,2F0,2B0,1B0\n";
    const auto with = [&](int m) {
        return [&csv, m](int) {
            PipelineOptions options;
            options.schedule_csv = csv;
            options.microbatches = m;
            return options;
        };
    };
    EXPECT_THAT(refused({{0}, {1}}, with(0), Code::invalid_argument),
                HasSubstr("stage 2 is missing; it belongs to rank 1"));
    EXPECT_THAT(refused({{0, 1, 2}, {1, 2}}, with(0), Code::invalid_argument),
                HasSubstr("has at most 2 stages on a rank, got 3 (0, 1, 2)"));
    EXPECT_THAT(refused({{0}, {1, 2}}, with(2), Code::invalid_argument),
                HasSubstr("microbatches is 2; the CSV has a schedule of 1"));
    EXPECT_THAT(refused({{0}, {1, 2}, {3}}, with(0), Code::invalid_argument),
                HasSubstr("the CSV has a schedule of 2 ranks; the communicator has 3"));
}

TEST(PipelinePlacement, RefusesEdgesThatDoNotGoForward) {
    const auto edge = [](pipeline::Edge one, bool twice = false) {
        return refused(
            {{0, 2}, {1, 3}},
            [&](int) {
                PipelineOptions options = options_of("looped_bfs", 4);
                options.edges = {one};
                if (twice) options.edges.push_back(one);
                return options;
            },
            Code::invalid_argument);
    };
    EXPECT_THAT(edge({2, 0, 1}), HasSubstr("edge 0, output 0 of stage 2 to stage 1: it must go to a later stage"));
    EXPECT_THAT(edge({2, 0, 2}), HasSubstr("it must go to a later stage"));
    EXPECT_THAT(edge({0, 0, 4}), HasSubstr("there are stages 0 to 3"));
    EXPECT_THAT(edge({-1, 0, 3}), HasSubstr("there are stages 0 to 3"));
    EXPECT_THAT(edge({0, -1, 3}), HasSubstr("outputs have numbers from 0 to 1023"));
    EXPECT_THAT(edge({0, 1, 3}, true), HasSubstr("edge 1, output 1 of stage 0 to stage 3: it is there twice"));
}

TEST(PipelinePlacement, NeedsTheCallbacksOfItsSchedule) {
    const auto lacking = [](const std::string& schedule, int m, const std::function<void(Callbacks&)>& take) {
        std::string words;
        const Outcomes outcomes = run_ranks(1, test_options(), [&](Communicator& comm) {
            Trainer trainer({0});
            Callbacks callbacks = trainer.callbacks();
            take(callbacks);
            std::vector<int> stages{0};
            if (schedule == "zbv") stages.push_back(1);
            Pipeline pipe(shared(comm), stages, options_of(schedule, m), callbacks);
        });
        if (outcomes[0]) {
            EXPECT_EQ(outcomes[0]->code(), Code::invalid_argument);
        }
        return outcomes[0] ? std::string(outcomes[0]->what()) : "";
    };
    EXPECT_THAT(lacking("gpipe", 1, [](auto& c) { c.forward = nullptr; }),
                HasSubstr("schedule gpipe needs the callback forward"));
    EXPECT_THAT(lacking("gpipe", 1, [](auto& c) { c.backward = nullptr; }), HasSubstr("needs the callback backward"));
    EXPECT_THAT(lacking("zbv", 2, [](auto& c) { c.backward_input = nullptr; }),
                HasSubstr("schedule zbv needs the callback backward_input"));
    EXPECT_THAT(lacking("zbv", 2, [](auto& c) { c.backward_weight = nullptr; }),
                HasSubstr("needs the callback backward_weight"));
    EXPECT_EQ(lacking("gpipe", 1, [](auto& c) { c.backward_input = c.backward_weight = nullptr; }), "");
    EXPECT_EQ(lacking("zbv", 2, [](auto& c) { c.backward = nullptr; }), "");
}

}  // namespace
}  // namespace tsr::testing
