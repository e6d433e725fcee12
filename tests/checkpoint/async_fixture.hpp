// What the tests of saves in the background share: a root with a state of one tensor, ranks over a real communicator,
// and how a save ended.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "checkpoint/root/root.hpp"
#include "fixture.hpp"
#include "patience.hpp"
#include "ranks.hpp"

namespace tsr::testing {

inline Outcomes run_with_comm(int world_size, const RankBody& body) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    return run_threads(world_size,
                       [&](int rank) { body(Communicator::create(store, rank, world_size, test_options())); });
}

inline Code code_of(const WorkPtr& work) {
    try {
        work->wait(Deadline::in(patience(milliseconds{60000})));
        return Code::ok;
    } catch (const Error& error) {
        return error.code();
    }
}

class AsyncTest : public ::testing::Test {
   protected:
    AsyncTest() { owned_.add_whole({"w", DType::f32, {100}}); }
    std::vector<int64_t> steps() {
        std::vector<int64_t> found;
        for (const SavedStep& save : scan_root(posix_file_system(), dir_.path())) {
            if (save.committed) found.push_back(save.step);
        }
        return found;
    }
    TempDir dir_;
    OwnedState owned_;
};

}  // namespace tsr::testing
