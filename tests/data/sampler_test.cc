#include "data/sampler.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>

#include "base/error.hpp"
#include "base/splitmix64.hpp"

namespace tsr {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int64_t> take(Sampler& sampler, size_t size) {
    std::vector<int64_t> indices(size, -1);
    indices.resize(sampler.next(indices));
    return indices;
}

// What all ranks take in one step, in order of ranks; all must take the same number.
std::vector<int64_t> take_all(std::vector<Sampler>& ranks, size_t size) {
    std::vector<int64_t> all;
    size_t count = 0;
    for (size_t r = 0; r < ranks.size(); ++r) {
        const auto mine = take(ranks[r], size);
        if (r == 0) count = mine.size();
        EXPECT_EQ(mine.size(), count);
        all.insert(all.end(), mine.begin(), mine.end());
    }
    return all;
}

std::vector<Sampler> ranks_of(int world_size, int64_t length, const SamplerOptions& options) {
    std::vector<Sampler> ranks;
    for (int r = 0; r < world_size; ++r) ranks.emplace_back(r, world_size, length, options);
    return ranks;
}

// The numbers that the authors' C program prints for the seed 1234567 (Rosetta Code lists them too).
TEST(SplitMix64, GivesThePublishedSequence) {
    SplitMix64 random(1234567);
    const std::array<uint64_t, 5> expected{6457827717110365317U, 3203168211198807973U, 9817491932198370423U,
                                           4593380528125082431U, 16408922859458223821U};
    for (const uint64_t number : expected) EXPECT_EQ(random.next(), number);
}

TEST(SplitMix64, BoundedNumbersAreUniform) {
    SplitMix64 random(7);
    std::array<int, 6> counts{};
    constexpr int draws = 60000;
    for (int i = 0; i < draws; ++i) ++counts.at(random.below(6));
    double chi_squared = 0;
    for (const int count : counts) chi_squared += (count - draws / 6.0) * (count - draws / 6.0) / (draws / 6.0);
    EXPECT_LT(chi_squared, 20.5);  // 99.9 % of fair dice, 5 degrees of freedom; the seed is fixed
}

// Frozen: checkpoints hold positions in these orders. Computed by tests/data/make_orders.py.
TEST(ShuffledOrder, NeverChanges) {
    EXPECT_THAT(shuffled_order(0, 0, 10), ElementsAre(4, 9, 2, 5, 1, 7, 6, 0, 3, 8));
    EXPECT_THAT(shuffled_order(7, 3, 10), ElementsAre(1, 9, 4, 7, 5, 0, 6, 3, 8, 2));
    EXPECT_THAT(shuffled_order(0xffffffffffffffff, 1, 7), ElementsAre(3, 6, 0, 1, 2, 5, 4));
}

TEST(ShuffledOrder, IsAPermutationThatDiffersByEpochAndSeed) {
    const auto order = shuffled_order(5, 2, 1000);
    auto sorted = order;
    std::sort(sorted.begin(), sorted.end());
    std::vector<int64_t> expected(1000);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(sorted, expected);
    EXPECT_NE(order, shuffled_order(5, 3, 1000));
    EXPECT_NE(order, shuffled_order(6, 2, 1000));
}

TEST(Sampler, RanksTogetherTakeEachSampleOncePerEpoch) {
    for (const int world_size : {1, 2, 3, 5}) {
        auto ranks = ranks_of(world_size, 60, {.seed = 3});
        std::map<int64_t, int> seen;
        while (ranks[0].epoch() == 0) {
            for (const int64_t index : take_all(ranks, 4)) ++seen[index];
        }
        EXPECT_EQ(seen.size(), 60U);
        for (const auto& [index, times] : seen) EXPECT_EQ(times, 1) << "sample " << index;
    }
}

TEST(Sampler, GlobalStepHasTheSameSamplesAtAnyWorldSize) {
    auto one = ranks_of(1, 96, {.seed = 11});
    auto four = ranks_of(4, 96, {.seed = 11});
    for (int step = 0; step < 20; ++step) {
        auto a = take_all(one, 12);
        auto b = take_all(four, 3);
        std::sort(a.begin(), a.end());
        std::sort(b.begin(), b.end());
        EXPECT_EQ(a, b) << "step " << step;
    }
}

TEST(Sampler, WithoutShuffleRanksInterleave) {
    auto ranks = ranks_of(3, 9, {.shuffle = false});
    EXPECT_THAT(take(ranks[0], 2), ElementsAre(0, 3));
    EXPECT_THAT(take(ranks[1], 2), ElementsAre(1, 4));
    EXPECT_THAT(take(ranks[2], 2), ElementsAre(2, 5));
}

TEST(Sampler, ShortEndIsFilledFromTheBeginning) {
    auto ranks = ranks_of(3, 7, {.shuffle = false});
    EXPECT_THAT(take_all(ranks, 2), ElementsAre(0, 3, 1, 4, 2, 5));
    EXPECT_EQ(ranks[0].consumed(), 6);
    EXPECT_THAT(take_all(ranks, 2), ElementsAre(6, 0, 1));
    EXPECT_EQ(ranks[0].epoch(), 1);
    EXPECT_EQ(ranks[0].consumed(), 0);
}

TEST(Sampler, DropLastLeavesOutTheShortEnd) {
    auto ranks = ranks_of(3, 8, {.shuffle = false, .drop_last = true});
    EXPECT_THAT(take_all(ranks, 5), ElementsAre(0, 3, 1, 4, 2, 5));
    EXPECT_EQ(ranks[0].epoch(), 1);
}

TEST(Sampler, FewerSamplesThanRanksAreRepeated) {
    auto ranks = ranks_of(5, 2, {.shuffle = false});
    EXPECT_THAT(take_all(ranks, 3), ElementsAre(0, 1, 0, 1, 0));
    EXPECT_EQ(ranks[4].epoch(), 1);
}

TEST(Sampler, ResumesInMidEpochAtAnotherWorldSize) {
    const SamplerOptions options{.seed = 42};
    auto four = ranks_of(4, 100, options);
    std::map<int64_t, int> seen;
    for (int step = 0; step < 3; ++step) {
        for (const int64_t index : take_all(four, 5)) ++seen[index];
    }
    auto three = ranks_of(3, 100, options);
    for (Sampler& sampler : three) sampler.load_state(four[0].state());
    EXPECT_EQ(three[0].consumed(), 60);
    while (three[0].epoch() == 0) {
        for (const int64_t index : take_all(three, 5)) ++seen[index];
    }
    int total = 0;
    for (const auto& [index, times] : seen) total += times;
    EXPECT_EQ(seen.size(), 100U);
    EXPECT_EQ(total, 102);  // 40 left over 3 ranks: the end is filled up by 2
}

TEST(Sampler, LoadedStateContinuesWithTheSameSamples) {
    Sampler one(1, 2, 50, {.seed = 9});
    for (int i = 0; i < 9; ++i) take(one, 4);
    Sampler other(1, 2, 50, {.seed = 9});
    other.load_state(one.state());
    EXPECT_EQ(other.state(), one.state());
    for (int i = 0; i < 9; ++i) EXPECT_EQ(take(other, 4), take(one, 4));
}

TEST(Sampler, StateOfAnotherOrderIsRefused) {
    Sampler sampler(0, 1, 50, {.seed = 9});
    take(sampler, 3);
    const SamplerState before = sampler.state();
    const auto refused = [&](auto change) {
        SamplerState state = before;
        change(state);
        try {
            sampler.load_state(state);
            return std::string("nothing thrown");
        } catch (const Error& e) {
            EXPECT_EQ(e.code(), Code::mismatch);
            return std::string(e.what());
        }
    };
    EXPECT_THAT(refused([](auto& s) { s.length = 51; }), HasSubstr("length 51"));
    EXPECT_THAT(refused([](auto& s) { s.seed = 8; }), HasSubstr("seed 8"));
    EXPECT_THAT(refused([](auto& s) { s.shuffle = false; }), HasSubstr("shuffle"));
    EXPECT_THAT(refused([](auto& s) { s.drop_last = true; }), HasSubstr("drop_last"));
    EXPECT_THAT(refused([](auto& s) { s.consumed = 51; }), HasSubstr("sample 51"));
    EXPECT_THAT(refused([](auto& s) { s.epoch = -1; }), HasSubstr("epoch -1"));
    EXPECT_EQ(sampler.state(), before);
}

TEST(Sampler, SetEpochGoesToItsBeginning) {
    Sampler sampler(0, 1, 10, {.seed = 7});
    take(sampler, 4);
    sampler.set_epoch(3);
    EXPECT_EQ(take(sampler, 10), shuffled_order(7, 3, 10));
    EXPECT_THROW(sampler.set_epoch(-1), Error);
}

TEST(Sampler, BadArgumentsAreRefused) {
    EXPECT_THROW(Sampler(0, 1, 0, {}), Error);
    EXPECT_THROW(Sampler(2, 2, 5, {}), Error);
    EXPECT_THROW(Sampler(0, 4, 3, {.drop_last = true}), Error);
    Sampler sampler(0, 1, 5, {});
    EXPECT_THROW((void)sampler.next({}), Error);
}

TEST(Sampler, TellsWhatFillsUpTheLastStep) {
    for (const bool shuffle : {false, true}) {
        std::vector<Sampler> ranks = ranks_of(4, 10, {.seed = 3, .shuffle = shuffle});
        std::map<int64_t, int> seen;
        for (const size_t size : {2U, 1U}) {
            for (Sampler& rank : ranks) {
                const auto batch = take(rank, size);
                std::vector<uint8_t> valid(batch.size());
                rank.last_valid(valid);
                for (size_t i = 0; i < batch.size(); ++i) seen[batch[i]] += valid[i];
            }
        }
        EXPECT_EQ(ranks[0].epoch(), 1);
        EXPECT_EQ(seen.size(), 10U);
        for (const auto& [index, times] : seen) EXPECT_EQ(times, 1) << index;
    }
}

TEST(Sampler, TheMaskIsThatOfTheLastBatch) {
    Sampler sampler(0, 1, 5, {});
    sampler.last_valid({});
    (void)take(sampler, 3);
    std::vector<uint8_t> valid(2);
    try {
        sampler.last_valid(valid);
        ADD_FAILURE() << "a mask of another length was taken";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_THAT(error.what(), HasSubstr("the last batch has 3 samples"));
    }
}

}  // namespace
}  // namespace tsr
