// The orders of schedules, and what is refused. tests/interop/test_torch_pipeline_orders.py compares them with PyTorch's.
#include "parallel/pipeline/schedule.hpp"

#include <gmock/gmock.h>

#include "base/error.hpp"

namespace tsr::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <typename Call>
std::string refusal_of(Call&& call) {
    try {
        call();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument) << error.what();
        return error.what();
    }
    return "accepted";
}

std::string order_of(const Schedule& schedule, int rank) {
    std::string text;
    for (const Action& action : schedule.orders[static_cast<size_t>(rank)]) {
        if (!text.empty()) text += ' ';
        text += text_of(action);
    }
    return text;
}

struct Vector {
    const char* name;
    int stages_per_rank;
    const char* rank_0;
    const char* rank_1;
};

class Orders : public ::testing::TestWithParam<Vector> {};

// 2 ranks, 4 micro-batches.
TEST_P(Orders, AreThoseOfTheirSources) {
    const Vector& expected = GetParam();
    const Schedule schedule = make_schedule(expected.name, 2, expected.stages_per_rank, 4);
    EXPECT_EQ(order_of(schedule, 0), expected.rank_0);
    EXPECT_EQ(order_of(schedule, 1), expected.rank_1);
    EXPECT_NO_THROW(validate(schedule));
}

INSTANTIATE_TEST_SUITE_P(
    Known, Orders,
    ::testing::Values(
        Vector{"gpipe", 1, "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"},
        Vector{"1f1b", 1, "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"},
        Vector{"looped_bfs", 2, "0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0 0B3 0B2 0B1 0B0",
               "1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0 1B3 1B2 1B1 1B0"},
        Vector{"interleaved_1f1b", 2, "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
               "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"},
        Vector{"interleaved_zero_bubble", 1, "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3",
               "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3"},
        Vector{"zb_h2", 1, "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
               "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"},
        Vector{"zbv", 2,
               "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
               "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3"},
        Vector{"dualpipev", 2, "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
               "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3"}),
    [](const auto& row) { return "Schedule_" + std::string(row.param.name); });

TEST(Schedules, OverlapPairsOfDualPipeV) {
    const Schedule schedule = make_schedule("dualpipev", 2, 2, 4);
    std::string pairs;
    for (const Action& action : schedule.orders[1]) {
        if (action.overlaps_next) pairs += text_of(action) + " ";
    }
    EXPECT_EQ(pairs, "2F2 1F3 2F3 ");
}

TEST(Schedules, AllThatAreAcceptedAreValid) {
    int accepted = 0;
    for (const Name& name : schedule_names()) {
        for (int ranks = 1; ranks <= 8; ++ranks) {
            for (int stages = 1; stages <= 4; ++stages) {
                for (int microbatches = 1; microbatches <= 16; ++microbatches) {
                    Schedule schedule;
                    try {
                        schedule = make_schedule(name.name, ranks, stages, microbatches);
                    } catch (const Error& error) {
                        ASSERT_EQ(error.code(), Code::invalid_argument);
                        continue;
                    }
                    ++accepted;
                    ASSERT_NO_THROW(validate(schedule))
                        << name.name << " P " << ranks << " v " << stages << " m " << microbatches;
                    ASSERT_EQ(from_csv(to_csv(schedule, Csv::compute_only)).orders, schedule.orders);
                }
            }
        }
    }
    EXPECT_GT(accepted, 1424);
}

TEST(Schedules, NamesOfPyTorchInAnyCase) {
    EXPECT_EQ(make_schedule("ZBVZeroBubble", 2, 0, 4).orders, make_schedule("zbv", 2, 2, 4).orders);
    EXPECT_EQ(make_schedule("INTERLEAVED1F1B", 2, 2, 4).orders, make_schedule("interleaved-1f1b", 2, 2, 4).orders);
    EXPECT_EQ(make_schedule("gpipe", 3, 0, 4).stages(), 3);
}

TEST(Schedules, RefusalsNameWhatWorks) {
    const auto refused = [](const char* name, int ranks, int stages, int microbatches, auto text) {
        EXPECT_THAT(refusal_of([&] { (void)make_schedule(name, ranks, stages, microbatches); }), text);
    };
    refused("1f2b", 2, 1, 4, AllOf(HasSubstr("'1f2b' is not a pipeline schedule"), HasSubstr("zb_h2")));
    refused("1f1b", 8, 1, 4, HasSubstr("cannot run 4 micro-batches on 8 ranks; the next number that works is 8"));
    refused("dualpipev", 4, 2, 7, HasSubstr("the next number that works is 8"));
    refused("interleaved_1f1b", 2, 2, 5, HasSubstr("the next number that works is 6"));
    refused("gpipe", 2, 1, 0, HasSubstr("the next number that works is 1"));
    refused("zbv", 2, 3, 4, HasSubstr("zbv has two stages per rank, got 3"));
    refused("1f1b", 2, 2, 4, HasSubstr("1f1b has one stage per rank, got 2"));
    refused("gpipe", 0, 1, 4, HasSubstr("0 ranks with 1 stages each"));
    refused("looped_bfs", 65535, 2, 4, HasSubstr("1 to 65535 stages"));
    refused("gpipe", 2, 1, 1 << 30, HasSubstr("at most 16777216"));
    refused("interleaved_1f1b", 1, 256, 1 << 24, HasSubstr("16777216 micro-batches of 256 stages are too many"));
    refused("gpipe", 65535, 1, 1 << 24, HasSubstr("too many"));
    refused("looped_bfs", 2, -1, 4, HasSubstr("-1 stages each"));
}

class Csvs : public ::testing::Test {
   protected:
    static void refused(const std::string& text, const std::string& why) {
        EXPECT_THAT(refusal_of([&] { (void)from_csv(text); }), HasSubstr(why)) << text;
    }
};

TEST_F(Csvs, BothFormatsOfPyTorchAreRead) {
    const Schedule schedule = make_schedule("dualpipev", 2, 2, 4);
    EXPECT_EQ(from_csv(to_csv(schedule, Csv::compute_only)).orders, schedule.orders);
    // Pairs are not kept there: communication goes between.
    Schedule apart = schedule;
    for (auto& order : apart.orders) {
        for (Action& action : order) action.overlaps_next = false;
    }
    EXPECT_EQ(from_csv(to_csv(schedule, Csv::compute_comms)).orders, apart.orders);
    EXPECT_EQ(from_csv("0F0, \"0B0\" ,,\r\n1F0,1B0\r\n").rank_of_stage, (std::vector<int>{0, 1}));
}

TEST_F(Csvs, CommunicationStandsAroundWhatNeedsIt) {
    EXPECT_EQ(to_csv(make_schedule("gpipe", 2, 1, 1), Csv::compute_comms),
              "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
              "1RECV_F0,1UNSHARD,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,1WAIT_SEND_B0\n");
    // Between two stages of one rank nothing is sent.
    EXPECT_EQ(to_csv(make_schedule("zbv", 1, 2, 1), Csv::compute_comms),
              "0UNSHARD,0F0,1UNSHARD,1F0,1I0,1W0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,"
              "0I0,0W0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n");
}

TEST_F(Csvs, FaultsAreNamedWithTheirPlace) {
    refused("0F0,0X0\n", "line 1, cell 2: '0X0' has an unknown action");
    refused("0F0,0B0\nF0\n", "line 2, cell 1: 'F0' needs a number from 0 to 65534");
    refused("0F99999999999\n", "needs a number");
    refused("-1F0\n", "needs a number");
    refused("0F\n", "needs a number");
    refused("0F0x\n", "has more text after the action");
    refused("(0F0;0B0)OVERLAP\n", "is not a pair");
    refused("(0F0)OVERLAP_F_B\n", "is not a pair");
    refused("(0F0;0SEND_F0)OVERLAP_F_B\n", "only computations");
    refused(std::string(1000, '9') + "\n", "...'");
    refused(
        "0F0,\x1b[31m\xff"
        "0\n",
        "cell 2: '?[31m?0' needs a number");
    refused("(0F0;1F0)OVERLAP_F_B\n", "cannot overlap");
    refused("(0B0;1F0)OVERLAP_F_B\n", "cannot overlap");
    refused("(0F0;0B0)OVERLAP_F_B\n", "cannot overlap");
    refused("65000F16000000\n", "1 actions are too few for the 65001 stages");
    refused("0F0,0B0\n0F1,0B1\n", "stage 0 is on rank 0 and on rank 1");
    refused("0F0,0B0,2F0,2B0\n", "stage 1 of 3 has no actions");
}

TEST_F(Csvs, OrdersThatDoNotWorkAreNamed) {
    refused("0F0,0F0,0B0\n", "the order of rank 0: 0F0: already computed before");
    refused("0B0,0F0\n", "0B0 without 0F0 before it");
    refused("0F0,0W0,0I0\n", "0W0 without 0I0 before it");
    refused("0F0,0I0,0B0,0W0\n", "0B0: already computed before");
    refused("0F0,0I0\n", "0W0 is missing");
    refused("0F0,0F1,0B0\n", "0B1 is missing");
    refused(
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        "the ranks of this schedule wait for each other: rank 0 waits at 0B0 for stage 1 of rank 1, rank 1 waits at "
        "1F1 for stage 0 of rank 0");
}

TEST_F(Csvs, AnEmptyFileIsRefused) {
    refused("", "no actions");
    refused("\n\n", "no actions");
}

TEST_F(Csvs, OnesBeyondTheLimitAreRefused) {
    std::string text(max_csv_bytes, ' ');
    EXPECT_THAT(refusal_of([&] { (void)from_csv(text); }), HasSubstr("no actions"));
    text += ' ';
    EXPECT_THAT(refusal_of([&] { (void)from_csv(text); }),
                HasSubstr("a schedule of 268435457 bytes; at most 268435456 are allowed"));
}

}  // namespace
}  // namespace tsr::pipeline
