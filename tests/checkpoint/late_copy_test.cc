// Saves that copy what an optimizer owns late: whenever the optimizer's next step comes, what is saved is what the state
// was when save_async was called.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <map>
#include <optional>

#include "checkpoint/native/root.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "optim/adam.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr::testing {
namespace {

constexpr int64_t rows = 700;  // 2.8 MB a tensor: chunks that hold parts of two, and several that hold parts of one

// A state whose tensors "w0", ... belong to a barrier, and "other" to nobody.
struct Guarded {
    explicit Guarded(int tensors, bool with_other = true) {
        for (int i = 0; i < tensors; ++i) owned.add_whole({"w" + std::to_string(i), DType::f32, {rows, 1000}});
        if (with_other) owned.add_whole({"other", DType::f32, {10}});
        std::vector<Memory> memories;
        for (const auto& [name, tensor] : owned.state.tensors()) {
            if (name != "other") memories.push_back(memory(name));
        }
        barrier = std::make_shared<WriteBarrier>(std::move(memories));
        owned.state.add_barrier(barrier);
        owned.fill();
    }
    Memory memory(const std::string& name) {
        const Tensor& tensor = owned.state.tensors().at(name).pieces[0];
        return {tensor.data, tensor.size_bytes()};
    }
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
            EXPECT_EQ(opened_.wait_for(std::chrono::seconds(60)), std::future_status::ready);
        };
    }
    void wait_until_reached() {
        ASSERT_EQ(reached_.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
    }
    void open() { open_.set_value(); }

   private:
    std::promise<void> open_;
    std::shared_future<void> opened_ = open_.get_future().share();
    std::promise<void> reached_;
    std::atomic<bool> was_reached_{false};
};

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
    // How many elements of the newest checkpoint differ from fill(salt).
    int64_t saved_differences(int tensors, uint64_t salt = 0, bool with_other = true) {
        Guarded loaded(tensors, with_other);
        loaded.owned.poison();
        (void)Checkpoint::open(dir_.path())->load(loaded.owned.state);
        return loaded.owned.differences(salt);
    }
    TempDir dir_;
    Busy busy_;
};

class LateCopyOfFormat : public LateCopyTest, public ::testing::WithParamInterface<SaveFormat> {};

TEST_P(LateCopyOfFormat, WhatIsWrittenAfterTheBarrierIsNotSaved) {
    Guarded guarded(5);
    Saver saver(nullptr, dir_.path(), options(GetParam()));
    const WorkPtr first = saver.save_async(1, guarded.owned.state);
    busy_.wait_until_reached();
    const WorkPtr second = saver.save_async(2, guarded.owned.state);
    // In another order than the file's, and not all.
    for (const char* name : {"w3", "w0", "w4"}) {
        const Memory memory = guarded.memory(name);
        guarded.barrier->before_write(memory);
        std::fill_n(const_cast<std::byte*>(memory.data()), memory.size(), std::byte{0xcd});
    }
    const Memory other = guarded.memory("other");
    std::fill_n(const_cast<std::byte*>(other.data()), other.size(), std::byte{0xcd});  // nobody's: copied at once
    busy_.open();
    saver.wait();
    EXPECT_EQ(Checkpoint::open(dir_.path())->manifest().step, 2);
    EXPECT_EQ(saved_differences(5), 0);
}

INSTANTIATE_TEST_SUITE_P(Formats, LateCopyOfFormat, ::testing::Values(SaveFormat::native, SaveFormat::torch_dcp));

TEST_F(LateCopyTest, WhatTheBarrierOwnsIsIndeedLate) {
    Guarded guarded(3, false);
    Saver saver(nullptr, dir_.path(), options());
    const WorkPtr first = saver.save_async(1, guarded.owned.state);
    busy_.wait_until_reached();
    const WorkPtr second = saver.save_async(2, guarded.owned.state);
    guarded.owned.fill(1);  // behind the barrier's back: the save, which has not begun, sees it
    busy_.open();
    saver.wait();
    EXPECT_EQ(saved_differences(3, 1, false), 0);
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
    const WorkPtr first = saver.save_async(1, guarded.owned.state);
    busy_.wait_until_reached();
    const WorkPtr second = saver.save_async(2, guarded.owned.state);
    (void)Checkpoint::open(dir_ / "elsewhere")->load(guarded.owned.state);
    EXPECT_EQ(guarded.owned.differences(7), 0);
    busy_.open();
    saver.wait();
    (void)Checkpoint::open(dir_ / "root")->load(guarded.owned.state);
    EXPECT_EQ(guarded.owned.differences(), 0);
}

TEST_F(LateCopyTest, AReplacedSaveGivesItsMemoryBackAndAsksForNothing) {
    Guarded guarded(3);
    Saver saver(nullptr, dir_.path(), options());
    const WorkPtr first = saver.save_async(1, guarded.owned.state);
    busy_.wait_until_reached();
    const WorkPtr second = saver.save_async(2, guarded.owned.state);
    const WorkPtr third = saver.save_async(3, guarded.owned.state);
    EXPECT_TRUE(second->done());
    busy_.open();
    saver.wait();
    EXPECT_EQ(guarded.barrier.use_count(), 2) << "the test's and the state's";
    saver.trim();
    EXPECT_EQ(saver.staging_size(), 0);
    EXPECT_EQ(saved_differences(3), 0);
}

TEST_F(LateCopyTest, AStateLargerThanTheStagingMemoryIsCopiedAtOnce) {
    Guarded guarded(5);
    SaverOptions bounded = options();
    bounded.staging_bytes = int64_t{8} << 20;
    bounded.progress = nullptr;
    Saver saver(nullptr, dir_.path(), bounded);
    const WorkPtr work = saver.save_async(1, guarded.owned.state);
    guarded.owned.fill(1);
    saver.wait();
    EXPECT_EQ(saved_differences(5), 0);
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
                const auto floats = tensor.pieces[0].as<float>();
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
