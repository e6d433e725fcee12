// A pipeline whose ranks are real processes: what the others say of one that is killed in the middle of a step.
#include <gmock/gmock.h>

#include "parallel/pipeline/toy.hpp"
#include "processes.hpp"

namespace tsr::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

TEST(PipelineProcesses, AKilledRankIsLostToAllAndNamed) {
    Processes processes(4, [](int rank, const auto& store, const auto& say) {
        const auto comm = join_job(store, rank, 4, test_options());
        Trainer trainer({rank});
        Pipeline& pipe = trainer.join(*comm, {rank}, options_of("1f1b", 8));
        trainer.before_each = [&](const StageCall& call) {
            if (call.stage != 2 || call.microbatch != 5 || call.work != pipeline::Work::forward) return;
            say("in the middle");
            wait_until([] { return false; }, soon(), "the end of this process");
        };
        Data data(8, 4, 0);
        static_cast<void>(data.step(pipe));
    });
    processes.await(2, "in the middle");
    const auto killed = Clock::now();
    processes.signal(2, SIGKILL);
    for (const int rank : {0, 1, 3}) {
        const Outcome& outcome = processes.join(rank);
        EXPECT_FALSE(outcome.well());
        EXPECT_THAT(outcome.text, HasSubstr("PEER_LOST peer 2 rank " + std::to_string(rank) + ": "));
        EXPECT_LT(outcome.ended - killed, patience(milliseconds{5000}));
    }
    EXPECT_THAT(processes.join(3).text,
                ContainsRegex("stage 3 waited for the activation of micro-batch [0-9] from stage 2 on rank 2: "));
    EXPECT_THAT(processes.join(1).text, ContainsRegex("stage 1 waited for the (activation|gradient) of micro-batch"));
}

}  // namespace
}  // namespace tsr::testing
