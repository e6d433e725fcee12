// Optimizers whose state is copied late. A step asks for each tensor before it changes it, so a save holds the step of
// its call however soon the next step comes.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/root/root.hpp"
#include "fixture.hpp"
#include "late_copy_fixture.hpp"
#include "optim/adam.hpp"
#include "optim/sgd.hpp"
#include "tensor/write_barrier.hpp"

namespace tsr::testing {
namespace {

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
