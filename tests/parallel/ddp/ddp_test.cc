#include "parallel/ddp/ddp.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <fstream>
#include <mutex>
#include <numeric>
#include <thread>

#include "base/json.hpp"
#include "data/splitmix64.hpp"
#include "optim/adam.hpp"
#include "optim/sgd.hpp"
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

TEST(Ddp, WrappersPrefixesAreStripped) {
    EXPECT_EQ(without_wrappers("module.fc1.weight"), "fc1.weight");
    EXPECT_EQ(without_wrappers("module._orig_mod.fc1.weight"), "fc1.weight");
    EXPECT_EQ(without_wrappers("fc.module.weight"), "fc.module.weight");
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model;
        model.add(comm.rank() == 0 ? "module.w" : "w", {4});
        const Ddp ddp(shared(comm), model.params(), {});
        EXPECT_EQ(ddp.param(0).name, "w");
    }));
}

TEST(Ddp, DifferentModelsAreNamedAlikeOnEveryRank) {
    struct Case {
        std::function<void(Model&)> change;  // what rank 2 registers otherwise
        std::string said;
    };
    const std::vector<Case> cases{
        {[](Model& m) { m.entries[1].name = "bb"; },
         R"(rank 2 has parameter 1 "bb" f32 [20, 15], rank 0 has parameter 1 "b")"},
        {[](Model& m) { m.entries[1].shape = {15, 20}; }, R"(rank 2 has parameter 1 "b" f32 [15, 20])"},
        {[](Model& m) { m.entries.pop_back(); }, R"(rank 2 has nothing, rank 0 has parameter 2 "c" f32 [7])"},
        {[](Model& m) { m.add("d", {3}); }, R"(rank 2 has parameter 3 "d" f32 [3], rank 0 has nothing)"},
        {[](Model& m) { std::swap(m.entries[0], m.entries[2]); }, R"(rank 2 has parameter 0 "c" f32 [7])"},
    };
    for (const Case& one : cases) {
        const Outcomes outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
            Model model = three_layers();
            if (comm.rank() == 2) one.change(model);
            const Ddp ddp(shared(comm), model.params(), {});
        });
        for (const auto& outcome : outcomes) {
            ASSERT_TRUE(outcome);
            EXPECT_EQ(outcome->code(), Code::mismatch);
            EXPECT_THAT(outcome->what(), HasSubstr(one.said));
            EXPECT_EQ(outcome->record()->peer, 2);
        }
    }
}

TEST(Ddp, DifferentDtypesAndOptionsAreNamed) {
    const Outcomes dtypes = run_ranks(2, test_options(), [](Communicator& comm) {
        std::array<double, 4> memory{};
        const DType dtype = comm.rank() == 0 ? DType::f32 : DType::f64;
        const Tensor tensor{reinterpret_cast<std::byte*>(memory.data()), Dims{4}, dtype, {}};
        const Ddp ddp(shared(comm), {{"w", tensor}}, {});
    });
    for (const auto& outcome : dtypes) {
        ASSERT_TRUE(outcome);
        EXPECT_THAT(outcome->what(),
                    HasSubstr(R"(rank 1 has parameter 0 "w" f64 [4], rank 0 has parameter 0 "w" f32 [4])"));
    }
    const Outcomes options = run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        const Ddp ddp(shared(comm), model.params(), {.op = comm.rank() == 0 ? ReduceOp::avg : ReduceOp::sum});
    });
    for (const auto& outcome : options) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("rank 1 has the option op sum, rank 0 has the option op avg;"));
    }
}

TEST(Ddp, CommunicatorIsUsableAfterAMismatch) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Model other = three_layers();
        if (comm.rank() == 1) other.entries[0].name = "x";
        expect_error([&] { const Ddp ddp(shared(comm), other.params(), {}); }, Code::mismatch);
        Ddp ddp(shared(comm), model.params(), {});
        ddp.ready_all();
        ddp.wait();
    }));
}

TEST(Ddp, GradientsThatWereNotSaidReadyAreNamedAndCanBeCompleted) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small_buckets);
        for (float& g : ddp.grad(0).as<float>()) g = static_cast<float>(comm.rank());
        ddp.ready(1);
        const Error error = expect_error([&] { ddp.wait(); }, Code::invalid_state);
        EXPECT_THAT(error.what(), HasSubstr(R"(2 of 3 gradients were never said to be ready: "a", "c")"));
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
        EXPECT_THAT(expect_error([&] { ddp.ready_all(); }, Code::invalid_state).what(), HasSubstr("wait for them"));
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
                    HasSubstr("wait for the gradients first"));
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

TEST(Ddp, BadRegistrationsAreRefused) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        const auto own = shared(comm);
        std::array<int32_t, 2> integers{};
        Model twice;
        twice.add("w", {2});
        twice.add("module.w", {2});
        Model model = three_layers();
        expect_error([&] { const Ddp ddp(own, {}, {}); }, Code::invalid_argument);
        EXPECT_THAT(expect_error([&] { const Ddp ddp(own, twice.params(), {}); }, Code::invalid_argument).what(),
                    HasSubstr("two parameters are named \"w\"; names are of the whole model"));
        EXPECT_THAT(
            expect_error([&] { const Ddp ddp(own, {{"i", tensor_of(std::span<int32_t>(integers), DType::i32)}}, {}); },
                         Code::invalid_argument)
                .what(),
            HasSubstr("\"i\" is i32"));
        expect_error([&] { const Ddp ddp(own, model.params(), {.op = ReduceOp::max}); }, Code::invalid_argument);
    }));
}

// The others would wait for it until their deadline.
TEST(Ddp, WhatOneRankAloneRegistersBadlyIsToldToAll) {
    for (const int bad : {0, 1}) {
        expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
            const bool is_bad = comm.rank() == bad;
            Model model = three_layers();
            const auto refused = [&](const std::function<void()>& call, const char* said) {
                const Error error = expect_error(call, Code::invalid_argument);
                EXPECT_THAT(error.what(), HasSubstr(said));
                if (!is_bad) {
                    EXPECT_THAT(error.what(), HasSubstr(fmt::format("rank {}: ", bad)));
                }
            };
            auto params = model.params();
            if (is_bad) params[2].name = "a";
            refused([&] { const Ddp ddp(shared(comm), params, {}); }, "two parameters are named \"a\"");
            refused([&] { const Ddp ddp(shared(comm), model.params(), {.pre_divide = is_bad ? -1.0 : 1.0}); },
                    "pre_divide is -1");
            Ddp ddp(shared(comm), model.params(), {});  // nothing else has happened
            Model others = three_layers();
            auto buffers = others.params();
            if (is_bad) buffers[1].name = "module.";
            refused([&] { ddp.register_buffers(buffers); }, "a buffer's name is empty");
            buffers[1].name = "b";
            ddp.register_buffers(buffers);
        }));
    }
}

TEST(Ddp, FailedReductionPoisonsAndNamesItsCause) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small_buckets);
        Sgd optimizer(with_grads(ddp), {});
        optimizer.set_gate([&] { ddp.check_idle("the optimizer cannot use the gradients"); });
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
            std::atomic<bool> inside{false};
            std::thread other([&] {
                const auto poll = [](void* polled) {
                    static_cast<std::atomic<bool>*>(polled)->store(true);
                    return int32_t{0};
                };
                set_interrupt(poll, &inside);
                comm.run({});
                set_interrupt(nullptr, nullptr);
            });
            wait_until([&] { return inside.load(); }, testing::soon(), "the other thread's call");
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

// ---- whole trainings -------------------------------------------------------------------------------------------------

// A two-layer network with tanh on a fixed regression problem of 24 samples; the rank's share of each batch is every
// world-th sample. The gradients are those of the mean over the rank's samples.
class Regression {
   public:
    static constexpr size_t in = 5;
    static constexpr size_t hidden = 8;
    static constexpr size_t samples = 24;

    Regression() {
        SplitMix64 random(99);
        const auto uniform = [&] { return static_cast<float>(random.next() >> 40) / 0x1p24F * 2 - 1; };
        for (auto& x : inputs_) {
            for (float& value : x) value = uniform();
        }
        for (float& y : targets_) y = uniform();
        model.add("w1", {hidden, in});
        model.add("b1", {hidden});
        model.add("w2", {1, hidden});
        for (auto& entry : model.entries) {
            for (float& value : entry.values) value = uniform() / 2;
        }
    }

    // Adds the gradients of the mean over every `parts * world_size`-th sample, a part of the rank's share.
    void backward(const Ddp& ddp, int first, int world_size, int parts) const {
        const auto w1 = ddp.param(0).tensor.as<float>();
        const auto b1 = ddp.param(1).tensor.as<float>();
        const auto w2 = ddp.param(2).tensor.as<float>();
        const auto g1 = ddp.grad(0).as<float>();
        const auto gb = ddp.grad(1).as<float>();
        const auto g2 = ddp.grad(2).as<float>();
        const float share = static_cast<float>(world_size) / samples;
        for (size_t s = static_cast<size_t>(first); s < samples; s += static_cast<size_t>(world_size * parts)) {
            const auto [h, y] = forward(w1, b1, w2, s);
            const float d = 2 * (y - targets_[s]) * share;
            for (size_t j = 0; j < hidden; ++j) {
                const float dh = d * w2[j] * (1 - h[j] * h[j]);
                g2[j] += d * h[j];
                gb[j] += dh;
                for (size_t k = 0; k < in; ++k) g1[j * in + k] += dh * inputs_[s][k];
            }
        }
    }

    // The mean over all samples.
    double loss() {
        double sum = 0;
        for (size_t s = 0; s < samples; ++s) {
            const float y =
                forward(model.entries[0].values, model.entries[1].values, model.entries[2].values, s).second;
            sum += std::pow(double{y} - double{targets_[s]}, 2);
        }
        return sum / samples;
    }

    Model model;

   private:
    [[nodiscard]] std::pair<std::array<float, hidden>, float> forward(std::span<const float> w1,
                                                                      std::span<const float> b1,
                                                                      std::span<const float> w2, size_t s) const {
        std::array<float, hidden> h{};
        float y = 0;
        for (size_t j = 0; j < hidden; ++j) {
            float sum = b1[j];
            for (size_t k = 0; k < in; ++k) sum += w1[j * in + k] * inputs_[s][k];
            h[j] = std::tanh(sum);
            y += w2[j] * h[j];
        }
        return {h, y};
    }

    std::array<std::array<float, in>, samples> inputs_{};
    std::array<float, samples> targets_{};
};

// How a training goes about its steps.
struct Way {
    DdpOptions ddp = small_buckets;
    int micro_steps = 1;   // parts of a rank's share of the batch, of which the last one synchronises
    double near = 1e-4;    // how close to one rank with the whole batch
    bool by_hand = false;  // backward reduces nothing; the trainer averages what it left
};

struct Trained {
    std::vector<float> weights;
    std::vector<double> losses;  // after each step, of all samples
    friend bool operator==(const Trained&, const Trained&) = default;
};

// 50 steps on `world_size` ranks; all ranks must have the same bits.
template <class Kind, class Options>
Trained trained(int world_size, const Options& options, const Way& way) {
    std::mutex mutex;
    std::vector<Trained> results;
    expect_all_well(run_ranks(world_size, test_options(), [&](Communicator& comm) {
        Regression problem;
        Ddp ddp(shared(comm), problem.model.params(), way.ddp);
        Kind optimizer(with_grads(ddp), options);
        Trained result;
        for (int step = 0; step < 50; ++step) {
            ddp.zero_grad();
            for (int micro = 0; micro < way.micro_steps; ++micro) {
                ddp.set_sync(micro + 1 == way.micro_steps);
                problem.backward(ddp, comm.rank() + comm.world_size() * micro, comm.world_size(), way.micro_steps);
                for (size_t i = 3; i-- > 0;) ddp.ready(i);
                ddp.wait();
            }
            for (size_t i = 0; way.by_hand && i < 3; ++i) {
                const std::array grad{ddp.grad(i)};
                comm.run({.collective = Collective::all_reduce, .outputs = grad, .op = ReduceOp::avg});
            }
            optimizer.step();
            result.losses.push_back(problem.loss());
        }
        for (const auto& entry : problem.model.entries) {
            result.weights.insert(result.weights.end(), entry.values.begin(), entry.values.end());
        }
        const std::lock_guard lock(mutex);
        results.push_back(std::move(result));
    }));
    for (const auto& result : results) EXPECT_TRUE(result == results[0]) << "ranks ended with different bits";
    return results[0];
}

template <class Kind, class Options>
void expect_world_size_does_not_matter(const Options& options, const Way& way = {}) {
    const Trained alone = trained<Kind>(1, options, {});
    EXPECT_LT(alone.losses.back(), alone.losses.front() * 0.8) << "it learns something";
    for (const int world_size : {2, 3, 4}) {
        const Trained together = trained<Kind>(world_size, options, way);
        for (size_t i = 0; i < alone.losses.size(); ++i) {
            EXPECT_NEAR(together.losses[i], alone.losses[i], way.near * alone.losses[i])
                << world_size << " ranks, step " << i;
        }
        for (size_t i = 0; way.near <= 1e-4 && i < alone.weights.size(); ++i) {
            EXPECT_NEAR(together.weights[i], alone.weights[i], way.near * std::abs(alone.weights[i]) + 1e-6)
                << world_size << " ranks, weight " << i;
        }
        EXPECT_TRUE(trained<Kind>(world_size, options, way) == together) << "a second run gave other bits";
    }
}

TEST(DdpTraining, GradientsAveragedByHandEqualOneRankWithAllOfIt) {
    DdpOptions nothing_in_backward = small_buckets;
    nothing_in_backward.hook = DdpHook::noop;
    expect_world_size_does_not_matter<Sgd>(SgdOptions{.lr = 0.05, .momentum = 0.9},
                                           {.ddp = nothing_in_backward, .by_hand = true});
}

TEST(DdpTraining, GradientsAddedUpInMicroStepsEqualOneRankWithAllOfIt) {
    expect_world_size_does_not_matter<Sgd>(SgdOptions{.lr = 0.05, .momentum = 0.9}, {.micro_steps = 2});
}

TEST(DdpTraining, GradientsReducedInBf16ComeCloseToOneRankWithAllOfIt) {
    DdpOptions in_bf16 = small_buckets;
    in_bf16.reduce_dtype = DType::bf16;
    const SgdOptions sgd{.lr = 0.05, .momentum = 0.9};
    expect_world_size_does_not_matter<Sgd>(sgd, {.ddp = in_bf16, .near = 2e-2});
    EXPECT_FALSE(trained<Sgd>(2, sgd, {.ddp = in_bf16}) == trained<Sgd>(2, sgd, {})) << "nothing was reduced in bf16";
}

TEST(DdpTraining, RanksWithAShareOfTheBatchEqualOneRankWithAllOfItSgd) {
    expect_world_size_does_not_matter<Sgd>(SgdOptions{.lr = 0.05, .momentum = 0.9});
}

TEST(DdpTraining, RanksWithAShareOfTheBatchEqualOneRankWithAllOfItAdamW) {
    expect_world_size_does_not_matter<Adam>(AdamOptions{.lr = 0.003, .weight_decay = 0.01, .decay = Decay::decoupled});
}

}  // namespace
}  // namespace tsr
