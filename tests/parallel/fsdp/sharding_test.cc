// Cutting units among ranks: by rows, by blocks of rows, flat. Shards hold rank 0's values as their layouts say, and a
// unit is whole at the same address in every pass.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <time.h>

#include <array>
#include <numeric>
#include <vector>

#include "parallel/fsdp/fsdp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "sanitized.hpp"
#include "units.hpp"

namespace tsr {
namespace {

using testing::Cut;
using testing::cut_by;
using testing::cuts;
using testing::elements_of;
using testing::expect_all_well;
using testing::FsdpOverWorlds;
using testing::Model;
using testing::odd_shapes;
using testing::run_ranks;
using testing::shared;
using testing::test_options;
using testing::two_units;

INSTANTIATE_TEST_SUITE_P(Worlds, FsdpOverWorlds, ::testing::Values(1, 2, 3, 4, 5));

TEST_P(FsdpOverWorlds, ShardsAreTheRowsOfRankZerosValues) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        Model model = odd_shapes(comm.rank());
        const Fsdp fsdp(shared(comm), two_units(model), {});
        const Model expected = odd_shapes(0);
        for (size_t i = 0; i < fsdp.params(); ++i) {
            const auto& entry = expected.entries[static_cast<size_t>(fsdp.param(i).name[1] - '0')];
            const Range rows = chunk(entry.shape[0], comm.world_size(), comm.rank());
            const Tensor shard = fsdp.shard(i);
            ASSERT_EQ(shard.shape[0], rows.end - rows.begin);
            const auto boxes = fsdp.held(i).layout.boxes_of(comm.rank());
            if (shard.numel() == 0) continue;
            ASSERT_EQ(boxes.size(), 1U);
            EXPECT_EQ(boxes[0].sizes, shard.shape);
            EXPECT_EQ(boxes[0].offsets[0], rows.begin);
        }
    }));
}

TEST_P(FsdpOverWorlds, HoweverTheyAreCutShardsAreWhatTheirLayoutSaysOfRankZerosValues) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        const Model expected = odd_shapes(0);
        for (const Cut& cut : cuts) {
            SCOPED_TRACE(cut.name);
            for (const bool sync_values : {true, false}) {
                Model model = odd_shapes(sync_values ? comm.rank() : 0);
                const Fsdp fsdp(shared(comm), cut_by(cut, two_units(model)), {.sync_values = sync_values});
                for (size_t i = 0; i < fsdp.params(); ++i) {
                    const auto& entry = expected.entries[static_cast<size_t>(fsdp.param(i).name[1] - '0')];
                    const Layout layout = fsdp.held(i).layout;
                    const auto shard = fsdp.shard(i).as<float>();
                    const std::vector<size_t> elements = elements_of(layout, comm.rank());
                    ASSERT_EQ(shard.size(), elements.size()) << entry.name;
                    for (size_t k = 0; k < shard.size(); ++k) ASSERT_EQ(shard[k], entry.values[elements[k]]);
                    std::vector<size_t> all;  // of all ranks, each once and in order
                    for (int r = 0; r < comm.world_size(); ++r) {
                        const std::vector<size_t> theirs = elements_of(layout, r);
                        all.insert(all.end(), theirs.begin(), theirs.end());
                    }
                    ASSERT_EQ(all.size(), entry.values.size());
                    for (size_t k = 0; k < all.size(); ++k) ASSERT_EQ(all[k], k);
                    for (const Box& box : layout.boxes_of(comm.rank())) {
                        EXPECT_EQ(cut.row_block > 0 ? box.offsets[0] % cut.row_block : 0, 0);
                    }
                }
            }
        }
    }));
}

// A look at all parameters of the unit for each of them takes ten times as long as is allowed here.
TEST(Fsdp, AUnitOfVeryManyParametersIsCutInTheTimeThatTheyTakeOneByOne) {
    constexpr size_t count = testing::sanitized ? 2'000 : 60'000;
    const auto used = [] {
        timespec time{};
        ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
    };
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        std::vector<float> values(2 * count, -1);
        if (comm.rank() == 0) std::iota(values.begin(), values.end(), 0.0F);
        FsdpUnit unit;
        unit.name = "many";
        for (size_t i = 0; i < count; ++i) {
            const Tensor param{reinterpret_cast<std::byte*>(&values[2 * i]), Dims{2}, DType::f32, {}};
            unit.params.push_back({fmt::format("p{}", i), param});
        }
        const double before = used();
        const Fsdp fsdp(shared(comm), {unit}, {});
        if (!testing::sanitized) {
            EXPECT_LT(used() - before, 4);
        }
        for (size_t i = 0; i < count; i += 97) {
            EXPECT_EQ(fsdp.shard(i).as<float>()[0], static_cast<float>(2 * i) + static_cast<float>(comm.rank()));
        }
    }));
}

TEST(Fsdp, BlocksThatRanksHaveEquallyManyOfAreARegularLayout) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model;
        model.add("even", {16, 2});
        model.add("uneven", {17, 2});
        const Fsdp fsdp(shared(comm), {{.name = "all", .params = model.params(), .row_block = 4}}, {});
        EXPECT_FALSE(fsdp.held(0).layout.is_explicit());
        EXPECT_TRUE(fsdp.held(1).layout.is_explicit());
    }));
}

TEST(Fsdp, AFlatUnitIsCutEvenlyInTheMiddleOfParameters) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Model model;
        for (const Dims& shape : {Dims{1, 250}, Dims{}, Dims{3, 50}}) {
            model.add(fmt::format("p{}", model.entries.size()), shape);
        }
        const Fsdp fsdp(shared(comm), {{.name = "all", .params = model.params(), .flat = true}}, {});
        int64_t elements = 0;
        for (size_t i = 0; i < fsdp.params(); ++i) {
            EXPECT_EQ(fsdp.shard(i).shape.ndim(), 1);
            elements += fsdp.shard(i).numel();
        }
        EXPECT_GT(elements, 110);  // of 401
        EXPECT_LT(elements, 180);
    }));
}

TEST(Fsdp, ReplicasHoldTheSameShardsAndSaySo) {
    expect_all_well(run_ranks(4, test_options(), [](Communicator& comm) {
        Model model = odd_shapes(comm.rank());
        const Fsdp fsdp(shared(comm), two_units(model), {.shard_ranks = 2});
        const Model expected = odd_shapes(0);
        for (size_t i = 0; i < fsdp.params(); ++i) {
            const auto& entry = expected.entries[static_cast<size_t>(fsdp.param(i).name[1] - '0')];
            const Range rows = chunk(entry.shape[0], 2, comm.rank() % 2);
            const int64_t row = entry.shape[0] > 0 ? entry.shape.product() / entry.shape[0] : 0;
            const auto shard = fsdp.shard(i).as<float>();
            ASSERT_EQ(static_cast<int64_t>(shard.size()), (rows.end - rows.begin) * row);
            for (size_t k = 0; k < shard.size(); ++k) {
                ASSERT_EQ(shard[k], entry.values[static_cast<size_t>(rows.begin * row) + k]);
            }
            const Held held = fsdp.held(i);
            EXPECT_EQ(held.layout.replica_count(), 2);
            EXPECT_EQ(held.layout.replica_of(comm.rank()), comm.rank() / 2);
        }
    }));
}

TEST_P(FsdpOverWorlds, AUnitIsWholeInItsPassesAtTheSameAddress) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        Model model = odd_shapes(comm.rank());
        const Model expected = odd_shapes(0);
        for (const Cut& cut : cuts) {
            SCOPED_TRACE(cut.name);
            Fsdp fsdp(shared(comm), cut_by(cut, two_units(model)), {});
            std::array<const std::byte*, 6> addresses{};
            const auto check = [&](size_t unit) {
                for (const size_t i : fsdp.unit(unit).params) {
                    const Tensor whole = fsdp.whole(i);
                    const auto& entry = expected.entries[static_cast<size_t>(fsdp.param(i).name[1] - '0')];
                    ASSERT_EQ(whole.shape, entry.shape);
                    if (addresses.at(i) != nullptr) {
                        ASSERT_EQ(whole.data, addresses.at(i));
                    }
                    addresses.at(i) = whole.data;
                    for (size_t k = 0; k < entry.values.size(); ++k) ASSERT_EQ(whole.as<float>()[k], entry.values[k]);
                }
            };
            for (int step = 0; step < 3; ++step) {
                for (const size_t unit : {0, 1}) {
                    fsdp.forward(unit);
                    check(unit);
                    fsdp.forward_done(unit);
                    EXPECT_EQ(fsdp.phase(unit), UnitPhase::sharded);
                }
                for (const size_t unit : {1, 0}) {
                    fsdp.backward(unit);
                    check(unit);
                    for (const size_t i : fsdp.unit(unit).params) fsdp.unused(i);
                    fsdp.grads_ready(unit);
                }
                fsdp.wait();
            }
        }
    }));
}

}  // namespace
}  // namespace tsr
