// Each option of DDP alone, and several models at once.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "grads.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "soon.hpp"

namespace tsr {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using testing::expect_all_well;
using testing::expect_error;
using testing::fill;
using ::testing::HasSubstr;
using testing::Model;
using testing::Outcomes;
using testing::run_ranks;
using testing::shared;
using testing::small;
using testing::test_options;
using testing::three_layers;

// ---- no_sync ---------------------------------------------------------------------------------------------------------

TEST(DdpNoSync, GradientsStayTheRanksOwnUntilTheFirstStepThatSynchronises) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small());
        const auto rank = static_cast<float>(comm.rank());
        for (int round = 0; round < 2; ++round) {
            ddp.zero_grad();
            ddp.set_sync(false);
            for (int micro = 0; micro < 3; ++micro) {
                for (float& g : ddp.grad(0).as<float>()) g += rank;
                ddp.ready(0);
                ddp.wait();
                EXPECT_THAT(ddp.grad(0).as<float>(), Each(rank * static_cast<float>(micro + 1)));
            }
            ddp.set_sync(true);
            for (float& g : ddp.grad(0).as<float>()) g += rank;
            ddp.ready_all();
            ddp.wait();
            EXPECT_THAT(ddp.grad(0).as<float>(), Each(4.0F));
        }
    }));
}

TEST(DdpNoSync, NothingIsSent) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small());
        if (comm.rank() == 0) {  // alone: a collective would stay behind
            ddp.set_sync(false);
            ddp.ready_all();
            ddp.wait();
            ddp.set_sync(true);
        }
        ddp.ready_all();
        ddp.wait();
    }));
}

TEST(DdpNoSync, CannotBeSwitchedInAStep) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {});
        ddp.ready(0);
        EXPECT_THAT(expect_error([&] { ddp.set_sync(false); }, Code::invalid_state).what(),
                    HasSubstr("synchronisation cannot be changed while gradients are being reduced"));
    }));
}

// ---- unused parameters -----------------------------------------------------------------------------------------------

TEST(DdpUnused, ARankAddsZerosForWhatItDoesNotUse) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small({.find_unused = true}));
        for (int step = 0; step < 3; ++step) {
            const int user = step % 3;  // only this rank has a gradient of "b"; nobody one of "c"
            fill(ddp, 1, 100);          // what is left of an earlier step
            fill(ddp, 2, static_cast<float>(7 + comm.rank()));
            fill(ddp, 0, 3);
            ddp.ready(0);
            if (comm.rank() == user) {
                fill(ddp, 1, 6);
                ddp.ready(1);
            }
            ddp.wait();
            EXPECT_THAT(ddp.grad(0).as<float>(), Each(3.0F));
            EXPECT_THAT(ddp.grad(1).as<float>(), Each(2.0F));
            EXPECT_THAT(ddp.grad(2).as<float>(), Each(static_cast<float>(7 + comm.rank()))) << "nobody used it";
            EXPECT_THAT((std::array{ddp.used(0), ddp.used(1), ddp.used(2)}), ElementsAre(true, true, false));
        }
    }));
}

TEST(DdpUnused, AGradientOfAStepWithoutSynchronisationCounts) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small({.find_unused = true}));
        ddp.set_sync(false);
        fill(ddp, 1, 4);
        if (comm.rank() == 0) ddp.ready(1);
        ddp.wait();
        ddp.set_sync(true);
        ddp.ready(0);
        ddp.wait();
        EXPECT_THAT(ddp.grad(1).as<float>(), Each(2.0F));
        EXPECT_TRUE(ddp.used(1));
        EXPECT_FALSE(ddp.used(2));
    }));
}

TEST(DdpUnused, AStepWithoutAnyGradientIsAStep) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small({.find_unused = true}));
        fill(ddp, 0, 5);
        ddp.wait();
        EXPECT_THAT(ddp.grad(0).as<float>(), Each(5.0F));
        EXPECT_FALSE(ddp.used(0));
    }));
}

TEST(DdpUnused, WithoutTheOptionTheMessageNamesThemAndTheOption) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {});
        ddp.ready(1);
        EXPECT_THAT(expect_error([&] { ddp.wait(); }, Code::invalid_state).what(),
                    ::testing::AllOf(HasSubstr(R"("a", "c")"), HasSubstr("then end the step again, or create the model "
                                                                         "with the option find_unused")));
    }));
}

// ---- static graph ----------------------------------------------------------------------------------------------------

TEST(DdpStaticGraph, LaterStepsHaveTheParametersOfTheFirst) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small({.static_graph = true}));
        for (int step = 0; step < 4; ++step) {
            fill(ddp, 0, 1);
            fill(ddp, 1, 50);
            fill(ddp, 2, 60);
            if (comm.rank() == 1) {
                fill(ddp, 2, 8);
                ddp.ready(2);
            }
            if (step % 2 == 0) {
                ddp.ready(0);
            } else {
                ddp.ready_all();  // what the first step had
            }
            ddp.wait();
            EXPECT_THAT(ddp.grad(0).as<float>(), Each(1.0F));
            EXPECT_THAT(ddp.grad(1).as<float>(), Each(50.0F)) << "nobody used it";
            EXPECT_THAT(ddp.grad(2).as<float>(), Each(4.0F));
            EXPECT_EQ(ddp.used(1), false);
        }
    }));
}

TEST(DdpStaticGraph, AnotherGraphIsRefusedByName) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small({.static_graph = true}));
        ddp.ready(0);
        ddp.ready(2);
        ddp.wait();
        EXPECT_THAT(expect_error([&] { ddp.ready(1); }, Code::invalid_state).what(),
                    ::testing::AllOf(HasSubstr("\"b\""), HasSubstr("if steps differ, use find_unused")));
        ddp.ready(2);
        EXPECT_THAT(
            expect_error([&] { ddp.wait(); }, Code::invalid_state).what(),
            ::testing::AllOf(HasSubstr("1 of 3 gradients were never marked ready: \"a\""), HasSubstr("first step")));
        ddp.ready(0);
        ddp.wait();
    }));
}

// ---- buckets ---------------------------------------------------------------------------------------------------------

TEST(DdpRebuild, BucketsFollowRankZerosOrderAndGradientsStay) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Model model;
        for (int i = 0; i < 6; ++i) model.add(fmt::format("p{}", i), {100});
        Ddp ddp(shared(comm), model.params(),
                {.bucket_bytes = 800, .first_bucket_bytes = 800, .rebuild_buckets = true});
        std::vector<std::byte*> places;
        for (size_t i = 0; i < 6; ++i) places.push_back(ddp.grad(i).data);
        const std::array<size_t, 6> of_zero{2, 5, 0, 3, 1, 4};
        for (int step = 0; step < 3; ++step) {
            for (size_t k = 0; k < 6; ++k) {
                const size_t i = comm.rank() == 0 ? of_zero.at(k) : k;
                fill(ddp, i, static_cast<float>(10 * i) + static_cast<float>(comm.rank() * 3));
                ddp.ready(i);
            }
            ddp.wait();
            for (size_t i = 0; i < 6; ++i) {
                EXPECT_THAT(ddp.grad(i).as<float>(), Each(static_cast<float>(10 * i + 3))) << "step " << step;
                EXPECT_EQ(ddp.grad(i).data, places[i]);
            }
            EXPECT_EQ(ddp.stats(0).size_bytes, 896U);
            EXPECT_EQ(ddp.stats(0).end.count() == 0, step == 0) << "those buckets were grouped after it";
        }
        ASSERT_EQ(ddp.buckets().size(), 3U);
        for (size_t b = 0; b < 3; ++b) {
            EXPECT_EQ(ddp.buckets()[b].slots[0].param, of_zero.at(2 * b));
            EXPECT_EQ(ddp.buckets()[b].slots[1].param, of_zero.at(2 * b + 1));
        }
    }));
}

TEST(DdpStats, SayWhenEachBucketWasReadyReducedAndWaitedFor) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small());
        EXPECT_EQ(ddp.stats(0).end.count(), 0);
        EXPECT_EQ(ddp.stats(1).size_bytes, 1216U) << "known before the first step";
        ddp.ready(0);
        ddp.ready(1);
        ddp.ready(2);
        ddp.wait();
        const std::array<size_t, 3> sizes{64, 1216, 1216};  // c, b, a
        std::chrono::nanoseconds last{};
        for (size_t b = 0; b < 3; ++b) {
            const BucketStats& stats = ddp.stats(b);
            EXPECT_EQ(stats.size_bytes, sizes.at(b));
            EXPECT_EQ(stats.params, 1U);
            EXPECT_LE(stats.ready, stats.start);
            EXPECT_LE(stats.start, stats.end);
            EXPECT_LE(last, stats.start) << "in the order of buckets";
            EXPECT_LE(stats.exposed, stats.end);
            last = stats.end;
        }
        EXPECT_LT(ddp.stats(2).ready, ddp.stats(0).ready) << "parameter a was first";
        expect_error([&] { (void)ddp.stats(3); }, Code::invalid_argument);
    }));
}

TEST(DdpStats, AReductionThatIsWaitedForIsExposed) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small());
        std::atomic<bool> waited{false};
        ddp.set_hook([&](const BucketView& bucket) {
            if (bucket.bucket == 1) wait_until([&] { return waited.load(); }, testing::soon(), "wait");
        });
        ddp.ready_all();
        const testing::CallInInterrupt callback([] {}, waited);  // called when wait() has waited for 100 ms
        ddp.wait();
        EXPECT_GT(ddp.stats(1).exposed, milliseconds{50});
        EXPECT_LT(ddp.stats(0).exposed, ddp.stats(1).exposed);
    }));
}

// ---- what is sent ----------------------------------------------------------------------------------------------------

TEST(DdpReduceDtype, GradientsAreRoundedToItAndReduced) {
    for (const auto& [dtype, exact] : {std::pair{DType::bf16, 1.0F}, std::pair{DType::f16, 1.0009765625F}}) {
        expect_all_well(run_ranks(3, test_options(), [dtype = dtype, exact = exact](Communicator& comm) {
            Model model = three_layers();
            Ddp ddp(shared(comm), model.params(), {.reduce_dtype = dtype});
            fill(ddp, 0, 1.0009765625F);  // 1 + 2^-10: f16 has it, bf16 has not
            fill(ddp, 1, static_cast<float>(comm.rank()));
            ddp.ready_all();
            ddp.wait();
            EXPECT_THAT(ddp.grad(0).as<float>(), Each(exact));
            EXPECT_THAT(ddp.grad(1).as<float>(), Each(1.0F));
        }));
    }
}

TEST(DdpReduceDtype, ANarrowGradientCanBeSummedInAWideOne) {
    expect_all_well(run_ranks(4, test_options(), [](Communicator& comm) {
        std::array<uint16_t, 40> values{};
        Ddp ddp(shared(comm), {{"w", tensor_of(std::span<uint16_t>(values), DType::bf16)}},
                {.op = ReduceOp::sum, .reduce_dtype = DType::f32});
        for (uint16_t& g : ddp.grad(0).as<uint16_t>()) g = 0x3f80;  // 1
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(ddp.grad(0).as<uint16_t>(), Each(0x4080));  // 4
    }));
}

TEST(DdpPreDivide, SumsStayInRange) {
    expect_all_well(run_ranks(4, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp half(shared(comm), model.params(), {.pre_divide = 4, .reduce_dtype = DType::f16});
        fill(half, 0, 60000);  // four of them are beyond f16
        half.ready_all();
        half.wait();
        EXPECT_THAT(half.grad(0).as<float>(), Each(::testing::FloatNear(60000, 40)));
        Ddp sum(shared(comm), model.params(), {.op = ReduceOp::sum, .pre_divide = 8});
        fill(sum, 0, static_cast<float>(comm.rank()));
        sum.ready_all();
        sum.wait();
        EXPECT_THAT(sum.grad(0).as<float>(), Each(6.0F));
    }));
}

TEST(DdpHooks, NoopLeavesEachRankItsOwn) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small({.hook = DdpHook::noop}));
        fill(ddp, 0, static_cast<float>(comm.rank()));
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(ddp.grad(0).as<float>(), Each(static_cast<float>(comm.rank())));
    }));
}

TEST(DdpHooks, ACallbackReducesWithTheCommunicatorsCollectives) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {.bucket_bytes = 1216, .first_bucket_bytes = 64});
        std::vector<size_t> seen;
        ddp.set_hook([&](const BucketView& bucket) {
            EXPECT_EQ(bucket.params.size(), bucket.grads.size());
            seen.insert(seen.end(), bucket.params.begin(), bucket.params.end());
            comm.run({.collective = Collective::all_reduce, .outputs = bucket.grads, .op = ReduceOp::max});
            EXPECT_THAT(
                expect_error([&] { (void)comm.submit({.collective = Collective::barrier}); }, Code::invalid_state)
                    .what(),
                HasSubstr("use the synchronous calls"));
        });
        for (size_t i = 0; i < 3; ++i) fill(ddp, i, static_cast<float>(comm.rank()) + static_cast<float>(i));
        ddp.ready_all();
        ddp.wait();
        for (size_t i = 0; i < 3; ++i) EXPECT_THAT(ddp.grad(i).as<float>(), Each(static_cast<float>(i + 2)));
        EXPECT_THAT(seen, ElementsAre(2, 1, 0));
        ddp.set_hook({});
        fill(ddp, 0, static_cast<float>(comm.rank()));
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(ddp.grad(0).as<float>(), Each(1.0F)) << "as the options say";
    }));
}

TEST(DdpHooks, AHookThatFailsFailsTheStepOnEveryRank) {
    const Outcomes outcomes = run_ranks(3, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small());
        ddp.set_hook([&](const BucketView& bucket) {
            if (comm.rank() == 1 && bucket.bucket == 1)
                throw Error(Code::user, "rank 1: the hook gave up").with_rank(1);
            comm.run({.collective = Collective::all_reduce, .outputs = bucket.grads, .op = ReduceOp::sum});
        });
        ddp.ready_all();
        ddp.wait();
    });
    for (size_t rank = 0; rank < 3; ++rank) {
        ASSERT_TRUE(outcomes[rank]) << rank;
        EXPECT_EQ(outcomes[rank]->code(), rank == 1 ? Code::user : Code::aborted) << outcomes[rank]->what();
        EXPECT_THAT(outcomes[rank]->what(), HasSubstr("rank 1: the hook gave up"));
    }
}

// A later bucket finds the communicator out of use.
TEST(DdpHooks, WhatAHookFailedOfIsToldByTheBucketBehindIt) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small());
        ddp.set_hook([&](const BucketView&) {
            if (comm.rank() == 1) throw Error(Code::user, "rank 1: the hook gave up").with_rank(1);
            comm.run({});
        });
        ddp.ready(2);
        if (comm.rank() == 1) {
            wait_until([&] { return comm.error().has_value(); }, testing::soon(), "the hook's failure");
        }
        const Error error = expect_error(
            [&] {
                ddp.ready_all();
                if (comm.rank() == 0) ddp.wait();
            },
            comm.rank() == 1 ? Code::user : Code::aborted);
        EXPECT_THAT(error.what(), HasSubstr("rank 1: the hook gave up"));
    }));
}

// ---- several models --------------------------------------------------------------------------------------------------

TEST(DdpModels, TwoWithACommunicatorEachReduceInAnyOrder) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        const auto own = comm.split(0, comm.rank(), test_options());
        Model one = three_layers();
        Model other = three_layers();
        Ddp first(shared(comm), one.params(), small());
        Ddp second(own, other.params(), small());
        for (int step = 0; step < 5; ++step) {
            std::array<Ddp*, 2> models{&first, &second};
            if ((comm.rank() + step) % 2 == 0) std::swap(models[0], models[1]);
            for (size_t i = 3; i-- > 0;) {
                for (Ddp* ddp : models) {
                    fill(*ddp, i, static_cast<float>(comm.rank()) + (ddp == &first ? 10.0F : 20.0F));
                    ddp->ready(i);
                }
            }
            for (Ddp* ddp : models) ddp->wait();
            EXPECT_THAT(first.grad(0).as<float>(), Each(11.0F));
            EXPECT_THAT(second.grad(0).as<float>(), Each(21.0F));
        }
    }));
}

TEST(DdpModels, TwoOverOneCommunicatorTakeTurns) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model generator = three_layers();
        Model critic = three_layers();
        Ddp one(shared(comm), generator.params(), small());
        Ddp other(shared(comm), critic.params(), small());
        for (int step = 0; step < 3; ++step) {
            for (Ddp* ddp : {&one, &other}) {
                fill(*ddp, 1, static_cast<float>(comm.rank()));
                ddp->ready_all();
            }
            one.wait();
            other.wait();
            EXPECT_THAT(one.grad(1).as<float>(), Each(0.5F));
            EXPECT_THAT(other.grad(1).as<float>(), Each(0.5F));
        }
    }));
}

// ---- what is refused -------------------------------------------------------------------------------------------------

TEST(DdpOptionsTest, BadValuesAreNamed) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        struct Case {
            DdpOptions options;
            const char* said;
        };
        for (const Case& given : std::vector<Case>{
                 {{.pre_divide = 0}, "pre_divide is 0"},
                 {{.pre_divide = NAN}, "pre_divide is nan"},
                 {{.reduce_dtype = DType::i32}, "reduce_dtype is i32"},
                 {{.reduce_dtype = static_cast<DType>(99)}, "reduce_dtype is unknown"},
                 {{.hook = static_cast<DdpHook>(9)}, "hook is 9"},
                 {{.join = static_cast<DdpJoin>(-1)}, "join is -1"},
                 {{.power_sgd_rank = 0}, "powersgd_rank is 0"},
                 {{.power_sgd_start_step = -1}, "powersgd_start_step is -1"},
             }) {
            Model model = three_layers();
            EXPECT_THAT(expect_error([&] { const Ddp ddp(shared(comm), model.params(), given.options); },
                                     Code::invalid_argument)
                            .what(),
                        HasSubstr(given.said));
        }
    }));
}

}  // namespace
}  // namespace tsr
