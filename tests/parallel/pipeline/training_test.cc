// Every schedule trains the toy model to the same bits as one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <set>

#include "comm/inner_options.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/pipeline/simulate.hpp"
#include "soon.hpp"
#include "toy.hpp"

namespace tsr::testing {
namespace {

using ::testing::ElementsAreArray;
using ::testing::UnorderedElementsAreArray;

struct Row {
    const char* schedule;
    int ranks;
    int stages_per_rank;
};

class EverySchedule : public ::testing::TestWithParam<Row> {};

// Those of `numbers` that the schedule takes.
std::vector<int> accepted(const Row& row, std::initializer_list<int> numbers) {
    std::vector<int> found;
    for (const int m : numbers) {
        try {
            static_cast<void>(pipeline::make_schedule(row.schedule, row.ranks, row.stages_per_rank, m));
            found.push_back(m);
        } catch (const Error&) {
            continue;
        }
    }
    return found;
}

TEST_P(EverySchedule, TrainsToTheBitsOfOneProcess) {
    const Row& row = GetParam();
    const std::vector<int> counts = accepted(row, {1, 2, 3, 4, 5, 8, 9});
    ASSERT_FALSE(counts.empty());
    expect_all_well(run_ranks(row.ranks, test_options(), [&](Communicator& comm) {
        for (const int m : counts) {
            const Schedule schedule = pipeline::make_schedule(row.schedule, row.ranks, row.stages_per_rank, m);
            const std::vector<int> stages = stages_of(schedule, comm.rank());
            Trainer trainer(stages);
            Pipeline& pipe = trainer.join(comm, stages, options_of(row.schedule, m));
            Results alone;
            // The rows are no multiple of m, and differ from step to step. Gradients add up over the steps.
            for (const int more : {1, 0, 4}) {
                Data data(static_cast<size_t>(2 * m + more), schedule.stages(), m + more);
                train_alone(schedule, alone, data.inputs, data.targets, data.rows);
                const auto losses = data.step(pipe);
                EXPECT_THAT(losses, ElementsAreArray(alone.losses)) << m << " micro-batches";
                expect_same(trainer.results, alone);
                EXPECT_LE(
                    pipe.stats().peak_activations,
                    static_cast<size_t>(pipeline::simulate(schedule).ranks[static_cast<size_t>(comm.rank())].peak));
            }
            EXPECT_EQ(trainer.results.input_grads.size(),
                      (stages.size() - (stages.front() == 0 ? 1 : 0)) * static_cast<size_t>(m));
            EXPECT_EQ(trainer.last_backwards.size(), 3 * stages.size());
        }
    }));
}

std::vector<Row> rows() {
    std::vector<Row> all;
    for (const int ranks : {1, 2, 4}) {
        for (const char* one : {"gpipe", "1f1b", "zb_h2"}) all.push_back({one, ranks, 1});
        for (const char* one : {"looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble"}) {
            for (const int per_rank : {1, 2}) all.push_back({one, ranks, per_rank});
        }
        for (const char* one : {"zbv", "dualpipev"}) all.push_back({one, ranks, 2});
    }
    return all;
}

INSTANTIATE_TEST_SUITE_P(Of, EverySchedule, ::testing::ValuesIn(rows()), [](const auto& row) {
    return std::string(row.param.schedule) + "_" + std::to_string(row.param.ranks) + "x" +
           std::to_string(row.param.stages_per_rank);
});

TEST(PipelineTraining, AnOrderOfOnesOwnComesAsCsv) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        const Schedule schedule = pipeline::from_csv("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n");
        PipelineOptions options;
        options.schedule_csv = pipeline::to_csv(schedule, pipeline::Csv::compute_comms);
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options);
        Results alone;
        Data data(5, 2, 0);
        train_alone(schedule, alone, data.inputs, data.targets, data.rows);
        EXPECT_THAT(data.step(pipe), ElementsAreArray(alone.losses));
        expect_same(trainer.results, alone);
    }));
}

// Stage 1 begins when stage 0 has computed more than stage 1 should receive before.
TEST(PipelineTraining, AnEvaluationDoesNotGatherTheBatchInFrontOfASlowStage) {
    constexpr int m = 40;
    constexpr size_t rows = 2000;
    std::atomic<int> ahead{0};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("gpipe", m));
        Results alone;
        Data data(m * rows, 2, 0);
        train_alone(pipeline::make_schedule("gpipe", 2, 1, m), alone, data.inputs, data.targets, data.rows);
        trainer.before_each = [&](const StageCall& call) {
            if (comm.rank() == 0) ahead.fetch_add(1);
            if (comm.rank() == 0 || call.microbatch > 0) return;
            const Deadline deadline = soon();
            while (ahead.load() < 16 && !deadline.expired()) std::this_thread::yield();
            EXPECT_GE(ahead.load(), 16);
        };
        EXPECT_THAT(data.eval(pipe), ElementsAreArray(alone.losses));
        const size_t activation = rows * width_of(1) * sizeof(double);
        if (comm.rank() == 1) {
            EXPECT_LE(pipe.stats().peak_bytes, 10 * activation) << "4 that came, one that comes, what is computed";
        }
        trainer.before_each = nullptr;
        for (int i = 0; i < 2; ++i) EXPECT_THAT(data.eval(pipe), ElementsAreArray(alone.losses));
    }));
    EXPECT_EQ(ahead.load(), m);
}

// Each rank's second stage has its inputs from the other, which sends all of them first.
TEST(PipelineTraining, AnEvaluationWithManyMicroBatchesOfSeveralStagesEnds) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        for (const char* name : {"looped_bfs", "interleaved_1f1b", "zbv"}) {
            const Schedule schedule = pipeline::make_schedule(name, 2, 2, 100);
            const std::vector<int> stages = stages_of(schedule, comm.rank());
            Trainer trainer(stages);
            Pipeline& pipe = trainer.join(comm, stages, options_of(name, 100));
            Results alone;
            Data data(100, 4, 0);
            train_alone(schedule, alone, data.inputs, data.targets, data.rows);
            EXPECT_THAT(data.eval(pipe), ElementsAreArray(alone.losses)) << name;
        }
    }));
}

TEST(PipelineTraining, AnEvaluationRunsForwardsAloneAndLeavesGradients) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        const Schedule schedule = pipeline::make_schedule("interleaved_zero_bubble", 2, 2, 4);
        const std::vector<int> stages = stages_of(schedule, comm.rank());
        Trainer trainer(stages);
        Pipeline& pipe = trainer.join(comm, stages, options_of("interleaved_zero_bubble", 4));
        Results alone;
        Data data(7, schedule.stages(), 0);
        train_alone(schedule, alone, data.inputs, data.targets, data.rows);
        std::vector<std::string> calls;
        trainer.before_each = [&](const StageCall& call) {
            EXPECT_FALSE(call.training);
            calls.push_back(pipeline::text_of(
                {call.work, false, static_cast<uint16_t>(call.stage), static_cast<uint32_t>(call.microbatch)}));
        };
        EXPECT_THAT(data.eval(pipe), ElementsAreArray(alone.losses));
        std::vector<std::string> forwards;
        for (const int stage : stages) {
            for (int i = 0; i < 4; ++i) forwards.push_back(std::to_string(stage) + "F" + std::to_string(i));
        }
        EXPECT_THAT(calls, UnorderedElementsAreArray(forwards));
        EXPECT_EQ(pipe.stats().peak_activations, 1U) << "nothing is kept for a backward";
        trainer.before_each = nullptr;
        for (int more = 0; more < 2; ++more) static_cast<void>(data.step(pipe));
        EXPECT_THAT(data.eval(pipe), ElementsAreArray(alone.losses));
        Results twice;
        for (int more = 0; more < 2; ++more) train_alone(schedule, twice, data.inputs, data.targets, data.rows);
        expect_same(trainer.results, twice);
    }));
}

TEST(PipelineTraining, CallbacksComeInTheOrderOfTheSchedule) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("1f1b", 3));
        std::vector<std::string> calls;
        trainer.before_each = [&](const StageCall& call) {
            EXPECT_EQ(call.microbatches, 3);
            EXPECT_TRUE(call.training);
            calls.push_back(pipeline::text_of(
                {call.work, false, static_cast<uint16_t>(call.stage), static_cast<uint32_t>(call.microbatch)}));
        };
        Data data(3, 2, 0);
        static_cast<void>(data.step(pipe));
        std::vector<std::string> order;
        for (const auto& action : pipe.schedule().orders[static_cast<size_t>(comm.rank())])
            order.push_back(pipeline::text_of(action));
        EXPECT_EQ(calls, order);
        EXPECT_THAT(trainer.last_backwards, ::testing::ElementsAre(comm.rank() == 0 ? "0B2" : "1B2"));
    }));
}

TEST(PipelineTraining, WeightsScaleTheLastStagesGradients) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("gpipe", 2));
        Values seen;
        trainer.before_each = [&](const StageCall& call) { seen.push_back(call.weight); };
        Data data(5, 2, 0);
        const Tensor x = matrix(data.inputs, 5);
        const Tensor t = matrix(data.targets, 5);
        static_cast<void>(pipe.step({{&x, 1}, {&t, 1}, {}}));
        const Values given{0.25, -3};
        static_cast<void>(pipe.step({{&x, 1}, {&t, 1}, given}));
        const Values wanted =
            comm.rank() == 0 ? Values(8, 0) : Values{3.0 / 5, 2.0 / 5, 3.0 / 5, 2.0 / 5, 0.25, -3, 0.25, -3};
        EXPECT_EQ(seen, wanted);
    }));
}

TEST(PipelineTraining, LossesThatNobodyReportsAreNaN) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Callbacks callbacks;
        Pipeline* self = nullptr;
        callbacks.forward = [&](const StageCall& call) {
            if (call.stage == 1 && call.microbatch == 1) self->loss(4);
        };
        callbacks.backward = [](const StageCall&) {};
        Pipeline pipe(shared(comm), {comm.rank()}, options_of("gpipe", 2), callbacks);
        self = &pipe;
        const auto losses = pipe.step({});  // without data: the callbacks have their own
        EXPECT_TRUE(std::isnan(losses[0]));
        EXPECT_EQ(losses[1], 4);
    }));
}

// Stage 0 sends an integer tensor and two of floating point, the second with another shape in each micro-batch, or
// empty.
TEST(PipelineTraining, StagesSendSeveralTensorsOfAnyShape) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        constexpr int m = 4;
        Callbacks callbacks;
        Pipeline* self = nullptr;
        callbacks.forward = [&](const StageCall& call) {
            const int64_t n = call.microbatch * 1000;
            if (call.stage == 0) {
                self->output(DType::i64, Dims{}).as<int64_t>()[0] = call.microbatch;
                self->output(DType::f32, Dims{1, 2}).as<float>()[1] = static_cast<float>(call.microbatch) + 0.5F;
                for (double& value : self->output(DType::f64, Dims{2, n}).as<double>()) value = call.microbatch;
                return;
            }
            ASSERT_EQ(call.inputs.size(), 3U);
            EXPECT_EQ(call.inputs[0].as<int64_t>()[0], call.microbatch);
            EXPECT_EQ(call.inputs[1].as<float>()[1], static_cast<float>(call.microbatch) + 0.5F);
            EXPECT_EQ(call.inputs[2].shape, (Dims{2, n}));
            for (const double value : call.inputs[2].as<double>()) EXPECT_EQ(value, call.microbatch);
        };
        callbacks.backward = [&](const StageCall& call) {
            if (call.stage == 1) {
                ASSERT_EQ(call.input_grads.size(), 3U);
                EXPECT_EQ(call.input_grads[0].data, nullptr) << "an integer has no gradient";
                for (const double value : call.input_grads[2].as<double>()) EXPECT_EQ(value, 0);
                call.input_grads[1].as<float>()[0] = 7;
                for (double& value : call.input_grads[2].as<double>()) value = -call.microbatch;
                return;
            }
            ASSERT_EQ(call.output_grads.size(), 3U);
            EXPECT_EQ(call.output_grads[0].data, nullptr);
            EXPECT_EQ(call.output_grads[1].as<float>()[0], 7);
            EXPECT_EQ(call.output_grads[1].as<float>()[1], 0);
            EXPECT_EQ(call.output_grads[2].shape, call.outputs[2].shape);
            for (const double value : call.output_grads[2].as<double>()) EXPECT_EQ(value, -call.microbatch);
            EXPECT_TRUE(call.input_grads.empty());
        };
        Pipeline pipe(shared(comm), {comm.rank()}, options_of("1f1b", m), callbacks);
        self = &pipe;
        for (int step = 0; step < 2; ++step) static_cast<void>(pipe.step({}));
    }));
}

// Ranks 0 and 1 have the stages 0, 3 and 1, 2 of a V. Output 1 of stage 0 skips to stages 2 and 3; output 0 goes on.
TEST(PipelineTraining, EdgesSkipStages) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        constexpr int m = 5;
        PipelineOptions options = options_of("zbv", m);
        options.edges = {{0, 1, 2}, {0, 1, 3}};
        Callbacks callbacks;
        Pipeline* self = nullptr;
        callbacks.forward = [&](const StageCall& call) {
            Values in;
            for (const Tensor& input : call.inputs) in.push_back(input.as<double>()[0]);
            const double i = call.microbatch;
            const std::vector<Values> wanted{{}, {i}, {i + 1, 10 * i}, {i + 2, 10 * i}};
            EXPECT_EQ(in, wanted[static_cast<size_t>(call.stage)]);
            if (call.stage == 3) return;
            self->output(DType::f64, Dims{1}).as<double>()[0] = call.stage == 0 ? i : in[0] + 1;
            if (call.stage == 0) self->output(DType::f64, Dims{1}).as<double>()[0] = 10 * i;
        };
        callbacks.backward = callbacks.backward_input = [&](const StageCall& call) {
            Values grads;
            for (const Tensor& grad : call.output_grads) grads.push_back(grad.as<double>()[0]);
            const std::vector<Values> wanted{{1, 12, 13}, {2}, {3}, {}};
            EXPECT_EQ(grads, wanted[static_cast<size_t>(call.stage)]);
            for (size_t k = 0; k < call.input_grads.size(); ++k) {
                call.input_grads[k].as<double>()[0] = call.stage + 10.0 * static_cast<double>(k);
            }
        };
        callbacks.backward_weight = [&](const StageCall& call) {
            EXPECT_EQ(call.output_grads.size(), call.stage == 0 ? 3U : call.stage == 3 ? 0U : 1U);
            EXPECT_TRUE(call.input_grads.empty());
        };
        Pipeline pipe(shared(comm), stages_of(pipeline::make_schedule("zbv", 2, 2, m), comm.rank()), options,
                      callbacks);
        self = &pipe;
        for (int step = 0; step < 2; ++step) static_cast<void>(pipe.step({}));
    }));
}

TEST(PipelineTraining, TiedGradientsAreSummedInTheOrderOfTheStages) {
    expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("gpipe", 2));
        Data data(4, 3, 0);
        static_cast<void>(data.step(pipe));
        const Values all{1e16, 1, -1e16};  // the order shows: (1e16 + 1) - 1e16 is 0
        Values grad(1000, all[static_cast<size_t>(comm.rank())]);
        const std::vector<int> everywhere{0, 1, 2};
        pipe.sum_tied(tensor_of(std::span(grad), DType::f64), everywhere);
        EXPECT_THAT(grad, ::testing::Each((1e16 + 1) - 1e16));
        if (comm.rank() != 1) {
            Values ends(3, comm.rank() + 1);
            const std::vector<int> two{0, 2};
            pipe.sum_tied(tensor_of(std::span(ends), DType::f64), two);
            EXPECT_EQ(ends, Values(3, 4));
        }
        Values alone(3, 5);
        const std::vector<int> own{comm.rank()};
        pipe.sum_tied(tensor_of(std::span(alone), DType::f64), own);
        EXPECT_EQ(alone, Values(3, 5));
        static_cast<void>(data.step(pipe));
    }));
}

// Two replicas of a pipeline of two ranks, with two stages each: ranks 0 and 1, ranks 2 and 3. Each stage has a DDP over
// its two replicas, whose collectives begin in the callback of the stage's last backward. Those of a rank's later stage
// end while it computes the cool-down of its earlier one.
TEST(PipelineTraining, DdpReducesTheGradientsOfAStageOnceAStepDuringTheCoolDown) {
    std::array<std::atomic<bool>, 2> reduced{};
    expect_all_well(run_ranks(4, test_options(), [&](Communicator& comm) {
        const int replica = comm.rank() / 2;
        const int place = comm.rank() % 2;
        const std::array<int, 2> own{place, place + 2};
        const auto stages = comm.split(replica, comm.rank(), inner_options(comm, "/pp"));
        Trainer trainer({own.begin(), own.end()});
        Pipeline& pipe = trainer.join(*stages, {own.begin(), own.end()}, options_of("looped_bfs", 3));
        std::map<int, std::unique_ptr<Ddp>> models;
        for (const int stage : own) {
            Layer& layer = trainer.results.layers.at(stage);
            const auto name = "/dp" + std::to_string(stage / 2);
            models[stage] =
                std::make_unique<Ddp>(comm.split(place, comm.rank(), inner_options(comm, name)),
                                      std::vector<NamedTensor>{{"w", tensor_of(std::span(layer.w), DType::f64)},
                                                               {"b", tensor_of(std::span(layer.b), DType::f64)}},
                                      DdpOptions{});
        }
        trainer.after_each_backward = [&](const StageCall& call) {
            if (!call.is_last_backward) return;
            const Layer& layer = trainer.results.layers.at(call.stage);
            Ddp& model = *models.at(call.stage);
            std::ranges::copy(layer.dw, model.grad(0).as<double>().begin());
            std::ranges::copy(layer.db, model.grad(1).as<double>().begin());
            const Deadline deadline = soon();
            std::atomic<bool>& later = reduced[static_cast<size_t>(place)];
            while (replica == 1 && call.stage == place && !later && !deadline.expired()) std::this_thread::yield();
            EXPECT_TRUE(later || replica == 0 || call.stage != place) << "stage " << place + 2 << " is not reduced";
            model.ready_all();
        };
        Data data(7, 4, replica);
        static_cast<void>(data.step(pipe));
        models.at(place + 2)->wait();
        if (replica == 0) reduced[static_cast<size_t>(place)] = true;
        models.at(place)->wait();
        std::array<Results, 2> alone;
        for (const int other : {0, 1}) {
            Data theirs(7, 4, other);
            train_alone(pipe.schedule(), alone[static_cast<size_t>(other)], theirs.inputs, theirs.targets, theirs.rows);
        }
        const auto mean = [&](int stage, auto grad_of) {
            Values sum = grad_of(alone[0].layers.at(stage));
            const Values& other = grad_of(alone[1].layers.at(stage));
            for (size_t i = 0; i < sum.size(); ++i) sum[i] = (sum[i] + other[i]) / 2;
            return sum;
        };
        for (const int stage : own) {
            const Ddp& model = *models.at(stage);
            EXPECT_EQ(model.synced_steps(), 1);
            EXPECT_THAT(model.grad(0).as<double>(),
                        ElementsAreArray(mean(stage, [](auto& layer) { return layer.dw; })));
            EXPECT_THAT(model.grad(1).as<double>(),
                        ElementsAreArray(mean(stage, [](auto& layer) { return layer.db; })));
        }
    }));
}

TEST(PipelineTraining, StagesOfOneRankShareMemory) {
    expect_all_well(run_ranks(1, test_options(), [&](Communicator& comm) {
        Callbacks callbacks;
        Pipeline* self = nullptr;
        std::map<int, std::byte*> made;
        std::map<int, std::byte*> grads;
        callbacks.forward = [&](const StageCall& call) {
            if (call.stage == 0) made[call.microbatch] = self->output(DType::f32, Dims{10}).data;
            if (call.stage == 1) {
                EXPECT_EQ(call.inputs[0].data, made[call.microbatch]);
            }
        };
        callbacks.backward = [&](const StageCall& call) {
            if (call.stage == 1) grads[call.microbatch] = call.input_grads[0].data;
            if (call.stage == 0) {
                EXPECT_EQ(call.output_grads[0].data, grads[call.microbatch]);
            }
        };
        Pipeline pipe(shared(comm), {0, 1}, options_of("looped_bfs", 3), callbacks);
        self = &pipe;
        static_cast<void>(pipe.step({}));
        EXPECT_EQ(made.size(), 3U);
        EXPECT_EQ(grads.size(), 3U);
    }));
}

// 1F1B on one rank: one activation at a time, so that each micro-batch finds the memory of the one before.
TEST(PipelineTraining, LaterMicroBatchesUseTheSameMemory) {
    expect_all_well(run_ranks(1, test_options(), [&](Communicator& comm) {
        Callbacks callbacks;
        Pipeline* self = nullptr;
        std::set<std::byte*> made;
        callbacks.forward = [&](const StageCall&) { made.insert(self->output(DType::f32, Dims{10000}).data); };
        callbacks.backward = [](const StageCall&) {};
        Pipeline pipe(shared(comm), {0}, options_of("1f1b", 6), callbacks);
        self = &pipe;
        for (int step = 0; step < 3; ++step) static_cast<void>(pipe.step({}));
        EXPECT_EQ(made.size(), 1U);
        EXPECT_EQ(pipe.stats().peak_bytes, 40960U);
        EXPECT_EQ(pipe.stats().peak_activations, 1U);
    }));
}

// The receiver's trainer computes while far more arrives than a sender may have on its way.
TEST(PipelineTraining, SendsDoNotWaitForTheReceiversTrainer) {
    constexpr int m = 60;
    std::atomic<bool> sent{false};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Callbacks callbacks;
        Pipeline* self = nullptr;
        callbacks.forward = [&](const StageCall& call) {
            if (call.stage == 0) {
                self->output(DType::f32, Dims{50000}).as<float>()[49999] = static_cast<float>(call.microbatch);
                if (call.microbatch == m - 1) sent = true;
                return;
            }
            if (call.microbatch == 0) wait_until([&] { return sent.load(); }, soon(), "the last forward of stage 0");
            EXPECT_EQ(call.inputs[0].as<float>()[49999], static_cast<float>(call.microbatch));
        };
        callbacks.backward = [](const StageCall&) {};
        Pipeline pipe(shared(comm), {comm.rank()}, options_of("gpipe", m), callbacks);
        self = &pipe;
        static_cast<void>(pipe.step({}));
    }));
}

TEST(PipelineTraining, StatisticsTellWhoWasAwaited) {
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("1f1b", 4));
        EXPECT_EQ(pipe.stats().longest_stage, -1);
        Data data(8, 2, 0);
        static_cast<void>(data.step(pipe));
        const auto stats = pipe.stats();
        EXPECT_EQ(stats.longest_stage, 1 - comm.rank());
        EXPECT_EQ(stats.longest_rank, 1 - comm.rank());
        EXPECT_GT(stats.busy.count(), 0);
        EXPECT_GT(stats.longest.count(), 0);
        EXPECT_GE(stats.waited, stats.longest);
        EXPECT_GE(stats.wall, stats.busy + stats.waited);
        EXPECT_EQ(stats.peak_activations, comm.rank() == 0 ? 2U : 1U);
        EXPECT_GT(stats.peak_bytes, 0U);
    }));
}

}  // namespace
}  // namespace tsr::testing
