// tessera/pipeline.h through the C ABI.
#include "tessera/pipeline.h"

#include <cmath>
#include <cstdio>
#include <limits>

#include "api.hpp"

namespace {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The trainer of a rank: stage s multiplies its input by its weight, s + 2, and the loss of a micro-batch is the mean
// of what comes out minus the targets.
struct Trainer {
    api::Owned<tsr_pipeline> pipeline;
    std::vector<std::string> calls;
    double weight_grad = 0;
    std::function<int32_t(const tsr_stage_call& call, char* message)> first;
    int destroyed = 0;

    static double* data(const tsr_tensor& tensor) { return static_cast<double*>(tensor.data); }

    int32_t run(const tsr_stage_call& call, char* message) {
        if (first) {
            const int32_t failed = first(call, message);
            if (failed != 0) return failed;
        }
        calls.push_back(std::to_string(call.stage) + "?FBIW"[call.work] + std::to_string(call.microbatch) +
                        (call.is_last_backward == 1 ? "!" : ""));
        EXPECT_EQ(call.struct_size, sizeof(tsr_stage_call));
        const int64_t rows = call.inputs[0].shape[0];
        const double weight = call.stage + 2;
        if (call.work == TSR_STAGE_FORWARD) {
            tsr_tensor y;
            if (tsr_pipeline_output(pipeline, TSR_DTYPE_F64, call.inputs[0].shape, 1, &y) != TSR_OK) return -1;
            double loss = 0;
            for (int64_t i = 0; i < rows; ++i) {
                data(y)[i] = data(call.inputs[0])[i] * weight;
                if (call.n_targets == 1) loss += (data(y)[i] - data(call.targets[0])[i]) / static_cast<double>(rows);
            }
            return call.n_targets == 1 ? tsr_pipeline_loss(pipeline, loss) : 0;
        }
        for (int64_t i = 0; i < rows; ++i) {
            const double dy =
                call.n_targets == 1 ? call.weight / static_cast<double>(rows) : data(call.output_grads[0])[i];
            if (call.n_input_grads == 1) data(call.input_grads[0])[i] += dy * weight;
            weight_grad += dy * data(call.inputs[0])[i];
        }
        return 0;
    }

    tsr_pipeline_callbacks callbacks() {
        const tsr_stage_fn fn = [](const tsr_stage_call* call, char* message, void* self) {
            return static_cast<Trainer*>(self)->run(*call, message);
        };
        return {sizeof(tsr_pipeline_callbacks),
                fn,
                fn,
                fn,
                fn,
                [](void* self) { ++static_cast<Trainer*>(self)->destroyed; },
                this};
    }
};

tsr_pipeline_options options_of(tsr_schedule schedule, int32_t microbatches) {
    tsr_pipeline_options options;
    EXPECT_OK(tsr_pipeline_options_init(&options, sizeof options));
    options.schedule = schedule;
    options.microbatches = microbatches;
    return options;
}

// A pipeline with one stage per rank.
tsr_status join(Trainer& trainer, tsr_comm* comm, int32_t rank, const tsr_pipeline_options& options) {
    const auto callbacks = trainer.callbacks();
    return tsr_pipeline_create(comm, &rank, 1, &callbacks, &options, trainer.pipeline.out());
}

TEST(PipelineApi, HasDefaults) {
    tsr_pipeline_options options;
    ASSERT_OK(tsr_pipeline_options_init(&options, sizeof options));
    EXPECT_EQ(options.struct_size, sizeof options);
    EXPECT_EQ(options.schedule, TSR_SCHEDULE_1F1B);
    EXPECT_EQ(options.microbatches, 0);
    EXPECT_EQ(options.schedule_csv, nullptr);
    EXPECT_EQ(options.edge_count, 0U);
    EXPECT_EQ(options.max_message_bytes, uint64_t{1} << 30);
    EXPECT_EQ(options.on_device, 0);
    EXPECT_FAILS(tsr_pipeline_options_init(nullptr, sizeof options), TSR_E_INVALID_ARGUMENT, "options is NULL");
    EXPECT_FAILS(tsr_pipeline_options_init(&options, 0), TSR_E_INVALID_ARGUMENT, "struct_size of options is 0");
}

TEST(PipelineApi, TrainsAndEvaluates) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Trainer trainer;
        ASSERT_OK(join(trainer, comm, rank, options_of(TSR_SCHEDULE_1F1B, 2)));
        api::Array<double> batch({1, 2, 3});
        api::Array<double> targets({0, 0, 12});
        const tsr_tensor x = batch.tensor();
        const tsr_tensor t = targets.tensor();
        std::vector<double> losses(2);
        int32_t stages = 0;
        int32_t microbatches = 0;
        ASSERT_OK(tsr_pipeline_stages(trainer.pipeline, &stages));
        ASSERT_OK(tsr_pipeline_microbatches(trainer.pipeline, &microbatches));
        EXPECT_EQ(stages, 2);
        EXPECT_EQ(microbatches, 2);
        ASSERT_OK(tsr_pipeline_step(trainer.pipeline, &x, 1, &t, 1, nullptr, 0, losses.data(), losses.size()));
        EXPECT_THAT(losses, ElementsAre(9, 6)) << "means of 6, 12 and of 18 - 12";
        if (rank == 0) {
            EXPECT_THAT(trainer.calls, ElementsAre("0F0", "0F1", "0B0", "0B1!"));
            EXPECT_DOUBLE_EQ(trainer.weight_grad, 3 * (1.0 + 2 + 3) / 3);
        } else {
            EXPECT_THAT(trainer.calls, ElementsAre("1F0", "1B0", "1F1", "1B1!"));
            EXPECT_DOUBLE_EQ(trainer.weight_grad, 2 * (1.0 + 2 + 3) / 3);
        }
        tsr_pass_stats stats{};
        stats.struct_size = sizeof stats;
        ASSERT_OK(tsr_pipeline_stats(trainer.pipeline, &stats));
        EXPECT_GT(stats.wall_ns, 0);
        EXPECT_GE(stats.wall_ns, stats.busy_ns + stats.waited_ns);
        EXPECT_EQ(stats.longest_stage, 1 - rank);
        EXPECT_EQ(stats.longest_rank, 1 - rank);
        EXPECT_EQ(stats.peak_activations, rank == 0 ? 2U : 1U);
        EXPECT_GE(stats.peak_bytes, 4096U);

        trainer.calls.clear();
        const double grad = trainer.weight_grad;
        ASSERT_OK(tsr_pipeline_eval(trainer.pipeline, rank == 0 ? &x : nullptr, 1, rank == 1 ? &t : nullptr, 1, nullptr,
                                    0, losses.data(), losses.size()));
        EXPECT_THAT(losses, ElementsAre(9, 6));
        EXPECT_EQ(trainer.calls.size(), 2U);
        EXPECT_EQ(trainer.weight_grad, grad);

        const std::vector<double> weights{0, 2};
        trainer.weight_grad = 0;
        ASSERT_OK(tsr_pipeline_step(trainer.pipeline, &x, 1, &t, 1, weights.data(), weights.size(), nullptr, 0));
        EXPECT_DOUBLE_EQ(trainer.weight_grad, rank == 0 ? 2 * 3 * 3.0 : 2 * 2 * 3.0);

        api::Array<double> tied({2}, rank + 1.0);
        const tsr_tensor gradient = tied.tensor();
        const int32_t both[]{0, 1};
        ASSERT_OK(tsr_pipeline_sum_tied(trainer.pipeline, &gradient, both, 2));
        EXPECT_THAT(tied.values, ElementsAre(3, 3));
        trainer.pipeline.reset();
        EXPECT_EQ(trainer.destroyed, 1);
    });
}

TEST(PipelineApi, RefusesAPassInATurn) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Trainer trainer;
        ASSERT_OK(join(trainer, comm, rank, options_of(TSR_SCHEDULE_1F1B, 2)));
        api::Array<double> batch({1, 2});
        const tsr_tensor x = batch.tensor();
        std::vector<double> losses(2);
        const auto eval = [&] {
            return tsr_pipeline_eval(trainer.pipeline, &x, 1, &x, 1, nullptr, 0, losses.data(), losses.size());
        };
        api::Owned<tsr_turn> turn;
        ASSERT_OK(tsr_turn_create(comm, 0, tsr::testing::patience_ms(20000), turn.out()));
        EXPECT_FAILS(eval(), TSR_E_INVALID_STATE, "a pass of a pipeline needs the ranks of communicator 'world'");
        ASSERT_OK(tsr_turn_end(turn, nullptr));
        EXPECT_OK(eval());
    });
}

TEST(PipelineApi, HasEverySchedule) {
    struct Case {
        tsr_schedule schedule;
        std::vector<int32_t> stages;
        const char* order;
    };
    for (const Case& one :
         {Case{TSR_SCHEDULE_GPIPE, {0}, "0F0 0F1 0B0 0B1! "}, Case{TSR_SCHEDULE_1F1B, {0}, "0F0 0B0 0F1 0B1! "},
          Case{TSR_SCHEDULE_LOOPED_BFS, {0, 1}, "0F0 0F1 1F0 1F1 1B1 1B0! 0B1 0B0! "},
          Case{TSR_SCHEDULE_INTERLEAVED_1F1B, {1, 0}, nullptr},
          Case{TSR_SCHEDULE_INTERLEAVED_ZERO_BUBBLE, {0, 1}, nullptr}, Case{TSR_SCHEDULE_ZB_H2, {0}, nullptr},
          Case{TSR_SCHEDULE_ZBV, {0, 1}, nullptr}, Case{TSR_SCHEDULE_DUALPIPEV, {0, 1}, nullptr}}) {
        const auto comm = api::alone();
        Trainer trainer;
        const auto callbacks = trainer.callbacks();
        const auto options = options_of(one.schedule, 2);
        ASSERT_OK(tsr_pipeline_create(comm, one.stages.data(), one.stages.size(), &callbacks, &options,
                                      trainer.pipeline.out()));
        api::Array<double> batch({1, 2});
        const tsr_tensor x = batch.tensor();
        std::vector<double> losses(2);
        ASSERT_OK(tsr_pipeline_step(trainer.pipeline, &x, 1, &x, 1, nullptr, 0, losses.data(), losses.size()));
        EXPECT_THAT(losses, one.stages.size() == 1 ? ElementsAre(1, 2) : ElementsAre(5, 10));
        std::string order;
        for (const std::string& call : trainer.calls) order += call + " ";
        if (one.order != nullptr) {
            EXPECT_EQ(order, one.order);
        }
        for (size_t stage = 0; stage < one.stages.size(); ++stage) {
            EXPECT_THAT(order, HasSubstr(std::to_string(stage) + "F1"));
        }
    }
    const auto comm = api::alone();
    Trainer trainer;
    EXPECT_FAILS(join(trainer, comm, 0, options_of(8, 2)), TSR_E_INVALID_ARGUMENT,
                 "schedule is 8; use one of the TSR_SCHEDULE_ constants");
    EXPECT_EQ(trainer.destroyed, 1);
}

TEST(PipelineApi, TakesEdgesAndACsv) {
    const auto comm = api::alone();
    Trainer trainer;
    tsr_pipeline_options options = options_of(TSR_SCHEDULE_GPIPE, 0);
    options.schedule_csv = "0F0,1F0,2F0,2B0,1B0,0B0\n";
    const tsr_pipeline_edge edge{0, 1, 2, 0};
    options.edges = &edge;
    options.edge_count = 1;
    trainer.first = [&](const tsr_stage_call& call, char*) -> int32_t {
        if (call.work != TSR_STAGE_FORWARD) {
            EXPECT_EQ(call.n_input_grads, call.stage == 2 ? 2U : call.stage == 1 ? 1U : 0U);
            EXPECT_EQ(call.n_output_grads, call.stage == 0 ? 2U : call.stage == 1 ? 1U : 0U);
            EXPECT_EQ(call.n_outputs, call.stage == 0 ? 2U : 1U);
            return 0;
        }
        EXPECT_EQ(call.n_inputs, call.stage == 2 ? 2U : 1U);
        if (call.stage == 2) {
            EXPECT_EQ(static_cast<int64_t*>(call.inputs[1].data)[0], 42);
            return 0;
        }
        return 0;
    };
    // Stage 0 makes its second output after run() has made the first.
    const tsr_stage_fn forward = [](const tsr_stage_call* call, char* message, void* self) -> int32_t {
        auto& of = *static_cast<Trainer*>(self);
        const int32_t failed = of.run(*call, message);
        if (failed != 0 || call->stage != 0) return failed;
        tsr_tensor more;
        if (tsr_pipeline_output(of.pipeline, TSR_DTYPE_I64, nullptr, 0, &more) != TSR_OK) return -1;
        static_cast<int64_t*>(more.data)[0] = 42;
        return 0;
    };
    auto callbacks = trainer.callbacks();
    callbacks.forward = forward;
    const int32_t stages[]{0, 1, 2};
    ASSERT_OK(tsr_pipeline_create(comm, stages, 3, &callbacks, &options, trainer.pipeline.out()));
    api::Array<double> batch({1});
    const tsr_tensor x = batch.tensor();
    ASSERT_OK(tsr_pipeline_step(trainer.pipeline, &x, 1, &x, 1, nullptr, 0, nullptr, 0));
    EXPECT_EQ(trainer.calls.size(), 6U);
}

TEST(PipelineApi, CallbacksFailWithTheirOwnReasons) {
    struct Case {
        int32_t returned;
        const char* says;
        tsr_status status;
        int32_t native;
        const char* message;
    };
    for (const Case& one : {Case{-3, "", TSR_E_USER, -3, "the callback failed: it returned -3"},
                            Case{TSR_E_IO, "the disk is full", TSR_E_IO, 0, "the callback failed: the disk is full"}}) {
        api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
            Trainer trainer;
            trainer.first = [&](const tsr_stage_call& call, char* message) -> int32_t {
                if (call.stage != 1 || call.microbatch != 1) return 0;
                std::strcpy(message, one.says);
                return one.returned;
            };
            ASSERT_OK(join(trainer, comm, rank, options_of(TSR_SCHEDULE_GPIPE, 2)));
            api::Array<double> batch({1, 2});
            const tsr_tensor x = batch.tensor();
            const std::string where = std::string("stage 1, micro-batch 1, forward: ") + one.message;
            EXPECT_FAILS(tsr_pipeline_step(trainer.pipeline, &x, 1, &x, 1, nullptr, 0, nullptr, 0),
                         rank == 1 ? one.status : TSR_E_ABORTED, where);
            if (rank == 1) {
                int32_t domain = 0;
                EXPECT_EQ(tsr_error_native(tsr_error_last(), &domain), one.native);
            }
            EXPECT_FAILS(tsr_pipeline_eval(trainer.pipeline, &x, 1, &x, 1, nullptr, 0, nullptr, 0), TSR_E_ABORTED,
                         where);
        });
    }
}

// The other ranks wait for nobody but the late one, which goes on when they have failed.
TEST(PipelineApi, ALateCallbackIsNamedOnEveryRank) {
    std::atomic<int> failed{0};
    std::atomic<int> timeouts{0};
    api::run_ranks(3, [&](tsr_comm* comm, int32_t rank) {
        Trainer trainer;
        trainer.first = [&](const tsr_stage_call& call, char*) -> int32_t {
            return call.stage != 1 || api::becomes_true([&] { return failed == 2; }) ? TSR_OK : TSR_E_INTERNAL;
        };
        ASSERT_OK(join(trainer, comm, rank, options_of(TSR_SCHEDULE_1F1B, 3)));
        if (rank != 1) {
            ASSERT_OK(tsr_comm_set_timeout(comm, 300));
        }
        api::Array<double> batch({1, 2, 3});
        const tsr_tensor x = batch.tensor();
        const tsr_status status = tsr_pipeline_step(trainer.pipeline, &x, 1, &x, 1, nullptr, 0, nullptr, 0);
        EXPECT_THAT(api::message(),
                    ContainsRegex("stage [02] waited for the (activation|gradient) of micro-batch 0 from stage 1 on "
                                  "rank 1, in vain for 0.3 s; check the log of rank 1"));
        if (rank != 1 && status == TSR_E_TIMEOUT) {
            ++timeouts;
            EXPECT_EQ(tsr_error_peer(tsr_error_last()), 1);
        } else {
            EXPECT_EQ(status, TSR_E_ABORTED) << api::message();
        }
        if (rank != 1) ++failed;
    });
    EXPECT_GE(timeouts, 1);
}

// A stage that wants other shapes than it gets says so, and every rank says it after it.
TEST(PipelineApi, AShapeThatAStageDoesNotExpectIsNamedOnEveryRank) {
    api::run_ranks(3, [](tsr_comm* comm, int32_t rank) {
        Trainer trainer;
        trainer.first = [](const tsr_stage_call& call, char* message) -> int32_t {
            const int64_t rows = call.inputs[0].shape[0];
            if (call.stage != 1 || rows == 2) return 0;
            std::snprintf(message, TSR_MESSAGE_BYTES, "the input is [%d], expected was [2]", static_cast<int>(rows));
            return TSR_E_MISMATCH;
        };
        ASSERT_OK(join(trainer, comm, rank, options_of(TSR_SCHEDULE_1F1B, 3)));
        api::Array<double> batch({1, 2, 3, 4, 5});  // in parts of 2, 2 and 1
        const tsr_tensor x = batch.tensor();
        EXPECT_FAILS(tsr_pipeline_step(trainer.pipeline, &x, 1, &x, 1, nullptr, 0, nullptr, 0),
                     rank == 1 ? TSR_E_MISMATCH : TSR_E_ABORTED,
                     "stage 1, micro-batch 2, forward: the callback failed: the input is [1], expected was [2]");
    });
}

TEST(PipelineApi, StagesThatAreMissingOrDoubledAreNamedOnEveryRank) {
    struct Case {
        std::array<int32_t, 2> stage_of;
        const char* says;
    };
    for (const Case& one :
         {Case{{0, 0}, "stage 1 is missing; it belongs to rank 1; stage 0 is on rank 0 and on rank 1"},
          Case{{1, 0}, "stage 0 is on rank 1; it belongs to rank 0; stage 1 is on rank 0; it belongs to rank 1"},
          Case{{0, 7}, "stage 1 is missing; it belongs to rank 1; stage 7 of rank 1 does not exist"}}) {
        api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
            Trainer trainer;
            EXPECT_FAILS(
                join(trainer, comm, one.stage_of[static_cast<size_t>(rank)], options_of(TSR_SCHEDULE_GPIPE, 2)),
                TSR_E_INVALID_ARGUMENT, one.says);
        });
    }
}

TEST(PipelineApi, TooFewMicrobatchesNameTheNumberThatWorks) {
    api::run_ranks(3, [](tsr_comm* comm, int32_t rank) {
        Trainer trainer;
        EXPECT_FAILS(join(trainer, comm, rank, options_of(TSR_SCHEDULE_1F1B, 2)), TSR_E_INVALID_ARGUMENT,
                     "cannot run 2 micro-batches on 3 ranks; the next number that works is 3");
    });
}

TEST(PipelineApi, ACsvThatIsTooLargeIsRefused) {
    const auto comm = api::alone();
    Trainer trainer;
    tsr_pipeline_options options = options_of(TSR_SCHEDULE_GPIPE, 0);
    const std::string csv((size_t{256} << 20) + 1, ',');
    options.schedule_csv = csv.c_str();
    EXPECT_FAILS(join(trainer, comm, 0, options), TSR_E_INVALID_ARGUMENT,
                 "a schedule of 268435457 bytes; at most 268435456 are allowed");
}

TEST(PipelineApi, ACallbackFailsWithTheCallThatFailedInIt) {
    const auto comm = api::alone();
    Trainer trainer;
    trainer.first = [&](const tsr_stage_call&, char*) -> int32_t {
        const int64_t negative = -1;
        tsr_tensor tensor;
        return tsr_pipeline_output(trainer.pipeline, TSR_DTYPE_F32, &negative, 1, &tensor);
    };
    ASSERT_OK(join(trainer, comm, 0, options_of(TSR_SCHEDULE_GPIPE, 1)));
    api::Array<double> batch({1});
    const tsr_tensor x = batch.tensor();
    EXPECT_FAILS(tsr_pipeline_step(trainer.pipeline, &x, 1, &x, 1, nullptr, 0, nullptr, 0), TSR_E_INVALID_ARGUMENT,
                 "the callback failed: output 0 of stage 0 has a negative size in its shape [-1]");
}

TEST(PipelineApi, IsClosedToItsCallbacksButForOutputAndLoss) {
    const auto comm = api::alone();
    Trainer trainer;
    trainer.first = [&](const tsr_stage_call& call, char*) -> int32_t {
        tsr_pipeline* pipeline = trainer.pipeline;
        const char* busy = "while another call on it is running";
        EXPECT_FAILS(tsr_pipeline_step(pipeline, nullptr, 0, nullptr, 0, nullptr, 0, nullptr, 0), TSR_E_INVALID_STATE,
                     busy);
        EXPECT_FAILS(tsr_pipeline_eval(pipeline, nullptr, 0, nullptr, 0, nullptr, 0, nullptr, 0), TSR_E_INVALID_STATE,
                     busy);
        EXPECT_FAILS(tsr_pipeline_sum_tied(pipeline, &call.inputs[0], &call.stage, 1), TSR_E_INVALID_STATE, busy);
        EXPECT_FAILS(tsr_pipeline_set_stream(pipeline, nullptr), TSR_E_INVALID_STATE, busy);
        tsr_pass_stats stats{};
        stats.struct_size = sizeof stats;
        EXPECT_FAILS(tsr_pipeline_stats(pipeline, &stats), TSR_E_INVALID_STATE, busy);
        return 0;
    };
    ASSERT_OK(join(trainer, comm, 0, options_of(TSR_SCHEDULE_GPIPE, 1)));
    api::Array<double> batch({1});
    const tsr_tensor x = batch.tensor();
    ASSERT_OK(tsr_pipeline_step(trainer.pipeline, &x, 1, &x, 1, nullptr, 0, nullptr, 0));
    EXPECT_EQ(trainer.calls.size(), 2U);
    const int64_t one = 1;
    tsr_tensor tensor;
    EXPECT_FAILS(tsr_pipeline_output(trainer.pipeline, TSR_DTYPE_F32, &one, 1, &tensor), TSR_E_INVALID_STATE,
                 "outside of a forward callback");
    EXPECT_FAILS(tsr_pipeline_loss(trainer.pipeline, 1), TSR_E_INVALID_STATE,
                 "outside of a callback of the last stage");
}

TEST(PipelineApi, DestroyedInACallbackItLivesUntilItsStepEnds) {
    const auto comm = api::alone();
    Trainer trainer;
    trainer.first = [&](const tsr_stage_call& call, char*) -> int32_t {
        if (call.work == TSR_STAGE_BACKWARD) trainer.pipeline.reset();
        EXPECT_EQ(trainer.destroyed, 0);
        return 0;
    };
    ASSERT_OK(join(trainer, comm, 0, options_of(TSR_SCHEDULE_GPIPE, 1)));
    api::Array<double> batch({1});
    const tsr_tensor x = batch.tensor();
    ASSERT_OK(tsr_pipeline_step(trainer.pipeline, &x, 1, &x, 1, nullptr, 0, nullptr, 0));
    EXPECT_EQ(trainer.destroyed, 1);
}

TEST(PipelineApi, SaysWhatIsWrongWithArguments) {
    const auto comm = api::alone();
    Trainer trainer;
    const auto callbacks = trainer.callbacks();
    const auto options = options_of(TSR_SCHEDULE_GPIPE, 2);
    const int32_t stage = 0;
    tsr_pipeline* out = nullptr;
    EXPECT_FAILS(tsr_pipeline_create(nullptr, &stage, 1, &callbacks, &options, &out), TSR_E_INVALID_ARGUMENT,
                 "comm is NULL");
    EXPECT_FAILS(tsr_pipeline_create(comm, nullptr, 1, &callbacks, &options, &out), TSR_E_INVALID_ARGUMENT,
                 "stages is NULL");
    EXPECT_FAILS(tsr_pipeline_create(comm, &stage, 0, &callbacks, &options, &out), TSR_E_INVALID_ARGUMENT,
                 "this rank has no stage");
    EXPECT_FAILS(tsr_pipeline_create(comm, &stage, 1, &callbacks, nullptr, &out), TSR_E_INVALID_ARGUMENT,
                 "microbatches is 0");
    EXPECT_FAILS(tsr_pipeline_create(comm, &stage, 1, &callbacks, &options, nullptr), TSR_E_INVALID_ARGUMENT,
                 "out is NULL");
    EXPECT_EQ(trainer.destroyed, 5) << "once for each call that failed";
    EXPECT_FAILS(tsr_pipeline_create(comm, &stage, 1, nullptr, &options, &out), TSR_E_INVALID_ARGUMENT,
                 "callbacks is NULL");
    const tsr_pipeline_callbacks unread{};
    EXPECT_FAILS(tsr_pipeline_create(comm, &stage, 1, &unread, &options, &out), TSR_E_INVALID_ARGUMENT,
                 "callbacks.struct_size is 0");
    auto lacking = trainer.callbacks();
    lacking.forward = nullptr;
    EXPECT_FAILS(tsr_pipeline_create(comm, &stage, 1, &lacking, &options, &out), TSR_E_INVALID_ARGUMENT,
                 "needs the callback forward");
    const auto with = [&](auto change, const char* says) {
        auto changed = options;
        change(changed);
        EXPECT_FAILS(tsr_pipeline_create(comm, &stage, 1, &callbacks, &changed, &out), TSR_E_INVALID_ARGUMENT, says);
        EXPECT_EQ(out, nullptr);
    };
    const tsr_pipeline_edge reserved{0, 0, 1, 5};
    with([](auto& o) { o.schedule = -1; }, "schedule is -1; use one of the TSR_SCHEDULE_ constants");
    with([](auto& o) { o.microbatches = -1; }, "microbatches is -1");
    with([](auto& o) { o.schedule_csv = ""; }, "schedule_csv is empty");
    with([](auto& o) { o.schedule_csv = "0X0"; }, "has an unknown action");
    with([](auto& o) { o.edge_count = 1; }, "edges is NULL");
    with([&](auto& o) { o.edge_count = 1, o.edges = &reserved; }, "edges[0].reserved is 5");
    with([](auto& o) { o.max_message_bytes = 0; }, "max_message_bytes is 0");
    with([](auto& o) { o.on_device = 2; }, "on_device is 2");
    with([](auto& o) { o.struct_size = 3; }, "options.struct_size is 3");

    ASSERT_OK(join(trainer, comm, 0, options));
    api::Array<double> batch({1});
    const tsr_tensor x = batch.tensor();
    EXPECT_FAILS(tsr_pipeline_step(nullptr, &x, 1, &x, 1, nullptr, 0, nullptr, 0), TSR_E_INVALID_ARGUMENT,
                 "pipeline is NULL");
    EXPECT_FAILS(tsr_pipeline_set_stream(nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "pipeline is NULL");
    EXPECT_FAILS(tsr_pipeline_stats(trainer.pipeline, nullptr), TSR_E_INVALID_ARGUMENT, "stats is NULL");
    EXPECT_FAILS(tsr_pipeline_output(trainer.pipeline, TSR_DTYPE_F32, nullptr, 0, nullptr), TSR_E_INVALID_ARGUMENT,
                 "tensor is NULL");
    tsr_tensor tensor;
    EXPECT_FAILS(tsr_pipeline_output(trainer.pipeline, TSR_DTYPE_F32, nullptr, 1, &tensor), TSR_E_INVALID_ARGUMENT,
                 "shape is NULL");
    EXPECT_FAILS(tsr_pipeline_output(trainer.pipeline, TSR_DTYPE_F32, nullptr, 9, &tensor), TSR_E_INVALID_ARGUMENT,
                 "9 dimensions");
}

// What cannot be read on one rank ends the step, which the others have begun.
TEST(PipelineApi, AnUnreadableBatchFailsTheStepOnEveryRank) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Trainer trainer;
        ASSERT_OK(join(trainer, comm, rank, options_of(TSR_SCHEDULE_GPIPE, 1)));
        api::Array<double> batch({1});
        tsr_tensor x = batch.tensor();
        const tsr_tensor t = batch.tensor();
        x.dtype = 99;
        EXPECT_FAILS(tsr_pipeline_step(trainer.pipeline, &x, 1, &t, 1, nullptr, 0, nullptr, 0),
                     rank == 0 ? TSR_E_INVALID_ARGUMENT : TSR_E_ABORTED, "batch has the unknown dtype 99");
        EXPECT_FAILS(tsr_pipeline_sum_tied(trainer.pipeline, nullptr, &rank, 1), TSR_E_ABORTED, "unusable");
    });
}

TEST(PipelineApi, AWrongLengthFailsTheStepOnEveryRank) {
    struct Case {
        size_t n_weights;
        size_t n_losses;
        bool null;
        const char* says;
    };
    for (const Case& one : {Case{1, 2, false, "there are 1 weights for 2 micro-batches"},
                            Case{2, 3, false, "losses has room for 3 numbers; there are 2 micro-batches"},
                            Case{2, 0, false, "losses has room for 0 numbers; there are 2 micro-batches"},
                            Case{2, 0, true, "weights is NULL"}}) {
        api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
            Trainer trainer;
            ASSERT_OK(join(trainer, comm, rank, options_of(TSR_SCHEDULE_1F1B, 2)));
            api::Array<double> batch({1, 2});
            const tsr_tensor x = batch.tensor();
            std::vector<double> values(3);
            EXPECT_FAILS(tsr_pipeline_step(trainer.pipeline, &x, 1, &x, 1, one.null ? nullptr : values.data(),
                                           rank == 1 ? one.n_weights : 7, one.null ? nullptr : values.data(),
                                           rank == 1 ? one.n_losses : (one.null ? 0 : 2)),
                         rank == 1 ? TSR_E_INVALID_ARGUMENT : TSR_E_ABORTED, one.says);
        });
    }
}

}  // namespace
