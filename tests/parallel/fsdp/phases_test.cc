// The phases of a unit, from its forward to the end of its reduction: which calls each phase refuses, and how a step is
// abandoned, goes on after an interrupt, or ends with another rank.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <barrier>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "base/clock.hpp"
#include "mlp.hpp"
#include "optim/adam.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "sanitized.hpp"
#include "soon.hpp"
#include "units.hpp"

namespace tsr {
namespace {

using testing::a_unit_a_layer;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::expect_all_well;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::Mlp;
using testing::Model;
using testing::odd_shapes;
using testing::Outcomes;
using testing::run_ranks;
using testing::sharded;
using testing::shared;
using testing::test_options;
using testing::two_units;

void fill_grads(Fsdp& fsdp, size_t unit, float value) {
    for (const size_t i : fsdp.unit(unit).params) {
        for (float& g : fsdp.grad(i).as<float>()) g = value;
    }
}

void expect_shard_grads(const Fsdp& fsdp, float value) {
    for (size_t i = 0; i < fsdp.params(); ++i) EXPECT_THAT(fsdp.shard_grad(i).as<float>(), Each(value)) << i;
}

TEST(Fsdp, AccessorsRefuseWhatIsNotThere) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        Fsdp fsdp(shared(comm), a_unit_a_layer(model), {});
        EXPECT_THAT(expect_error([&] { (void)fsdp.whole(0); }, Code::invalid_state).what(),
                    HasSubstr(R"(parameter "fc0.weight" of unit "fc0" is sharded)"));
        EXPECT_THAT(expect_error([&] { (void)fsdp.grad(0); }, Code::invalid_state).what(), HasSubstr("\"fc0.weight\""));
        expect_error([&] { fsdp.await_unit(1); }, Code::invalid_state);
        expect_error([&] { fsdp.grads_ready(1); }, Code::invalid_state);
        for (const size_t beyond : {size_t{3}, size_t{100}}) {
            expect_error([&] { fsdp.forward(beyond); }, Code::invalid_argument);
            expect_error([&] { fsdp.backward(beyond); }, Code::invalid_argument);
            expect_error([&] { fsdp.unshard(beyond); }, Code::invalid_argument);
        }
        expect_error([&] { (void)fsdp.whole(6); }, Code::invalid_argument);
        EXPECT_THAT(expect_error([&] { fsdp.wait(); }, Code::invalid_state).what(),
                    HasSubstr(R"(3 of 3 units were never marked ready: "fc0", "fc1", "fc2")"));
        fsdp.unshard(2);
        fsdp.await_unit(2);
        EXPECT_THAT(expect_error([&] { fsdp.check_idle("it cannot be"); }, Code::invalid_state).what(),
                    HasSubstr("it cannot be while unit \"fc2\" is unsharded"));
        fsdp.reshard(2);
        fsdp.check_idle("it can");
        fsdp.backward(2);
        expect_error([&] { fsdp.forward(0); }, Code::invalid_state);
        expect_error([&] { fsdp.reshard(2); }, Code::invalid_state);
        expect_error([&] { fsdp.set_sync(false); }, Code::invalid_state);
        fill_grads(fsdp, 2, 0);
        fsdp.grads_ready(2);
        expect_error([&] { fsdp.grads_ready(2); }, Code::invalid_state);
        EXPECT_THAT(expect_error([&] { fsdp.forward(0); }, Code::invalid_state).what(),
                    HasSubstr(R"(the forward of unit "fc0" cannot begin during a backward pass (unit "fc2")"));
    }));
}

TEST(Fsdp, PhasesAreTold) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        auto units = a_unit_a_layer(model);
        units[2].reshard_after_forward = 0;
        Fsdp fsdp(shared(comm), units, {});
        const auto phases = [&] { return std::array{fsdp.phase(0), fsdp.phase(1), fsdp.phase(2)}; };
        constexpr auto sharded = UnitPhase::sharded;
        constexpr auto on_its_way = UnitPhase::on_its_way;
        constexpr auto whole = UnitPhase::whole;
        constexpr auto reducing = UnitPhase::reducing;
        EXPECT_THAT(phases(), Each(sharded));
        fsdp.forward(0);
        EXPECT_THAT(phases(), ElementsAre(whole, on_its_way, sharded));
        fsdp.forward_done(0);
        EXPECT_THAT(phases(), ElementsAre(sharded, on_its_way, sharded));
        fsdp.forward(1);
        fsdp.forward_done(1);
        fsdp.forward(2);
        fsdp.forward_done(2);
        EXPECT_THAT(phases(), ElementsAre(sharded, sharded, whole));
        fsdp.backward(2);
        EXPECT_THAT(phases(), ElementsAre(sharded, on_its_way, UnitPhase::backward));
        fill_grads(fsdp, 2, 0);
        fsdp.grads_ready(2);
        EXPECT_THAT(phases(), ElementsAre(sharded, on_its_way, reducing));
        EXPECT_THAT(expect_error([&] { fsdp.check_idle("it cannot be"); }, Code::invalid_state).what(),
                    HasSubstr("it cannot be while unit \"fc1\" is being unsharded"));
        for (const size_t unit : {1, 0}) {
            fsdp.backward(unit);
            fill_grads(fsdp, unit, 0);
            fsdp.grads_ready(unit);
        }
        EXPECT_THAT(phases(), Each(reducing));
        EXPECT_THAT(expect_error([&] { fsdp.check_idle("it cannot be"); }, Code::invalid_state).what(),
                    HasSubstr("while the gradients of unit \"fc0\" are being reduced"));
        fsdp.wait();
        EXPECT_THAT(phases(), Each(sharded));
    }));
}

TEST(Fsdp, AStepMayBeAbandonedAnywhere) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = odd_shapes(0);
        Fsdp fsdp(shared(comm), two_units(model), {});
        const std::vector<std::function<void()>> calls{
            [&] { fsdp.forward(0); },      [&] { fsdp.forward_done(0); }, [&] { fsdp.forward(1); },
            [&] { fsdp.forward_done(1); }, [&] { fsdp.backward(1); },     [&] { fill_grads(fsdp, 1, 3); },
            [&] { fsdp.grads_ready(1); },  [&] { fsdp.backward(0); },     [&] { fill_grads(fsdp, 0, 3); },
            [&] { fsdp.grads_ready(0); },  [&] { fsdp.wait(); }};
        for (const bool sync : {true, false}) {
            for (size_t end = 0; end <= calls.size(); ++end) {
                fsdp.set_sync(sync);
                for (size_t c = 0; c < end; ++c) calls[c]();
                fsdp.abandon();
                fsdp.check_idle("nothing can be");
                expect_shard_grads(fsdp, 0);
                fsdp.set_sync(true);
                for (const auto& call : calls) call();
                expect_shard_grads(fsdp, 3);
            }
        }
    }));
}

// Memory of gradients goes from unit to unit: what nobody wrote would be another's.
TEST(Fsdp, AGradientThatWasNotWrittenIsNamed) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
        expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
            Model model = Mlp::initial();
            Fsdp fsdp(shared(comm), a_unit_a_layer(model), {.grads_in_flight = 1, .reduce_dtype = dtype});
            const auto write = [&](size_t param) {
                const Tensor grad = fsdp.grad(param);
                std::memset(grad.data, 0, grad.size_bytes());
            };
            for (int step = 0; step < 2; ++step) {
                for (const size_t unit : {2, 1, 0}) {
                    const auto& params = fsdp.unit(unit).params;
                    fsdp.backward(unit);
                    EXPECT_THAT(
                        expect_error([&] { fsdp.grads_ready(unit); }, Code::invalid_state).what(),
                        HasSubstr(fmt::format(
                            R"(2 of 2 gradients of unit "fc{0}" were not written: "fc{0}.weight", "fc{0}.bias")",
                            unit)));
                    write(params[0]);
                    EXPECT_THAT(expect_error([&] { fsdp.grads_ready(unit); }, Code::invalid_state).what(),
                                HasSubstr(fmt::format(
                                    R"(1 of 2 gradients of unit "fc{0}" were not written: "fc{0}.bias";)", unit)));
                    fsdp.unused(params[1]);
                    fsdp.grads_ready(unit);
                }
                fsdp.wait();
                expect_shard_grads(fsdp, 0);
            }
            fsdp.set_sync(false);  // zeros, to which nothing may be added
            fsdp.backward(2);
            fsdp.grads_ready(2);
            fsdp.wait();
            fsdp.set_sync(true);
            fsdp.backward(2);
            fsdp.grads_ready(2);
        }));
    }
}

// Rank 1 comes late to a call until rank 0 was interrupted in it.
TEST(Fsdp, WhatWasInterruptedGoesOn) {
    std::atomic<int> interrupts{0};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = odd_shapes(0);
        Fsdp fsdp(shared(comm), two_units(model), {.grads_in_flight = 1});
        const auto late = [&] {
            if (comm.rank() == 0) return;
            const int before = interrupts;
            wait_until([&] { return interrupts > before; }, testing::soon(), "an interrupt");
        };
        const auto call = [&](const std::function<void()>& what) {
            if (comm.rank() == 1) return what();
            while (true) {
                try {
                    set_interrupt([](void*) { return int32_t{1}; }, nullptr);
                    what();
                    return set_interrupt(nullptr, nullptr);
                } catch (const Error& error) {
                    set_interrupt(nullptr, nullptr);
                    if (error.code() != Code::interrupted) throw;
                    ++interrupts;
                }
            }
        };
        for (int step = 0; step < 2; ++step) {  // the first one allocates
            late();
            call([&] { fsdp.forward(0); });
            call([&] { fsdp.forward_done(0); });
            call([&] { fsdp.forward(1); });
            call([&] { fsdp.forward_done(1); });
            late();
            call([&] { fsdp.backward(1); });
            EXPECT_EQ(fsdp.phase(1), UnitPhase::backward);
            EXPECT_FLOAT_EQ(fsdp.whole(fsdp.unit(1).params[0]).as<float>()[0], 200);
            fill_grads(fsdp, 1, static_cast<float>(comm.rank() + step));
            late();  // for the memory that it gives back
            call([&] { fsdp.grads_ready(1); });
            call([&] { fsdp.backward(0); });
            fill_grads(fsdp, 0, static_cast<float>(comm.rank() + step));
            late();
            call([&] { fsdp.grads_ready(0); });
            call([&] { fsdp.wait(); });
            expect_shard_grads(fsdp, 0.5F + static_cast<float>(step));
        }
        call([&] { fsdp.backward(1); });
        fill_grads(fsdp, 1, 3);
        late();
        call([&] { fsdp.grads_ready(1); });
        call([&] { fsdp.abandon(); });
        expect_shard_grads(fsdp, 0);
        late();
        call([&] { fsdp.unshard(1); });
        call([&] { fsdp.reshard(1); });
    }));
    EXPECT_GE(interrupts, 10);
}

TEST(Fsdp, ARankThatGivesUpEndsTheWaitsOfAll) {
    std::barrier all_have_begun(3);
    const Outcomes outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
        Model model = Mlp::initial();
        Fsdp fsdp(shared(comm), a_unit_a_layer(model), {});
        Adam optimizer(sharded(fsdp), {});
        optimizer.set_gate([&] { fsdp.check_idle("the optimizer cannot change the shards"); });
        fsdp.forward(0);
        all_have_begun.arrive_and_wait();
        if (comm.rank() == 1) return comm.abort("rank 1 gives up");
        const Error first = expect_error(
            [&] {
                for (size_t u = 0; u < 3; ++u) {
                    fsdp.forward(u);
                    fsdp.forward_done(u);
                }
                for (size_t u = 3; u-- > 0;) {
                    fsdp.backward(u);
                    fsdp.grads_ready(u);
                }
                fsdp.wait();
            },
            Code::aborted);
        EXPECT_THAT(first.what(), HasSubstr("rank 1 gives up"));
        for (const auto& call : std::vector<std::function<void()>>{
                 [&] { fsdp.forward(0); }, [&] { fsdp.backward(0); }, [&] { fsdp.wait(); }, [&] { fsdp.zero_grad(); },
                 [&] { fsdp.unshard(1); }, [&] { optimizer.step(); }}) {
            const Error later = expect_error(call, Code::aborted);
            ASSERT_NE(later.record()->cause, nullptr);
        }
    });
    expect_all_well(outcomes);
}

#ifndef NDEBUG
// The ranks of a host share the copy, and a view that has ended shows another unit's parameters.
TEST(FsdpDeathTest, InDebugBuildsWholeParametersAreReadOnlyAndGoneAfterwards) {
    ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
    const auto touch = [](bool after) {
        expect_all_well(run_ranks(1, test_options(), [&](Communicator& comm) {
            Model model = Mlp::initial();
            Fsdp fsdp(shared(comm), a_unit_a_layer(model), {});
            fsdp.forward(0);
            volatile float* const whole = fsdp.whole(0).as<float>().data();
            if (whole[0] == Mlp::initial().entries[0].values[0]) std::fputs("it was whole\n", stderr);
            if (after) {
                fsdp.forward_done(0);
                (void)whole[0];
            } else {
                whole[0] = 1;
            }
        }));
        std::_Exit(0);
    };
    // A sanitizer takes the signal, tells of it and exits.
    const auto by_sigsegv = [](int status) {
        return testing::sanitized ? WIFEXITED(status) && WEXITSTATUS(status) != 0
                                  : WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
    };
    const auto told = ::testing::AllOf(HasSubstr("it was whole"), HasSubstr(testing::sanitized ? "SEGV" : ""));
    EXPECT_EXIT(touch(false), by_sigsegv, told);
    EXPECT_EXIT(touch(true), by_sigsegv, told);
}
#endif

}  // namespace
}  // namespace tsr
