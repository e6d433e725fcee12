// Gradients under DDP: what each rank has after a step, and how a step ends that another rank, thread or call disturbs.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <thread>

#include "base/clock.hpp"
#include "base/json.hpp"
#include "optim/sgd.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "soon.hpp"
#include "temporary_directory.hpp"
#include "with_grads.hpp"

namespace tsr {
namespace {

using ::testing::Each;
using testing::expect_all_well;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::Model;
using testing::Outcomes;
using testing::run_ranks;
using testing::shared;
using testing::TemporaryDirectory;
using testing::test_options;
using testing::three_layers;
using testing::with_grads;

constexpr DdpOptions small_buckets{.bucket_bytes = 64, .first_bucket_bytes = 64};  // one parameter a bucket

class DdpOverWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, DdpOverWorlds, ::testing::Values(1, 2, 3, 4, 5));

TEST_P(DdpOverWorlds, EveryRankStartsWithTheValuesOfRankZero) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        Model model = three_layers(static_cast<float>(comm.rank() + 5));
        Ddp ddp(shared(comm), model.params(), small_buckets);
        for (const auto& entry : model.entries) EXPECT_THAT(entry.values, Each(5.0F)) << entry.name;
        for (size_t i = 0; i < 3; ++i) {
            EXPECT_THAT(ddp.grad(i).as<float>(), Each(0.0F)) << "gradients begin at zero";
        }
    }));
}

TEST(Ddp, TheValuesOfRankZeroComeABucketAtATime) {
    const TemporaryDirectory directory;
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model;
        for (int i = 0; i < 200; ++i) model.add(fmt::format("p{}", i), {3}, static_cast<float>(comm.rank()));
        const Ddp ddp(shared(comm), model.params(), {.bucket_bytes = 4096, .first_bucket_bytes = 4096});
        const std::string record = (directory.path() / std::to_string(comm.rank())).string();
        comm.write_trace(record);
        size_t broadcasts = 0;
        std::ifstream lines(record);
        for (std::string line; std::getline(lines, line);) {
            const Json entry = Json::parse(line, record);
            if (entry.find("label") != nullptr && entry.at("label").as_string() == "parameters") {
                EXPECT_EQ(entry.at("operation").as_string(), "broadcast");
                ++broadcasts;
            }
        }
        EXPECT_EQ(broadcasts, ddp.buckets().size());
        EXPECT_EQ(ddp.buckets().size(), 4U);  // 200 of 64 bytes each
    }));
}

TEST_P(DdpOverWorlds, GradientsBecomeTheAverageWhateverTheOrderOfReady) {
    const int world_size = GetParam();
    expect_all_well(run_ranks(world_size, test_options(), [&](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small_buckets);
        const std::array<std::array<size_t, 3>, 3> orders{{{0, 1, 2}, {2, 0, 1}, {1, 2, 0}}};
        for (int step = 0; step < 6; ++step) {
            for (const size_t i : orders.at(static_cast<size_t>(comm.rank() + step) % 3)) {
                for (float& g : ddp.grad(i).as<float>())
                    g = static_cast<float>(i * 100) + static_cast<float>(comm.rank() + step);
                ddp.ready(i);
            }
            ddp.wait();
            for (size_t i = 0; i < 3; ++i) {
                const float mean =
                    static_cast<float>(i * 100) + static_cast<float>(world_size - 1) / 2 + static_cast<float>(step);
                for (const float g : ddp.grad(i).as<float>()) ASSERT_FLOAT_EQ(g, mean);
            }
        }
    }));
}

TEST(Ddp, SumIsTheSum) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {.op = ReduceOp::sum});
        for (float& g : ddp.grad(1).as<float>()) g = static_cast<float>(comm.rank() + 1);
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(ddp.grad(1).as<float>(), Each(6.0F));
    }));
}

TEST(Ddp, EveryFloatingDtypeIsReduced) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        std::array<uint16_t, 8> f16{};
        std::array<uint16_t, 8> bf16{};
        std::array<float, 8> f32{};
        std::array<double, 8> f64{};
        Ddp ddp(shared(comm),
                {{"f16", tensor_of(std::span<uint16_t>(f16), DType::f16)},
                 {"bf16", tensor_of(std::span<uint16_t>(bf16), DType::bf16)},
                 {"f32", tensor_of(std::span<float>(f32), DType::f32)},
                 {"f64", tensor_of(std::span<double>(f64), DType::f64)}},
                {});
        const bool first = comm.rank() == 0;
        for (uint16_t& g : ddp.grad(0).as<uint16_t>()) g = first ? 0x3c00 : 0x4200;  // 1, 3
        for (uint16_t& g : ddp.grad(1).as<uint16_t>()) g = first ? 0x3f80 : 0x4040;  // 1, 3
        for (float& g : ddp.grad(2).as<float>()) g = first ? 1 : 3;
        for (double& g : ddp.grad(3).as<double>()) g = first ? 1 : 3;
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(ddp.grad(0).as<uint16_t>(), Each(0x4000));
        EXPECT_THAT(ddp.grad(1).as<uint16_t>(), Each(0x4000));
        EXPECT_THAT(ddp.grad(2).as<float>(), Each(2.0F));
        EXPECT_THAT(ddp.grad(3).as<double>(), Each(2.0));
    }));
}

TEST(Ddp, EmptyParametersAreTaken) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model;
        model.add("empty", {0, 4});
        model.add("full", {4}, 1);
        Ddp ddp(shared(comm), model.params(), small_buckets);
        for (float& g : ddp.grad(1).as<float>()) g = 1;
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(ddp.grad(1).as<float>(), Each(1.0F));
    }));
}

TEST(Ddp, GradientsThatWereNotSaidReadyAreNamedAndCanBeCompleted) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small_buckets);
        for (float& g : ddp.grad(0).as<float>()) g = static_cast<float>(comm.rank());
        ddp.ready(1);
        const Error error = expect_error([&] { ddp.wait(); }, Code::invalid_state);
        EXPECT_THAT(error.what(), HasSubstr(R"(2 of 3 gradients were never marked ready: "a", "c")"));
        ddp.ready(0);
        ddp.ready(2);
        ddp.wait();
        EXPECT_THAT(ddp.grad(0).as<float>(), Each(0.5F));
    }));
}

TEST(Ddp, ManyMissingGradientsAreCountedAfterTheFirstEight) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        Model model;
        for (int i = 0; i < 20; ++i) model.add(fmt::format("p{}", i), {2});
        Ddp ddp(shared(comm), model.params(), {});
        const Error error = expect_error([&] { ddp.wait(); }, Code::invalid_state);
        EXPECT_THAT(error.what(), HasSubstr(R"("p7" and 12 more)"));
    }));
}

TEST(Ddp, ReadyTwiceIsRefusedByName) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {});
        ddp.ready(1);
        EXPECT_THAT(expect_error([&] { ddp.ready(1); }, Code::invalid_state).what(), HasSubstr("\"b\""));
        expect_error([&] { ddp.ready(3); }, Code::invalid_argument);
        ddp.ready_all();
        expect_error([&] { ddp.ready(0); }, Code::invalid_state);
        EXPECT_THAT(expect_error([&] { ddp.ready_all(); }, Code::invalid_state).what(),
                    HasSubstr("end the step before the next one"));
        ddp.wait();
        ddp.ready(1);  // a new step
        ddp.ready(0);
        ddp.ready(2);
        ddp.ready_all();  // of none
        ddp.wait();
        ddp.set_sync(false);
        ddp.ready_all();
        ddp.ready_all();
        ddp.wait();
    }));
}

TEST(Ddp, GradientsCannotBeTouchedWhileTheyAreReduced) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers(1);
        Ddp ddp(shared(comm), model.params(), {});
        Sgd optimizer(with_grads(ddp), {.lr = 1});
        optimizer.set_gate([&] { ddp.check_idle("the optimizer cannot use the gradients"); });
        for (float& g : ddp.grad(0).as<float>()) g = 1;
        ddp.ready(0);
        expect_error([&] { ddp.zero_grad(); }, Code::invalid_state);
        EXPECT_THAT(expect_error([&] { optimizer.step(); }, Code::invalid_state).what(),
                    HasSubstr("end the step first"));
        ddp.ready_all();
        expect_error([&] { optimizer.step(); }, Code::invalid_state);
        ddp.wait();
        optimizer.step();
        EXPECT_THAT(model.entries[0].values, Each(0.0F));
        EXPECT_THAT(model.entries[1].values, Each(1.0F));
        ddp.zero_grad();
        EXPECT_THAT(ddp.grad(0).as<float>(), Each(0.0F));
    }));
}

TEST(Ddp, FailedReductionPoisonsAndNamesItsCause) {
    std::barrier both_are_ready(2);
    const Outcomes outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small_buckets);
        Sgd optimizer(with_grads(ddp), {});
        optimizer.set_gate([&] { ddp.check_idle("the optimizer cannot use the gradients"); });
        both_are_ready.arrive_and_wait();
        if (comm.rank() == 1) {
            comm.abort("rank 1 gives up");
            return;
        }
        const Error first = expect_error(
            [&] {
                ddp.ready_all();
                ddp.wait();
            },
            Code::aborted);
        EXPECT_THAT(first.what(), HasSubstr("rank 1 gives up"));
        const Error later = expect_error([&] { ddp.ready(0); }, Code::aborted);
        ASSERT_NE(later.record()->cause, nullptr);
        EXPECT_THAT(later.record()->cause->message, HasSubstr("rank 1 gives up"));
        expect_error([&] { ddp.wait(); }, Code::aborted);
        expect_error([&] { ddp.ready_all(); }, Code::aborted);
        expect_error([&] { ddp.zero_grad(); }, Code::invalid_state);
        expect_error([&] { optimizer.step(); }, Code::invalid_state);
    });
    expect_all_well(outcomes);
}

TEST(Ddp, ARankWhoseGradientsAreLateIsNamedAtTheDeadline) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small_buckets);
        ddp.ready(2);
        if (comm.rank() == 0) {
            comm.set_timeout(milliseconds{300});
            ddp.ready_all();
            ddp.wait();
        } else {
            wait_until([&] { return comm.error().has_value(); }, testing::soon(), "the other's error");
        }
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_EQ(outcomes[0]->code(), Code::timeout) << outcomes[0]->what();
    EXPECT_THAT(outcomes[0]->what(), ::testing::AllOf(HasSubstr("rank 1"), HasSubstr("bucket 1")));
    EXPECT_FALSE(outcomes[1]);
}

TEST(Ddp, AWaitInTheInterruptCallbackOfAWaitIsRefused) {
    std::atomic<bool> made{false};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {});
        if (comm.rank() == 1) {
            testing::await_call(made);
            ddp.ready_all();
            ddp.wait();
            return;
        }
        ddp.ready_all();
        const testing::CallInInterrupt callback([&] { ddp.wait(); }, made);
        ddp.wait();
        ASSERT_TRUE(callback.error());
        EXPECT_EQ(callback.error()->code(), Code::invalid_state) << callback.error()->what();
    }));
}

TEST(Ddp, ATimeoutOfTheLongestHoldsForManyBuckets) {
    CommOptions endless = test_options();
    endless.timeout = milliseconds{INT32_MAX};
    expect_all_well(run_ranks(2, endless, [](Communicator& comm) {
        Model model;
        for (int i = 0; i < 1500; ++i) model.add(fmt::format("p{}", i), {1});
        Ddp ddp(shared(comm), model.params(), {.bucket_bytes = 1, .first_bucket_bytes = 1});
        ASSERT_EQ(ddp.buckets().size(), 1500U);
        ddp.ready_all();
        ddp.wait();
    }));
}

// A thread that waits in a barrier of `comm` by now.
std::thread thread_inside(Communicator& comm) {
    const auto inside = std::make_shared<std::atomic<bool>>(false);
    std::thread other([&comm, inside] {
        const auto poll = [](void* polled) {
            static_cast<std::atomic<bool>*>(polled)->store(true);
            return int32_t{0};
        };
        set_interrupt(poll, inside.get());
        comm.run({});
        set_interrupt(nullptr, nullptr);
    });
    wait_until([&] { return inside->load(); }, testing::soon(), "the other thread's call");
    return other;
}

void expect_a_step_that_was_disturbed_goes_on(DdpJoin join) {
    std::atomic<bool> refused{false};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = three_layers(1);
        DdpOptions options = small_buckets;
        options.find_unused = true;
        options.join = join;
        Ddp ddp(shared(comm), model.params(), options);
        for (float& g : ddp.grad(0).as<float>()) g = static_cast<float>(comm.rank());
        for (float& g : ddp.grad(1).as<float>()) g = 7;  // which no rank has in this step
        if (comm.rank() == 1) {
            wait_until([&] { return refused.load(); }, testing::soon(), "the refusals");
            comm.run({});
            ddp.ready(0);
        } else {
            std::thread other = thread_inside(comm);
            if (join == DdpJoin::off) {
                ddp.ready(0);  // no bucket is full yet
            } else {
                expect_error([&] { ddp.ready(0); }, Code::invalid_state);
            }
            expect_error([&] { ddp.wait(); }, Code::invalid_state);
            refused = true;
            other.join();
            if (join != DdpJoin::off) ddp.ready(0);
        }
        ddp.wait();
        EXPECT_THAT(ddp.grad(0).as<float>(), Each(0.5F));
        EXPECT_THAT(ddp.grad(1).as<float>(), Each(7.0F));
    }));
}

TEST(Ddp, AStepGoesOnAfterAnotherThreadsUseOfTheCommunicator) {
    expect_a_step_that_was_disturbed_goes_on(DdpJoin::off);
    expect_a_step_that_was_disturbed_goes_on(DdpJoin::divide_by_world);
}

// INVALID_STATE says that nothing has happened: what was not said to be ready is still its owner's.
TEST(Ddp, WhatIsRefusedInACallbackHasNotHappened) {
    std::atomic<bool> made{false};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = three_layers(1);
        DdpOptions options = small_buckets;
        options.find_unused = true;
        options.join = DdpJoin::divide_by_world;
        Ddp ddp(shared(comm), model.params(), options);
        if (comm.rank() == 1) {
            testing::await_call(made);
            comm.run({});
        } else {
            const testing::CallInInterrupt callback(
                [&] {
                    expect_error([&] { ddp.ready(2); }, Code::invalid_state);
                    expect_error([&] { ddp.ready_all(); }, Code::invalid_state);
                    expect_error([&] { ddp.wait(); }, Code::invalid_state);
                    expect_error([&] { ddp.join(true); }, Code::invalid_state);
                    expect_error([&] { ddp.register_buffers(model.params()); }, Code::invalid_state);
                    ddp.check_idle("after refusals");
                },
                made);
            comm.run({});
        }
        ddp.zero_grad();
        for (size_t i = 0; i < 3; ++i) {
            for (float& g : ddp.grad(i).as<float>()) g = static_cast<float>(comm.rank());
        }
        ddp.ready(2);
        ddp.ready_all();
        ddp.wait();
        for (size_t i = 0; i < 3; ++i) EXPECT_THAT(ddp.grad(i).as<float>(), Each(0.5F));
        ddp.register_buffers(model.params());
        ddp.broadcast_buffers();
        ddp.join(true);
    }));
}

// The first step ends with a collective more, by which the buckets are grouped anew.
TEST(Ddp, TheFirstWaitIsRefusedAsAWhole) {
    std::atomic<bool> refused{false};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = three_layers(1);
        DdpOptions options = small_buckets;
        options.rebuild_buckets = true;
        Ddp ddp(shared(comm), model.params(), options);
        for (float& g : ddp.grad(0).as<float>()) g = static_cast<float>(comm.rank());
        ddp.ready_all();
        if (comm.rank() == 1) {
            wait_until([&] { return refused.load(); }, testing::soon(), "the refusal");
            comm.run({});
        } else {
            std::thread other = thread_inside(comm);
            expect_error([&] { ddp.wait(); }, Code::invalid_state);
            refused = true;
            other.join();
        }
        ddp.wait();
        EXPECT_THAT(ddp.grad(0).as<float>(), Each(0.5F));
    }));
}

TEST(Ddp, CanBeDestroyedWhileReducing) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        {
            Ddp ddp(shared(comm), model.params(), small_buckets);
            ddp.ready_all();
        }
        comm.run({.collective = Collective::barrier});
    }));
}

}  // namespace
}  // namespace tsr
