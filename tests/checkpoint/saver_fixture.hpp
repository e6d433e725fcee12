// What the tests of savers share: a root and a state of one tensor and one value, and which saves a root has.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/root/lease.hpp"
#include "checkpoint/root/root.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"

namespace tsr::testing {

inline std::vector<std::string> committed(const std::string& root) {
    std::vector<std::string> found;
    for (const SavedStep& save : scan_root(posix_file_system(), root)) {
        if (save.committed) found.push_back(std::to_string(save.step));
    }
    return found;
}

using Steps = std::vector<std::string>;

class SaverTest : public ::testing::Test {
   protected:
    SaverTest() {
        owned_.add_whole({"w", DType::f32, {100}});
        owned_.state.set_value("epoch", Json(int64_t{0}));
    }

    // Of savers that find a dead job's lease at the same time.
    void expect_one_winner(const SaverOptions& options) {
        for (int round = 0; round < 10; ++round) {
            Holder dead = Holder::this_process("dead");
            dead.start_time -= 1;
            spill(dir_ / ".owner", dead.dump());
            std::atomic<int> winners{0};
            std::atomic<int> refused{0};
            std::mutex mutex;
            std::vector<std::unique_ptr<Saver>> savers;
            expect_all_well(run_threads(4, [&](int) {
                try {
                    auto saver = std::make_unique<Saver>(nullptr, dir_.path(), options);
                    ++winners;
                    const std::lock_guard lock(mutex);
                    savers.push_back(std::move(saver));
                } catch (const Error& error) {
                    EXPECT_EQ(error.code(), Code::invalid_state) << error.what();
                    ++refused;
                }
            }));
            EXPECT_EQ(winners, 1);
            EXPECT_EQ(refused, 3);
        }
    }

    // A save by `ranks` ranks; rank 0 calls `before_manifest` when all have voted and it is about to write the manifest.
    Outcomes save_until_manifest(
        const std::shared_ptr<Meeting>& meeting, int ranks, const std::function<void()>& before_manifest,
        const std::function<void(int rank)>& ended = [](int) {}) {
        return run_threads(ranks, [&, meeting](int rank) {
            OwnedState owned;
            owned.add_whole({"w", DType::f32, {10}});
            FaultyFiles files;
            SaverOptions options = saver_options();
            if (rank == 0) {
                options.files = &files;
                files.on_call = [&](int64_t, const std::string& call) {
                    if (call.starts_with("create") && call.find("manifest.json.tmp") != std::string::npos) {
                        before_manifest();
                    }
                };
            }
            Saver saver(std::make_shared<MeetingComm>(meeting, rank, ranks), dir_.path(), options);
            try {
                saver.save(1, owned.state);
            } catch (const Error&) {
                ended(rank);
                throw;
            }
            ended(rank);
        });
    }

    TempDir dir_;
    OwnedState owned_;
};

}  // namespace tsr::testing
