// The first step of a save: the ranks compare the hash and the step of what they are about to save, agree on one id,
// and each computes what it writes. Nothing is on disk yet.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/attempt.hpp"
#include "base/error.hpp"
#include "base/ticks.hpp"
#include "checkpoint/formats/save_writer.hpp"
#include "checkpoint/model/plan.hpp"
#include "checkpoint/model/state.hpp"
#include "checkpoint/save/replicas.hpp"
#include "checkpoint/save/staging.hpp"
#include "comm/peers.hpp"

namespace tsr {

// One save, from the agreement to the commit.
struct SaveJob {
    uint64_t asked = ticks();  // when the program called
    int64_t step = 0;
    std::string save_id;
    std::string directory;  // path of the checkpoint
    std::shared_ptr<const SavePlan> plan;
    std::unique_ptr<SaveWriter> writer;  // of this rank's files
    size_t file_count = 0;
    std::vector<ByteRuns> data;        // foreground save: the tensors themselves
    std::shared_ptr<Staging> staging;  // background save: their copy
    int64_t data_bytes = 0;
    Values values;  // rank 0's, and every rank's private ones
    Aliases aliases;
    Values metrics;              // this rank's; those of rank 0 are saved
    std::optional<Error> error;  // this rank's next vote
    bool begun = false;          // rank 0 has created the directory

    SaveJob() = default;
    ~SaveJob() {
        if (staging) staging->close();  // also of a save that never began
    }
    SaveJob(const SaveJob&) = delete;
    SaveJob& operator=(const SaveJob&) = delete;
};

// Collective. Fills `job`, whose step and metrics are set. Throws the same error on every rank if they do not agree. A
// later failure of one rank is kept in job.error for the next vote, which the other ranks already expect.
void agree_on_state(Peers& peers, const std::string& root, const PlanOptions& options, CheckReplicas check,
                    PlanCache& plans, SaveJob& job, const State& state, CopyStreams& copies);

}  // namespace tsr
