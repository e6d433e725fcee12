// The optimizer's step in the backward: each bucket is updated once it is reduced, with the bits of a step afterwards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>

#include "base/clock.hpp"
#include "grads.hpp"
#include "optim/adam.hpp"
#include "optim/sgd.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "soon.hpp"
#include "tensor/write_barrier.hpp"
#include "with_grads.hpp"

namespace tsr {
namespace {

using ::testing::Each;
using testing::expect_all_well;
using testing::expect_error;
using testing::fill;
using ::testing::HasSubstr;
using testing::Model;
using testing::run_ranks;
using testing::shared;
using testing::small;
using testing::test_options;
using testing::three_layers;
using testing::with_grads;

template <class Kind, class Options>
void expect_the_bits_of_a_step_afterwards(const Options& options) {
    expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
        Model one = three_layers(1);
        Model other = three_layers(1);
        const DdpOptions unused = small({.find_unused = true});
        Ddp after(shared(comm), one.params(), unused);
        Ddp during(shared(comm), other.params(), unused);
        Kind late(with_grads(after), options);
        Kind early(with_grads(during), options);
        during.step_in_backward(early);
        std::mt19937 random(static_cast<unsigned>(17 + comm.rank()));
        for (int step = 0; step < 10; ++step) {
            for (size_t i = 0; i < 3; ++i) {
                const bool has = i != 1 || step % 3 == comm.rank();  // "b": one rank at most
                if (!has) continue;
                for (size_t k = 0; k < after.grad(i).as<float>().size(); ++k) {
                    after.grad(i).as<float>()[k] = during.grad(i).as<float>()[k] =
                        static_cast<float>(random() % 1000) / 500 - 1;
                }
            }
            for (Ddp* ddp : {&after, &during}) {
                for (size_t i = 3; i-- > 0;) {
                    if (i == 1 && (step % 3 != comm.rank() || step > 6)) continue;  // at the end nobody has it
                    ddp->ready(i);
                }
                ddp->wait();
            }
            late.step();
            for (size_t i = 0; i < 3; ++i) EXPECT_EQ(one.entries[i].values, other.entries[i].values) << "step " << step;
        }
        EXPECT_EQ(early.steps(), 10);
        for (size_t m = 0; m < late.moments().size(); ++m) {
            const Tensor& a = late.moments()[m].tensor;
            const Tensor& b = early.moments()[m].tensor;
            EXPECT_EQ(std::memcmp(a.data, b.data, a.size_bytes()), 0) << late.moments()[m].name;
        }
    }));
}

TEST(DdpStepInBackward, GivesTheBitsOfAStepAfterwards) {
    expect_the_bits_of_a_step_afterwards<Sgd>(SgdOptions{.lr = 0.1, .momentum = 0.9});
    expect_the_bits_of_a_step_afterwards<Adam>(AdamOptions{.lr = 0.01, .weight_decay = 0.1, .decay = Decay::decoupled});
}

// Tells when a step is about to change this memory.
class Watch final : public LateCopy {
   public:
    explicit Watch(const std::byte* memory) : memory_(memory) {}
    void copy_now(Memory memory) noexcept override {
        if (memory.data() == memory_) changed_ = true;
    }
    [[nodiscard]] bool changed() const { return changed_; }

   private:
    const std::byte* memory_;
    std::atomic<bool> changed_{false};
};

TEST(DdpStepInBackward, ABucketIsUpdatedWhileOthersAreNotReadyYet) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers(1);
        Ddp ddp(shared(comm), model.params(), small());
        Sgd optimizer(with_grads(ddp), {.lr = 1});
        ddp.step_in_backward(optimizer);
        const auto watch = std::make_shared<Watch>(ddp.param(2).tensor.data);
        optimizer.barrier()->add(watch);
        fill(ddp, 2, 1);
        ddp.ready(2);
        wait_until([&] { return watch->changed(); }, testing::soon(), "the first bucket's update");
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(model.entries[2].values, Each(0.0F));
        optimizer.barrier()->remove(watch.get());
        comm.run({});
    }));
}

TEST(DdpStepInBackward, TheOptimizersOwnStepAndASecondAreRefused) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        Model model = three_layers(1);
        Ddp ddp(shared(comm), model.params(), {});
        Sgd optimizer(with_grads(ddp), {.lr = 1});
        Sgd second(with_grads(ddp), {.lr = 1});
        ddp.step_in_backward(optimizer);
        expect_error([&] { ddp.step_in_backward(second); }, Code::invalid_state);
        EXPECT_THAT(expect_error([&] { optimizer.step(); }, Code::invalid_state).what(),
                    HasSubstr("the step is already done"));
        ddp.forget_optimizer(second);  // it does not step
        fill(ddp, 0, 1);
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(model.entries[0].values, Each(0.0F));
        ddp.forget_optimizer(optimizer);
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(model.entries[0].values, Each(0.0F));
    }));
}

}  // namespace
}  // namespace tsr
