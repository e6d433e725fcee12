// What goes wrong on a device: every rank fails, and says where.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <optional>

#include "base/attempt.hpp"
#include "parallel/pipeline/messages.hpp"
#include "toy_on_device.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class PipelineFailureOnDevices : public PipelineOnDevices {};

bool is(const StageCall& call, int stage, int microbatch, pipeline::Work work) {
    return call.stage == stage && call.microbatch == microbatch && call.work == work;
}

// Steps of 1F1B with four micro-batches, one stage a rank, until one fails.
void step_on(Communicator& comm, const std::function<void(DeviceTrainer&, int step)>& before,
             const std::function<void(DeviceTrainer&, const StageCall&)>& in_each = {}) {
    Data data(8, comm.world_size(), 0);
    DeviceTrainer trainer(comm, {comm.rank()}, options_of("1f1b", 4));
    if (in_each) trainer.before_each = [&](const StageCall& call) { in_each(trainer, call); };
    const Deadline deadline = soon();
    try {
        for (int step = 0; !deadline.expired(); ++step) {
            before(trainer, step);
            trainer.step_from_cpu(data);
            static_cast<void>(attempt([&] { trainer.settle(); }));
        }
    } catch (const Error&) {
        expect_error([&] { trainer.step_from_cpu(data); }, Code::aborted);
        throw;
    }
    ADD_FAILURE() << "no step has failed";
}

void expect_the_cpu_goes_on() {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Trainer trainer({comm.rank()});
        Pipeline& pipe = trainer.join(comm, {comm.rank()}, options_of("1f1b", 2));
        Data data(4, 2, 0);
        static_cast<void>(data.step(pipe));
    }));
}

TEST_F(PipelineFailureOnDevices, ADeviceThatIsLateIsATimeoutThatNamesItsRank) {
    std::atomic<int> failed{0};
    const Outcomes outcomes = run_on_devices(3, [&](Communicator& comm) {
        Data data(8, 3, 0);
        DeviceTrainer trainer(comm, {comm.rank()}, options_of("1f1b", 4));
        trainer.step(data);
        trainer.settle();
        comm.run({.collective = Collective::barrier});
        comm.set_timeout(milliseconds{300});
        std::optional<Hold> late;
        if (comm.rank() == 1) late.emplace(trainer.api, trainer.stream.get());
        trainer.step(data);  // does not wait
        if (comm.rank() == 1) {
            wait_until([&] { return failed == 2; }, soon(), "the other ranks");
            late.reset();
        }
        trainer.settle();
        ++failed;
        trainer.step(data);
    });
    for (size_t rank = 0; rank < 3; ++rank) {  // the rank whose operation is late may hear of its peers' answer first
        const Error& error = only_error(outcomes, rank);
        EXPECT_THAT(error.code(), AnyOf(Code::timeout, Code::aborted));
        EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1"), ContainsRegex("did not finish within [3-5]00 ms")));
        // Of what the late rank itself receives, it may only say that it has not come.
        EXPECT_THAT(error.what(),
                    AnyOf(HasSubstr("the stream of rank 1 has not come that far"), HasSubstr("from stage 1 on rank 1"),
                          HasSubstr("rank 1 failed: "), HasSubstr("stage 1 waited for")));
    }
    expect_the_cpu_goes_on();
}

TEST_F(PipelineFailureOnDevices, ARankThatDoesNotStepIsATimeoutThatNamesItsStage) {
    std::atomic<bool> failed{false};
    const Outcomes outcomes = run_on_devices(2, [&](Communicator& comm) {
        Data data(8, 2, 0);
        DeviceTrainer trainer(comm, {comm.rank()}, options_of("1f1b", 4));
        comm.set_timeout(milliseconds{300});
        if (comm.rank() == 1) wait_until([&] { return failed.load(); }, soon(), "the other rank");
        const auto error = attempt([&] { trainer.step(data); });
        failed = true;
        if (error) throw Error(*error);
    });
    EXPECT_EQ(only_error(outcomes, 0).code(), Code::timeout);
    EXPECT_THAT(only_error(outcomes, 0).what(),
                HasSubstr("stage 0 waited for the gradient of micro-batch 0 from stage 1 on rank 1"));
    EXPECT_THAT(only_error(outcomes, 1).what(), HasSubstr("the gradient of micro-batch 0 from stage 1 on rank 1"));
}

TEST_F(PipelineFailureOnDevices, AnOperationThatHangsTimesOut) {
    const Outcomes outcomes = run_on_devices(3, [](Communicator& comm) {
        step_on(comm, [&](DeviceTrainer&, int step) {
            if (step != 2) return;
            comm.run({.collective = Collective::barrier});  // all of the former step is done
            comm.set_timeout(milliseconds{300});
            if (comm.rank() == 1) mock_nccl_hang(1);
        });
    });
    for (size_t rank = 0; rank < 3; ++rank) {
        const Error& error = only_error(outcomes, rank);
        EXPECT_THAT(error.code(), AnyOf(Code::timeout, Code::aborted)) << error.what();
        EXPECT_THAT(error.what(), AllOf(ContainsRegex("micro-batch [0-9]|(activation|gradient) [0-9], stage [0-2]"),
                                        ContainsRegex("did not finish within [3-6][0-9][0-9] ms")));
    }
    expect_the_cpu_goes_on();
}

TEST_F(PipelineFailureOnDevices, ACallbackThatFailsIsNamedOnEveryRank) {
    const Outcomes outcomes = run_on_devices(4, [](Communicator& comm) {
        step_on(
            comm, [](DeviceTrainer&, int) {},
            [](DeviceTrainer&, const StageCall& call) {
                if (is(call, 2, 3, pipeline::Work::forward)) throw Error(Code::corrupt, "the tokens are wrong");
            });
    });
    for (size_t rank = 0; rank < 4; ++rank) {
        const Error& error = only_error(outcomes, rank);
        EXPECT_EQ(error.code(), rank == 2 ? Code::corrupt : Code::aborted) << error.what();
        EXPECT_EQ(error.record()->rank, static_cast<int>(rank));
        EXPECT_THAT(error.what(), HasSubstr("stage 2, micro-batch 3, forward: the tokens are wrong"));
    }
    expect_the_cpu_goes_on();
}

TEST_F(PipelineFailureOnDevices, ARankThatLeavesIsAPeerLost) {
    const Outcomes outcomes = run_on_devices(3, [](Communicator& comm) {
        if (comm.rank() != 2) return step_on(comm, [](DeviceTrainer&, int) {});
        Data data(8, 3, 0);
        DeviceTrainer trainer(comm, {2}, options_of("1f1b", 4));
        trainer.step(data);
    });
    EXPECT_FALSE(outcomes[2]);
    for (const size_t rank : {0U, 1U}) {
        const Error& error = only_error(outcomes, rank);
        EXPECT_EQ(error.code(), Code::peer_lost) << error.what();
        EXPECT_EQ(error.record()->peer, 2) << error.what();
    }
    expect_the_cpu_goes_on();
}

TEST_F(PipelineFailureOnDevices, ADeviceThatBreaksFailsTheStepOnAllRanks) {
    breaks_ = true;
    int broken = -1;
    const Outcomes outcomes = run_on_devices(2, [&](Communicator& comm) {
        step_on(comm, [&](DeviceTrainer&, int step) {
            if (step != 3 || comm.rank() != 0) return;
            broken = comm.device()->index;
            simulated_cuda_break(broken, 719);
        });
    });
    simulated_cuda_break(broken, 0);
    const Error& error = only_error(outcomes, 0);
    EXPECT_EQ(error.code(), Code::cuda) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("CUDA_ERROR_LAUNCH_FAILED (719)"));
    EXPECT_THAT(only_error(outcomes, 1).code(), AnyOf(Code::cuda, Code::aborted, Code::peer_lost));
    expect_the_cpu_goes_on();
}

TEST_F(PipelineFailureOnDevices, ACallOfTheDriverThatFailsFailsTheStepOnAllRanks) {
    for (const char* symbol : {"cuEventRecord", "cuStreamWaitEvent", "cuEventCreate", "cuMemsetD8Async"}) {
        const Outcomes outcomes = run_on_devices(2, [&](Communicator& comm) {
            step_on(comm, [&](DeviceTrainer& trainer, int step) {
                if (step != 1) return;
                trainer.settle();
                comm.run({.collective = Collective::barrier});
                if (comm.rank() == 0) simulated_cuda_fail(symbol, 0, 999);  // of whichever rank calls it next
                comm.run({.collective = Collective::barrier});
            });
        });
        size_t failed = 0;
        for (size_t rank = 0; rank < 2; ++rank) {
            const Error& error = only_error(outcomes, rank);
            failed += error.code() == Code::cuda ? 1 : 0;
            EXPECT_THAT(error.code(), AnyOf(Code::cuda, Code::aborted, Code::peer_lost)) << error.what();
        }
        EXPECT_GE(failed, 1U) << symbol;
    }
}

TEST_F(PipelineFailureOnDevices, ACallOfNcclThatFailsFailsTheStepOnAllRanks) {
    for (const char* symbol : {"ncclSend", "ncclRecv"}) {
        const Outcomes outcomes = run_on_devices(3, [&](Communicator& comm) {
            step_on(comm, [&](DeviceTrainer& trainer, int step) {
                if (step != 1) return;
                trainer.settle();
                comm.run({.collective = Collective::barrier});
                if (comm.rank() == 0) mock_nccl_fail(symbol, 1, 3);  // of whichever rank calls it then
                comm.run({.collective = Collective::barrier});
            });
        });
        for (size_t rank = 0; rank < 3; ++rank) {
            const Error& error = only_error(outcomes, rank);
            EXPECT_THAT(error.code(), AnyOf(Code::nccl, Code::aborted)) << symbol << ": " << error.what();
            EXPECT_THAT(error.what(), HasSubstr("NCCL 2.29.7 failed: internal error (3)")) << symbol;
        }
    }
}

TEST_F(PipelineFailureOnDevices, AnErrorThatNcclReportsLaterFailsTheStep) {
    const Outcomes outcomes = run_on_devices(2, [](Communicator& comm) {
        step_on(comm, [&](DeviceTrainer&, int step) {
            if (step != 2 || comm.rank() != 0) return;
            mock_nccl_hang(0);  // so that a send is there when the error is looked for
            mock_nccl_async_error(0, 3);
        });
    });
    for (size_t rank = 0; rank < 2; ++rank) {  // peers may answer to the end of a lane before its rank does
        EXPECT_THAT(only_error(outcomes, rank).code(), AnyOf(Code::nccl, Code::aborted));
        EXPECT_THAT(only_error(outcomes, rank).what(), HasSubstr("NCCL 2.29.7 failed: internal error (3)"));
    }
}

TEST_F(PipelineFailureOnDevices, ADeviceWithoutMemoryFailsTheStepOnAllRanks) {
    const Outcomes outcomes = run_on_devices(2, [](Communicator& comm) {
        Data data(4, 2, 0);
        DeviceTrainer trainer(comm, {comm.rank()}, options_of("gpipe", 2));
        comm.run({.collective = Collective::barrier});
        if (comm.rank() == 0) simulated_cuda_fail("cuMemAlloc_v2", 0, 2);  // of whichever rank calls it next
        comm.run({.collective = Collective::barrier});
        trainer.step_from_cpu(data);
    });
    size_t failed = 0;
    for (size_t rank = 0; rank < 2; ++rank) {
        const Error& error = only_error(outcomes, rank);
        failed += error.code() == Code::no_memory ? 1 : 0;
        EXPECT_THAT(error.what(), HasSubstr("allocating"));
    }
    EXPECT_EQ(failed, 1U);
}

// What a peer says that it has received is not more than what was sent.
TEST_F(PipelineFailureOnDevices, APeerThatHasReceivedMoreThanWasSentIsCorrupt) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        pipeline::Messages messages(shared(comm), {{0, 1, 0, 1}}, 1, 100,
                                    std::make_shared<pipeline::Pool>(cpu_device()));
        if (comm.rank() == 1) {
            messages.begin(pipeline::Pass::training, patience(milliseconds{20000}));
            static_cast<void>(messages.take({pipeline::Kind::activation, 0, 0}));
            return;
        }
        pipeline::MessageHeader header;
        header.step = 1;
        header.received = 1;
        std::vector<uint8_t> bytes(sizeof header);
        std::memcpy(bytes.data(), &header, sizeof header);
        const Tensor tensor = tensor_of(std::span(bytes), DType::u8);
        comm.run({.collective = Collective::send, .inputs = {&tensor, 1}, .peer = 1, .tag = pipeline::header_tag});
        comm.run({.collective = Collective::barrier});
    });
    EXPECT_EQ(only_error(outcomes, 1).code(), Code::corrupt);
    EXPECT_THAT(only_error(outcomes, 1).what(), HasSubstr("claims that 1 tensors have come to it on a device; 0 were"));
}

}  // namespace
}  // namespace tsr::testing
