// Saves over the real communicator: votes travel on a private one, so a background save and the trainer's collectives
// do not meet.
#include <gtest/gtest.h>

#include "fixture.hpp"
#include "patience.hpp"

namespace tsr::testing {
namespace {

Outcomes run_with_comm(int world_size, const RankBody& body) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    return run_threads(world_size,
                       [&](int rank) { body(Communicator::create(store, rank, world_size, test_options())); });
}

TEST(SaverOverCommunicator, SavesInTheBackgroundWhileTheTrainerReduces) {
    const TempDir dir;
    expect_all_well(run_with_comm(4, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"large", DType::f32, {1200, 1000}});
        owned.add_sharded({"rows", DType::f64, {37, 5}},
                          Layout::placed({37, 5}, std::vector<int>{4}, std::vector<Placement>{Placement::shard(0)}),
                          comm->rank());
        Saver saver(comm, dir.path(), saver_options());
        std::vector<float> numbers(1000, 1.0F);
        const Tensor tensor = tensor_of(std::span(numbers), DType::f32);
        for (int step = 1; step <= 5; ++step) {
            owned.fill(static_cast<uint64_t>(step));
            const WorkPtr work = saver.save_async(step, owned.state);
            for (int i = 0; i < 20; ++i) {
                Request request;
                request.collective = Collective::all_reduce;
                request.outputs = std::span(&tensor, 1);
                request.op = ReduceOp::avg;
                comm->run(request);
            }
        }
        saver.wait();
        EXPECT_EQ(numbers[0], 1.0F);
        owned.poison();
        EXPECT_EQ(saver.resume(owned.state), 5);
        EXPECT_EQ(owned.differences(5), 0);
    }));
    Checkpoint::open(dir.path())->check(Checkpoint::Depth::everything);
}

TEST(SaverOverCommunicator, AMismatchEndsTheSaveAndTheNextOneWorks) {
    const TempDir dir;
    expect_all_well(run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"w", DType::f32, {10}});
        Saver saver(comm, dir.path(), saver_options());
        EXPECT_EQ(error_of([&] { saver.save(comm->rank(), owned.state); }).code(), Code::mismatch);
        saver.save(3, owned.state);
        EXPECT_EQ(saver.resume(owned.state), 3);
    }));
}

// All of it once: a terminal in which all ranks write has room for the beginning.
TEST(SaverOverCommunicator, OfALongListOfDifferencesAllButOneRankTellTheBeginning) {
    const TempDir dir;
    expect_all_well(run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState saved;
        saved.add_whole({"w", DType::f32, {10}});
        Saver saver(comm, dir.path(), saver_options());
        saver.save(1, saved.state);
        OwnedState other;
        for (int i = 10; i < 42; ++i) other.add_whole({"v" + std::to_string(i), DType::f32, {10}});
        const Error error = error_of([&] { (void)saver.resume(other.state); });
        EXPECT_EQ(error.code(), Code::mismatch);
        const std::string text = error.what();
        EXPECT_NE(text.find("always strict):\n  'v10' is missing"), std::string::npos) << text;
        EXPECT_NE(text.find("\n  'v12' is missing"), std::string::npos) << text;
        const bool whole = text.find("'v41' is missing") != std::string::npos;
        EXPECT_EQ(whole, comm->rank() == 0) << text;
        if (comm->rank() != 0) {
            EXPECT_NE(text.find("\n  and 30 more lines; rank 0 has the full list"), std::string::npos) << text;
        }
        OwnedState three;  // a short one is whole everywhere
        for (const char* name : {"a", "b", "c"}) three.add_whole({name, DType::f32, {10}});
        EXPECT_NE(std::string(error_of([&] { (void)saver.resume(three.state); }).what()).find("'w' is unexpected"),
                  std::string::npos);
    }));
}

TEST(SaverOverCommunicator, ACallInTheInterruptCallbackOfAnotherIsRefused) {
    const TempDir dir;
    std::atomic<bool> made{false};
    expect_all_well(run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"w", DType::f32, {10}});
        Saver saver(comm, dir.path(), saver_options());
        if (comm->rank() == 1) {
            await_call(made);
            const WorkPtr work = saver.save_async(1, owned.state);
            saver.wait();
            return;
        }
        const CallInInterrupt callback([&] { saver.wait(); }, made);
        const WorkPtr work = saver.save_async(1, owned.state);
        saver.wait();
        ASSERT_TRUE(callback.error());
        EXPECT_EQ(callback.error()->code(), Code::invalid_state) << callback.error()->what();
    }));
}

}  // namespace
}  // namespace tsr::testing
