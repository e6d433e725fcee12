// The order of a trainer's calls: every stage refuses the same ones, with errors that name the engine's calls.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "engine/engine.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "toy.hpp"

namespace tsr {
namespace {

using testing::expect_all_well;
using testing::expect_error;
using testing::Params;
using testing::pass_with;
using testing::run_ranks;
using testing::shared;
using testing::test_options;
using testing::values_of;

class EngineOrder : public ::testing::TestWithParam<int> {
   protected:
    static Params<float> two_units() {
        Params<float> params;
        params.add(0, "w", {6});
        params.add(0, "b", {2});
        params.add(1, "v", {4});
        return params;
    }
    // SGD with a rate of 1: a parameter is minus the sum of its gradients.
    [[nodiscard]] static std::string config(int accumulation = 1, const std::string& more = "") {
        return fmt::format(
            R"({{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": {}, "gradient_clipping": 0,
            "optimizer": {{"type": "SGD", "params": {{"lr": 1}}}}, "zero_optimization": {{"stage": {}{}}}}})",
            accumulation, GetParam(), more);
    }
    static void fill(Engine& engine, size_t param, float value) {
        for (float& g : engine.model().grad(param).as<float>()) g = engine.adds_gradients() ? g + value : value;
    }
    static void backward(Engine& engine, size_t unit, float value) {
        engine.backward(unit);
        for (size_t i = 0; i < engine.model().params(); ++i) {
            if (engine.model().unit_of(i) == unit) fill(engine, i, value);
        }
        engine.unit_ready(unit);
    }
    static void expect_refused(const std::function<void()>& call, const std::string& said) {
        const std::string message = expect_error(call, Code::invalid_state).what();
        EXPECT_NE(message.find(said), std::string::npos) << message;
        EXPECT_NE(message.find("rank "), std::string::npos) << message;
        EXPECT_EQ(message.find("grads_ready"), std::string::npos) << message;
        EXPECT_EQ(message.find("reshard"), std::string::npos) << message;
    }
    static void expect_values(Engine& engine, float of_first, float of_second) {
        EXPECT_EQ(values_of<float>(engine, 0), std::vector<float>(6, of_first));
        EXPECT_EQ(values_of<float>(engine, 1), std::vector<float>(2, of_first));
        EXPECT_EQ(values_of<float>(engine, 2), std::vector<float>(4, of_second));
    }
};

TEST_P(EngineOrder, AUnitHasOneBackwardInAPass) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        auto params = two_units();
        Engine engine(shared(comm), params.in_units(), config(2));
        for (int pass = 0; pass < 2; ++pass) {  // the first only accumulates at stages 0 and 1
            backward(engine, 1, 1);
            expect_refused([&] { engine.backward(1); }, "the backward of unit \"unit1\" cannot begin twice");
            backward(engine, 0, 2);
            engine.backward_done();
            (void)engine.step();
        }
        expect_values(engine, -4, -2);
    }));
}

TEST_P(EngineOrder, ReadyNeedsABackwardOfItsUnit) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        auto params = two_units();
        Engine engine(shared(comm), params.in_units(), config());
        const std::string said = "was marked ready before the backward of its unit \"unit0\" began";
        expect_refused([&] { engine.ready(0); }, said);
        expect_refused([&] { engine.unit_ready(0); }, said);
        engine.set_boundary(std::nullopt);  // no pass has begun
        backward(engine, 1, 1);
        expect_refused([&] { engine.ready(0); }, said);
        backward(engine, 0, 2);
        expect_refused([&] { engine.ready(1); }, "marked ready twice");
        engine.unit_ready(0);  // nothing is left to mark
        engine.backward_done();
        expect_refused([&] { engine.ready(0); }, said);
        EXPECT_TRUE(engine.step());
        expect_values(engine, -2, -1);
    }));
}

TEST_P(EngineOrder, NoForwardDuringABackwardPass) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        auto params = two_units();
        Engine engine(shared(comm), params.in_units(), config());
        engine.backward(1);
        expect_refused([&] { engine.forward(0); }, "the forward of unit \"unit0\" cannot begin during a backward pass");
        expect_refused([&] { engine.forward_done(1); }, "call unit_ready() for it first");
        fill(engine, 2, 1);
        engine.ready(2);
        expect_refused([&] { engine.forward(1); }, "call backward_done() first");
        engine.backward_done();
        EXPECT_TRUE(engine.step());
        engine.forward(0);
        engine.forward_done(0);
    }));
}

TEST_P(EngineOrder, GradientsAreOfTheirUnitsBackward) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        auto params = two_units();
        Engine engine(shared(comm), params.in_units(), config());
        const auto grad = [&] { (void)engine.model().grad(1); };
        const std::string said = "the gradient of \"b\" can be written only between backward() and the last ready()";
        expect_refused(grad, said);
        backward(engine, 1, 1);
        expect_refused(grad, said);
        engine.backward(0);
        fill(engine, 0, 1);
        engine.ready(0);
        grad();
        fill(engine, 1, 1);
        engine.ready(1);
        expect_refused(grad, said);
        engine.backward_done();
        expect_refused(grad, said);
    }));
}

TEST_P(EngineOrder, UnitsWithoutABackwardCountAsZeros) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        auto params = two_units();
        Engine engine(shared(comm), params.in_units(), config(2));
        for (int step = 0; step < 2; ++step) {
            backward(engine, 1, 1);
            engine.backward_done();
            EXPECT_FALSE(engine.step());
            backward(engine, 0, 2);
            engine.backward_done();
            EXPECT_TRUE(engine.step());
        }
        engine.backward_done();  // of no unit at all
        EXPECT_FALSE(engine.step());
        engine.backward_done();
        EXPECT_TRUE(engine.step());
        expect_values(engine, -4, -2);
    }));
}

TEST_P(EngineOrder, UnitsWithoutABackwardAreNamedIfTheyMustHaveOne) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        auto params = two_units();
        Engine engine(shared(comm), params.in_units(), config(1, R"(, "ignore_unused_parameters": false)"));
        expect_refused([&] { engine.backward_done(); }, "3 of 3 gradients were not marked ready");
        engine.set_boundary(std::nullopt);  // no pass has begun
        backward(engine, 1, 1);
        expect_refused([&] { engine.backward_done(); }, R"("w" of unit "unit0", "b" of unit "unit0")");
        backward(engine, 0, 2);
        engine.backward_done();
        EXPECT_TRUE(engine.step());
        expect_values(engine, -2, -1);
    }));
}

// At stage 0 parameters are never sharded, and gradients begin as zeros.
class ShardedEngine : public EngineOrder {};

TEST_P(ShardedEngine, ErrorsNameTheCallsOfTheEngine) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        auto params = two_units();
        Engine engine(shared(comm), params.in_units(), config());
        expect_refused([&] { (void)engine.model().param(0); }, "or between backward() and unit_ready()");
        engine.backward(1);
        expect_refused([&] { engine.unit_ready(1); }, "write them and call unit_ready() again");
        fill(engine, 2, 1);
        engine.unit_ready(1);
        engine.backward_done();
        engine.forward(0);
        expect_refused([&] { (void)engine.step(); }, "call forward_done() or end the step first");
    }));
}

// As with several ranks, where a call uses it.
TEST_P(EngineOrder, ACommunicatorThatHasEndedIsRefused) {
    for (const bool aborted : {false, true}) {
        auto params = two_units();
        const auto comm = Communicator::self();
        Engine engine(comm, params.in_units(), config());
        if (aborted) {
            comm->abort("the test ends it");
        } else {
            comm->finalize();
        }
        std::vector<std::function<void()>> calls{[&] { engine.forward(0); }, [&] { engine.forward_done(0); },
                                                 [&] { engine.backward(0); }};
        if (GetParam() == 0) {  // nothing is sent before all gradients of a bucket are ready
            engine.backward(1);
            engine.backward(0);
            engine.unit_ready(1);
            calls = {[&] { engine.unit_ready(0); }};
        }
        calls.emplace_back([&] { engine.backward_done(); });
        for (const auto& call : calls) {
            const std::string message = expect_error(call, aborted ? Code::aborted : Code::invalid_state).what();
            EXPECT_NE(message.find(aborted ? "the test ends it" : "already finalized"), std::string::npos) << message;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Stage, EngineOrder, ::testing::Values(0, 1, 2, 3));
INSTANTIATE_TEST_SUITE_P(Stage, ShardedEngine, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace tsr
