// Saves in the background: what happens when one is in flight already, where the copy of the state lies and what it
// costs, how failures are told, progress, and the step at which all ranks stop.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <future>
#include <mutex>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

#include "checkpoint/native/root.hpp"
#include "checkpoint/native/staging.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "patience.hpp"

namespace tsr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

Outcomes run_with_comm(int world_size, const RankBody& body) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    return run_threads(world_size,
                       [&](int rank) { body(Communicator::create(store, rank, world_size, test_options())); });
}

Code code_of(const WorkPtr& work) {
    try {
        work->wait(Deadline::in(patience(milliseconds{60000})));
        return Code::ok;
    } catch (const Error& error) {
        return error.code();
    }
}

// Holds every save at its commit until it is opened.
class Gate {
   public:
    FaultyFiles files;
    Gate() {
        files.on_call = [this](int64_t, const std::string& name) {
            if (!name.starts_with("rename") || !name.ends_with("manifest.json")) return;
            if (!reached_.exchange(true)) reached_once_.set_value();
            if (opened_.wait_for(patience(std::chrono::seconds(60))) != std::future_status::ready) {
                throw Error(Code::timeout, "the test never opened the gate");
            }
        };
    }
    void wait_until_reached() { reached_future_.wait(); }
    void open() { open_.set_value(); }

   private:
    std::promise<void> open_;
    std::shared_future<void> opened_ = open_.get_future().share();
    std::promise<void> reached_once_;
    std::future<void> reached_future_ = reached_once_.get_future();
    std::atomic<bool> reached_{false};
};

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

// --- while another save is in flight ---

TEST_F(AsyncTest, ASecondSaveIsRefusedByOptionAndTheNextOneIsNot) {
    Gate gate;
    SaverOptions options = saver_options();
    options.files = &gate.files;
    options.when_busy = WhenBusy::refuse;
    Saver saver(nullptr, dir_.path(), options);
    const WorkPtr first = saver.save_async(1, owned_.state);
    const Error refused = error_of([&] { (void)saver.save_async(2, owned_.state); });
    EXPECT_EQ(refused.code(), Code::not_ready);
    EXPECT_THAT(refused.what(), HasSubstr("in flight"));
    gate.open();
    EXPECT_EQ(code_of(first), Code::ok);
    saver.wait();
    (void)saver.save_async(3, owned_.state);
    saver.wait();
    EXPECT_THAT(steps(), ElementsAre(1, 3));
}

TEST_F(AsyncTest, ANewerSaveReplacesTheQueuedOne) {
    Gate gate;
    SaverOptions options = saver_options();
    options.files = &gate.files;
    options.when_busy = WhenBusy::replace;
    Saver saver(nullptr, dir_.path(), options);
    const auto save = [&](int64_t step) {
        owned_.fill(static_cast<uint64_t>(step));
        const WorkPtr work = saver.save_async(step, owned_.state);
        owned_.poison();
        return work;
    };
    const WorkPtr first = save(1);
    gate.wait_until_reached();
    const WorkPtr second = save(2);
    const WorkPtr third = save(3);
    EXPECT_EQ(code_of(second), Code::aborted);
    EXPECT_FALSE(first->done());
    gate.open();
    saver.wait();  // being replaced is no failure
    EXPECT_EQ(code_of(first), Code::ok);
    EXPECT_EQ(code_of(third), Code::ok);
    EXPECT_THAT(steps(), ElementsAre(1, 3));
    EXPECT_EQ(saver.resume(owned_.state), 3);
    EXPECT_EQ(owned_.differences(3), 0);
}

// The gate opens only when the second call waits: one that does not copies its state while the first save is held.
TEST_F(AsyncTest, ASecondSaveWaitsForTheFirstUnlessToldOtherwise) {
    Gate gate;
    WorkPtr first;
    int staged_meanwhile = 0;
    SaverOptions options = saver_options();
    options.files = &gate.files;
    options.progress = [&](Phase phase, int64_t, int64_t) {
        if (phase == Phase::stage && first != nullptr && !first->done()) ++staged_meanwhile;
    };
    struct Waiting {
        Gate* gate;
        int asked = 0;
    } waiting{&gate};
    Saver saver(nullptr, dir_.path(), options);
    first = saver.save_async(1, owned_.state);
    gate.wait_until_reached();
    set_interrupt(
        [](void* data) {
            auto* const one = static_cast<Waiting*>(data);
            if (one->asked++ == 0) one->gate->open();
            return int32_t{0};
        },
        &waiting);
    const WorkPtr second = saver.save_async(2, owned_.state);
    set_interrupt(nullptr, nullptr);
    EXPECT_EQ(staged_meanwhile, 0);
    if (waiting.asked == 0) gate.open();
    EXPECT_GT(waiting.asked, 0);
    EXPECT_EQ(code_of(second), Code::ok);
    EXPECT_EQ(code_of(first), Code::ok);
    EXPECT_THAT(steps(), ElementsAre(1, 2));
}

// Ranks are at different places when they call; what happens to each save is the same on all of them.
TEST_F(AsyncTest, RanksAgreeWhichSavesAreRefusedOrReplaced) {
    for (const WhenBusy when : {WhenBusy::refuse, WhenBusy::replace, WhenBusy::wait}) {
        const TempDir dir;
        constexpr int rounds = 40;
        std::array<std::array<Code, rounds>, 3> ends{};
        expect_all_well(run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            owned.add_whole({"w", DType::f32, {30000}});
            SaverOptions options = saver_options();
            options.when_busy = when;
            options.retention.latest = 1;
            Saver saver(comm, dir.path(), options);
            std::array<WorkPtr, rounds> works;
            auto& end = ends[static_cast<size_t>(comm->rank())];
            for (int round = 0; round < rounds; ++round) {
                owned.fill(static_cast<uint64_t>(round));
                try {
                    works[static_cast<size_t>(round)] = saver.save_async(round, owned.state);
                } catch (const Error& error) {
                    end[static_cast<size_t>(round)] = error.code();
                }
                owned.poison();
            }
            saver.wait();
            int64_t last = 0;
            for (int round = 0; round < rounds; ++round) {
                const auto i = static_cast<size_t>(round);
                if (works[i]) end[i] = code_of(works[i]);
                if (end[i] == Code::ok) last = round;
            }
            EXPECT_EQ(saver.resume(owned.state), last);
            EXPECT_EQ(owned.differences(static_cast<uint64_t>(last)), 0);
        }));
        EXPECT_EQ(ends[0], ends[1]);
        EXPECT_EQ(ends[0], ends[2]);
        const Code other = when == WhenBusy::refuse ? Code::not_ready : Code::aborted;
        for (const Code code : ends[0]) EXPECT_TRUE(code == Code::ok || (code == other && when != WhenBusy::wait));
        EXPECT_EQ(ends[0][0], Code::ok);
        if (when != WhenBusy::refuse) {
            EXPECT_EQ(ends[0][rounds - 1], Code::ok);
        }
    }
}

TEST_F(AsyncTest, AFailureIsToldByTheFutureAndOnceByTheNextCall) {
    for (const WhenBusy when : {WhenBusy::refuse, WhenBusy::replace, WhenBusy::wait}) {
        const TempDir dir;
        std::atomic<bool> full{false};
        expect_all_well(run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            owned.add_whole({"w", DType::f32, {10}});
            FaultyFiles files;
            files.on_call = [&](int64_t, const std::string& name) {
                if (full && name.starts_with("mkdir")) throw os_error("cannot create it", ENOSPC);
            };
            SaverOptions options = saver_options();
            options.files = &files;
            options.when_busy = when;
            Saver saver(comm, dir.path(), options);
            saver.save(1, owned.state);
            full = true;
            const WorkPtr failing = saver.save_async(2, owned.state);
            EXPECT_EQ(code_of(failing), Code::io);
            Request barrier;
            comm->run(barrier);
            full = false;
            EXPECT_EQ(error_of([&] { (void)saver.save_async(3, owned.state); }).code(), Code::io);
            EXPECT_EQ(code_of(saver.save_async(4, owned.state)), Code::ok);
            saver.wait();
            EXPECT_EQ(saver.resume(owned.state), 4);
        }));
    }
}

TEST_F(AsyncTest, AFailureThatNobodyAskedForIsInTheLogAndTheFormerCheckpointStands) {
    struct Log {
        std::mutex mutex;
        std::string text;
    } log;
    FaultyFiles files;
    SaverOptions options = saver_options();
    options.files = &files;
    log::set_level(log::Level::warning);
    log::set_sink(
        [](int32_t, const char* line, void* user_data) {
            auto& to = *static_cast<Log*>(user_data);
            const std::lock_guard lock(to.mutex);
            to.text.append(line).append("\n");
        },
        &log, nullptr);
    {
        Saver saver(nullptr, dir_.path(), options);
        saver.save(1, owned_.state);
        files.on_call = [&](int64_t, const std::string& name) {
            if (name.starts_with("fsync") && name.ends_with(".safetensors")) throw os_error("cannot sync it", EIO);
        };
        (void)saver.save_async(2, owned_.state);
    }
    log::set_sink(nullptr, nullptr, nullptr);
    log::set_level(log::Level::error);
    EXPECT_THAT(log.text, HasSubstr("the save of step 2 failed: cannot sync it"));
    EXPECT_THAT(log.text, HasSubstr("nobody waited for it"));
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 1);
}

// --- staging memory ---

int64_t page_faults() {
    rusage usage{};
    EXPECT_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
    return usage.ru_minflt;
}

bool is_resident(std::span<const std::byte> memory) {
    std::vector<unsigned char> pages((memory.size() + 4095) / 4096);
    auto* begin = const_cast<std::byte*>(memory.data());  // mincore writes to the vector alone
    EXPECT_EQ(::mincore(begin, memory.size(), pages.data()), 0);
    return std::all_of(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1U) != 0; });
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

TEST_F(AsyncTest, RanksAgreeOnTheFormat) {
    const Outcomes outcomes = run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        SaverOptions options = saver_options();
        if (comm->rank() == 1) options.format = SaveFormat::torch_dcp;
        EXPECT_THAT(error_of([&] { const Saver saver(comm, dir_.path(), options); }).what(),
                    HasSubstr("rank 1 has another format than rank 0"));
    });
    expect_all_well(outcomes);
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

// --- politeness ---

TEST_F(AsyncTest, WritingKeepsToItsLimit) {
    OwnedState owned;
    owned.add_whole({"large", DType::f32, {4 << 20}});
    SaverOptions options = saver_options();
    options.write_bytes_per_s = 16 << 20;  // no disk is as slow
    Saver saver(nullptr, dir_.path(), options);
    const auto begin = Clock::now();
    saver.save(1, owned.state);
    // Four chunks of a quarter of a second; the first goes at once.
    EXPECT_GE(Clock::now() - begin, milliseconds{740});
}

// Its threads wait for their turns meanwhile, at this rate for more than an hour.
TEST_F(AsyncTest, ALimitedSaveIsInterruptedWhileItWaitsToWrite) {
    OwnedState owned;
    owned.add_whole({"large", DType::f32, {4 << 20}});
    for (const int threads : {1, 4}) {
        SaverOptions options = saver_options();
        options.retention.latest = 1;
        options.write.threads = threads;
        options.write_bytes_per_s = 1024;
        Saver saver(nullptr, dir_.path(), options);
        auto until = Clock::now() + milliseconds{300};
        set_interrupt([](void* at) { return Clock::now() > *static_cast<Clock::time_point*>(at) ? 1 : 0; }, &until);
        const Error error = error_of([&] { saver.save(1, owned.state); });
        set_interrupt(nullptr, nullptr);
        EXPECT_EQ(error.code(), Code::interrupted) << error.what();
        EXPECT_LT(Clock::now() - until, patience(std::chrono::seconds{20})) << threads << " threads";

        OwnedState small;  // does not wait for what was not written
        small.add_whole({"small", DType::f32, {10}});
        saver.save(threads, small.state);
        EXPECT_THAT(steps(), ElementsAre(threads));
    }
}

TEST_F(AsyncTest, BackgroundThreadsHaveALowPriorityByOption) {
    FaultyFiles files;
    std::atomic<int> background{-100};
    std::atomic<int64_t> of_disk{-1};  // class and level, as ioprio_set(2) has them
    const auto disk_priority = [] { return ::syscall(SYS_ioprio_get, 1, 0); };
    files.on_call = [&](int64_t, const std::string& name) {
        if (!name.starts_with("write") || !name.ends_with(".safetensors")) return;
        background = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)));
        of_disk = disk_priority();
    };
    SaverOptions options = saver_options();
    options.files = &files;
    options.priority = Priority::low;
    Saver saver(nullptr, dir_.path(), options);
    const int own = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)));
    const int64_t own_of_disk = disk_priority();
    EXPECT_EQ(code_of(saver.save_async(1, owned_.state)), Code::ok);
    EXPECT_EQ(background, std::max(own, 10));
    EXPECT_EQ(of_disk, (2 << 13) | 7) << "best effort, the lowest level";
    saver.wait();
    saver.save(2, owned_.state);
    EXPECT_EQ(background, own);
    EXPECT_EQ(of_disk, own_of_disk);
}

// --- progress ---

struct Told {
    Phase phase;
    int64_t done;
    int64_t total;
    bool on_caller;
};

TEST(Progress, ThatAllIsDoneIsToldOnce) {
    std::vector<int64_t> told;
    Progress progress([&](Phase, int64_t done, int64_t) { told.push_back(done); }, Phase::write, 10);
    const auto until_told = [&](size_t count) {
        for (const auto end = Clock::now() + patience(std::chrono::seconds(10));
             told.size() < count && Clock::now() < end;) {
            progress.poll();
        }
    };
    progress.add(4);
    until_told(2);
    progress.add(6);
    for (const auto end = Clock::now() + 2 * poll_slice; Clock::now() < end;) progress.poll();
    progress.finish();
    EXPECT_EQ(told, (std::vector<int64_t>{0, 4, 10}));
}

TEST_F(AsyncTest, ProgressIsToldOnTheThreadsThatAreDocumented) {
    OwnedState owned;
    owned.add_whole({"large", DType::f32, {8 << 20}});
    constexpr int64_t bytes = int64_t{32} << 20;
    std::mutex mutex;
    std::vector<Told> told;
    const auto caller = std::this_thread::get_id();
    const ProgressFn tell = [&](Phase phase, int64_t done, int64_t total) {
        const std::lock_guard lock(mutex);
        told.push_back({phase, done, total, std::this_thread::get_id() == caller});
    };
    SaverOptions options = saver_options();
    options.progress = tell;
    options.write_bytes_per_s = 100 << 20;  // long enough to be told in between
    Saver saver(nullptr, dir_.path(), options);
    const auto of = [&](Phase phase) {
        std::vector<Told> found;
        for (const Told& one : told) {
            if (one.phase == phase) found.push_back(one);
        }
        return found;
    };
    const auto expect_whole = [&](Phase phase, bool on_caller, int64_t total) {
        const auto found = of(phase);
        ASSERT_GE(found.size(), 2u) << static_cast<int>(phase);
        EXPECT_EQ(found.front().done, 0);
        EXPECT_EQ(found.back().done, total);
        int64_t last = 0;
        for (const Told& one : found) {
            EXPECT_EQ(one.total, total);
            EXPECT_EQ(one.on_caller, on_caller);
            EXPECT_GE(one.done, last);
            last = one.done;
        }
    };
    (void)saver.save_async(1, owned.state);
    saver.wait();
    expect_whole(Phase::stage, true, bytes);
    expect_whole(Phase::write, false, bytes);
    expect_whole(Phase::commit, false, 0);
    EXPECT_GE(of(Phase::write).size(), 3u);
    EXPECT_LE(of(Phase::write).size(), 40u);
    told.clear();
    saver.save(2, owned.state);
    expect_whole(Phase::write, true, bytes);
    EXPECT_TRUE(of(Phase::stage).empty());
    told.clear();
    EXPECT_EQ(saver.resume(owned.state), 2);
    expect_whole(Phase::read, true, bytes);
    told.clear();
    const auto checkpoint = Checkpoint::open(dir_.path());
    checkpoint->check(Checkpoint::Depth::everything, tell);
    expect_whole(Phase::verify, true, checkpoint->manifest().size_bytes());
}

// --- the step at which all stop ---

TEST_F(AsyncTest, AllRanksStopAtTheSameStepWhenOneIsTold) {
    std::array<std::atomic<int64_t>, 3> stopped{};
    expect_all_well(run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"w", DType::f32, {1000}});
        Saver saver(comm, dir_.path(), saver_options());
        for (int64_t step = 1;; ++step) {
            const bool stop = saver.should_stop(step, comm->rank() == 1 && step == 7);
            if (stop || step % 3 == 0) (void)saver.save_async(step, owned.state);
            if (!stop) continue;
            EXPECT_TRUE(saver.should_stop(step + 1, false));
            stopped[static_cast<size_t>(comm->rank())] = step;
            break;
        }
        saver.wait();
    }));
    for (const auto& step : stopped) EXPECT_EQ(step, 7);
    EXPECT_THAT(steps(), ElementsAre(3, 6, 7));
}

TEST_F(AsyncTest, RanksThatAskAtDifferentStepsAreTold) {
    const Outcomes outcomes = run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        Saver saver(comm, dir_.path(), saver_options());
        (void)saver.should_stop(comm->rank() == 0 ? 5 : 6, false);
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("5 to 6"));
    }
    // Of all numbers this one alone has no negative.
    const Outcomes least = run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        Saver saver(comm, dir_.path(), saver_options());
        (void)saver.should_stop(comm->rank() == 0 ? INT64_MIN : 5, false);
    });
    for (const auto& outcome : least) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
    }
}

}  // namespace
}  // namespace tsr::testing
