// What the tests of saves that copy late share: a state with a barrier, and a save in the background that is held, so
// that nothing of the one behind it is copied but by the barrier.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fixture.hpp"
#include "patience.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr::testing {

// 2.8 MB a tensor: chunks that hold parts of two, and several that hold parts of one.
inline constexpr int64_t rows = 700;

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

inline void overwrite(Memory memory) {
    std::fill_n(const_cast<std::byte*>(memory.data()), memory.size(), std::byte{0xcd});
}

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

}  // namespace tsr::testing
