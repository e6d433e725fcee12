// Layouts out of the boxes that each rank gives of itself.
#include "checkpoint/model/gathered_layout.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "patience.hpp"
#include "ranks.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

// What rank r of as many ranks as there are gives.
using Given = std::vector<OwnBoxes>;

struct Gathered {
    Outcomes outcomes;
    std::vector<std::optional<Layout>> layouts;
};

// Each rank gathers what is given; then all meet once more, so that an error has left the communicator whole.
Gathered gather(const Given& given, const std::function<void(int rank)>& before = [](int) {}) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    const int world_size = static_cast<int>(given.size());
    Gathered gathered{{}, std::vector<std::optional<Layout>>(given.size())};
    gathered.outcomes = run_threads(world_size, [&](int rank) {
        const auto comm = join_job(store, rank, world_size, test_options());
        std::optional<Error> error;
        try {
            gathered.layouts[static_cast<size_t>(rank)] = gather_layout(comm, [&] {
                before(rank);
                return given[static_cast<size_t>(rank)];
            });
        } catch (const Error& failed) {
            error = failed;
        }
        EXPECT_EQ(gather_layout(comm, [] { return OwnBoxes{{1}, {}}; }).world_size(), world_size);
        if (error) throw Error(*error);
    });
    return gathered;
}

void expect_all_fail(const Gathered& gathered, Code code, const char* what) {
    for (const auto& error : gathered.outcomes) {
        ASSERT_TRUE(error.has_value());
        EXPECT_EQ(error->code(), code) << error->what();
        EXPECT_THAT(error->what(), HasSubstr(what));
        EXPECT_STREQ(error->what(), gathered.outcomes[0]->what());
    }
}

TEST(GatheredLayout, IsThatOfTheBoxesOfAllRanks) {
    const Box top{{0, 0}, {2, 5}};
    const Box left{{2, 0}, {5, 2}};
    const Box right{{2, 2}, {5, 3}};
    const Dims shape{7, 5};
    const auto gathered = gather({{shape, {right, top}}, {shape, {}}, {shape, {left}}, {shape, {top}}});
    expect_all_well(gathered.outcomes);
    const std::vector<Box> all{right, top, left, top};
    const std::vector<int> counts{2, 0, 1, 1};
    for (const auto& layout : gathered.layouts) EXPECT_EQ(layout, Layout::from_boxes(shape, all, counts));
}

TEST(GatheredLayout, HoldsScalarsAndTensorsThatNobodyHas) {
    const auto scalar = gather({{{}, {}}, {{}, {Box{}}}});
    expect_all_well(scalar.outcomes);
    EXPECT_TRUE(scalar.layouts[0]->boxes_of(0).empty());
    EXPECT_EQ(scalar.layouts[0]->boxes_of(1).size(), 1U);
    const auto nobody = gather({{{4}, {}}, {{4}, {}}});
    expect_all_well(nobody.outcomes);
    EXPECT_EQ(nobody.layouts[1]->shape(), Dims({4}));
    const auto alone = gather({{{4}, {{{1}, {2}}}}});
    expect_all_well(alone.outcomes);
    EXPECT_EQ(alone.layouts[0]->boxes_of(0), (std::vector<Box>{{{1}, {2}}}));
}

TEST(GatheredLayout, ABoxOutsideIsToldToAllWithItsRank) {
    expect_all_fail(gather({{{4}, {{{0}, {2}}}}, {{4}, {{{2}, {3}}}}, {{4}, {}}}), Code::invalid_argument,
                    "rank 1: the box with offsets [2] and sizes [3] is not inside the shape [4]");
}

TEST(GatheredLayout, BoxesThatOverlapInPartAreToldToAllWithTheirRanks) {
    expect_all_fail(gather({{{4, 4}, {{{0, 0}, {2, 4}}}}, {{4, 4}, {}}, {{4, 4}, {{{1, 0}, {3, 4}}}}}),
                    Code::invalid_argument, "[0:2, 0:4] of rank 0 and [1:4, 0:4] of rank 2 overlap partly");
}

TEST(GatheredLayout, ShapesThatDifferAreToldToAllWithTheRank) {
    expect_all_fail(gather({{{4}, {{{0}, {2}}}}, {{4}, {}}, {{4, 1}, {{{2, 0}, {2, 1}}}}}), Code::mismatch,
                    "rank 2 passes boxes of a tensor of shape [4, 1], but rank 0 of shape [4]");
}

TEST(GatheredLayout, WhatOneRankCannotGiveFailsOnAll) {
    const auto refuse = [](int rank) {
        if (rank == 1) throw Error(Code::invalid_argument, "a shape of 9 dimensions");
    };
    expect_all_fail(gather({{{4}, {}}, {{4}, {}}}, refuse), Code::invalid_argument, "rank 1: a shape of 9 dimensions");
}

}  // namespace
}  // namespace tsr::testing
