// How many collectives a step takes, counted in the communicator's flight record.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "json_lines.hpp"
#include "parallel/tensor/cross_entropy.hpp"
#include "parallel/tensor/mlp.hpp"
#include "temporary_directory.hpp"

namespace tsr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// What a communicator did between two calls.
class Record {
   public:
    explicit Record(const std::shared_ptr<Communicator>& comm) : comm_(comm) { (void)next(); }

    std::vector<std::string> next() {
        const std::string file = (directory_.path() / "record").string();
        comm_->write_trace(file);
        const std::vector<Json> lines = lines_of(file);
        std::vector<std::string> names;
        for (size_t i = 1 + seen_; i < lines.size(); ++i) names.push_back(lines[i].at("operation").as_string());
        seen_ = lines.size() - 1;
        return names;
    }

   private:
    TemporaryDirectory directory_;
    std::shared_ptr<Communicator> comm_;
    size_t seen_ = 0;
};

struct Counted {
    std::vector<std::string> forward;
    std::vector<std::string> backward_input;
    std::vector<std::string> backward_weight;
    std::vector<std::string> sum;
};

Counted count_step(Communicator& comm, bool sequence) {
    Mlp mlp(8);
    std::vector<TpRule> rules = Mlp::rules();
    if (!sequence) rules.pop_back();
    TensorParallel tp(mesh_of(comm), mlp.named(), rules, {.sequence_parallel = sequence});
    const MlpParams<double> params{[&](size_t p) { return tp.slice(p).as<double>(); },
                                   [&](size_t p) { return tp.grad(p).as<double>(); }};
    const auto moves = moves_of(tp, sequence, Mlp::rows);
    MlpPass<double> pass{
        .inputs = Mlp::inputs, .width = static_cast<size_t>(tp.slice_shape(Mlp::b1)[0]), .outputs = Mlp::outputs};
    const auto own = [&](const std::vector<double>& whole, int64_t features) {
        return sequence ? part_of(whole, Dims{Mlp::rows, features}, 0, comm.world_size(), comm.rank()) : whole;
    };
    Record record(tp.comm());
    Counted counted;
    (void)pass.forward(params, moves, own(mlp.x, Mlp::inputs));
    counted.forward = record.next();
    (void)pass.backward_input(params, moves, own(mlp.dy, Mlp::outputs));
    counted.backward_input = record.next();
    pass.backward_weight(params);
    counted.backward_weight = record.next();
    tp.sum_grads(nullptr);
    counted.sum = record.next();
    return counted;
}

TEST(TpCounts, ARegionTakesOneAllReduceForwardAndOneBackward) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        const Counted counted = count_step(comm, false);
        EXPECT_THAT(counted.forward, ElementsAre("all_reduce"));
        EXPECT_THAT(counted.backward_input, ElementsAre("all_reduce"));
        EXPECT_THAT(counted.backward_weight, IsEmpty());
        EXPECT_THAT(counted.sum, IsEmpty());
    }));
}

// All gradients that are summed over the ranks go together.
TEST(TpCounts, ACutSequenceIsGatheredAndScatteredOnceEachWay) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        const Counted counted = count_step(comm, true);
        EXPECT_THAT(counted.forward, ElementsAre("all_gather", "reduce_scatter"));
        EXPECT_THAT(counted.backward_input, ElementsAre("all_gather", "reduce_scatter"));
        EXPECT_THAT(counted.backward_weight, IsEmpty());
        EXPECT_THAT(counted.sum, ElementsAre("all_reduce"));
    }));
}

TEST(TpCounts, ALossTakesTwoAllReduces) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Mlp mlp(8);
        TensorParallel tp(mesh_of(comm), mlp.named(), Mlp::rules(), {});
        std::vector<double> logits = random_numbers(1, 6);
        std::vector<double> grad(logits.size());
        std::vector<int64_t> targets{1, 0, 3};
        double loss = 0;
        const Tensor target{reinterpret_cast<std::byte*>(targets.data()), Dims{3}, DType::i64, {}};
        const Tensor result{reinterpret_cast<std::byte*>(&loss), Dims{}, DType::f64, {}};
        const Tensor gradient = tensor_of_shape(grad, Dims{3, 2});
        for (const double smoothing : {0.0, 0.1}) {
            Record record(tp.comm());
            cross_entropy(tp, tensor_of_shape(logits, Dims{3, 2}), target,
                          {.vocabulary = 4, .label_smoothing = smoothing}, result, &gradient, nullptr, nullptr);
            EXPECT_THAT(record.next(), ElementsAre("all_reduce", "all_reduce"));
        }
    }));
}

}  // namespace
}  // namespace tsr::testing
