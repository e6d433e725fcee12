// Ranks that save together. They agree before anything is written, each writes its share, and a lost rank ends the save
// on the others.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/root/root.hpp"
#include "fixture.hpp"
#include "patience.hpp"
#include "saver_fixture.hpp"

namespace tsr::testing {
namespace {

TEST_F(SaverTest, RanksThatDifferAreToldBeforeAnythingIsWritten) {
    const auto attempt = [&](const std::function<void(State&, int rank, int64_t& step)>& change) {
        std::vector<float> memory(8);
        return run_meeting(3, [&](const std::shared_ptr<Communicator>& comm) {
            std::vector<float> own(8);
            State state;
            state.add_tensor("a", tensor_of(std::span(own), DType::f32));
            int64_t step = 7;
            change(state, comm->rank(), step);
            Saver saver(comm, dir_.path(), saver_options());
            saver.save(step, state);
        });
    };
    static std::vector<float> extra(3);
    const auto expect = [&](const Outcomes& outcomes, const char* told) {
        for (const auto& outcome : outcomes) {
            ASSERT_TRUE(outcome);
            EXPECT_EQ(outcome->code(), Code::mismatch);
            EXPECT_NE(std::string(outcome->what()).find(told), std::string::npos) << outcome->what();
            EXPECT_STREQ(outcome->what(), outcomes[0]->what());
        }
        EXPECT_TRUE(scan_root(posix_file_system(), dir_.path()).empty());
    };
    expect(attempt([](State& state, int rank, int64_t&) {
               if (rank == 1) state.add_tensor("b", tensor_of(std::span(extra), DType::f32));
           }),
           "rank 1: state differs from rank 0's: it has tensor 'b' f32 [3]");
    expect(attempt([](State& state, int rank, int64_t&) {
               if (rank == 0) state.add_tensor("b", tensor_of(std::span(extra), DType::f32));
           }),
           "rank 1: state differs from rank 0's: it lacks tensor 'b' f32 [3]");
    expect(attempt([](State& state, int rank, int64_t&) {
               if (rank == 2) state.set_value("x", Json(true));
           }),
           "rank 2: state differs from rank 0's: it has value 'x', which rank 0's lacks");
    expect(attempt([](State&, int rank, int64_t& step) { step += rank == 2 ? 1 : 0; }),
           "rank 2: saves step 8, but rank 0 saves step 7");
}

TEST_F(SaverTest, RootsThatDifferAreBothTold) {
    const auto meeting = std::make_shared<Meeting>(2);
    for (const auto& outcome : run_threads(2, [&](int rank) {
             Saver(std::make_shared<MeetingComm>(meeting, rank, 2), dir_ / (rank == 0 ? "a" : "b"), saver_options());
         })) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_NE(std::string(outcome->what())
                      .find("rank 1's root differs from rank 0's: " + (dir_ / "b") + " instead of " + (dir_ / "a")),
                  std::string::npos)
            << outcome->what();
    }
}

TEST_F(SaverTest, ALayoutOfAnotherWorldIsRefused) {
    const Outcomes outcomes = run_meeting(2, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_sharded({"w", DType::f32, {9}},
                          Layout::placed({9}, std::vector<int>{3}, std::vector<Placement>{Placement::shard(0)}),
                          comm->rank());
        Saver saver(comm, dir_.path(), saver_options());
        saver.save(1, owned.state);
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::invalid_argument);
        EXPECT_NE(std::string(outcome->what()).find("layout of 3 ranks, but the saver has 2"), std::string::npos);
    }
}

TEST_F(SaverTest, BoxesThatLeaveAHoleAreRefused) {
    OwnedState owned;
    owned.add_sharded({"w", DType::f32, {4}},
                      Layout::from_boxes({4}, std::vector<Box>{{{0}, {3}}}, std::vector<int>{1}), 0);
    Saver saver(nullptr, dir_.path(), saver_options());
    const Error error = error_of([&] { saver.save(1, owned.state); });
    EXPECT_EQ(error.code(), Code::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("1 of 4 elements to no rank"), std::string::npos) << error.what();
}

TEST_F(SaverTest, PrivateValuesBelongToTheirRank) {
    const auto body = [&](int64_t base) {
        return [this, base](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            owned.add_whole({"w", DType::f32, {10}});
            const std::string name = "rank/" + std::to_string(comm->rank()) + "/rng";
            owned.state.set_value(name, Json(base + comm->rank()));
            Saver saver(comm, dir_.path(), saver_options());
            if (base != 0) {
                saver.save(1, owned.state);
                return;
            }
            EXPECT_EQ(saver.resume(owned.state), 1);
            // Ranks that the save did not have keep what they have.
            EXPECT_EQ(owned.state.value(name), Json(comm->rank() < 3 ? 100 + comm->rank() : comm->rank()));
        };
    };
    expect_all_well(run_meeting(3, body(100)));
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().values.size(), 3u);
    expect_all_well(run_meeting(2, body(0)));
    expect_all_well(run_meeting(5, body(0)));
}

TEST_F(SaverTest, ReplicatedDataIsWrittenOnceAndSpread) {
    expect_all_well(run_meeting(4, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"large", DType::f32, {4000, 1000}});
        for (int i = 0; i < 40; ++i) owned.add_whole({"small." + std::to_string(i), DType::f32, {10000}});
        Saver saver(comm, dir_.path(), saver_options());
        saver.save(1, owned.state);
    }));
    const auto checkpoint = Checkpoint::open(dir_.path());
    ASSERT_EQ(checkpoint->manifest().files.size(), 4u);
    int64_t least = INT64_MAX;
    int64_t most = 0;
    for (const SavedFile& file : checkpoint->manifest().files) {
        least = std::min(least, file.size);
        most = std::max(most, file.size);
    }
    EXPECT_LT(checkpoint->manifest().size_bytes(), 17'600'000 + 4 * 16384);
    EXPECT_LT(most - least, 200'000);
    EXPECT_EQ(checkpoint->manifest().tensors.at("large")->split, 4);
}

TEST_F(SaverTest, ALostRankEndsTheSaveOnTheOthers) {
    auto meeting = std::make_shared<Meeting>(3);
    const Outcomes outcomes = run_threads(3, [&](int rank) {
        OwnedState owned;
        owned.add_whole({"w", DType::f32, {10}});
        const auto comm = std::make_shared<MeetingComm>(meeting, rank, 3);
        Saver saver(comm, dir_.path(), saver_options());
        if (rank == 1) {
            meeting->leave(1);
            return;
        }
        saver.save(1, owned.state);
    });
    EXPECT_FALSE(outcomes[1]);
    EXPECT_EQ(outcomes[0]->code(), Code::peer_lost);
    EXPECT_EQ(outcomes[2]->code(), Code::peer_lost);
}

// Rank 0 vanishes after all ranks said yes, before the manifest: nobody else can know.
TEST_F(SaverTest, RankZeroLostAfterTheVotesIsCommitUnknown) {
    auto meeting = std::make_shared<Meeting>(2);
    const Outcomes outcomes = save_until_manifest(meeting, 2, [&] {
        meeting->leave(0);
        throw Error(Code::aborted, "rank 0 dies here");
    });
    ASSERT_TRUE(outcomes[1]);
    EXPECT_EQ(outcomes[1]->code(), Code::commit_unknown);
    EXPECT_NE(std::string(outcomes[1]->what()).find("manifest.json"), std::string::npos);
    EXPECT_EQ(outcomes[1]->record()->peer, 0);
    EXPECT_NE(std::string(outcomes[1]->what()).find("rank 0 was lost"), std::string::npos) << outcomes[1]->what();
}

// Rank 2 vanishes in the last vote, while rank 0 still writes the manifest: rank 1 cannot know, and names rank 2.
TEST_F(SaverTest, CommitUnknownNamesTheRankThatWasLost) {
    auto meeting = std::make_shared<Meeting>(3);
    std::promise<void> rank1_has_ended;
    const Outcomes outcomes = save_until_manifest(
        meeting, 3,
        [&] {
            meeting->leave(2);
            EXPECT_EQ(rank1_has_ended.get_future().wait_for(patience(std::chrono::seconds(30))),
                      std::future_status::ready);
        },
        [&](int rank) {
            if (rank == 1) rank1_has_ended.set_value();
        });
    EXPECT_FALSE(outcomes[0]) << "it committed";
    ASSERT_TRUE(outcomes[1]);
    EXPECT_EQ(outcomes[1]->code(), Code::commit_unknown);
    EXPECT_EQ(outcomes[1]->record()->peer, 2);
    EXPECT_NE(std::string(outcomes[1]->what()).find("rank 2 was lost"), std::string::npos) << outcomes[1]->what();
}

}  // namespace
}  // namespace tsr::testing
