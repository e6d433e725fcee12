// Saves that compare replicas: ranks that hold the same, by whatever layout, are told where they do not, before
// anything is written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fixture.hpp"
#include "saver_fixture.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class ReplicasTest : public SaverTest {
   protected:
    static SaverOptions checking() {
        SaverOptions options = saver_options();
        options.check_replicas = CheckReplicas::yes;
        return options;
    }

    // All ranks save; the error that each of them gets, and nothing is there then. "" if all are well.
    std::string told_by(int ranks, const std::function<void(State&, int rank)>& fill,
                        const SaverOptions& options = checking()) {
        const TempDir dir;
        const Outcomes outcomes = run_meeting(ranks, [&](const std::shared_ptr<Communicator>& comm) {
            State state;
            fill(state, comm->rank());
            Saver saver(comm, dir.path(), options);
            saver.save(1, state);
        });
        if (!outcomes[0]) {
            expect_all_well(outcomes);
            EXPECT_EQ(committed(dir.path()), Steps{"1"});
            return "";
        }
        for (const auto& outcome : outcomes) {
            if (!outcome) {
                ADD_FAILURE() << "a rank saved";
                continue;
            }
            EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
            EXPECT_STREQ(outcome->what(), outcomes[0]->what());
        }
        EXPECT_TRUE(scan_root(posix_file_system(), dir.path()).empty());
        return outcomes[0]->what();
    }

    // A tensor of `shape` as the layout has it on `rank`, of ones; `change` gets each piece, which the state keeps.
    static void add(State& state, const std::string& name, const Layout& layout, int rank,
                    const std::function<void(size_t piece, std::vector<float>& values)>& change = {}) {
        std::vector<Tensor> pieces;
        for (const Box& box : layout.boxes_of(rank)) {
            auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(box.numel()), 1.0F);
            if (change) change(pieces.size(), *values);
            pieces.push_back({reinterpret_cast<std::byte*>(values->data()), box.sizes, DType::f32, {}});
            state.keep(values);
        }
        state.add_sharded(name, layout, DType::f32, pieces, rank);
    }
    static void add(State& state, const std::string& name, std::vector<float> values) {
        auto kept = std::make_shared<std::vector<float>>(std::move(values));
        state.add_tensor(name, tensor_of(std::span(*kept), DType::f32));
        state.keep(kept);
    }
};

TEST_F(ReplicasTest, OneRankThatDiffersIsTold) {
    const std::string told = told_by(3, [](State& state, int rank) {
        add(state, "same", {1, 2, 3});
        add(state, "w", {1, 2, rank == 1 ? 4.0F : 3.0F});
    });
    EXPECT_THAT(told,
                HasSubstr("tensor 'w' differs between replicas: rank 1 differs from rank 0; broadcast rank 0's state"));
    EXPECT_THAT(told, HasSubstr("check_replicas"));
}

TEST_F(ReplicasTest, ThoseOfTheFewAreTheOthers) {
    EXPECT_THAT(told_by(5, [](State& state, int rank) { add(state, "w", {rank == 0 || rank == 3 ? 1.0F : 2.0F}); }),
                HasSubstr("ranks 0, 3 differ from rank 1;"));
    EXPECT_THAT(told_by(2, [](State& state, int rank) { add(state, "w", {static_cast<float>(rank)}); }),
                HasSubstr("rank 1 differs from rank 0;"));
}

TEST_F(ReplicasTest, AllThatDifferAreCountedAndTheFirstOnesNamed) {
    const auto told = [&](int count) {
        return told_by(2, [&](State& state, int rank) {
            for (int i = 0; i < count; ++i) {
                add(state, "t" + std::to_string(10 + i), {static_cast<float>(rank)});
                add(state, "s" + std::to_string(10 + i), {1});
            }
        });
    };
    EXPECT_THAT(told(1), Not(HasSubstr("more")));
    EXPECT_THAT(told(2), HasSubstr("tensor 't10' differs"));
    EXPECT_THAT(told(2), HasSubstr("; 1 more differs: 't11'; "));
    EXPECT_THAT(told(4), HasSubstr("; 3 more differ: 't11', 't12', 't13'; "));
    EXPECT_THAT(told(20), HasSubstr("; 19 more differ: 't11', 't12', 't13', 't14', 't15', 't16', 't17', 't18', ...; "));
}

// However many there are: their checksums are gathered some at a time.
TEST_F(ReplicasTest, TheLastOfManyIsFound) {
    EXPECT_THAT(told_by(2,
                        [](State& state, int rank) {
                            for (int i = 10000; i < 15000; ++i) {
                                state.set_value(std::to_string(i), Json(i == 14999 ? rank : 0));
                            }
                        }),
                HasSubstr("value '14999' differs"));
}

// Differences that would make up for each other in a plain sum of checksums.
TEST_F(ReplicasTest, TensorsThatAreExchangedAreNotEqual) {
    EXPECT_THAT(told_by(2,
                        [](State& state, int rank) {
                            add(state, "a", {rank == 0 ? 1.0F : 2.0F});
                            add(state, "b", {rank == 0 ? 2.0F : 1.0F});
                        }),
                HasSubstr("tensor 'a' differs"));
    EXPECT_THAT(told_by(4,
                        [](State& state, int rank) {
                            const Layout layout = Layout::placed(
                                {2}, std::vector<int>{2, 2}, std::vector{Placement::replicate(), Placement::shard(0)});
                            add(state, "w", layout, rank, [&](size_t, std::vector<float>& values) {
                                values[0] = rank == 0 || rank == 3 ? 1.0F : 2.0F;
                            });
                        }),
                HasSubstr("tensor 'w' (part [0:1]) differs"));
}

TEST_F(ReplicasTest, ShardsAreComparedAmongTheRanksThatHoldThem) {
    const Layout layout =
        Layout::placed({5, 3}, std::vector<int>{2, 3}, std::vector{Placement::replicate(), Placement::shard(0)});
    const auto save = [&](int wrong) {
        return told_by(6, [&](State& state, int rank) {
            add(state, "w", layout, rank, [&](size_t, std::vector<float>& values) {
                values[0] = static_cast<float>(layout.shard_of(rank));
                if (rank == wrong) values.back() = 7;
            });
        });
    };
    EXPECT_EQ(save(-1), "");
    EXPECT_THAT(save(4),
                HasSubstr("tensor 'w' (part [2:4, 0:3]) differs between replicas: rank 4 differs from rank 1;"));
    EXPECT_THAT(save(2), HasSubstr("(part [4:5, 0:3]) differs between replicas: rank 5 differs from rank 2;"));
}

TEST_F(ReplicasTest, SoAreBoxes) {
    // Ranks 0 and 2 hold the first part, rank 1 the second, 1 and 2 the third.
    const std::vector<Box> boxes{{{0}, {2}}, {{2}, {3}}, {{5}, {4}}, {{5}, {4}}, {{0}, {2}}};
    const Layout layout = Layout::from_boxes({9}, boxes, std::vector<int>{1, 2, 2});
    const auto save = [&](int wrong, size_t wrong_piece) {
        return told_by(3, [&](State& state, int rank) {
            add(state, "w", layout, rank, [&](size_t piece, std::vector<float>& values) {
                if (rank == wrong && piece == wrong_piece) values[1] = 7;
            });
        });
    };
    EXPECT_EQ(save(-1, 0), "");
    EXPECT_EQ(save(1, 0), "") << "nobody else has it";
    EXPECT_THAT(save(2, 1), HasSubstr("(part [0:2]) differs between replicas: rank 2 differs from rank 0;"));
    EXPECT_THAT(save(2, 0), HasSubstr("(part [5:9]) differs between replicas: rank 2 differs from rank 1;"));
}

TEST_F(ReplicasTest, ShardsOfOneRankAreItsOwn) {
    EXPECT_EQ(told_by(3,
                      [](State& state, int rank) {
                          const std::vector<int> mesh{3};
                          const std::vector<Placement> rows{Placement::shard(0)};
                          add(state, "w", Layout::placed({7}, mesh, rows), rank,
                              [&](size_t, std::vector<float>& values) { values[0] = static_cast<float>(rank); });
                          add(state, "none", Layout::placed({0, 3}, mesh, rows), rank);
                          add(state, "empty", std::vector<float>());
                      }),
              "");
}

// Of any size: each byte counts, wherever the tasks of the checksums are cut.
TEST_F(ReplicasTest, EveryByteCounts) {
    constexpr size_t task = size_t{4} << 20;
    for (const size_t at : {size_t{0}, task - 1, task, 2 * task + 4}) {
        EXPECT_THAT(told_by(2,
                            [&](State& state, int rank) {
                                for (const size_t size : {2 * task + 5, size_t{3}, task - 1}) {
                                    auto bytes = std::make_shared<std::vector<uint8_t>>(size);
                                    if (rank == 1 && size > 2 * task) (*bytes)[at] = 1;
                                    state.add_tensor(std::to_string(size), {reinterpret_cast<std::byte*>(bytes->data()),
                                                                            Dims{static_cast<int64_t>(size)},
                                                                            DType::u8,
                                                                            {}});
                                    state.keep(bytes);
                                }
                            }),
                    HasSubstr("tensor '8388613' differs"));
    }
}

TEST_F(ReplicasTest, BytesAreComparedNotNumbers) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(told_by(2, [&](State& state, int) { add(state, "w", {nan}); }), "");
    EXPECT_THAT(told_by(2, [&](State& state, int rank) { add(state, "w", {rank == 0 ? 0.0F : -0.0F}); }),
                HasSubstr("tensor 'w' differs"));
}

TEST_F(ReplicasTest, ValuesAreComparedButThoseOfOneRank) {
    EXPECT_EQ(told_by(2,
                      [](State& state, int rank) {
                          state.set_value("epoch", Json(3));
                          state.set_value("rank/" + std::to_string(rank) + "/rng", Json(rank));
                          state.set_metric("loss", rank);
                      }),
              "");
    EXPECT_THAT(told_by(2, [](State& state, int rank) { state.set_value("epoch", Json(rank)); }),
                HasSubstr("value 'epoch' differs between replicas: rank 1 differs from rank 0; name a per-rank value "
                          "rank/<r>/... (PerRank in Python);"));
}

TEST_F(ReplicasTest, TiedTensorsAreComparedOnceAndUntiedOnesEach) {
    const auto save = [&](bool tied_on_both, float second) {
        return told_by(2, [&](State& state, int rank) {
            auto values = std::make_shared<std::vector<float>>(3, 1.0F);
            if (tied_on_both) (*values)[0] = rank == 0 ? 1.0F : second;
            state.add_tensor("a", tensor_of(std::span(*values), DType::f32));
            state.keep(values);
            if (tied_on_both || rank == 0) {
                state.add_tensor("b", tensor_of(std::span(*values), DType::f32));
            } else {
                add(state, "b", {second, 1, 1});
            }
        });
    };
    EXPECT_EQ(save(true, 1), "");
    EXPECT_THAT(save(true, 2), HasSubstr("tensor 'a' differs"));
    EXPECT_THAT(save(true, 2), Not(HasSubstr("more")));
    EXPECT_EQ(save(false, 1), "");
    EXPECT_THAT(save(false, 2), HasSubstr("tensor 'b' differs"));
}

TEST_F(ReplicasTest, PyTorchsFormatIsCheckedToo) {
    SaverOptions options = checking();
    options.format = SaveFormat::torch_dcp;
    EXPECT_THAT(told_by(
                    2, [](State& state, int rank) { add(state, "w", {static_cast<float>(rank)}); }, options),
                HasSubstr("tensor 'w' differs"));
}

TEST_F(ReplicasTest, NothingIsComparedUnlessItIsAskedFor) {
    EXPECT_EQ(told_by(
                  2,
                  [](State& state, int rank) {
                      add(state, "w", {static_cast<float>(rank)});
                      state.set_value("epoch", Json(rank));
                  },
                  saver_options()),
              "");
}

TEST_F(ReplicasTest, RanksAreOfOneMind) {
    const Outcomes outcomes = run_meeting(2, [&](const std::shared_ptr<Communicator>& comm) {
        Saver(comm, dir_.path(), comm->rank() == 1 ? checking() : saver_options());
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_STREQ(outcome->what(), "rank 1's check_replicas differs from rank 0's");
    }
}

// What the call compares is what it saves: the state may change as soon as it returns. A saver goes on after a
// difference.
TEST_F(ReplicasTest, SavesInTheBackgroundAreCheckedInTheirCall) {
    expect_all_well(run_meeting(3, [&](const std::shared_ptr<Communicator>& comm) {
        std::vector<float> values(1000, comm->rank() == 2 ? 5.0F : 1.0F);
        State state;
        state.add_tensor("w", tensor_of(std::span(values), DType::f32));
        Saver saver(comm, dir_.path(), checking());
        const Error error = error_of([&] { (void)saver.save_async(1, state); });
        EXPECT_EQ(error.code(), Code::mismatch);
        EXPECT_EQ(error.record()->peer, 2);
        EXPECT_EQ(error.record()->operation, "save");
        values.assign(1000, 1.0F);
        (void)saver.save_async(2, state);
        values.assign(1000, static_cast<float>(comm->rank()));
        saver.wait();
    }));
    EXPECT_EQ(committed(dir_.path()), Steps{"2"});
    std::vector<float> saved(1000);
    Checkpoint::open(dir_.path())->read("w", tensor_of(std::span(saved), DType::f32));
    EXPECT_THAT(saved, ::testing::Each(1.0F));
}

}  // namespace
}  // namespace tsr::testing
