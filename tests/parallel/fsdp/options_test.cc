// Options alone and in pairs: whatever the schedule, the dtypes, the replicas, the optimizer or the way of accumulating, the
// ranks train as one rank does with the whole batch, and a repeat has the same bits. Of the pairs a part, drawn by
// TESSERA_TEST_SEED; all with `./dev test --long`.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <compare>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlp.hpp"
#include "optim/adam.hpp"
#include "optim/grad_scaler.hpp"
#include "optim/sgd.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "sampling.hpp"
#include "sanitized.hpp"
#include "tensor/convert.hpp"

namespace tsr {
namespace {

using testing::expect_all_well;
using testing::Mlp;
using testing::Model;
using testing::run_ranks;
using testing::shared;
using testing::test_options;

constexpr int world = 4;
constexpr size_t batch_size = 64;

// Where everything takes longer.
bool is_slow() {
    // NOLINTBEGIN(concurrency-mt-unsafe): nobody sets them
    return testing::sanitized || std::getenv("TESSERA_TEST_HOSTS") != nullptr ||
           std::getenv("TESSERA_TEST_BACKEND") != nullptr;
    // NOLINTEND(concurrency-mt-unsafe)
}

const int training_steps = is_slow() ? 20 : 50;

// How gradients of two halves of a rank's batch add up.
enum class Adding { whole_batch, without_sync, into_shards, over_replicas_later };

enum class Updates { adamw, adam, sgd };

// What one rank alone does otherwise, too.
struct Alone {
    Updates updates = Updates::adamw;
    bool frozen = false;  // the bias of the second layer
    bool clips = false;   // to a norm that most gradients exceed

    friend auto operator<=>(const Alone&, const Alone&) = default;
};

struct Training {
    Alone alone;
    FsdpOptions options;
    std::vector<size_t> kept;                            // units that stay whole,
    int kept_among = 0;                                  // or are kept among so many ranks
    std::vector<std::pair<size_t, DType>> param_dtypes;  // of some units
    bool is_left = false;                                // all units' memory, after their backward
    int row_block = 0;                                   // of all units
    std::vector<size_t> flat;                            // units
    Adding adding = Adding::whole_batch;
    bool scales = false;    // its losses, by a GradScaler
    bool deferred = false;  // values come after the model is made
    bool unused = false;    // one more parameter, which no rank uses
    float tolerance = 1e-4F;
};

struct Option {
    std::string name;
    std::string kind;  // of the same kind, one counts
    std::function<void(Training&)> set;
};

const std::vector<Option>& all_options() {
    static const auto narrow = [](Training& training) { training.tolerance = 2e-2F; };
    static const std::vector<Option> options{
        {"no forward prefetch", "forward", [](Training& t) { t.options.forward_prefetch = 0; }},
        {"3 units ahead in forward", "forward", [](Training& t) { t.options.forward_prefetch = 3; }},
        {"no backward prefetch", "backward", [](Training& t) { t.options.backward_prefetch = 0; }},
        {"3 units ahead in backward", "backward", [](Training& t) { t.options.backward_prefetch = 3; }},
        {"1 reduction in flight", "in flight", [](Training& t) { t.options.grads_in_flight = 1; }},
        {"5 reductions in flight", "in flight", [](Training& t) { t.options.grads_in_flight = 5; }},
        {"whole in bf16", "param dtype",
         [](Training& t) {
             t.options.param_dtype = DType::bf16;
             narrow(t);
         }},
        {"whole in f16 with a scaler", "param dtype",
         [](Training& t) {
             t.options.param_dtype = DType::f16;
             t.scales = true;
             narrow(t);
         }},
        {"whole in f64", "param dtype", [](Training& t) { t.options.param_dtype = DType::f64; }},
        {"a unit in f16", "a unit's dtype",
         [](Training& t) {
             t.param_dtypes = {{1, DType::f16}};
             narrow(t);
         }},
        {"reduced in bf16", "reduce dtype",
         [](Training& t) {
             t.options.reduce_dtype = DType::bf16;
             narrow(t);
         }},
        {"reduced in f64", "reduce dtype", [](Training& t) { t.options.reduce_dtype = DType::f64; }},
        {"sum", "op", [](Training& t) { t.options.op = ReduceOp::sum; }},
        {"divided before", "pre_divide", [](Training& t) { t.options.pre_divide = 2; }},
        {"replicas alone", "shard_ranks", [](Training& t) { t.options.shard_ranks = 1; }},
        {"2 replicas", "shard_ranks", [](Training& t) { t.options.shard_ranks = 2; }},
        {"one unit kept", "kept", [](Training& t) { t.kept = {1}; }},
        {"all units kept among 2 ranks", "kept", [](Training& t) { t.kept_among = 2; }},
        {"all units kept", "kept", [](Training& t) { t.kept = {0, 1, 2}; }},
        {"cut by blocks of 3 rows", "cut", [](Training& t) { t.row_block = 3; }},
        {"one unit flat", "cut", [](Training& t) { t.flat = {1}; }},
        {"all units flat", "cut", [](Training& t) { t.flat = {0, 1, 2}; }},
        {"memory left after the backward", "after backward", [](Training& t) { t.is_left = true; }},
        {"half a batch without synchronisation", "adding", [](Training& t) { t.adding = Adding::without_sync; }},
        {"half a batch added to the shards", "adding", [](Training& t) { t.adding = Adding::into_shards; }},
        {"replicas reduced later", "adding", [](Training& t) { t.adding = Adding::over_replicas_later; }},
        {"a frozen parameter", "frozen", [](Training& t) { t.alone.frozen = true; }},
        {"an unused parameter", "unused", [](Training& t) { t.unused = true; }},
        {"own values", "values", [](Training& t) { t.options.sync_values = false; }},
        {"values that come later", "values", [](Training& t) { t.deferred = true; }},
        {"Adam", "optimizer", [](Training& t) { t.alone.updates = Updates::adam; }},
        {"SGD", "optimizer", [](Training& t) { t.alone.updates = Updates::sgd; }},
        {"clipped", "clipping", [](Training& t) { t.alone.clips = true; }},
    };
    return options;
}

constexpr size_t frozen_param = 3;

constexpr double max_norm = 0.1;

std::shared_ptr<Optimizer> optimizer_of(Updates updates, std::vector<OptimizerParam> params) {
    switch (updates) {
        case Updates::adamw:
            return std::make_shared<Adam>(std::move(params), AdamOptions{.lr = 0.01, .decay = Decay::decoupled});
        case Updates::adam:
            return std::make_shared<Adam>(std::move(params), AdamOptions{.lr = 0.01, .weight_decay = 0.01});
        case Updates::sgd: break;
    }
    return std::make_shared<Sgd>(std::move(params), SgdOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true});
}

// One rank with the whole batch.
std::vector<float> losses_alone(const Alone& alone) {
    Model model = Mlp::initial();
    Model gradients = model;
    auto params = model.params();
    auto grads = gradients.params();
    std::vector<OptimizerParam> trained;
    for (size_t i = 0; i < params.size(); ++i) {
        if (alone.frozen && i == frozen_param) continue;
        trained.push_back({params[i].name, params[i].tensor, grads[i].tensor});
    }
    const auto optimizer = optimizer_of(alone.updates, trained);
    int clipped = 0;
    std::vector<float> losses;
    for (int step = 0; step < training_steps; ++step) {
        losses.push_back(Mlp::forward_backward(
            Mlp::batch(static_cast<uint64_t>(step) * batch_size, batch_size),
            [&](size_t i) { return model.entries[i].values.data(); },
            [&](size_t i) { return gradients.entries[i].values.data(); }, false, {}));
        if (alone.clips && optimizer->clip_grad_norm(max_norm, 2) > max_norm) ++clipped;
        optimizer->step();
    }
    if (alone.clips && clipped < training_steps / 2) throw std::logic_error("hardly any gradient is clipped");
    return losses;
}

void copy(const Tensor& from, std::vector<float>& to) {
    to.resize(static_cast<size_t>(from.numel()));
    convert(from.data, from.dtype, reinterpret_cast<std::byte*>(to.data()), DType::f32, from.numel());
}

// Computes in f32 from whatever whole parameters are, and writes gradients as what they are.
class Trainer {
   public:
    Trainer(Communicator& comm, const Training& training) : comm_(comm), training_(training) {
        Model model = Mlp::initial(training.options.sync_values ? static_cast<uint64_t>(comm.rank()) + 1 : 1);
        if (training.unused) model.add("unused", {5, 2});
        auto params = model.params();
        if (training.deferred) {
            for (NamedTensor& param : params) param.tensor.data = nullptr;
        }
        std::vector<FsdpUnit> units(Mlp::layers);
        for (size_t l = 0; l < Mlp::layers; ++l) {
            units[l].name = fmt::format("fc{}", l);
            units[l].params = {params[2 * l], params[2 * l + 1]};
        }
        if (training.unused) units.back().params.push_back(params.back());
        if (training.alone.frozen) units[frozen_param / 2].trained = {true, false};
        const int cut = training.options.shard_ranks > 0 ? training.options.shard_ranks : world;
        for (FsdpUnit& unit : units) {
            if (training.kept_among > 0 && cut % training.kept_among == 0) {
                unit.reshard_after_forward = training.kept_among;
            }
        }
        for (const size_t u : training.kept) units[u].reshard_after_forward = 0;
        for (FsdpUnit& unit : units) unit.row_block = training.row_block;
        for (const size_t u : training.flat) units[u].flat = true;
        for (const auto& [u, dtype] : training.param_dtypes) units[u].param_dtype = dtype;
        fsdp_.emplace(shared(comm), units, training.options);
        for (size_t u = 0; u < fsdp_->units(); ++u) fsdp_->set_reshard_after_backward(u, !training.is_left);
        if (training.deferred) write_values(Mlp::initial());
        std::vector<OptimizerParam> trained;
        for (size_t i = 0; i < fsdp_->params(); ++i) {
            if (!fsdp_->param(i).trained) continue;
            trained.push_back({fsdp_->param(i).name, fsdp_->shard(i), fsdp_->shard_grad(i), fsdp_->held(i)});
        }
        optimizer_ = optimizer_of(training.alone.updates, trained);
        optimizer_->add_together({[this](double own, Optimizer::Over how) {
            const Tensor tensor = tensor_of(std::span<double>(&own, 1), DType::f64);
            comm_.run({.collective = Collective::all_reduce,
                       .outputs = {&tensor, 1},
                       .op = how == Optimizer::Over::max ? ReduceOp::max : ReduceOp::sum});
            return own;
        }});
    }

    // The loss of the whole batch.
    float step(int number) {
        const size_t own = batch_size / world;
        const uint64_t begin = static_cast<uint64_t>(number) * batch_size + own * static_cast<uint64_t>(comm_.rank());
        const Adding adding = training_.adding;
        std::array<float, 1> loss{0};
        if (adding == Adding::whole_batch) {
            loss[0] = pass(begin, own, false);
        } else {
            set_adding(false);
            loss[0] = pass(begin, own / 2, adding == Adding::without_sync) / 2;
            set_adding(true);
            loss[0] += pass(begin + own / 2, own / 2, adding == Adding::without_sync) / 2;
        }
        update();
        const Tensor tensor = tensor_of(std::span<float>(loss), DType::f32);
        comm_.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::avg});
        return loss[0];
    }

   private:
    // Each rank its part, where it lies in the whole parameter.
    void write_values(const Model& model) {
        for (size_t i = 0; i < model.entries.size(); ++i) {
            const auto shard = fsdp_->shard(i).as<float>();
            const auto begin = model.entries[i].values.begin() + fsdp_->param(i).elements.begin;
            std::copy_n(begin, shard.size(), shard.begin());
        }
    }

    void update() {
        if (training_.scales) scaler_.unscale(optimizer_);
        if (training_.alone.clips) (void)optimizer_->clip_grad_norm(max_norm, 2);
        if (!training_.scales) return optimizer_->step();
        EXPECT_TRUE(scaler_.step(optimizer_));
        scaler_.update();
    }

    void set_adding(bool last) {
        switch (training_.adding) {
            case Adding::whole_batch: break;
            case Adding::without_sync: return fsdp_->set_sync(last);
            case Adding::into_shards: return fsdp_->set_accumulate(last);
            case Adding::over_replicas_later: return fsdp_->set_all_reduce(last);
        }
    }

    float pass(uint64_t begin, size_t count, bool add) {
        const auto widen = [&](size_t l) {
            for (const size_t i : {2 * l, 2 * l + 1}) {
                copy(fsdp_->whole(i), params_.at(i));
                grads_.at(i).resize(params_.at(i).size());
            }
        };
        const Mlp::Hooks hooks{[&](size_t l) {
                                   fsdp_->forward(l);
                                   widen(l);
                               },
                               [&](size_t l) { fsdp_->forward_done(l); },
                               [&](size_t l) {
                                   fsdp_->backward(l);
                                   widen(l);
                               },
                               [&](size_t l) {
                                   for (const size_t i : fsdp_->unit(l).params) hand_over(i, add);
                                   fsdp_->grads_ready(l);
                               }};
        const float loss = Mlp::forward_backward(
            Mlp::batch(begin, count), [&](size_t i) { return params_.at(i).data(); },
            [&](size_t i) { return grads_.at(i).data(); }, false, hooks);
        fsdp_->wait();
        return loss;
    }

    void hand_over(size_t param, bool add) {
        if (!fsdp_->param(param).trained) return;
        if (param >= params_.size()) return fsdp_->unused(param);
        std::vector<float>& grad = grads_.at(param);
        const float scale = (training_.adding == Adding::whole_batch ? 1.0F : 0.5F) /
                            (training_.options.op == ReduceOp::sum ? static_cast<float>(world) : 1.0F) *
                            (training_.scales ? static_cast<float>(scaler_.scale()) : 1.0F);
        for (float& g : grad) g *= scale;
        const Tensor out = fsdp_->grad(param);
        if (add) {
            std::vector<float> before;
            copy(out, before);
            for (size_t k = 0; k < grad.size(); ++k) grad[k] += before[k];
        }
        convert(reinterpret_cast<const std::byte*>(grad.data()), DType::f32, out.data, out.dtype, out.numel());
    }

    Communicator& comm_;
    const Training& training_;
    std::optional<Fsdp> fsdp_;
    std::shared_ptr<Optimizer> optimizer_;
    GradScaler scaler_{{.init_scale = 1024, .growth_interval = 20}};  // which no gradient here makes too large for f16
    std::array<std::vector<float>, 2 * Mlp::layers> params_;
    std::array<std::vector<float>, 2 * Mlp::layers> grads_;
};

std::vector<float> losses_of(const Training& training) {
    std::vector<float> losses;
    expect_all_well(run_ranks(world, test_options(), [&](Communicator& comm) {
        Trainer trainer(comm, training);
        for (int step = 0; step < training_steps; ++step) {
            const float loss = trainer.step(step);
            if (comm.rank() == 0) losses.push_back(loss);
        }
    }));
    return losses;
}

void expect_trains_as_one_rank(const std::vector<const Option*>& options) {
    static std::map<Alone, std::vector<float>> all_alone;
    Training training;
    std::string names;
    for (const Option* option : options) {
        option->set(training);
        names += (names.empty() ? "" : ", ") + option->name;
    }
    SCOPED_TRACE(names);
    std::vector<float>& expected = all_alone[training.alone];
    if (expected.empty()) expected = losses_alone(training.alone);
    const std::vector<float> losses = losses_of(training);
    ASSERT_EQ(losses.size(), expected.size());
    for (size_t i = 0; i < losses.size(); ++i) {
        ASSERT_NEAR(losses[i], expected[i], training.tolerance * expected[i]) << "step " << i;
    }
    EXPECT_LT(losses.back(), 0.95F * losses.front()) << "it learns";
    EXPECT_EQ(losses_of(training), losses) << "a repeat";
}

TEST(FsdpOptions, EachAloneTrainsAsOneRankDoes) {
    for (const Option& option : all_options()) expect_trains_as_one_rank({&option});
}

TEST(FsdpOptions, InPairsTheyTrainAsOneRankDoes) {
    std::vector<std::pair<const Option*, const Option*>> pairs;
    for (const Option& one : all_options()) {
        for (const Option& other : all_options()) {
            if (&one < &other && one.kind != other.kind) pairs.emplace_back(&one, &other);
        }
    }
    for (const auto& [one, other] : testing::sample_of(pairs, is_slow() ? 6 : 40)) {
        expect_trains_as_one_rank({one, other});
    }
}

}  // namespace
}  // namespace tsr
