// Pipelines whose activations are on CUDA devices: every schedule trains to the bits of one process, as on the CPU, in
// the order of streams, and the host does not wait for the device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "comm/inner_options.hpp"
#include "device/captured_graph.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/pipeline/device_lanes.hpp"
#include "parallel/pipeline/simulate.hpp"
#include "toy_on_device.hpp"

namespace tsr::testing {
namespace {

using pipeline::Callback;
using pipeline::Direction;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

// --- lanes

TEST(DeviceLanes, NoRankHasTwoDirectionsOnOne) {
    const auto both = [](std::initializer_list<std::pair<int, int>> neighbours) {
        std::vector<Direction> all;
        for (const auto& [a, b] : neighbours) all.insert(all.end(), {{a, b}, {b, a}});
        return all;
    };
    struct Case {
        std::vector<Direction> directions;
        size_t most;
    };
    for (const Case& one : {Case{both({{0, 0}}), 0}, Case{both({{0, 1}}), 2}, Case{both({{0, 1}, {1, 2}, {2, 3}}), 4},
                            Case{both({{0, 1}, {1, 2}, {2, 3}, {3, 0}}), 4}, Case{both({{0, 1}, {1, 2}, {2, 0}}), 6},
                            Case{both({{0, 1}, {1, 2}, {0, 2}, {2, 3}, {1, 3}, {0, 3}}), 12}}) {
        const auto lanes = pipeline::lanes_of(one.directions);
        std::set<std::pair<int, size_t>> taken;  // ranks and lanes
        for (const auto& [direction, lane] : lanes) {
            EXPECT_TRUE(taken.insert({direction.from, lane}).second);
            EXPECT_TRUE(taken.insert({direction.to, lane}).second);
            EXPECT_LT(lane, one.most);
        }
        for (const Direction& direction : one.directions) {
            EXPECT_EQ(lanes.contains(direction), direction.from != direction.to);
        }
    }
}

// --- the bits of one process

struct Row {
    const char* schedule;
    int ranks;
    int stages_per_rank;
};

class EveryScheduleOnDevices : public PipelineOnDevices, public ::testing::WithParamInterface<Row> {};

TEST_P(EveryScheduleOnDevices, TrainsToTheBitsOfOneProcess) {
    const Row& row = GetParam();
    simulated_cuda_delay(60, 7);
    expect_all_well(run_on_devices(row.ranks, [&](Communicator& comm) {
        for (const int m : row.schedule == std::string_view("dualpipev") ? std::vector{8} : std::vector{4, 8}) {
            const Schedule schedule = pipeline::make_schedule(row.schedule, row.ranks, row.stages_per_rank, m);
            const std::vector<int> stages = stages_of(schedule, comm.rank());
            DeviceTrainer trainer(comm, stages, options_of(row.schedule, m));
            Results alone;
            for (const int more : {1, 0, 4}) {
                Data data(static_cast<size_t>(2 * m + more), schedule.stages(), m + more);
                train_alone(schedule, alone, data.inputs, data.targets, data.rows);
                trainer.step(data);
                EXPECT_LE(
                    trainer.pipe->stats().peak_activations,
                    static_cast<size_t>(pipeline::simulate(schedule).ranks[static_cast<size_t>(comm.rank())].peak));
            }
            trainer.settle();  // once, after three steps
            expect_same(trainer.results, alone);
            if (trainer.pipe->has_stage(schedule.stages() - 1)) {
                EXPECT_THAT(trainer.results.losses, ElementsAreArray(alone.losses)) << m << " micro-batches";
            }
            EXPECT_EQ(trainer.results.input_grads.size(),
                      (stages.size() - (stages.front() == 0 ? 1 : 0)) * static_cast<size_t>(m));
        }
    }));
}

std::vector<Row> rows() {
    std::vector<Row> all;
    for (const int ranks : {1, 2, 4}) {
        for (const char* one : {"gpipe", "1f1b", "zb_h2"}) all.push_back({one, ranks, 1});
        for (const char* one : {"looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble"}) {
            all.push_back({one, ranks, 2});
        }
        for (const char* one : {"zbv", "dualpipev"}) all.push_back({one, ranks, 2});
    }
    return all;
}

INSTANTIATE_TEST_SUITE_P(Of, EveryScheduleOnDevices, ::testing::ValuesIn(rows()), [](const auto& row) {
    return std::string(row.param.schedule) + "_" + std::to_string(row.param.ranks) + "x" +
           std::to_string(row.param.stages_per_rank);
});

// Larger than what the mock of NCCL keeps for a receiver that has not come: a send ends with its receive, as with NCCL.
TEST_F(PipelineOnDevices, LargeTensorsInBothDirectionsBetweenTwoRanksDoNotWaitForEachOther) {
    simulated_cuda_delay(100, 3);
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        for (const char* name : {"interleaved_1f1b", "interleaved_zero_bubble", "zbv"}) {
            const Schedule schedule = pipeline::make_schedule(name, 2, 2, 8);
            DeviceTrainer trainer(comm, stages_of(schedule, comm.rank()), options_of(name, 8));
            Results alone;
            Data data(8 * 3000, schedule.stages(), 1);
            for (int step = 0; step < 2; ++step) {
                train_alone(schedule, alone, data.inputs, data.targets, data.rows);
                trainer.step(data);
            }
            trainer.settle();
            expect_same(trainer.results, alone);
        }
    }));
}

TEST_F(PipelineOnDevices, AnEvaluationRunsForwardsAlone) {
    simulated_cuda_delay(50, 4);
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        const Schedule schedule = pipeline::make_schedule("looped_bfs", 2, 2, 40);
        DeviceTrainer trainer(comm, stages_of(schedule, comm.rank()), options_of("looped_bfs", 40));
        Results alone;
        Data data(80, schedule.stages(), 0);
        train_alone(schedule, alone, data.inputs, data.targets, data.rows);
        trainer.eval(data);
        trainer.step(data);
        trainer.eval(data);
        trainer.settle();
        expect_same(trainer.results, alone);
        if (comm.rank() == 1) {
            EXPECT_THAT(trainer.results.losses, ElementsAreArray(alone.losses));
        }
    }));
}

TEST_F(PipelineOnDevices, ABatchMayBeOnTheCpu) {
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        DeviceTrainer trainer(comm, {comm.rank()}, options_of("1f1b", 4));
        Results alone;
        Data data(9, 2, 0);
        train_alone(pipeline::make_schedule("1f1b", 2, 1, 4), alone, data.inputs, data.targets, data.rows);
        trainer.before_each = [](const StageCall& call) {
            EXPECT_EQ(call.inputs[0].device.type, call.stage == 0 ? DeviceType::cpu : DeviceType::cuda);
            if (call.stage == 1) {
                EXPECT_EQ(call.targets[0].device.type, DeviceType::cpu);
            }
        };
        trainer.step_from_cpu(data);
        trainer.settle();
        for (const auto& [stage, layer] : trainer.results.layers) {
            EXPECT_THAT(layer.dw, ElementsAreArray(alone.layers.at(stage).dw));
        }
    }));
}

// Output 1 of stage 0 skips to stages 2 and 3, an integer goes along; one tensor of a micro-batch is empty.
TEST_F(PipelineOnDevices, EdgesSkipStagesAndTensorsMayBeOfAnyKind) {
    simulated_cuda_delay(100, 6);
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        constexpr int m = 5;
        PipelineOptions options = on_devices(options_of("zbv", m));
        options.edges = {{0, 1, 2}, {0, 1, 3}};
        Callbacks callbacks;
        Pipeline* self = nullptr;
        DeviceApi& api = device_api(comm.device().value());
        const auto stream = api.new_stream();
        const auto put = [&](const Tensor& tensor, double value) {
            enqueue(stream.get(), [=] { std::ranges::fill(seen(tensor), value); });
        };
        const auto expect = [&](const Tensor& tensor, double value) {
            enqueue(stream.get(), [=] {
                for (const double one : seen(tensor)) EXPECT_EQ(one, value);
            });
        };
        callbacks.forward = [&](const StageCall& call) {
            const double i = call.microbatch;
            if (call.stage > 0) {
                const Tensor& number = call.inputs[1];
                EXPECT_EQ(number.dtype, DType::i64);
                EXPECT_EQ(number.shape, (Dims{call.microbatch, 2}));
                expect(call.inputs[0], i + call.stage);
            }
            if (call.stage > 1) expect(call.inputs[2], 10 * i);
            if (call.stage == 3) return;
            put(self->output(DType::f64, Dims{3}), i + call.stage + 1);
            if (call.stage == 0) put(self->output(DType::f64, Dims{1}), 10 * i);
            static_cast<void>(self->output(DType::i64, Dims{call.microbatch, 2}));
        };
        callbacks.backward = callbacks.backward_input = [&](const StageCall& call) {
            // Of the next stage's two inputs, and of the edges.
            const size_t next = call.stage == 3 ? 0 : 2;
            ASSERT_EQ(call.output_grads.size(), next + (call.stage == 0 ? 2 : 0));
            if (next > 0) {
                expect(call.output_grads[0], call.stage + 1);
                EXPECT_EQ(call.output_grads[1].data, nullptr) << "an integer has no gradient";
            }
            if (call.stage == 0) expect(call.output_grads[2], 2 + 20);
            if (call.stage == 0) expect(call.output_grads[3], 3 + 20);
            for (size_t k = 0; k < call.input_grads.size(); ++k) {
                const Tensor& grad = call.input_grads[k];
                if (grad.data == nullptr) continue;
                expect(grad, 0);
                put(grad, call.stage + 10.0 * static_cast<double>(k));
            }
        };
        callbacks.backward_weight = [&](const StageCall&) {};
        Pipeline pipe(shared(comm), stages_of(pipeline::make_schedule("zbv", 2, 2, m), comm.rank()), options,
                      callbacks);
        self = &pipe;
        pipe.set_stream(stream.get());
        for (int step = 0; step < 3; ++step) static_cast<void>(pipe.step({}));
        api.record(stream.get())->wait(soon());
    }));
}

// Two ranks have each stage, y = w * x. A gradient adds up over the micro-batches and is reduced once, in the last backward.
TEST_F(PipelineOnDevices, DdpAndFsdpInAStageReduceOnceAStep) {
    simulated_cuda_delay(50, 9);
    for (const bool is_sharded : {false, true}) {
        expect_all_well(run_on_devices(4, [&](Communicator& comm) {
            constexpr int m = 4;
            const int stage = comm.rank() / 2;
            const int replica = comm.rank() % 2;
            const auto part = [&](int color, const char* name) {
                CommOptions options = inner_options(comm, name);
                options.backend = comm.options().backend;
                options.device = comm.device()->index;
                return comm.split(color, comm.rank(), options);
            };
            const auto group = part(stage, "/group");
            const auto line = part(replica, "/line");
            DeviceApi& api = device_api(comm.device().value());
            const auto stream = api.new_stream();
            Values values(2, stage + 2);
            Tensor param = tensor_of(std::span(values), DType::f64);
            const auto memory = api.allocate(param.size_bytes());
            api.copy(memory.get(), param.data, param.size_bytes(), nullptr);
            param.data = memory.get();
            param.device = comm.device().value();
            std::unique_ptr<Ddp> ddp;
            std::unique_ptr<Fsdp> fsdp;
            if (is_sharded) {
                FsdpUnit unit;
                unit.name = "stage";
                unit.params = {{"w", param}};
                unit.reshard_after_forward = 0;
                fsdp = std::make_unique<Fsdp>(group, std::vector{unit}, FsdpOptions{});
                fsdp->set_stream(stream.get());
            } else {
                ddp = std::make_unique<Ddp>(group, std::vector<NamedTensor>{{"w", param}}, DdpOptions{});
                ddp->set_stream(stream.get());
            }
            const auto weight = [&] { return fsdp ? fsdp->whole(0) : param; };
            const auto grad = [&] { return fsdp ? fsdp->grad(0) : ddp->grad(0); };

            Pipeline* self = nullptr;
            bool is_first = true;
            Callbacks callbacks;
            callbacks.forward = [&](const StageCall& call) {
                const Tensor x = call.inputs[0];
                const Tensor y = self->output(DType::f64, x.shape);
                enqueue(stream.get(), [x, y, w = weight()] {
                    for (size_t i = 0; i < seen(x).size(); ++i) seen(y)[i] = seen(x)[i] * seen(w)[i % 2];
                });
            };
            callbacks.backward = [&](const StageCall& call) {
                if (std::exchange(is_first, false)) {
                    if (fsdp) fsdp->backward(0);
                    api.zero(grad().data, grad().size_bytes(), stream.get());
                }
                const Tensor x = call.inputs[0];
                const Tensor dy = stage == 0 ? call.output_grads[0] : Tensor{};
                const Tensor dx = stage == 1 ? call.input_grads[0] : Tensor{};
                enqueue(stream.get(), [x, dy, dx, w = weight(), dw = grad()] {
                    for (size_t i = 0; i < seen(x).size(); ++i) {
                        const double d = dy.data != nullptr ? seen(dy)[i] : 1;
                        seen(dw)[i % 2] += seen(x)[i] * d;
                        if (dx.data != nullptr) seen(dx)[i] = seen(w)[i % 2] * d;
                    }
                });
                if (!call.is_last_backward) return;
                fsdp ? fsdp->grads_ready(0) : ddp->ready(0);
            };
            Pipeline pipe(line, {stage}, on_devices(options_of("1f1b", m)), callbacks);
            self = &pipe;
            pipe.set_stream(stream.get());
            constexpr int rows = 2 * m;
            Values x(2 * rows);
            for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(i / 2) + replica;
            const Tensor batch = matrix(x, rows);
            const auto on_device = api.allocate(batch.size_bytes());
            api.copy(on_device.get(), batch.data, batch.size_bytes(), stream.get());
            const Tensor there{on_device.get(), batch.shape, DType::f64, comm.device().value()};
            for (int step = 1; step <= 2; ++step) {
                is_first = true;
                if (fsdp) {
                    fsdp->forward(0);
                    fsdp->forward_done(0);
                }
                static_cast<void>(pipe.step({{&there, 1}, {}, {}}));
                fsdp ? fsdp->wait() : ddp->wait();
                EXPECT_EQ(fsdp ? fsdp->synced_steps() : ddp->synced_steps(), step);
                const Tensor reduced = fsdp ? fsdp->shard_grad(0) : ddp->grad(0);
                Values found(static_cast<size_t>(reduced.numel()));
                api.copy(reinterpret_cast<std::byte*>(found.data()), reduced.data, reduced.size_bytes(), stream.get());
                api.record(stream.get())->wait(soon());
                // 0 to 7 and 1 to 8, by the other stage's parameter, on average
                EXPECT_EQ(found, Values(found.size(), 32.0 * (3 - stage))) << "step " << step;
            }
        }));
    }
}

TEST_F(PipelineOnDevices, TiedGradientsAreSummedInTheOrderOfTheStages) {
    expect_all_well(run_on_devices(3, [](Communicator& comm) {
        DeviceTrainer trainer(comm, {comm.rank()}, options_of("1f1b", 3));
        DeviceApi& api = trainer.api;
        const std::vector<int> stages{0, 1, 2};
        Values own{0.1 * (comm.rank() + 1), 1e16 * (comm.rank() - 1), 1};
        const Values wanted{0.1 + 0.2 + 0.1 * 3, 0 * 1e16, 3};
        Tensor gradient = matrix(own, 1);
        const auto memory = api.allocate(gradient.size_bytes());
        gradient.data = memory.get();
        gradient.device = comm.device().value();
        for (int round = 0; round < 2; ++round) {
            const Hold hold(trainer.api, trainer.stream.get());
            api.copy(memory.get(), reinterpret_cast<const std::byte*>(own.data()), gradient.size_bytes(),
                     trainer.stream.get());
            hold.release();
            trainer.pipe->sum_tied(gradient, stages);
            Values sum(3);
            api.copy(reinterpret_cast<std::byte*>(sum.data()), memory.get(), gradient.size_bytes(),
                     trainer.stream.get());
            trainer.settle();
            EXPECT_EQ(sum, wanted);
        }
        Values on_cpu{1.0 + comm.rank()};
        trainer.pipe->sum_tied(matrix(on_cpu, 1), stages);
        EXPECT_EQ(on_cpu[0], 6);
    }));
}

// --- order

TEST_F(PipelineOnDevices, NoCallOfAStepWaitsForTheDevice) {
    for (const char* name : {"1f1b", "gpipe", "zb_h2"}) {
        expect_all_well(run_on_devices(3, [&](Communicator& comm) {
            const Schedule schedule = pipeline::make_schedule(name, 3, 1, 12);
            DeviceTrainer trainer(comm, {comm.rank()}, options_of(name, 12));
            Results alone;
            Data data(24, 3, 0);
            const Hold hold(trainer.api, trainer.stream.get());
            for (int step = 0; step < 2; ++step) {
                train_alone(schedule, alone, data.inputs, data.targets, data.rows);
                trainer.step(data);
            }
            const auto after = trainer.api.record(trainer.stream.get());
            comm.run({.collective = Collective::barrier});
            EXPECT_FALSE(after->done()) << "the stream was not held";
            comm.run({.collective = Collective::barrier});
            hold.release();
            trainer.settle();
            expect_same(trainer.results, alone);
        }));
    }
}

// Rank 1 computes with the first activation while the stream of rank 0 is held in the second.
TEST_F(PipelineOnDevices, TensorsMoveWhileTheTrainerGoesOn) {
    std::atomic<bool> computed{false};
    expect_all_well(run_on_devices(2, [&](Communicator& comm) {
        Data data(4, 2, 0);
        DeviceTrainer trainer(comm, {comm.rank()}, options_of("gpipe", 2));
        trainer.before_each = [&](const StageCall& call) {
            if (call.work != pipeline::Work::forward || call.stage == call.microbatch) return;
            if (call.stage == 1) return enqueue(trainer.stream.get(), [&] { computed = true; });
            enqueue(trainer.stream.get(), [&] {
                const Deadline deadline = soon();
                while (!computed && !deadline.expired()) std::this_thread::yield();
            });
        };
        trainer.step(data);
        trainer.settle();
        EXPECT_TRUE(computed);
    }));
}

// The host is many micro-batches ahead of the device, and later ones use the memory of former ones all the same.
TEST_F(PipelineOnDevices, AHostThatIsAheadNeedsNoMoreMemory) {
    constexpr size_t rows = 100;
    const auto peak_of = [&](int m, bool held) {
        std::atomic<size_t> most{0};
        expect_all_well(run_on_devices(2, [&](Communicator& comm) {
            Data data(static_cast<size_t>(m) * rows, 2, 0);
            DeviceTrainer trainer(comm, {comm.rank()}, options_of("1f1b", m));
            trainer.step(data);
            trainer.settle();
            comm.run({.collective = Collective::barrier});
            std::optional<Hold> hold;
            if (held) hold.emplace(trainer.api, trainer.stream.get());
            trainer.step(data);
            size_t now = most.load();
            const size_t own = trainer.pipe->stats().peak_bytes;
            while (now < own && !most.compare_exchange_weak(now, own)) continue;
            comm.run({.collective = Collective::barrier});
            if (hold) hold->release();
            trainer.settle();
        }));
        return most.load();
    };
    EXPECT_LE(peak_of(40, true), 2 * peak_of(4, false)) << "of a batch ten times as large";
}

// The empty gradient of micro-batch 1 takes memory that the stream of rank 1 has yet to read, and leaves it at once. What
// comes next from rank 0 fits there.
TEST_F(PipelineOnDevices, MemoryOfAnEmptyGradientIsNotOverwrittenEither) {
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        DeviceApi& api = device_api(comm.device().value());
        const auto stream = api.new_stream();
        Pipeline* self = nullptr;
        Callbacks callbacks;
        callbacks.forward = [&](const StageCall& call) {
            // Integers have no gradient, for which rank 0 would wait.
            const bool is_empty = call.microbatch == 1;
            const Tensor tensor = call.stage == 1 ? call.inputs[0]
                                  : is_empty      ? self->output(DType::f64, Dims{0})
                                                  : self->output(DType::i64, Dims{1024});
            EXPECT_EQ(tensor.device, comm.device().value());
            if (is_empty) return;
            enqueue(stream.get(), [tensor, stage = call.stage, number = call.microbatch] {
                if (stage == 0) std::ranges::fill(seen(tensor), number);
                if (stage == 1) {
                    EXPECT_EQ(seen(tensor)[0], number);
                }
            });
        };
        callbacks.backward = [](const StageCall&) {};
        PipelineOptions options;
        options.schedule_csv = "0F0,0F1,0B0,0B1,0F2,0B2\n1F0,1F1,1B0,1B1,1F2,1B2\n";
        Pipeline pipe(shared(comm), {comm.rank()}, on_devices(options), callbacks);
        self = &pipe;
        pipe.set_stream(stream.get());
        std::optional<Hold> hold;
        if (comm.rank() == 1) hold.emplace(api, stream.get());
        static_cast<void>(pipe.step({}));
        const auto after = api.record(stream.get());
        if (comm.rank() == 0) after->wait(soon());
        comm.run({.collective = Collective::barrier});
        for (int look = 0; hold && look < 1000; ++look) EXPECT_FALSE(after->done());
        hold.reset();
        after->wait(soon());
    }));
}

TEST_F(PipelineOnDevices, ANewStreamGoesOnAfterTheFormer) {
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        const Schedule schedule = pipeline::make_schedule("1f1b", 2, 1, 4);
        DeviceTrainer trainer(comm, {comm.rank()}, options_of("1f1b", 4));
        Results alone;
        Data data(8, 2, 0);
        const Hold hold(trainer.api, trainer.stream.get());
        trainer.step(data);
        auto former = std::exchange(trainer.stream, trainer.api.new_stream());
        trainer.pipe->set_stream(trainer.stream.get());
        const auto next = trainer.api.record(trainer.stream.get());
        for (int look = 0; look < 1000; ++look) ASSERT_FALSE(next->done());
        hold.release();
        former.reset();
        trainer.step(data);
        trainer.settle();
        for (int step = 0; step < 2; ++step) {
            train_alone(schedule, alone, data.inputs, data.targets, data.rows);
        }
        expect_same(trainer.results, alone);
    }));
}

TEST_F(PipelineOnDevices, ADestroyedOneLeavesWhatTheDevicesStillDo) {
    simulated_cuda_delay(2000, 3);
    expect_all_well(run_on_devices(3, [](Communicator& comm) {
        const Schedule schedule = pipeline::make_schedule("1f1b", 3, 1, 4);
        for (int round = 0; round < 3; ++round) {
            DeviceTrainer trainer(comm, {comm.rank()}, options_of("1f1b", 4));
            Results alone;
            Data data(8, 3, 0);
            trainer.step(data);
            trainer.pipe.reset();
            train_alone(schedule, alone, data.inputs, data.targets, data.rows);
            trainer.settle();
            expect_same(trainer.results, alone);
        }
        comm.finalize();
    }));
}

// --- what is refused

TEST_F(PipelineOnDevices, WrongStreamsAndTensorsAreRefused) {
    const auto refused_step = [](Communicator& comm, bool on_device, const std::function<void(Tensor&)>& change,
                                 const std::function<std::shared_ptr<std::byte>(DeviceApi&)>& memory, Code code,
                                 const char* says) {
        PipelineOptions options = options_of("gpipe", 2);
        options.on_device = on_device;
        const Callback nothing = [](const StageCall&) {};
        Pipeline pipe(shared(comm), {comm.rank()}, options, {nothing, nothing, nothing, nothing});
        comm.run({.collective = Collective::barrier});  // no rank fails while another still creates it
        Values values(4);
        Tensor tensor = matrix(values, 2);
        tensor.device = comm.device().value();
        const auto held = memory ? memory(device_api(tensor.device)) : nullptr;
        if (held) tensor.data = held.get();
        change(tensor);
        const Error error = expect_error([&] { static_cast<void>(pipe.step({{&tensor, 1}, {}, {}})); },
                                         comm.rank() == 0 ? code : Code::aborted);
        EXPECT_THAT(error.what(), HasSubstr(says));
    };
    const auto allocated = [](DeviceApi& api) { return api.allocate(32); };
    expect_all_well(run_on_devices(2, [&](Communicator& comm) {
        refused_step(
            comm, true, [](Tensor& tensor) { tensor.device.index = 3; }, allocated, Code::invalid_argument,
            "tensor 0 of the batch is on CUDA device 3, but this rank communicates from CUDA device 0");
        refused_step(
            comm, true, [](Tensor&) {}, {}, Code::invalid_argument,
            "tensor 0 of the batch is memory of the host, not of CUDA device 0");
        refused_step(
            comm, false, [](Tensor&) {}, allocated, Code::unsupported,
            "tensor 0 of the batch is on CUDA device 0, but this pipeline has its tensors on the CPU");
        const Callback nothing = [](const StageCall&) {};
        const auto stream = device_api(comm.device().value()).new_stream();
        Pipeline host(shared(comm), {comm.rank()}, options_of("gpipe", 1), {nothing, nothing, nothing, nothing});
        host.set_stream(nullptr);
        EXPECT_THAT(expect_error([&] { host.set_stream(stream.get()); }, Code::invalid_argument).what(),
                    HasSubstr("on the CPU, which has none"));
        DeviceTrainer trainer(comm, {comm.rank()}, options_of("gpipe", 1));
        const auto other = cuda_device(3).new_stream();
        EXPECT_THAT(expect_error([&] { trainer.pipe->set_stream(other.get()); }, Code::invalid_argument).what(),
                    HasSubstr("stream of another device"));
        trainer.before_each = [&](const StageCall&) {
            expect_error([&] { trainer.pipe->set_stream(stream.get()); }, Code::invalid_state);
        };
        Data data(2, 2, 0);
        trainer.step(data);  // and goes on
    }));
}

TEST_F(PipelineOnDevices, AStreamThatIsBeingCapturedIsRefused) {
    expect_all_well(run_on_devices(1, [](Communicator& comm) {
        DeviceTrainer trainer(comm, {0}, options_of("gpipe", 1));
        const CapturedGraph graph(trainer.api, trainer.stream.get(), [&] {
            EXPECT_THAT(expect_error([&] { static_cast<void>(trainer.pipe->step({})); }, Code::invalid_state).what(),
                        HasSubstr("is being captured into a CUDA graph"));
        });
    }));
}

TEST_F(PipelineOnDevices, NeedACommunicatorWithDevicesAndTheSameOnAllRanks) {
    expect_all_well(run_on_devices(2, [](Communicator& comm) {
        const Callback nothing = [](const StageCall&) {};
        const Callbacks callbacks{nothing, nothing, nothing, nothing};
        const auto refused = [&](Communicator& over, PipelineOptions options, Code code) {
            return std::string(
                expect_error([&] { const Pipeline pipe(shared(over), {over.rank()}, options, callbacks); }, code)
                    .what());
        };
        const auto cpu = comm.split(0, 0, inner_options(comm, ".cpu"));
        EXPECT_THAT(refused(*cpu, on_devices(options_of("gpipe", 1)), Code::unsupported),
                    HasSubstr("'cpu:auto,cuda:nccl'"));
        PipelineOptions options = options_of("gpipe", 1);
        options.on_device = comm.rank() == 1;
        EXPECT_THAT(refused(comm, options, Code::mismatch), HasSubstr("tensors on CUDA devices"));
    }));
}

}  // namespace
}  // namespace tsr::testing
