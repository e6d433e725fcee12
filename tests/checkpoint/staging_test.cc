// Staging memory of saves in the background. It is reused, and given back on demand; a state larger than the bound, or
// than what is free, goes through it as through a ring.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "async_fixture.hpp"
#include "base/clock.hpp"
#include "checkpoint/io/pace.hpp"
#include "checkpoint/save/staging.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "patience.hpp"
#include "resident.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

int64_t page_faults() {
    rusage usage{};
    EXPECT_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
    return usage.ru_minflt;
}

TEST(StagingPool, APrefaultedSlotIsResidentBeforeItIsWritten) {
    StagingPool pool(0);
    ASSERT_TRUE(pool.make_room_for(1));
    StagingPool::SlotPtr slot = pool.take();
    ASSERT_NE(slot, nullptr);
    const std::span<const std::byte> memory(slot->memory.data(), static_cast<size_t>(chunk_bytes));
    EXPECT_FALSE(is_resident(memory));
    slot->prefault(chunk_bytes);
    EXPECT_TRUE(is_resident(memory));
    pool.give_back(std::move(slot));
}

// By the copy at once, and by the one on demand.
TEST(StagingTest, EachSlotIsPrefaultedForItsChunk) {
    std::vector<std::byte> memory(static_cast<size_t>(chunk_bytes + 5000));
    const Piece piece{"w", DType::u8, std::make_shared<const Box>(Box::whole({chunk_bytes + 5000})), memory.data()};
    const auto resident_after = [&](const Barriers& barriers) {
        const auto pool = std::make_shared<StagingPool>(0);
        const auto staging = std::make_shared<Staging>(pool, 1, std::vector<ByteRuns>{ByteRuns(std::span(&piece, 1))},
                                                       patience(milliseconds{1000}), barriers);
        staging->stage(1, {});
        staging->copy_late(1);
        staging->close();
        std::vector<int64_t> resident;
        for (int i = 0; i < 2; ++i) resident.push_back(pool->take()->resident);
        return resident;
    };
    EXPECT_THAT(resident_after({}), UnorderedElementsAre(chunk_bytes, 5000));
    const auto barrier = std::make_shared<WriteBarrier>(std::vector<Memory>{memory});
    EXPECT_THAT(resident_after({barrier}), UnorderedElementsAre(chunk_bytes, 5000));
}

TEST(StagingTest, WhatWasStagedByAnotherSaveOrForAnotherChunkIsNotWritten) {
    std::vector<std::byte> memory(static_cast<size_t>(2 * chunk_bytes));
    const Piece piece{"w", DType::u8, std::make_shared<const Box>(Box::whole({2 * chunk_bytes})), memory.data()};
    const auto pool = std::make_shared<StagingPool>(0);
    ASSERT_TRUE(pool->make_room_for(2));
    StagingPool::Slot* first = nullptr;
    {
        auto slot = pool->take();
        first = slot.get();
        pool->give_back(std::move(slot));
    }
    Staging staging(pool, 7, {ByteRuns(std::span(&piece, 1))}, patience(milliseconds{1000}));
    staging.stage(1, {});
    ASSERT_EQ(first->generation, 7u);
    ASSERT_EQ(first->chunk, 0u);
    const auto source = staging.source(0);
    EXPECT_NE(source->contiguous(0, chunk_bytes), nullptr);
    first->generation = 6;
    const Error stale = error_of([&] { (void)source->contiguous(0, chunk_bytes); });
    EXPECT_EQ(stale.code(), Code::internal);
    EXPECT_THAT(stale.what(), HasSubstr("of save 7, chunk 0, holds save 6, chunk 0"));
    first->generation = 7;
    first->chunk = 1;
    EXPECT_THAT(error_of([&] { source->written(0); }).what(), HasSubstr("holds save 7, chunk 1"));
}

TEST(StagingTest, BoundsThatMakeNoSenseAreRefused) {
    EXPECT_THAT(error_of([] { const StagingPool pool(chunk_bytes); }).what(), HasSubstr("staging_bytes is 4194304"));
    EXPECT_THAT(error_of([] { const StagingPool pool(-1); }).what(), HasSubstr("staging_bytes is -1"));
    EXPECT_THAT(error_of([] { const Pace pace(-1); }).what(), HasSubstr("write_bytes_per_s is -1"));
}

TEST_F(AsyncTest, StagingMemoryIsReusedAndGivenBackOnDemand) {
    OwnedState owned;
    owned.add_whole({"large", DType::f32, {8 << 20}});
    Saver saver(nullptr, dir_.path(), saver_options());
    for (uint64_t round = 1; round <= 2; ++round) {
        owned.fill(round);
        (void)saver.save_async(static_cast<int64_t>(round), owned.state);
        saver.wait();
    }
    EXPECT_GE(saver.staging_size(), 32 << 20);
    const int64_t before = page_faults();
    const WorkPtr work = saver.save_async(3, owned.state);
    const int64_t faults = page_faults() - before;
    EXPECT_LT(faults, (32 << 20) / 4096 / 4) << "the pages were there";
    EXPECT_EQ(code_of(work), Code::ok);
    saver.wait();
    saver.trim();
    EXPECT_EQ(saver.staging_size(), 0);
    (void)saver.save_async(4, owned.state);
    saver.wait();
    EXPECT_EQ(saver.resume(owned.state), 4);
    EXPECT_EQ(owned.differences(2), 0);
}

class Ring : public AsyncTest {
   protected:
    void saves_through(const std::function<void(SaverOptions&)>& shorten);
};

// Of two ranks that may have two chunks each for a part of five or more.
void Ring::saves_through(const std::function<void(SaverOptions&)>& shorten) {
    expect_all_well(run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"large", DType::f64, {3 << 20}});
        owned.add_whole({"odd", DType::u8, {(5 << 20) + 7}});
        owned.add_sharded({"rows", DType::f64, {3001, 500}},
                          Layout::placed({3001, 500}, std::vector<int>{2}, std::vector<Placement>{Placement::shard(0)}),
                          comm->rank());
        SaverOptions options = saver_options();
        shorten(options);
        options.retention.latest = 1;
        Saver saver(comm, dir_.path(), options);
        for (uint64_t round = 1; round <= 3; ++round) {
            owned.fill(round);
            const WorkPtr work = saver.save_async(static_cast<int64_t>(round), owned.state);
            owned.poison();
            EXPECT_EQ(code_of(work), Code::ok);
            EXPECT_EQ(saver.staging_size(), 2 * chunk_bytes);
            EXPECT_EQ(saver.resume(owned.state), static_cast<int64_t>(round));
            EXPECT_EQ(owned.differences(round), 0);
        }
    }));
}

TEST_F(Ring, TakesAStateLargerThanTheBound) {
    saves_through([](SaverOptions& options) { options.staging_bytes = 2 * chunk_bytes; });
}

// What is free is for both ranks, and what the first save took is free no more. A system that has next to nothing is
// asked for two chunks all the same.
TEST_F(Ring, TakesAStateLargerThanWhatIsFree) {
    const auto free_at_first = [](uint64_t bytes) {
        return [bytes, is_first = true]() mutable { return std::exchange(is_first, false) ? bytes : 0; };
    };
    saves_through([&](SaverOptions& options) { options.free_memory = free_at_first(5 * uint64_t{chunk_bytes}); });
    saves_through([&](SaverOptions& options) { options.free_memory = free_at_first(4096); });
    saves_through([&](SaverOptions& options) {
        options.staging_bytes = 8 * chunk_bytes;
        options.free_memory = free_at_first(5 * uint64_t{chunk_bytes});
    });
}

// While this lives no thread can be started: nobody has room for its stack.
class NoMoreThreads {
   public:
    NoMoreThreads() {
        EXPECT_EQ(::pthread_getattr_default_np(&former_), 0);
        pthread_attr_t attributes = former_;
        EXPECT_EQ(::pthread_attr_setstacksize(&attributes, size_t{1} << 47), 0);
        EXPECT_EQ(::pthread_setattr_default_np(&attributes), 0);
    }
    ~NoMoreThreads() {
        EXPECT_EQ(::pthread_setattr_default_np(&former_), 0);
        ::pthread_attr_destroy(&former_);
    }
    NoMoreThreads(const NoMoreThreads&) = delete;
    NoMoreThreads& operator=(const NoMoreThreads&) = delete;

   private:
    pthread_attr_t former_{};
};

TEST_F(Ring, IsNoneWhereNoThreadCouldEmptyIt) {
    for (const SaveFormat format : {SaveFormat::native, SaveFormat::torch_dcp}) {
        OwnedState owned;
        owned.add_whole({"large", DType::u8, {5 * chunk_bytes + 7}});
        owned.fill(1);
        SaverOptions options = saver_options();
        options.format = format;
        options.timeout = patience(milliseconds{2000});
        options.staging_bytes = 2 * chunk_bytes;
        options.write.threads = 1;
        Saver saver(nullptr, dir_ / std::to_string(static_cast<int>(format)), options);
        {
            const NoMoreThreads none;
            EXPECT_THROW(std::thread([] {}).join(), std::system_error);
            EXPECT_EQ(code_of(saver.save_async(1, owned.state)), Code::ok);
        }
        EXPECT_EQ(code_of(saver.save_async(2, owned.state)), Code::ok) << "there are threads again";
        owned.poison();
        EXPECT_EQ(saver.resume(owned.state), 2);
        EXPECT_EQ(owned.differences(1), 0);
    }
}

TEST_F(Ring, IsNoneWhereWhatIsFreeIsEnough) {
    OwnedState owned;
    owned.add_whole({"large", DType::u8, {3 * chunk_bytes}});
    SaverOptions options = saver_options();
    uint64_t free = 3 * chunk_bytes;
    options.free_memory = [&] { return free; };
    Saver saver(nullptr, dir_.path(), options);
    for (const int64_t step : {1, 2}) {
        EXPECT_EQ(code_of(saver.save_async(step, owned.state)), Code::ok);
        saver.wait();
        EXPECT_EQ(saver.staging_size(), 3 * chunk_bytes);
        free = 0;  // the second save has its memory already
    }
}

TEST_F(AsyncTest, PyTorchsFormatGoesThroughTheSameRing) {
    expect_all_well(run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"large", DType::f32, {12 << 20}});
        owned.add_whole({"odd", DType::u8, {(5 << 20) + 7}});
        owned.add_whole({"empty", DType::i64, {0, 3}});
        SaverOptions options = saver_options();
        options.format = SaveFormat::torch_dcp;
        options.staging_bytes = 2 * chunk_bytes;
        options.retention.latest = 1;
        std::mutex mutex;
        int64_t staged = 0;
        int64_t written = 0;
        options.progress = [&](Phase phase, int64_t done, int64_t) {
            const std::lock_guard lock(mutex);
            if (phase == Phase::stage) staged = done;
            if (phase == Phase::write) written = done;
        };
        Saver saver(comm, dir_.path(), options);
        for (uint64_t round = 1; round <= 3; ++round) {
            owned.fill(round);
            const WorkPtr work = saver.save_async(static_cast<int64_t>(round), owned.state);
            owned.poison();
            EXPECT_EQ(code_of(work), Code::ok);
            EXPECT_LE(saver.staging_size(), options.staging_bytes);
            EXPECT_EQ(saver.resume(owned.state), static_cast<int64_t>(round));
            EXPECT_EQ(owned.differences(round), 0);
        }
        const std::lock_guard lock(mutex);
        EXPECT_GT(written, chunk_bytes);
        EXPECT_EQ(staged, written);
    }));
    Checkpoint::open(dir_.path())->check(Checkpoint::Depth::everything);
}

TEST_F(AsyncTest, ARingEndsWhenTheSaveFails) {
    OwnedState owned;
    owned.add_whole({"large", DType::f32, {12 << 20}});
    FaultyFiles files;
    SaverOptions options = saver_options();
    options.files = &files;
    options.staging_bytes = 2 * chunk_bytes;
    Saver saver(nullptr, dir_.path(), options);
    std::atomic<int> writes{0};
    files.on_call = [&](int64_t, const std::string& name) {
        if (name.starts_with("write") && name.ends_with(".safetensors") && ++writes == 5) {
            throw os_error("the disk is full", ENOSPC);
        }
    };
    const WorkPtr work = saver.save_async(1, owned.state);
    EXPECT_EQ(code_of(work), Code::io);
    EXPECT_EQ(error_of([&] { saver.wait(); }).code(), Code::io);
    files.on_call = nullptr;
    owned.fill(2);
    EXPECT_EQ(code_of(saver.save_async(2, owned.state)), Code::ok);
    EXPECT_THAT(steps(), ElementsAre(2));
}

TEST_F(AsyncTest, AnInterruptedRingFailsTheSave) {
    OwnedState owned;
    owned.add_whole({"large", DType::f32, {12 << 20}});
    SaverOptions options = saver_options();
    options.staging_bytes = 2 * chunk_bytes;
    Saver saver(nullptr, dir_.path(), options);
    set_interrupt([](void*) { return int32_t{1}; }, nullptr);
    const WorkPtr work = saver.save_async(1, owned.state);
    set_interrupt(nullptr, nullptr);
    EXPECT_EQ(code_of(work), Code::interrupted);
    EXPECT_EQ(error_of([&] { saver.wait(); }).code(), Code::interrupted);
    EXPECT_TRUE(steps().empty());
}

}  // namespace
}  // namespace tsr::testing
