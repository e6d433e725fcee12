#include "parallel/ddp/ddp.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>

#include "data/splitmix64.hpp"
#include "optim/adam.hpp"
#include "optim/sgd.hpp"
#include "ranks.hpp"

namespace tsr {
namespace {

using ::testing::Each;
using testing::expect_all_well;
using ::testing::HasSubstr;
using testing::Outcomes;
using testing::run_ranks;
using testing::test_options;

// Parameters of f32 in memory of their own.
struct Model {
    struct Entry {
        std::string name;
        Dims shape;
        std::vector<float> values;
    };
    std::vector<Entry> entries;

    void add(const std::string& name, Dims shape, float value = 0) {
        entries.push_back({name, shape, std::vector<float>(static_cast<size_t>(shape.product()), value)});
    }
    std::vector<NamedTensor> params() {
        std::vector<NamedTensor> out;
        for (Entry& entry : entries) {
            Tensor tensor = tensor_of(std::span<float>(entry.values), DType::f32);
            tensor.shape = entry.shape;
            out.push_back({entry.name, tensor});
        }
        return out;
    }
};

Model three_layers(float value = 0) {
    Model model;
    model.add("a", {300}, value);
    model.add("b", {20, 15}, value);
    model.add("c", {7}, value);
    return model;
}

// The test's rank keeps the communicator for longer than any DDP object lives.
std::shared_ptr<Communicator> shared(Communicator& comm) { return {std::shared_ptr<void>(), &comm}; }

constexpr DdpOptions small_buckets{.bucket_bytes = 64, .first_bucket_bytes = 64};  // one parameter a bucket

std::vector<OptimizerParam> with_grads(const Ddp& ddp) {
    std::vector<OptimizerParam> out;
    for (size_t i = 0; i < ddp.params().size(); ++i)
        out.push_back({ddp.param(i).name, ddp.param(i).tensor, ddp.grad(i)});
    return out;
}

Error expect_error(const std::function<void()>& call, Code code) {
    try {
        call();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), code) << error.what();
        return error;
    }
    ADD_FAILURE() << "nothing was thrown";
    return Error(Code::ok, "");
}

class DdpOverWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, DdpOverWorlds, ::testing::Values(1, 2, 3, 4, 5));

TEST_P(DdpOverWorlds, EveryRankStartsWithTheValuesOfRankZero) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        Model model = three_layers(static_cast<float>(comm.rank() + 5));
        Ddp ddp(shared(comm), model.params(), small_buckets);
        for (const auto& entry : model.entries) EXPECT_THAT(entry.values, Each(5.0F)) << entry.name;
        for (size_t i = 0; i < 3; ++i) {
            EXPECT_THAT(ddp.grad(i).as<float>(), Each(0.0F)) << "gradients begin at zero";
        }
    }));
}

TEST_P(DdpOverWorlds, GradientsBecomeTheAverageWhateverTheOrderOfReady) {
    const int world_size = GetParam();
    expect_all_well(run_ranks(world_size, test_options(), [&](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small_buckets);
        const std::array<std::array<size_t, 3>, 3> orders{{{0, 1, 2}, {2, 0, 1}, {1, 2, 0}}};
        for (int step = 0; step < 6; ++step) {
            for (const size_t i : orders.at(static_cast<size_t>(comm.rank() + step) % 3)) {
                for (float& g : ddp.grad(i).as<float>())
                    g = static_cast<float>(i * 100) + static_cast<float>(comm.rank() + step);
                ddp.ready(i);
            }
            ddp.wait();
            for (size_t i = 0; i < 3; ++i) {
                const float mean =
                    static_cast<float>(i * 100) + static_cast<float>(world_size - 1) / 2 + static_cast<float>(step);
                for (const float g : ddp.grad(i).as<float>()) ASSERT_FLOAT_EQ(g, mean);
            }
        }
    }));
}

TEST(Ddp, SumIsTheSum) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {.op = ReduceOp::sum});
        for (float& g : ddp.grad(1).as<float>()) g = static_cast<float>(comm.rank() + 1);
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(ddp.grad(1).as<float>(), Each(6.0F));
    }));
}

TEST(Ddp, EveryFloatingDtypeIsReduced) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        std::array<uint16_t, 8> f16{};
        std::array<uint16_t, 8> bf16{};
        std::array<float, 8> f32{};
        std::array<double, 8> f64{};
        Ddp ddp(shared(comm),
                {{"f16", tensor_of(std::span<uint16_t>(f16), DType::f16)},
                 {"bf16", tensor_of(std::span<uint16_t>(bf16), DType::bf16)},
                 {"f32", tensor_of(std::span<float>(f32), DType::f32)},
                 {"f64", tensor_of(std::span<double>(f64), DType::f64)}},
                {});
        const bool first = comm.rank() == 0;
        for (uint16_t& g : ddp.grad(0).as<uint16_t>()) g = first ? 0x3c00 : 0x4200;  // 1, 3
        for (uint16_t& g : ddp.grad(1).as<uint16_t>()) g = first ? 0x3f80 : 0x4040;  // 1, 3
        for (float& g : ddp.grad(2).as<float>()) g = first ? 1 : 3;
        for (double& g : ddp.grad(3).as<double>()) g = first ? 1 : 3;
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(ddp.grad(0).as<uint16_t>(), Each(0x4000));
        EXPECT_THAT(ddp.grad(1).as<uint16_t>(), Each(0x4000));
        EXPECT_THAT(ddp.grad(2).as<float>(), Each(2.0F));
        EXPECT_THAT(ddp.grad(3).as<double>(), Each(2.0));
    }));
}

TEST(Ddp, EmptyParametersAreTaken) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model;
        model.add("empty", {0, 4});
        model.add("full", {4}, 1);
        Ddp ddp(shared(comm), model.params(), small_buckets);
        for (float& g : ddp.grad(1).as<float>()) g = 1;
        ddp.ready_all();
        ddp.wait();
        EXPECT_THAT(ddp.grad(1).as<float>(), Each(1.0F));
    }));
}

TEST(Ddp, WrappersPrefixesAreStripped) {
    EXPECT_EQ(without_wrappers("module.fc1.weight"), "fc1.weight");
    EXPECT_EQ(without_wrappers("module._orig_mod.fc1.weight"), "fc1.weight");
    EXPECT_EQ(without_wrappers("fc.module.weight"), "fc.module.weight");
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model;
        model.add(comm.rank() == 0 ? "module.w" : "w", {4});
        const Ddp ddp(shared(comm), model.params(), {});
        EXPECT_EQ(ddp.param(0).name, "w");
    }));
}

TEST(Ddp, DifferentModelsAreNamedAlikeOnEveryRank) {
    struct Case {
        std::function<void(Model&)> change;  // what rank 2 registers otherwise
        std::string said;
    };
    const std::vector<Case> cases{
        {[](Model& m) { m.entries[1].name = "bb"; },
         R"(rank 2 has parameter 1 "bb" f32 [20, 15], rank 0 has parameter 1 "b")"},
        {[](Model& m) { m.entries[1].shape = {15, 20}; }, R"(rank 2 has parameter 1 "b" f32 [15, 20])"},
        {[](Model& m) { m.entries.pop_back(); }, R"(rank 2 has nothing, rank 0 has parameter 2 "c" f32 [7])"},
        {[](Model& m) { m.add("d", {3}); }, R"(rank 2 has parameter 3 "d" f32 [3], rank 0 has nothing)"},
        {[](Model& m) { std::swap(m.entries[0], m.entries[2]); }, R"(rank 2 has parameter 0 "c" f32 [7])"},
    };
    for (const Case& one : cases) {
        const Outcomes outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
            Model model = three_layers();
            if (comm.rank() == 2) one.change(model);
            const Ddp ddp(shared(comm), model.params(), {});
        });
        for (const auto& outcome : outcomes) {
            ASSERT_TRUE(outcome);
            EXPECT_EQ(outcome->code(), Code::mismatch);
            EXPECT_THAT(outcome->what(), HasSubstr(one.said));
            EXPECT_EQ(outcome->record()->peer, 2);
        }
    }
}

TEST(Ddp, DifferentDtypesAndOptionsAreNamed) {
    const Outcomes dtypes = run_ranks(2, test_options(), [](Communicator& comm) {
        std::array<double, 4> memory{};
        const DType dtype = comm.rank() == 0 ? DType::f32 : DType::f64;
        const Tensor tensor{reinterpret_cast<std::byte*>(memory.data()), Dims{4}, dtype, {}};
        const Ddp ddp(shared(comm), {{"w", tensor}}, {});
    });
    for (const auto& outcome : dtypes) {
        ASSERT_TRUE(outcome);
        EXPECT_THAT(outcome->what(),
                    HasSubstr(R"(rank 1 has parameter 0 "w" f64 [4], rank 0 has parameter 0 "w" f32 [4])"));
    }
    const Outcomes options = run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        const Ddp ddp(shared(comm), model.params(), {.op = comm.rank() == 0 ? ReduceOp::avg : ReduceOp::sum});
    });
    for (const auto& outcome : options) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("op sum"));
    }
}

TEST(Ddp, CommunicatorIsUsableAfterAMismatch) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Model other = three_layers();
        if (comm.rank() == 1) other.entries[0].name = "x";
        expect_error([&] { const Ddp ddp(shared(comm), other.params(), {}); }, Code::mismatch);
        Ddp ddp(shared(comm), model.params(), {});
        ddp.ready_all();
        ddp.wait();
    }));
}

TEST(Ddp, GradientsThatWereNotSaidReadyAreNamedAndCanBeCompleted) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small_buckets);
        for (float& g : ddp.grad(0).as<float>()) g = static_cast<float>(comm.rank());
        ddp.ready(1);
        const Error error = expect_error([&] { ddp.wait(); }, Code::invalid_state);
        EXPECT_THAT(error.what(), HasSubstr(R"(2 of 3 gradients were never said to be ready: "a", "c")"));
        ddp.ready(0);
        ddp.ready(2);
        ddp.wait();
        EXPECT_THAT(ddp.grad(0).as<float>(), Each(0.5F));
    }));
}

TEST(Ddp, ManyMissingGradientsAreCountedAfterTheFirstEight) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        Model model;
        for (int i = 0; i < 20; ++i) model.add(fmt::format("p{}", i), {2});
        Ddp ddp(shared(comm), model.params(), {});
        const Error error = expect_error([&] { ddp.wait(); }, Code::invalid_state);
        EXPECT_THAT(error.what(), HasSubstr(R"("p7" and 12 more)"));
    }));
}

TEST(Ddp, ReadyTwiceIsRefusedByName) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {});
        ddp.ready(1);
        EXPECT_THAT(expect_error([&] { ddp.ready(1); }, Code::invalid_state).what(), HasSubstr("\"b\""));
        expect_error([&] { ddp.ready(3); }, Code::invalid_argument);
        ddp.ready_all();
        expect_error([&] { ddp.ready(0); }, Code::invalid_state);
        ddp.wait();
        ddp.ready(1);  // a new step
        ddp.ready_all();
        ddp.wait();
    }));
}

TEST(Ddp, GradientsCannotBeTouchedWhileTheyAreReduced) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers(1);
        Ddp ddp(shared(comm), model.params(), {});
        Sgd optimizer(with_grads(ddp), {.lr = 1});
        optimizer.set_gate([&] { ddp.check_idle("the optimizer cannot use the gradients"); });
        for (float& g : ddp.grad(0).as<float>()) g = 1;
        ddp.ready(0);
        expect_error([&] { ddp.zero_grad(); }, Code::invalid_state);
        EXPECT_THAT(expect_error([&] { optimizer.step(); }, Code::invalid_state).what(),
                    HasSubstr("wait for the gradients first"));
        ddp.ready_all();
        expect_error([&] { optimizer.step(); }, Code::invalid_state);
        ddp.wait();
        optimizer.step();
        EXPECT_THAT(model.entries[0].values, Each(0.0F));
        EXPECT_THAT(model.entries[1].values, Each(1.0F));
        ddp.zero_grad();
        EXPECT_THAT(ddp.grad(0).as<float>(), Each(0.0F));
    }));
}

TEST(Ddp, BadRegistrationsAreRefused) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        const auto own = shared(comm);
        std::array<int32_t, 2> integers{};
        Model twice;
        twice.add("w", {2});
        twice.add("module.w", {2});
        Model model = three_layers();
        expect_error([&] { const Ddp ddp(own, {}, {}); }, Code::invalid_argument);
        EXPECT_THAT(expect_error([&] { const Ddp ddp(own, twice.params(), {}); }, Code::invalid_argument).what(),
                    HasSubstr("two parameters are named \"w\""));
        EXPECT_THAT(
            expect_error([&] { const Ddp ddp(own, {{"i", tensor_of(std::span<int32_t>(integers), DType::i32)}}, {}); },
                         Code::invalid_argument)
                .what(),
            HasSubstr("\"i\" is i32"));
        expect_error([&] { const Ddp ddp(own, model.params(), {.op = ReduceOp::max}); }, Code::invalid_argument);
    }));
}

TEST(Ddp, FailedReductionPoisonsAndNamesItsCause) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), small_buckets);
        Sgd optimizer(with_grads(ddp), {});
        optimizer.set_gate([&] { ddp.check_idle("the optimizer cannot use the gradients"); });
        if (comm.rank() == 1) {
            comm.abort("rank 1 gives up");
            return;
        }
        const Error first = expect_error(
            [&] {
                ddp.ready_all();
                ddp.wait();
            },
            Code::aborted);
        EXPECT_THAT(first.what(), HasSubstr("rank 1 gives up"));
        const Error later = expect_error([&] { ddp.ready(0); }, Code::aborted);
        ASSERT_NE(later.record()->cause, nullptr);
        EXPECT_THAT(later.record()->cause->message, HasSubstr("rank 1 gives up"));
        expect_error([&] { ddp.wait(); }, Code::aborted);
        expect_error([&] { ddp.ready_all(); }, Code::aborted);
        expect_error([&] { ddp.zero_grad(); }, Code::invalid_state);
        expect_error([&] { optimizer.step(); }, Code::invalid_state);
    });
    expect_all_well(outcomes);
}

TEST(Ddp, AWaitInTheInterruptCallbackOfAWaitIsRefused) {
    std::atomic<bool> made{false};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {});
        if (comm.rank() == 1) {
            testing::await_call(made);
            ddp.ready_all();
            ddp.wait();
            return;
        }
        ddp.ready_all();
        const testing::CallInInterrupt callback([&] { ddp.wait(); }, made);
        ddp.wait();
        ASSERT_TRUE(callback.error());
        EXPECT_EQ(callback.error()->code(), Code::invalid_state) << callback.error()->what();
    }));
}

TEST(Ddp, CanBeDestroyedWhileReducing) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        {
            Ddp ddp(shared(comm), model.params(), small_buckets);
            ddp.ready_all();
        }
        comm.run({.collective = Collective::barrier});
    }));
}

// ---- whole trainings -------------------------------------------------------------------------------------------------

// A two-layer network with tanh on a fixed regression problem of 24 samples; the rank's share of each batch is every
// world-th sample. The gradients are those of the mean over the rank's samples.
class Regression {
   public:
    static constexpr size_t in = 5;
    static constexpr size_t hidden = 8;
    static constexpr size_t samples = 24;

    Regression() {
        SplitMix64 random(99);
        const auto uniform = [&] { return static_cast<float>(random.next() >> 40) / 0x1p24F * 2 - 1; };
        for (auto& x : inputs_) {
            for (float& value : x) value = uniform();
        }
        for (float& y : targets_) y = uniform();
        model.add("w1", {hidden, in});
        model.add("b1", {hidden});
        model.add("w2", {1, hidden});
        for (auto& entry : model.entries) {
            for (float& value : entry.values) value = uniform() / 2;
        }
    }

    void backward(const Ddp& ddp, int rank, int world_size) const {
        const auto w1 = ddp.param(0).tensor.as<float>();
        const auto b1 = ddp.param(1).tensor.as<float>();
        const auto w2 = ddp.param(2).tensor.as<float>();
        const auto g1 = ddp.grad(0).as<float>();
        const auto gb = ddp.grad(1).as<float>();
        const auto g2 = ddp.grad(2).as<float>();
        for (const auto g : {g1, gb, g2}) std::fill(g.begin(), g.end(), 0.0F);
        const float share = static_cast<float>(world_size) / samples;
        for (size_t s = static_cast<size_t>(rank); s < samples; s += static_cast<size_t>(world_size)) {
            std::array<float, hidden> h{};
            float y = 0;
            for (size_t j = 0; j < hidden; ++j) {
                float sum = b1[j];
                for (size_t k = 0; k < in; ++k) sum += w1[j * in + k] * inputs_[s][k];
                h[j] = std::tanh(sum);
                y += w2[j] * h[j];
            }
            const float d = 2 * (y - targets_[s]) * share;
            for (size_t j = 0; j < hidden; ++j) {
                const float dh = d * w2[j] * (1 - h[j] * h[j]);
                g2[j] += d * h[j];
                gb[j] += dh;
                for (size_t k = 0; k < in; ++k) g1[j * in + k] += dh * inputs_[s][k];
            }
        }
    }

    Model model;

   private:
    std::array<std::array<float, in>, samples> inputs_{};
    std::array<float, samples> targets_{};
};

// The weights after 50 steps on `world_size` ranks; all ranks must have the same bits.
template <class Kind, class Options>
std::vector<float> trained(int world_size, const Options& options) {
    std::mutex mutex;
    std::vector<std::vector<float>> results;
    expect_all_well(run_ranks(world_size, test_options(), [&](Communicator& comm) {
        Regression problem;
        Ddp ddp(shared(comm), problem.model.params(), small_buckets);
        Kind optimizer(with_grads(ddp), options);
        for (int step = 0; step < 50; ++step) {
            problem.backward(ddp, comm.rank(), comm.world_size());
            for (size_t i = 3; i-- > 0;) ddp.ready(i);
            ddp.wait();
            optimizer.step();
        }
        std::vector<float> all;
        for (const auto& entry : problem.model.entries) all.insert(all.end(), entry.values.begin(), entry.values.end());
        const std::lock_guard lock(mutex);
        results.push_back(std::move(all));
    }));
    for (const auto& result : results) EXPECT_EQ(result, results[0]) << "ranks ended with different bits";
    return results[0];
}

template <class Kind, class Options>
void expect_world_size_does_not_matter(const Options& options) {
    const auto alone = trained<Kind>(1, options);
    for (const int world_size : {2, 3, 4}) {
        const auto together = trained<Kind>(world_size, options);
        for (size_t i = 0; i < alone.size(); ++i) {
            EXPECT_NEAR(together[i], alone[i], 1e-4 * std::abs(alone[i]) + 1e-6)
                << world_size << " ranks, weight " << i;
        }
        EXPECT_EQ(trained<Kind>(world_size, options), together) << "a second run gave other bits";
    }
}

TEST(DdpTraining, RanksWithAShareOfTheBatchEqualOneRankWithAllOfItSgd) {
    expect_world_size_does_not_matter<Sgd>(SgdOptions{.lr = 0.05, .momentum = 0.9});
}

TEST(DdpTraining, RanksWithAShareOfTheBatchEqualOneRankWithAllOfItAdamW) {
    expect_world_size_does_not_matter<Adam>(AdamOptions{.lr = 0.003, .weight_decay = 0.01, .decay = Decay::decoupled});
}

}  // namespace
}  // namespace tsr
