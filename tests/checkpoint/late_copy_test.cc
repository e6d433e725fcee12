// Saves that copy what an optimizer owns late: whenever the optimizer's next step comes, what is saved is what the state
// was when save_async was called.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "checkpoint/native/root.hpp"
#include "checkpoint/native/staging.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "optim/adam.hpp"
#include "optim/sgd.hpp"
#include "patience.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr::testing {
namespace {

constexpr int64_t rows = 700;  // 2.8 MB a tensor: chunks that hold parts of two, and several that hold parts of one

// A state whose tensors "w0", ... and "small" belong to a barrier, and "other" to nobody.
struct Guarded {
    explicit Guarded(int tensor_count, bool has_other = true) : tensors(tensor_count), with_other(has_other) {
        for (int i = 0; i < tensors; ++i) owned.add_whole({"w" + std::to_string(i), DType::f32, {rows, 1000}});
        owned.add_whole({"small", DType::f32, {11}});
        if (with_other) owned.add_whole({"other", DType::f32, {10}});
        std::vector<Memory> memories;
        for (const auto& [name, tensor] : owned.state.tensors()) {
            if (name != "other") memories.push_back(memory(name));
        }
        barrier = std::make_shared<WriteBarrier>(std::move(memories));
        owned.state.add_barrier(barrier);
        owned.fill();
    }
    [[nodiscard]] Memory memory(const std::string& name) const {
        const Tensor tensor = owned.state.tensors().find(name)->second.piece(0);
        return {tensor.data, tensor.size_bytes()};
    }
    int tensors;
    bool with_other;
    OwnedState owned;
    std::shared_ptr<WriteBarrier> barrier;
};

// Holds the first save in the background while it writes, so that nothing of a second one is done in the background.
class Busy {
   public:
    ProgressFn progress() {
        return [this](Phase phase, int64_t, int64_t) {
            if (phase != Phase::write || was_reached_.exchange(true)) return;
            reached_.set_value();
            EXPECT_EQ(opened_.wait_for(patience(std::chrono::seconds(60))), std::future_status::ready);
        };
    }
    void wait_until_reached() {
        ASSERT_EQ(reached_.get_future().wait_for(patience(std::chrono::seconds(60))), std::future_status::ready);
    }
    void open() { open_.set_value(); }

   private:
    std::promise<void> open_;
    std::shared_future<void> opened_ = open_.get_future().share();
    std::promise<void> reached_;
    std::atomic<bool> was_reached_{false};
};

void overwrite(Memory memory) { std::fill_n(const_cast<std::byte*>(memory.data()), memory.size(), std::byte{0xcd}); }

class LateCopyTest : public ::testing::Test {
   protected:
    SaverOptions options(SaveFormat format = SaveFormat::native) {
        SaverOptions result = saver_options();
        result.copies = Copies::on_demand;
        result.when_busy = WhenBusy::replace;
        result.format = format;
        result.progress = busy_.progress();
        return result;
    }
    // Of a save behind one that is held: it has not begun, so nothing late of it is copied but by the barrier.
    WorkPtr save_behind_another(Saver& saver, Guarded& guarded) {
        (void)saver.save_async(1, guarded.owned.state);
        busy_.wait_until_reached();
        return saver.save_async(2, guarded.owned.state);
    }
    // How many elements of the newest checkpoint differ from fill(salt).
    static int64_t saved_differences(const std::string& root, const Guarded& like, uint64_t salt = 0) {
        Guarded loaded(like.tensors, like.with_other);
        loaded.owned.poison();
        (void)Checkpoint::open(root)->load(loaded.owned.state);
        return loaded.owned.differences(salt);
    }
    int64_t saved_differences(const Guarded& like, uint64_t salt = 0) {
        return saved_differences(dir_.path(), like, salt);
    }
    // Of one of its tensors alone.
    int64_t saved_differences_of(const std::string& name, uint64_t salt) {
        OwnedState loaded;
        loaded.add_whole({name, DType::f32, {rows, 1000}});
        loaded.poison();
        LoadOptions options;
        options.unexpected = Allow::yes;
        (void)Checkpoint::open(dir_.path())->load(loaded.state, options);
        return loaded.differences(salt);
    }
    // The test's and the state's: no save holds the barrier, and none is asked for anything.
    static void expect_released(const Guarded& guarded) { EXPECT_EQ(guarded.barrier.use_count(), 2); }

    TempDir dir_;
    Busy busy_;
};

class LateCopyOfFormat : public LateCopyTest, public ::testing::WithParamInterface<SaveFormat> {};

// The small tensors lie in chunks with the large ones' parts.
TEST_P(LateCopyOfFormat, WhatIsWrittenAfterTheBarrierIsNotSaved) {
    Guarded guarded(5);
    Saver saver(nullptr, dir_.path(), options(GetParam()));
    (void)save_behind_another(saver, guarded);
    overwrite(guarded.memory("other"));  // nobody's: copied at once
    // In another order than the file's, and not all.
    for (const char* name : {"w3", "w0", "small", "w4"}) {
        guarded.barrier->before_write(guarded.memory(name));
        overwrite(guarded.memory(name));
    }
    busy_.open();
    saver.wait();
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 2);
    EXPECT_EQ(saved_differences(guarded), 0);
    expect_released(guarded);
}

// From the fence on the memory is anybody's, though not a byte is written yet.
TEST_P(LateCopyOfFormat, WhatIsWrittenAfterTheFenceIsNotSaved) {
    Guarded guarded(5);
    FaultyFiles files;
    SaverOptions slow = options(GetParam());
    slow.progress = nullptr;
    slow.files = &files;
    Saver saver(nullptr, dir_.path(), slow);
    std::promise<void> open;
    const std::shared_future<void> opened = open.get_future().share();
    files.on_call = [&](int64_t, const std::string& name) {
        if (!name.starts_with("mkdir") && !name.starts_with("create")) return;
        EXPECT_EQ(opened.wait_for(patience(std::chrono::seconds(60))), std::future_status::ready);
    };
    const auto save = saver.save_async(1, guarded.owned.state);
    save->staged()->wait(Deadline::in(patience(milliseconds{60000})));
    EXPECT_FALSE(save->done());
    guarded.owned.poison();  // without a word to the barrier
    open.set_value();
    saver.wait();
    expect_released(guarded);
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_P(LateCopyOfFormat, TheFenceComesBeforeTheEndOfASlowSave) {
    Guarded guarded(2);
    SaverOptions slow = options(GetParam());
    std::atomic<int64_t> written{0};
    slow.progress = [&](Phase phase, int64_t done, int64_t) {
        if (phase == Phase::write) written = done;
    };
    slow.write_bytes_per_s = 32 << 20;
    std::mutex mutex;
    std::vector<std::string> order;
    std::promise<void> both;
    const auto tell = [&](const char* what) {
        return [&, what](const std::optional<Error>& error) {
            EXPECT_FALSE(error.has_value());
            const std::lock_guard lock(mutex);
            order.emplace_back(what);
            if (order.size() == 2) both.set_value();
        };
    };
    Saver saver(nullptr, dir_.path(), slow);
    const auto save = saver.save_async(1, guarded.owned.state);
    save->on_done(tell("durable"));
    save->staged()->on_done([&](const std::optional<Error>& error) {
        EXPECT_EQ(written, 0) << "the first byte is written when all is copied";
        tell("staged")(error);
    });
    ASSERT_EQ(both.get_future().wait_for(patience(std::chrono::seconds(60))), std::future_status::ready);
    saver.wait();
    EXPECT_THAT(order, ::testing::ElementsAre("staged", "durable"));
    EXPECT_EQ(saved_differences(guarded), 0);
}

INSTANTIATE_TEST_SUITE_P(Formats, LateCopyOfFormat, ::testing::Values(SaveFormat::native, SaveFormat::torch_dcp));

TEST_F(LateCopyTest, TheCallReturnsBeforeAnythingOfTheBarriersIsCopied) {
    Guarded guarded(3, false);
    Saver saver(nullptr, dir_.path(), options());
    (void)save_behind_another(saver, guarded);
    guarded.owned.fill(1);  // behind the barrier's back: the save, which has not begun, sees it
    busy_.open();
    saver.wait();
    EXPECT_EQ(saved_differences(guarded, 1), 0);
}

// w0 shares its chunk with half of w1; what lies in other chunks is still to be copied.
// The save has not begun: its only copies are those that writes ask for.
TEST_F(LateCopyTest, TheFenceWaitsForTheLastTensorThatIsLeftToCopy) {
    Guarded guarded(3);
    Saver saver(nullptr, dir_.path(), options());
    (void)saver.save_async(1, guarded.owned.state);
    busy_.wait_until_reached();
    const auto save = saver.save_async(2, guarded.owned.state);
    std::thread::id told;
    save->staged()->on_done([&](const std::optional<Error>&) { told = std::this_thread::get_id(); });
    for (const char* name : {"w1", "w0"}) {
        guarded.barrier->before_write(guarded.memory(name));
        EXPECT_FALSE(save->staged()->done()) << name;
    }
    guarded.barrier->before_write(guarded.memory("w2"));
    EXPECT_TRUE(save->staged()->done());
    EXPECT_EQ(told, std::this_thread::get_id());
    EXPECT_FALSE(save->done());
    guarded.owned.poison();
    busy_.open();
    saver.wait();
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_F(LateCopyTest, WithoutTheOptionOrBeyondTheBoundTheFenceIsDoneWhenTheCallReturns) {
    Guarded guarded(5);
    for (const bool is_ring : {false, true}) {
        const TempDir dir;
        SaverOptions copying = options();
        copying.progress = nullptr;
        if (is_ring) copying.staging_bytes = 2 * chunk_bytes;
        if (!is_ring) copying.copies = Copies::at_once;
        Saver saver(nullptr, dir.path(), copying);
        const auto save = saver.save_async(1, guarded.owned.state);
        EXPECT_TRUE(save->staged()->done()) << is_ring;
        EXPECT_FALSE(save->staged()->error().has_value()) << is_ring;
        saver.wait();
    }
}

TEST_F(LateCopyTest, ASaveThatEndsBeforeItsFenceGivesItItsError) {
    Guarded guarded(3);
    Saver saver(nullptr, dir_.path(), options());
    (void)saver.save_async(1, guarded.owned.state);
    busy_.wait_until_reached();
    const auto replaced = saver.save_async(2, guarded.owned.state);
    const auto third = saver.save_async(3, guarded.owned.state);
    EXPECT_TRUE(replaced->staged()->done());
    EXPECT_EQ(error_of([&] { replaced->staged()->wait(Deadline::in(milliseconds{1000})); }).code(), Code::aborted);
    EXPECT_FALSE(third->staged()->done());
    busy_.open();
    saver.wait();
    EXPECT_FALSE(third->staged()->error().has_value());

    SaverOptions throwing = options();
    throwing.progress = [](Phase phase, int64_t, int64_t) {
        if (phase == Phase::stage) throw Error(Code::interrupted, "the test wants no more");
    };
    Saver interrupted(nullptr, dir_ / "other", throwing);
    const auto save = interrupted.save_async(1, guarded.owned.state);
    EXPECT_EQ(error_of([&] { interrupted.wait(); }).code(), Code::interrupted);
    EXPECT_EQ(error_of([&] { save->staged()->wait(Deadline::in(milliseconds{1000})); }).code(), Code::interrupted);
}

TEST_F(LateCopyTest, AWriteCopiesItsOwnTensorAlone) {
    Guarded guarded(6);
    Saver saver(nullptr, dir_.path(), options());
    (void)save_behind_another(saver, guarded);
    guarded.barrier->before_write(guarded.memory("w0"));
    guarded.owned.fill(1);  // behind the barrier's back
    busy_.open();
    saver.wait();
    EXPECT_EQ(saved_differences_of("w0", 0), 0);
    for (const char* name : {"w3", "w4", "w5"}) EXPECT_EQ(saved_differences_of(name, 1), 0) << name;
}

TEST_F(LateCopyTest, WithoutTheOptionAllIsCopiedBeforeTheCallReturns) {
    Guarded guarded(3);
    SaverOptions at_once = options();
    at_once.copies = Copies::at_once;
    Saver saver(nullptr, dir_.path(), at_once);
    (void)save_behind_another(saver, guarded);
    guarded.owned.fill(1);
    busy_.open();
    saver.wait();
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_F(LateCopyTest, ProgressTellsWhatIsCopiedBeforeTheCallReturns) {
    Guarded guarded(3);
    SaverOptions telling = options();
    std::vector<int64_t> totals;
    telling.progress = [&](Phase phase, int64_t, int64_t total) {
        if (phase == Phase::stage) totals.push_back(total);
    };
    Saver saver(nullptr, dir_.path(), telling);
    (void)saver.save_async(1, guarded.owned.state);
    saver.wait();
    ASSERT_FALSE(totals.empty());
    for (const int64_t total : totals) EXPECT_EQ(total, static_cast<int64_t>(guarded.memory("other").size()));
}

TEST_F(LateCopyTest, ALoadIntoTheStateWaitsForTheCopies) {
    Guarded guarded(3);
    {
        Guarded other(3);
        other.owned.fill(7);
        Saver elsewhere(nullptr, dir_ / "elsewhere", saver_options());
        elsewhere.save(1, other.owned.state);
    }
    Saver saver(nullptr, dir_ / "root", options());
    (void)save_behind_another(saver, guarded);
    (void)Checkpoint::open(dir_ / "elsewhere")->load(guarded.owned.state);
    EXPECT_EQ(guarded.owned.differences(7), 0);
    busy_.open();
    saver.wait();
    EXPECT_EQ(saved_differences(dir_ / "root", guarded), 0);
}

TEST_F(LateCopyTest, AReplacedSaveGivesItsMemoryBackAndAsksForNothing) {
    Guarded guarded(3);
    Saver saver(nullptr, dir_.path(), options());
    const WorkPtr second = save_behind_another(saver, guarded);
    const WorkPtr third = saver.save_async(3, guarded.owned.state);
    EXPECT_TRUE(second->done());
    for (const char* name : {"w0", "w1", "w2", "small"}) {
        guarded.barrier->before_write(guarded.memory(name));
        overwrite(guarded.memory(name));
    }
    busy_.open();
    saver.wait();
    expect_released(guarded);
    saver.trim();
    EXPECT_EQ(saver.staging_size(), 0);
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 3);
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_F(LateCopyTest, ARefusedSaveAsksForNothing) {
    Guarded guarded(3);
    SaverOptions refusing = options();
    refusing.when_busy = WhenBusy::refuse;
    Saver saver(nullptr, dir_.path(), refusing);
    (void)saver.save_async(1, guarded.owned.state);
    busy_.wait_until_reached();  // by then all of the first one is copied
    EXPECT_EQ(error_of([&] { (void)saver.save_async(2, guarded.owned.state); }).code(), Code::not_ready);
    guarded.owned.fill(1);
    busy_.open();
    saver.wait();
    expect_released(guarded);
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_F(LateCopyTest, TwoSaversOfOneOptimizerEachSaveTheTimeOfTheirCall) {
    Guarded guarded(3);
    Busy busy_of_other;
    SaverOptions of_other = options();
    of_other.progress = busy_of_other.progress();
    Saver one(nullptr, dir_ / "one", options());
    Saver other(nullptr, dir_ / "other", of_other);
    (void)save_behind_another(one, guarded);
    (void)other.save_async(1, guarded.owned.state);
    busy_of_other.wait_until_reached();
    const auto write = [&](const char* name) {
        guarded.barrier->before_write(guarded.memory(name));
        overwrite(guarded.memory(name));
    };
    write("w1");
    (void)other.save_async(2, guarded.owned.state);
    for (const char* name : {"w0", "w2", "small"}) write(name);
    busy_of_other.open();
    busy_.open();
    one.wait();
    other.wait();
    expect_released(guarded);
    EXPECT_EQ(saved_differences(dir_ / "one", guarded), 0);
    EXPECT_EQ(saved_differences(dir_ / "other", guarded), rows * 1000) << "all but w1, which was written before";
}

TEST_F(LateCopyTest, AStateLargerThanTheStagingMemoryIsCopiedAtOnce) {
    Guarded guarded(5);
    SaverOptions bounded = options();
    bounded.staging_bytes = 2 * chunk_bytes;
    bounded.progress = nullptr;
    Saver saver(nullptr, dir_.path(), bounded);
    (void)saver.save_async(1, guarded.owned.state);
    guarded.owned.fill(1);
    saver.wait();
    expect_released(guarded);
    EXPECT_LE(saver.staging_size(), bounded.staging_bytes);
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_F(LateCopyTest, ASaveThatFailsReleasesTheBarrierAndTheFormerCheckpointStands) {
    for (const char* operation : {"mkdir", "create", "write", "fsync", "rename"}) {
        const TempDir dir;
        Guarded guarded(3);
        FaultyFiles files;
        SaverOptions failing = options();
        failing.progress = nullptr;
        failing.files = &files;
        Saver saver(nullptr, dir.path(), failing);
        saver.save(1, guarded.owned.state);
        std::atomic<int> failures{0};
        files.on_call = [&](int64_t, const std::string& name) {
            if (!name.starts_with(operation)) return;
            ++failures;
            throw os_error("the disk is full", ENOSPC);
        };
        const WorkPtr work = saver.save_async(2, guarded.owned.state);
        guarded.barrier->before_write_all();
        guarded.owned.poison();
        EXPECT_EQ(error_of([&] { saver.wait(); }).code(), Code::io) << operation;
        EXPECT_GT(failures, 0) << operation;
        files.on_call = nullptr;
        expect_released(guarded);
        EXPECT_EQ(saved_differences(dir.path(), guarded), 0) << operation;
    }
}

TEST_F(LateCopyTest, ACallThatIsInterruptedReleasesTheBarrier) {
    Guarded guarded(3);
    SaverOptions throwing = options();
    throwing.progress = [](Phase phase, int64_t, int64_t) {
        if (phase == Phase::stage) throw Error(Code::interrupted, "the test wants no more");
    };
    Saver saver(nullptr, dir_.path(), throwing);
    (void)saver.save_async(1, guarded.owned.state);
    EXPECT_EQ(error_of([&] { saver.wait(); }).code(), Code::interrupted);
    expect_released(guarded);
}

TEST_F(LateCopyTest, ALostPeerReleasesTheBarrier) {
    const Outcomes outcomes = run_meeting(2, [&](const std::shared_ptr<Communicator>& comm) {
        Guarded guarded(3);
        Saver saver(comm, dir_.path(), options());
        if (comm->rank() == 1) busy_.open();
        (void)saver.save_async(1, guarded.owned.state);
        if (comm->rank() == 1) comm->abort("the test leaves");
        guarded.barrier->before_write_all();
        EXPECT_NE(error_of([&] { saver.wait(); }).code(), Code::ok);
        expect_released(guarded);
    });
    expect_all_well(outcomes);
}

TEST_F(LateCopyTest, ASaverDestroyedInItsCallbackReleasesWhatWasQueued) {
    Guarded guarded(3);
    auto saver = std::make_unique<Saver>(nullptr, dir_.path(), options());
    const WorkPtr first = saver->save_async(1, guarded.owned.state);
    busy_.wait_until_reached();
    const WorkPtr second = saver->save_async(2, guarded.owned.state);
    std::promise<void> destroyed;
    first->on_done([&](const std::optional<Error>&) {
        saver.reset();
        destroyed.set_value();
    });
    busy_.open();
    ASSERT_EQ(destroyed.get_future().wait_for(patience(std::chrono::seconds(60))), std::future_status::ready);
    expect_released(guarded);
    EXPECT_TRUE(second->done());
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 1);
    EXPECT_EQ(saved_differences(guarded), 0);
}

TEST_F(LateCopyTest, ADestroyedSaverSavesWhatIsLeftToCopy) {
    Guarded guarded(3);
    {
        Saver saver(nullptr, dir_.path(), options());
        (void)save_behind_another(saver, guarded);
        busy_.open();
    }
    expect_released(guarded);
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 2);
    EXPECT_EQ(saved_differences(guarded), 0);
}

// An optimizer over memory of its own, of two kinds by `T`.
template <class T>
class LateCopyOfOptimizer : public LateCopyTest {
   protected:
    using Floats = std::vector<float>;
    static constexpr size_t n = 1 << 20;
    LateCopyOfOptimizer() {
        const OptimizerParam param{"w", tensor_of(std::span<float>(value_), DType::f32),
                                   tensor_of(std::span<float>(grad_), DType::f32)};
        if constexpr (std::is_same_v<T, Adam>) {
            optimizer_ = std::make_unique<Adam>(std::vector{param}, AdamOptions{});
        } else {
            optimizer_ = std::make_unique<Sgd>(std::vector{param}, SgdOptions{.lr = 0.1, .momentum = 0.9});
        }
        state_.add_tensor("w", param.value);
        for (const Moment& moment : optimizer_->moments()) state_.add_tensor("optim." + moment.name, moment.tensor);
        state_.add_barrier(optimizer_->barrier());
        optimizer_->step();
    }
    std::map<std::string, Floats> values() const {
        std::map<std::string, Floats> found;
        for (const auto& [name, tensor] : state_.tensors()) {
            const auto floats = tensor.piece(0).template as<float>();
            found[name].assign(floats.begin(), floats.end());
        }
        return found;
    }
    void save_behind_another(Saver& saver) {
        (void)saver.save_async(1, state_);
        busy_.wait_until_reached();
        (void)saver.save_async(2, state_);
    }
    void expect_saved(const std::map<std::string, Floats>& expected) {
        const auto checkpoint = Checkpoint::open(dir_.path());
        EXPECT_EQ(checkpoint->manifest().step, 2);
        for (const auto& [name, floats] : expected) {
            Floats read(floats.size());
            const Dims& shape = checkpoint->manifest().find(name)->shape;
            checkpoint->read(name, {reinterpret_cast<std::byte*>(read.data()), shape, DType::f32, {}});
            EXPECT_TRUE(read == floats) << name;
        }
    }
    Floats value_ = Floats(n, 1.0F);
    Floats grad_ = Floats(n, 0.5F);
    std::unique_ptr<Optimizer> optimizer_;
    State state_;
};

using OptimizerKinds = ::testing::Types<Adam, Sgd>;
TYPED_TEST_SUITE(LateCopyOfOptimizer, OptimizerKinds);

TYPED_TEST(LateCopyOfOptimizer, IsMadeBeforeAStepChangesTheMemory) {
    Saver saver(nullptr, this->dir_.path(), this->options());
    this->save_behind_another(saver);
    const auto expected = this->values();
    this->optimizer_->step();
    for (const auto& [name, floats] : this->values()) EXPECT_FALSE(floats == expected.at(name)) << name;
    this->busy_.open();
    saver.wait();
    this->expect_saved(expected);
}

TYPED_TEST(LateCopyOfOptimizer, IsMadeBeforeTheOptimizerAndTheMemoryGo) {
    Saver saver(nullptr, this->dir_.path(), this->options());
    this->save_behind_another(saver);
    const auto expected = this->values();
    this->state_ = State();
    this->optimizer_.reset();
    this->value_.assign(this->value_.size(), -1.0F);
    this->busy_.open();
    saver.wait();
    this->expect_saved(expected);
}

// Notes what it is asked for, and what is already changed then.
class Noted final : public LateCopy {
   public:
    explicit Noted(std::function<void(Memory)> note) : note_(std::move(note)) {}
    void copy_now(Memory memory) noexcept override { note_(memory); }

   private:
    std::function<void(Memory)> note_;
};

template <class T>
class StepOfManyParameters : public ::testing::Test {};
TYPED_TEST_SUITE(StepOfManyParameters, OptimizerKinds);

// Never for all at once: while the last parameter is asked for, the first one has its new value.
TYPED_TEST(StepOfManyParameters, AsksForEachBeforeItChangesIt) {
    constexpr size_t count = 4;
    std::vector<std::vector<float>> values(count, std::vector<float>(1000, 1.0F));
    std::vector<float> grad(1000, 0.5F);
    std::vector<OptimizerParam> params;
    for (size_t i = 0; i < count; ++i) {
        params.push_back({"p" + std::to_string(i), tensor_of(std::span<float>(values[i]), DType::f32),
                          tensor_of(std::span<float>(grad), DType::f32)});
    }
    std::unique_ptr<Optimizer> optimizer;
    if constexpr (std::is_same_v<TypeParam, Adam>) {
        optimizer = std::make_unique<Adam>(params, AdamOptions{});
    } else {
        optimizer = std::make_unique<Sgd>(params, SgdOptions{.lr = 0.1, .momentum = 0.9});
    }
    // What belongs to each parameter: by its address, with its size.
    std::vector<std::map<const std::byte*, size_t>> unasked(count);
    for (size_t i = 0; i < count; ++i) {
        unasked[i][params[i].value.data] = params[i].value.size_bytes();
        for (const Moment& moment : optimizer->moments()) {
            if (moment.param == params[i].name) unasked[i][moment.tensor.data] = moment.tensor.size_bytes();
        }
        ASSERT_GE(unasked[i].size(), 2u);
    }
    const auto is_changed = [&](size_t param) { return values[param][0] != 1.0F; };
    const auto noted = std::make_shared<Noted>([&](Memory memory) {
        for (size_t i = 0; i < count; ++i) {
            const auto found = unasked[i].find(memory.data());
            if (found == unasked[i].end()) continue;
            EXPECT_EQ(memory.size(), found->second) << "more than one tensor of parameter " << i;
            for (size_t other = 0; other < count; ++other)
                EXPECT_EQ(is_changed(other), other < i) << other << " at " << i;
            unasked[i].erase(found);
            return;
        }
        ADD_FAILURE() << "asked for something else, or once more";
    });
    optimizer->barrier()->add(noted);
    optimizer->step();
    optimizer->barrier()->remove(noted.get());
    for (size_t i = 0; i < count; ++i) {
        EXPECT_TRUE(is_changed(i)) << i;
        EXPECT_TRUE(unasked[i].empty()) << "was changed unasked: parameter " << i;
    }
}

// One chunk whose copying stands still, in a handler of SIGSEGV, until it is let go on. One at a time.
class StuckMemory {
   public:
    StuckMemory() {
        memory_ =
            static_cast<std::byte*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        closed = memory_;
        reached = false;
        opening = ::eventfd(0, EFD_CLOEXEC);
        limit_ms = patience_ms(60000);
        struct sigaction handler{};
        handler.sa_sigaction = [](int, siginfo_t* info, void*) {
            if (info->si_addr < closed || info->si_addr >= closed + size) ::abort();
            reached = true;
            pollfd entry{opening, POLLIN, 0};
            if (::poll(&entry, 1, limit_ms) != 1) ::abort();  // the test never opened it
            ::mprotect(closed, size, PROT_READ | PROT_WRITE);
        };
        handler.sa_flags = SA_SIGINFO;
        ::sigaction(SIGSEGV, &handler, &former_);
        ::mprotect(memory_, size, PROT_NONE);
    }
    ~StuckMemory() {
        ::sigaction(SIGSEGV, &former_, nullptr);
        ::munmap(memory_, size);
        ::close(opening);
    }
    StuckMemory(const StuckMemory&) = delete;
    StuckMemory& operator=(const StuckMemory&) = delete;
    [[nodiscard]] Memory memory() const { return {memory_, size}; }
    static void wait_until_reached() {
        wait_until([] { return reached.load(); }, Deadline::in(patience(milliseconds{60000})), "nobody copied");
    }
    static void open() { EXPECT_EQ(::eventfd_write(opening, 1), 0); }

   private:
    static constexpr size_t size = static_cast<size_t>(chunk_bytes);
    static inline std::byte* closed = nullptr;
    static inline std::atomic<bool> reached{false};
    static inline int opening = -1;  // an eventfd, which a signal handler may wait for
    static inline int limit_ms = 0;
    std::byte* memory_ = nullptr;
    struct sigaction former_{};
};

// A save whose one chunk another thread copies, and gets stuck.
class StuckCopyTest : public ::testing::Test {
   protected:
    void copy(milliseconds timeout) {
        const Piece piece{"w", DType::u8, std::make_shared<const Box>(Box::whole({chunk_bytes})),
                          const_cast<std::byte*>(stuck_.memory().data())};
        staging_ = std::make_shared<Staging>(std::make_shared<StagingPool>(0), 1,
                                             std::vector<ByteRuns>{ByteRuns(std::span(&piece, 1))}, timeout,
                                             Barriers{barrier_});
        staging_->stage(1, {});
        copying_ = std::async(std::launch::async, [this] { staging_->copy_late(1); });
        StuckMemory::wait_until_reached();
    }
    // Whether `body` returns only when the copy is made. A return that comes too early may be missed, but never made up.
    bool waits_for_the_copy(const std::function<void()>& body) {
        const auto done = std::async(std::launch::async, body);
        const bool waited = done.wait_for(std::chrono::milliseconds(100)) == std::future_status::timeout;
        StuckMemory::open();
        return waited && done.wait_for(patience(std::chrono::seconds(60))) == std::future_status::ready;
    }
    StuckMemory stuck_;
    std::shared_ptr<WriteBarrier> barrier_ = std::make_shared<WriteBarrier>(std::vector<Memory>{stuck_.memory()});
    std::shared_ptr<Staging> staging_;
    std::future<void> copying_;
};

TEST_F(StuckCopyTest, AWriteWaitsForACopyThatAnotherThreadHasBegun) {
    copy(patience(milliseconds{60000}));
    EXPECT_TRUE(waits_for_the_copy([&] { barrier_->before_write(stuck_.memory().subspan(4096, 1)); }));
    EXPECT_NE(staging_->source(0)->contiguous(0, chunk_bytes), nullptr);
}

TEST_F(StuckCopyTest, TheEndOfASaveWaitsForTheCopyAndThenAsksForNothing) {
    copy(patience(milliseconds{60000}));
    EXPECT_TRUE(waits_for_the_copy([&] { staging_->close(); }));
    copying_.get();
    EXPECT_EQ(staging_.use_count(), 1);
    EXPECT_EQ(barrier_.use_count(), 2);
}

TEST_F(StuckCopyTest, AWriterThatCannotWaitLongerGoesOnAndNothingTornIsSaved) {
    copy(milliseconds{20});
    barrier_->before_write(stuck_.memory());
    StuckMemory::open();
    copying_.get();
    const Error torn = error_of([&] { (void)staging_->source(0)->contiguous(0, chunk_bytes); });
    EXPECT_EQ(torn.code(), Code::timeout);
    EXPECT_THAT(torn.what(), ::testing::HasSubstr("chunk 0 of 1 was not copied within 20 ms"));
}

// An optimizer that goes on while its state is saved; what is loaded is compared with copies of the time of each save.
TEST_F(LateCopyTest, TrainingGoesOnAndEverySaveIsOfItsStep) {
    constexpr int params = 12;
    constexpr int64_t n = 300'000;
    using Floats = std::vector<float>;
    std::vector<Floats> values(params, Floats(n, 1.0F));
    std::vector<Floats> grads(params, Floats(n, 0.5F));
    std::map<int64_t, std::map<std::string, Floats>> expected;  // by step and name
    {
        std::vector<OptimizerParam> list;
        for (int i = 0; i < params; ++i) {
            const auto at = static_cast<size_t>(i);
            list.push_back({"p" + std::to_string(i), tensor_of(std::span<float>(values[at]), DType::f32),
                            tensor_of(std::span<float>(grads[at]), DType::f32)});
        }
        auto optimizer = std::make_optional<Adam>(list, AdamOptions{});
        std::optional<State> state(std::in_place);
        for (const OptimizerParam& param : list) state->add_tensor("model." + param.name, param.value);
        for (const Moment& moment : optimizer->moments()) {
            state->add_tensor("optim." + moment.param + "." + moment.name, moment.tensor);
        }
        state->add_barrier(optimizer->barrier());
        SaverOptions waiting = saver_options();
        waiting.copies = Copies::on_demand;
        Saver saver(nullptr, dir_.path(), waiting);
        for (int64_t step = 1; step <= 9; ++step) {
            for (Floats& grad : grads) grad.assign(n, 0.25F * static_cast<float>(step));
            optimizer->step();
            if (step % 3 != 0) continue;
            for (const auto& [name, tensor] : state->tensors()) {
                const auto floats = tensor.piece(0).as<float>();
                expected[step][name].assign(floats.begin(), floats.end());
            }
            (void)saver.save_async(step, *state);
        }
        state.reset();
        optimizer.reset();  // its memory goes while the last save may still copy
        for (Floats& value : values) value.assign(n, -1.0F);
        saver.wait();
    }
    ASSERT_EQ(expected.size(), 3u);
    for (const auto& [step, tensors] : expected) {
        std::shared_ptr<const Checkpoint> checkpoint;
        for (const SavedStep& save : scan_root(posix_file_system(), dir_.path())) {
            if (save.step == step) checkpoint = Checkpoint::open(dir_ / save.directory);
        }
        ASSERT_NE(checkpoint, nullptr) << step;
        ASSERT_EQ(checkpoint->names().size(), tensors.size());
        for (const auto& [name, floats] : tensors) {
            Floats read(floats.size());
            const SavedTensor& saved = *checkpoint->manifest().find(name);
            checkpoint->read(name, {reinterpret_cast<std::byte*>(read.data()), saved.shape, DType::f32, {}});
            EXPECT_EQ(std::memcmp(read.data(), floats.data(), floats.size() * sizeof(float)), 0) << step << name;
        }
    }
}

}  // namespace
}  // namespace tsr::testing
