// What a rank's failure is to the others: every rank fails, and says where.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "toy.hpp"

namespace tsr::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;

bool is(const StageCall& call, int stage, int microbatch, pipeline::Work work) {
    return call.stage == stage && call.microbatch == microbatch && call.work == work;
}

// Each of four ranks has one stage and makes a 1F1B step of eight micro-batches, with `before_each` in its callbacks.
// Every pipeline is destroyed with its rank.
Outcomes step_of_four(const std::function<void(Communicator& comm, const StageCall& call)>& before_each,
                      CommOptions options = test_options()) {
    return run_ranks(4, options, [&](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("1f1b", 8));
        trainer.before_each = [&](const StageCall& call) { before_each(comm, call); };
        Data data(8, 4, 0);
        static_cast<void>(data.step(pipe));
    });
}

TEST(PipelineFailure, OfACallbackIsNamedOnEveryRank) {
    const Outcomes outcomes = step_of_four([](Communicator&, const StageCall& call) {
        if (is(call, 2, 5, pipeline::Work::forward)) throw Error(Code::corrupt, "the tokens are wrong");
    });
    for (size_t rank = 0; rank < 4; ++rank) {
        ASSERT_TRUE(outcomes[rank]) << rank;
        const Error& error = *outcomes[rank];
        EXPECT_EQ(error.code(), rank == 2 ? Code::corrupt : Code::aborted) << error.what();
        EXPECT_EQ(error.record()->rank, static_cast<int>(rank));
        EXPECT_THAT(error.what(), StartsWith("rank " + std::to_string(rank) + ": "));
        EXPECT_THAT(error.what(), HasSubstr("stage 2, micro-batch 5, forward: the tokens are wrong"));
    }
    // The failure may overtake the activation of an earlier micro-batch.
    EXPECT_THAT(
        outcomes[3]->what(),
        ContainsRegex("^rank 3: stage 3 waited for the activation of micro-batch [0-9] from stage 2 on rank 2: "));
}

TEST(PipelineFailure, OfAnotherExceptionIsInternal) {
    const Outcomes outcomes = step_of_four([](Communicator&, const StageCall& call) {
        if (is(call, 1, 0, pipeline::Work::backward)) throw std::runtime_error("a bug");
    });
    for (const auto& error : outcomes) {
        ASSERT_TRUE(error);
        EXPECT_THAT(error->what(), HasSubstr("stage 1, micro-batch 0, backward: unexpected exception: a bug"));
    }
    EXPECT_EQ(outcomes[1]->code(), Code::internal);
}

TEST(PipelineFailure, EndsThePipelineForGood) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("gpipe", 2));
        Data data(4, 2, 0);
        trainer.before_each = [](const StageCall& call) {
            if (is(call, 0, 1, pipeline::Work::forward)) throw Error(Code::user, "enough");
        };
        static_cast<void>(
            expect_error([&] { static_cast<void>(data.step(pipe)); }, comm.rank() == 0 ? Code::user : Code::aborted));
        trainer.before_each = nullptr;
        for (const auto& call : {std::function([&] { static_cast<void>(data.step(pipe)); }),
                                 std::function([&] { static_cast<void>(data.eval(pipe)); }), std::function([&] {
                                     const std::vector<int> both{0, 1};
                                     pipe.sum_tied(matrix(data.inputs, 4), both);
                                 })}) {
            const Error later = expect_error(call, Code::aborted);
            EXPECT_THAT(later.what(), HasSubstr("the pipeline is unusable after an earlier error"));
            EXPECT_THAT(later.what(), HasSubstr("stage 0, micro-batch 1, forward: enough"));
        }
        // The communicator that it was made from is unharmed.
        comm.run({.collective = Collective::barrier});
        trainer.join(comm, {comm.rank()}, options_of("gpipe", 2));
        static_cast<void>(data.step(*trainer.pipe));
    }));
}

TEST(PipelineFailure, OfALateRankIsATimeoutThatNamesIt) {
    std::atomic<int> failed{0};
    const Outcomes outcomes = run_ranks(4, test_options(), [&](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("1f1b", 4));
        Data data(4, 4, 0);
        // What has to pass, and only where stage 1 alone can be the reason, however slow the machine is.
        if (comm.rank() == 0 || comm.rank() == 2) comm.set_timeout(patience(milliseconds{400}));
        trainer.before_each = [&](const StageCall& call) {
            if (is(call, 1, 0, pipeline::Work::forward))
                wait_until([&] { return failed == 3; }, soon(), "the other ranks");
        };
        try {
            static_cast<void>(data.step(pipe));
        } catch (...) {
            if (comm.rank() != 1) ++failed;
            throw;
        }
    });
    int timeouts = 0;
    for (size_t rank = 0; rank < 4; ++rank) {
        ASSERT_TRUE(outcomes[rank]) << rank;
        const Error& error = *outcomes[rank];
        EXPECT_THAT(error.what(),
                    ContainsRegex("from stage 1 on rank 1, in vain for [0-9.]+ s; check the log of rank 1"));
        if (rank != 1 && error.code() == Code::timeout) {
            ++timeouts;
            EXPECT_EQ(error.record()->peer, 1);
        }
    }
    EXPECT_GE(timeouts, 1);
}

// The others have all that they need, and wait for the end of the step.
TEST(PipelineFailure, OfARankThatIsLateInItsLastCallbackIsATimeoutThatNamesIt) {
    for (const auto pass : {&Data::step, &Data::eval}) {
        const bool trains = pass == &Data::step;
        std::atomic<int> failed{0};
        const Outcomes outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
            Trainer trainer({comm.rank()});
            Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("1f1b", 3));
            Data data(3, 3, 0);
            const auto late = trains ? pipeline::Work::backward : pipeline::Work::forward;
            const int stage = trains ? 0 : 2;
            trainer.before_each = [&](const StageCall& call) {
                if (is(call, stage, 2, late)) wait_until([&] { return failed > 0; }, soon(), "rank 1");
                if (is(call, 1, 2, late)) comm.set_timeout(patience(milliseconds{400}));  // of the end alone
            };
            try {
                static_cast<void>((data.*pass)(pipe));
            } catch (...) {
                if (comm.rank() == 1) ++failed;
                throw;
            }
        });
        const size_t late_rank = trains ? 0 : 2;
        for (size_t rank = 0; rank < outcomes.size(); ++rank) {
            const auto& error = outcomes[rank];
            // The late one has all that it needs. Over Gloo it may be done before it hears of the others' timeout.
            if (rank == late_rank && !error && std::string_view(testing::test_backend()) == "gloo") continue;
            ASSERT_TRUE(error);
            EXPECT_EQ(error->code(), Code::timeout) << error->what();
            EXPECT_EQ(error->record()->peer, static_cast<int>(late_rank)) << error->what();
            EXPECT_THAT(error->what(),
                        HasSubstr(trains ? "The last that rank 0 computes is stage 0, micro-batch 2, backward"
                                         : "The last that rank 2 computes is stage 2, micro-batch 2, forward"));
        }
    }
}

// In an evaluation it receives no more than 4 micro-batches ahead, which here are too large to lie in between.
TEST(PipelineFailure, OfARankThatIsTooLateToReceiveIsATimeoutThatNamesIt) {
    std::atomic<bool> failed{false};
    const Outcomes outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("gpipe", 8));
        Data data(size_t{8} << 14, 2, 0);
        trainer.before_each = [&](const StageCall& call) {
            if (call.stage == 1) wait_until([&] { return failed.load(); }, soon(), "rank 0");
        };
        if (comm.rank() == 0) comm.set_timeout(patience(milliseconds{400}));
        try {
            static_cast<void>(data.eval(pipe));
        } catch (...) {
            if (comm.rank() == 0) failed = true;
            throw;
        }
    });
    for (const auto& error : outcomes) {
        ASSERT_TRUE(error);
        EXPECT_THAT(error->what(),
                    HasSubstr("waited until stage 1 on rank 1 had received the activation of micro-batch "
                              "7 from stage 0 on rank 0, in vain"));
    }
    EXPECT_EQ(outcomes[0]->code(), Code::timeout);
    EXPECT_EQ(outcomes[0]->record()->peer, 1);
}

// A rank that goes before its step is missed by those that wait for it; the others learn of it.
TEST(PipelineFailure, OfARankThatLeavesIsAPeerLost) {
    const Outcomes outcomes = run_ranks(4, test_options(), [](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("1f1b", 4));
        Data data(4, 4, 0);
        if (comm.rank() == 2) return;
        static_cast<void>(data.step(pipe));
    });
    EXPECT_FALSE(outcomes[2]);
    for (const size_t rank : {0U, 1U, 3U}) {
        ASSERT_TRUE(outcomes[rank]) << rank;
        EXPECT_EQ(outcomes[rank]->code(), Code::peer_lost) << outcomes[rank]->what();
        EXPECT_EQ(outcomes[rank]->record()->peer, 2) << outcomes[rank]->what();
    }
    EXPECT_THAT(outcomes[3]->what(),
                HasSubstr("stage 3 waited for the activation of micro-batch 0 from stage 2 on rank 2: "));
}

TEST(PipelineFailure, OfTheCommunicatorItWasMadeFromEndsIt) {
    const Outcomes outcomes = step_of_four([](Communicator& comm, const StageCall& call) {
        if (is(call, 3, 1, pipeline::Work::forward)) comm.abort("no more");
    });
    for (const auto& error : outcomes) {
        ASSERT_TRUE(error);
        EXPECT_THAT(error->what(), HasSubstr("no more"));
    }
}

TEST(PipelineFailure, OfAnInterruptedWaitEndsTheStep) {
    std::atomic<bool> interrupted{false};
    const Outcomes outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("1f1b", 2));
        Data data(4, 2, 0);
        trainer.before_each = [&](const StageCall& call) {
            if (is(call, 0, 1, pipeline::Work::forward))
                wait_until([&] { return interrupted.load(); }, soon(), "rank 1");
        };
        if (comm.rank() == 1) set_interrupt([](void*) -> int32_t { return 1; }, nullptr);
        try {
            static_cast<void>(data.step(pipe));
        } catch (...) {
            if (comm.rank() == 1) {
                set_interrupt(nullptr, nullptr);
                interrupted = true;
            }
            throw;
        }
    });
    ASSERT_TRUE(outcomes[0]);
    ASSERT_TRUE(outcomes[1]);
    EXPECT_EQ(outcomes[1]->code(), Code::interrupted);
    EXPECT_THAT(outcomes[1]->what(), HasSubstr("stage 1 waited for the activation of micro-batch"));
    EXPECT_EQ(outcomes[0]->code(), Code::aborted);
}

TEST(PipelineFailure, OfABatchWithTooFewRows) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("gpipe", 4));
        Data data(comm.rank() == 0 ? 3 : 4, 2, 0);
        static_cast<void>(data.step(pipe));
    });
    for (size_t rank = 0; rank < 2; ++rank) {
        ASSERT_TRUE(outcomes[rank]);
        EXPECT_EQ(outcomes[rank]->code(), rank == 0 ? Code::invalid_argument : Code::aborted);
        EXPECT_THAT(outcomes[rank]->what(), HasSubstr("tensor 0 of the batch has 3 rows, too few for 4 micro-batches"));
    }
}

TEST(PipelineFailure, OfAStepThatMeetsAnEvaluation) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("gpipe", 2));
        Data data(4, 2, 0);
        static_cast<void>(comm.rank() == 0 ? data.step(pipe) : data.eval(pipe));
    });
    ASSERT_TRUE(outcomes[0]);
    ASSERT_TRUE(outcomes[1]);
    EXPECT_EQ(outcomes[1]->code(), Code::mismatch) << outcomes[1]->what();
    EXPECT_THAT(outcomes[1]->what(), HasSubstr("of pass 1, a training step; here it is pass 1, an evaluation"));
    EXPECT_THAT(outcomes[0]->what(), HasSubstr("call step and eval in the same order on every rank"));
}

TEST(PipelineFailure, OfOutputsThatAnEdgeMisses) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        PipelineOptions options = options_of("looped_bfs", 1);
        options.edges = {{0, 1, 3}};
        Trainer trainer({comm.rank(), comm.rank() + 2});
        Pipeline& pipe = trainer.join(comm, {comm.rank(), comm.rank() + 2}, options);
        Data data(4, 4, 0);
        static_cast<void>(data.step(pipe));
    });
    for (const auto& error : outcomes) {
        ASSERT_TRUE(error);
        EXPECT_THAT(error->what(),
                    HasSubstr("stage 0, micro-batch 0: the forward made 1 outputs; an edge takes output 1 to stage 3"));
    }
}

TEST(PipelineFailure, OfAnOutputThatIsTooLarge) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        PipelineOptions options = options_of("gpipe", 1);
        options.max_message_bytes = 31;
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options);
        Data data(2, 2, 0);
        static_cast<void>(data.step(pipe));
    });
    for (const auto& error : outcomes) {
        ASSERT_TRUE(error);
        EXPECT_THAT(error->what(), HasSubstr("output 0 of stage 0, f64 [2, 3], has 48 bytes; max_message_bytes is 31"));
    }
}

TEST(PipelineCallback, MayNotUseThePipelineOtherwise) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        Trainer trainer({0});
        Pipeline& pipe = trainer.join(comm, {0}, options_of("gpipe", 1));
        Data data(2, 1, 0);
        trainer.before_each = [&](const StageCall& call) {
            const std::vector<int> own{0};
            for (const auto& nested : {std::function([&] { static_cast<void>(data.step(pipe)); }),
                                       std::function([&] { static_cast<void>(data.eval(pipe)); }),
                                       std::function([&] { static_cast<void>(pipe.stats()); }),
                                       std::function([&] { pipe.sum_tied(matrix(data.inputs, 2), own); })}) {
                EXPECT_THAT(expect_error(nested, Code::invalid_state).what(),
                            HasSubstr("while another call on it is running"));
            }
            if (call.work == pipeline::Work::forward) return;
            EXPECT_THAT(
                expect_error([&] { static_cast<void>(pipe.output(DType::f32, Dims{1})); }, Code::invalid_state).what(),
                HasSubstr("outside of a forward callback"));
        };
        static_cast<void>(data.step(pipe));
        EXPECT_THAT(expect_error([&] { pipe.loss(1); }, Code::invalid_state).what(),
                    HasSubstr("outside of a callback"));
        EXPECT_THAT(
            expect_error([&] { static_cast<void>(pipe.output(DType::f32, Dims{1})); }, Code::invalid_state).what(),
            HasSubstr("outside of a forward callback"));
    }));
}

TEST(PipelineCallback, OfAnotherStageHasNoLoss) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        Callbacks callbacks;
        Pipeline* self = nullptr;
        callbacks.forward = [&](const StageCall&) { self->loss(1); };
        callbacks.backward = [](const StageCall&) {};
        Pipeline pipe(shared(comm), {comm.rank()}, options_of("gpipe", 1), callbacks);
        self = &pipe;
        static_cast<void>(pipe.step({}));
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_EQ(outcomes[0]->code(), Code::invalid_state);
    EXPECT_THAT(outcomes[0]->what(), HasSubstr("a loss was reported outside of a callback of the last stage"));
}

TEST(PipelineTied, RefusesWhatItCannotSum) {
    struct Case {
        DType dtype;
        std::vector<int> stages;
        const char* says;
    };
    for (const Case& one :
         {Case{DType::f64, {1, 0}, "in ascending order"}, Case{DType::f64, {0, 0}, "in ascending order"},
          Case{DType::f64, {0, 2}, "there are stages 0 to 1"}, Case{DType::f64, {}, "none of them is on this rank"},
          Case{DType::i64, {0, 1}, "it must be of floating point"}}) {
        const Outcomes outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
            Trainer trainer({comm.rank()});
            Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("gpipe", 1));
            Values grad(3);
            pipe.sum_tied(tensor_of(std::span(grad), one.dtype), one.stages);
        });
        for (const auto& error : outcomes) {
            ASSERT_TRUE(error) << one.says;
            EXPECT_EQ(error->code(), Code::invalid_argument);
            EXPECT_THAT(error->what(), HasSubstr(one.says));
        }
    }
}

}  // namespace
}  // namespace tsr::testing
