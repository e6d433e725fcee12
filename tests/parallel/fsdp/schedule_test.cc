// The schedule: how many units are fetched ahead, how many reductions are in flight, and when one unit's memory becomes
// another's. A rank that leaves the common order of units is named.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "mlp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/model.hpp"
#include "patience.hpp"
#include "ranks.hpp"
#include "soon.hpp"
#include "units.hpp"

namespace tsr {
namespace {

using testing::a_unit_a_layer;
using testing::a_unit_each;
using ::testing::Each;
using testing::equal_layers;
using testing::expect_all_well;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::Mlp;
using testing::Model;
using testing::Outcomes;
using testing::run_ranks;
using testing::shared;
using testing::test_options;

std::vector<UnitPhase> phases_of(const Fsdp& fsdp) {
    std::vector<UnitPhase> phases;
    for (size_t u = 0; u < fsdp.units(); ++u) phases.push_back(fsdp.phase(u));
    return phases;
}

TEST(Fsdp, UnitsComeAheadInTheOrderOfTheForwardBefore) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        constexpr auto sharded = UnitPhase::sharded;
        constexpr auto on_its_way = UnitPhase::on_its_way;
        Model model = equal_layers(3);
        Fsdp fsdp(shared(comm), a_unit_each(model), {});
        for (const std::vector<size_t>& order : {std::vector<size_t>{2, 0, 1}, {0, 2, 1}}) {
            for (const bool recorded : {false, true}) {
                std::vector<UnitPhase> expected(3, sharded);
                for (size_t i = 0; i < 3; ++i) {
                    fsdp.forward(order[i]);
                    if (recorded) {  // else some came ahead in the order before
                        expected[order[i]] = UnitPhase::whole;
                        if (i < 2) expected[order[i + 1]] = on_its_way;
                        EXPECT_EQ(phases_of(fsdp), expected) << i;
                    }
                    fsdp.forward_done(order[i]);
                    expected[order[i]] = sharded;
                }
                // The backward goes back over this forward, whatever the one before was.
                for (size_t i = 3; i-- > 0;) {
                    fsdp.backward(order[i]);
                    expected[order[i]] = UnitPhase::backward;
                    if (i > 0) {
                        EXPECT_EQ(fsdp.phase(order[i - 1]), on_its_way) << i;
                        expected[order[i - 1]] = on_its_way;
                    }
                    if (recorded) {
                        EXPECT_EQ(phases_of(fsdp), expected) << i;
                    }
                    fsdp.unused(order[i]);
                    fsdp.grads_ready(order[i]);
                    expected[order[i]] = UnitPhase::reducing;
                }
                fsdp.wait();
            }
        }
    }));
}

TEST(Fsdp, NoMoreUnitsAreAheadThanTheOptionsSay) {
    constexpr size_t count = 6;
    for (const int ahead : {0, 1, 2}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            Model model = equal_layers(count);
            Fsdp fsdp(shared(comm), a_unit_each(model), {.forward_prefetch = ahead, .backward_prefetch = ahead});
            const auto expect_unsharded = [&](size_t left) {
                const auto phases = phases_of(fsdp);
                const auto at_rest = [](UnitPhase p) { return p == UnitPhase::sharded || p == UnitPhase::reducing; };
                const auto unsharded = count - static_cast<size_t>(std::ranges::count_if(phases, at_rest));
                EXPECT_EQ(unsharded, std::min(left, static_cast<size_t>(ahead) + 1)) << left;
            };
            for (int step = 0; step < 2; ++step) {
                for (size_t u = 0; u < count; ++u) {
                    fsdp.forward(u);
                    expect_unsharded(count - u);
                    fsdp.forward_done(u);
                }
                for (size_t u = count; u-- > 0;) {
                    fsdp.backward(u);
                    expect_unsharded(u + 1);
                    fsdp.unused(u);
                    fsdp.grads_ready(u);
                }
                fsdp.wait();
            }
        }));
    }
}

// Rank 1 reduces nothing until rank 0 waits in a backward, which is that of the unit after so many in flight. Units stay
// whole, so that nothing but their gradients needs both ranks.
TEST(Fsdp, ABackwardWaitsWhileAsManyReductionsAreInFlightAsTheOptionsSay) {
    constexpr size_t count = 4;
    for (const size_t in_flight : {1U, 2U, 3U}) {
        std::atomic<bool> waits{false};
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            Model model = equal_layers(count);
            Fsdp fsdp(shared(comm), a_unit_each(model, 0), {.grads_in_flight = static_cast<int>(in_flight)});
            for (const bool held : {false, true}) {  // the first step gets the memory
                for (size_t u = 0; u < count; ++u) {
                    fsdp.forward(u);
                    fsdp.forward_done(u);
                }
                if (held && comm.rank() == 1) testing::await_call(waits);
                for (size_t done = 0; done < count; ++done) {
                    const size_t unit = count - 1 - done;
                    if (held && comm.rank() == 0 && done == in_flight) {
                        const testing::CallInInterrupt noticed([] {}, waits);
                        fsdp.backward(unit);
                        EXPECT_TRUE(waits) << "it waited";
                    } else {
                        fsdp.backward(unit);
                    }
                    for (float& g : fsdp.grad(unit).as<float>()) g = static_cast<float>(unit) + (held ? 10.0F : 20.0F);
                    fsdp.grads_ready(unit);
                }
                fsdp.wait();
                for (size_t u = 0; u < count; ++u) {
                    EXPECT_THAT(fsdp.shard_grad(u).as<float>(), Each(static_cast<float>(u) + (held ? 10.0F : 20.0F)));
                }
            }
        }));
    }
}

// The second unit is the larger one, so that it never lies in the first one's memory, which rank 0 gives back earlier.
TEST(Fsdp, AUnitBecomesWholeWhileAReductionWaitsForAnotherRank) {
    std::atomic<bool> is_whole{false};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = equal_layers(1);
        model.add("large", {5000, 2}, 7);
        Fsdp fsdp(shared(comm), a_unit_each(model), {.backward_prefetch = 0});
        fsdp.backward(0);
        for (float& g : fsdp.grad(0).as<float>()) g = static_cast<float>(comm.rank() + 1);
        if (comm.rank() == 0) fsdp.grads_ready(0);
        fsdp.unshard(1);
        fsdp.await_unit(1);
        EXPECT_THAT(fsdp.whole(1).as<float>(), Each(7.0F));
        if (comm.rank() == 0) {
            is_whole = true;
        } else {
            wait_until([&] { return is_whole.load(); }, testing::soon(), "rank 0's whole unit");
            fsdp.grads_ready(0);
        }
        fsdp.backward(1);
        fsdp.unused(1);
        fsdp.grads_ready(1);
        fsdp.wait();
        EXPECT_THAT(fsdp.shard_grad(0).as<float>(), Each(1.5F));
    }));
}

// Which page of which shared memory an address shows, as the kernel tells it.
std::string page_of(const void* address) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        std::istringstream fields(line);
        uintptr_t begin = 0;
        uintptr_t end = 0;
        uintptr_t offset = 0;
        uint64_t inode = 0;
        char dash = 0;
        std::string rights;
        std::string device;
        fields >> std::hex >> begin >> dash >> end >> rights >> offset >> device >> std::dec >> inode;
        if (begin <= at && at < end) return fmt::format("{} of {} on {}", offset + (at - begin), inode, device);
    }
    throw std::runtime_error("nothing is mapped there");
}

// Rank 1 goes on to the second unit, in the memory of the first, which rank 0 still uses.
TEST(Fsdp, MemoryIsAnotherUnitsWhenAllRanksOfTheHostHaveLetGoOfIt) {
    std::atomic<int> asked{0};  // how often rank 1 was asked, as it waits, whether to go on
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = equal_layers(2, {4096, 4});
        Fsdp fsdp(shared(comm), a_unit_each(model), {});
        fsdp.unshard(0);
        fsdp.await_unit(0);
        const std::string first = page_of(fsdp.whole(0).data);
        if (comm.rank() == 1) {
            fsdp.reshard(0);
            fsdp.unshard(1);
            set_interrupt(
                [](void* count) {
                    ++*static_cast<std::atomic<int>*>(count);
                    return int32_t{0};
                },
                &asked);
            fsdp.await_unit(1);
            set_interrupt(nullptr, nullptr);
        } else {
            // Long enough for the second unit's rows to be copied, were that not to wait for this rank.
            wait_until([&] { return asked.load() >= 5; }, testing::soon(), "rank 1 waiting");
            EXPECT_THAT(fsdp.whole(0).as<float>(), Each(0.0F));
            fsdp.reshard(0);
            fsdp.unshard(1);
            fsdp.await_unit(1);
        }
        EXPECT_EQ(page_of(fsdp.whole(1).data), first) << "it is the same memory";
        EXPECT_THAT(fsdp.whole(1).as<float>(), Each(1.0F));
        fsdp.reshard(1);
    }));
}

TEST(Fsdp, ARankThatLeavesOutTheBackwardOfAUnitIsNamedAtTheDeadline) {
    CommOptions options = test_options();
    options.timeout = testing::patience(milliseconds{1000});  // also of the communicators that it makes for itself
    std::atomic<int> told{0};
    expect_all_well(run_ranks(3, options, [&](Communicator& comm) {
        Model model = equal_layers(2);
        Fsdp fsdp(shared(comm), a_unit_each(model), {});
        const auto backward = [&](size_t unit) {
            fsdp.backward(unit);
            fsdp.unused(unit);
            fsdp.grads_ready(unit);
        };
        backward(1);
        if (comm.rank() == 1) {
            EXPECT_THAT(expect_error([&] { fsdp.wait(); }, Code::invalid_state).what(), HasSubstr("\"uw0\""));
            wait_until([&] { return told.load() == 2; }, testing::soon(), "the others' errors");
            return;
        }
        const Error error = expect_error(
            [&] {
                backward(0);
                fsdp.wait();
            },
            Code::timeout);
        EXPECT_THAT(error.what(), HasSubstr("rank 1"));
        ++told;
    }));
}

TEST(Fsdp, RanksThatMakeDifferentUnitsWholeAreNamed) {
    const Outcomes outcomes = run_ranks(3, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        Fsdp fsdp(shared(comm), a_unit_a_layer(model), {.forward_prefetch = 0});
        fsdp.forward(comm.rank() == 2 ? 1 : 0);
    });
    size_t named = 0;
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        const std::string what = outcome->what();
        if (outcome->code() == Code::mismatch) {
            EXPECT_THAT(what, HasSubstr("\"fc0\""));
            EXPECT_THAT(what, HasSubstr("\"fc1\""));
            ++named;
        } else {
            EXPECT_EQ(outcome->code(), Code::aborted) << what;
        }
    }
    EXPECT_GT(named, 0U);
}

}  // namespace
}  // namespace tsr
