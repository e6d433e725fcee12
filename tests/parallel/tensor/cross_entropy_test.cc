#include "parallel/tensor/cross_entropy.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "parallel/tensor/helpers.hpp"

namespace tsr {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Problem {
    int64_t vocabulary = 7;
    std::vector<int64_t> targets;
    std::vector<double> logits;   // rows x vocabulary
    std::vector<double> weights;  // empty: none
    double smoothing = 0;
    LossReduction reduction = LossReduction::mean;

    [[nodiscard]] size_t rows() const { return targets.size(); }
    [[nodiscard]] double weight(size_t c) const { return weights.empty() ? 1 : weights[c]; }
};

struct Result {
    std::vector<double> loss;
    std::vector<double> grad;
};

constexpr int64_t ignored = -100;

// From the definition, over the whole vocabulary, with the gradient by the chain rule over log-probabilities.
Result reference(const Problem& p) {
    const auto v = static_cast<size_t>(p.vocabulary);
    Result result;
    result.grad.assign(p.logits.size(), 0);
    double divisor = 0;
    std::vector<double> losses;
    for (size_t i = 0; i < p.rows(); ++i) {
        losses.push_back(0);
        if (p.targets[i] == ignored) continue;
        const auto y = static_cast<size_t>(p.targets[i]);
        divisor += p.weight(y);
        const double* x = &p.logits[i * v];
        const double most = *std::max_element(x, x + v);
        double sum = 0;
        for (size_t c = 0; c < v; ++c) sum += std::exp(x[c] - most);
        // The weight of each log-probability in the loss.
        std::vector<double> share(v, 0);
        for (size_t c = 0; c < v; ++c) share[c] = p.smoothing / static_cast<double>(v) * p.weight(c);
        share[y] += (1 - p.smoothing) * p.weight(y);
        double all = 0;
        for (size_t c = 0; c < v; ++c) {
            losses[i] -= share[c] * (x[c] - most - std::log(sum));
            all += share[c];
        }
        for (size_t c = 0; c < v; ++c) result.grad[i * v + c] = all * std::exp(x[c] - most) / sum - share[c];
    }
    if (p.reduction == LossReduction::none) {
        result.loss = losses;
        return result;
    }
    double total = 0;
    for (const double loss : losses) total += loss;
    if (p.reduction == LossReduction::sum) divisor = 1;
    result.loss = {total / divisor};
    for (double& g : result.grad) g = divisor == 0 ? 0 : g / divisor;
    return result;
}

Tensor targets_of(std::vector<int64_t>& targets, const Dims& shape) {
    return {reinterpret_cast<std::byte*>(targets.data()), shape, DType::i64, {}};
}

// The loss and this rank's gradient, computed by the ranks of `comm`.
Result parallel(Communicator& comm, TensorParallel& tp, Problem p, const std::shared_ptr<Communicator>& data = {}) {
    const Dims whole{static_cast<int64_t>(p.rows()), p.vocabulary};
    const Dims own = part_shape(whole, 1, comm.world_size(), comm.rank());
    std::vector<double> logits = part_of(p.logits, whole, 1, comm.world_size(), comm.rank());
    Result result;
    CrossEntropyOptions options;
    options.vocabulary = p.vocabulary;
    options.label_smoothing = p.smoothing;
    options.reduction = p.reduction;
    options.data_ranks = data;
    if (!p.weights.empty()) options.class_weights = tensor_of_shape(p.weights, Dims{p.vocabulary});
    const Dims of_loss = p.reduction == LossReduction::none ? Dims{whole[0]} : Dims{};
    const Tensor grad = tensor_of_shape(result.grad, own);
    cross_entropy(tp, tensor_of_shape(logits, own), targets_of(p.targets, Dims{whole[0]}), options,
                  tensor_of_shape(result.loss, of_loss), &grad, nullptr, nullptr);
    return result;
}

TensorParallel any_model(const DeviceMesh& mesh) {
    static std::vector<double> weight{1, 2};
    const NamedTensor param{"w", tensor_of_shape(weight, Dims{2})};
    return {mesh, {&param, 1}, {}, {}};
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected, double tolerance = 1e-12) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
        if (std::isnan(expected[i])) {
            EXPECT_TRUE(std::isnan(found[i])) << i;
        } else {
            EXPECT_NEAR(found[i], expected[i], tolerance * std::max(1.0, std::abs(expected[i]))) << i;
        }
    }
}

class TpCrossEntropy : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, TpCrossEntropy, ::testing::Values(1, 2, 3, 4));

TEST_P(TpCrossEntropy, LossAndGradientAreThoseOfTheWholeVocabulary) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        TensorParallel tp = any_model(mesh_of(comm));
        for (const int64_t vocabulary : {7, 2, 1}) {  // of 2 and of 1, some ranks have nothing
            for (const double scale : {1.0, 1e4}) {
                for (const bool weighted : {false, true}) {
                    for (const double smoothing : {0.0, 0.3}) {
                        for (const auto reduction : {LossReduction::none, LossReduction::mean, LossReduction::sum}) {
                            Problem p;
                            p.vocabulary = vocabulary;
                            p.targets = {0, vocabulary - 1, ignored, vocabulary / 2, 0};
                            p.logits = random_numbers(3, p.rows() * static_cast<size_t>(vocabulary));
                            for (double& x : p.logits) x *= scale;
                            if (weighted) p.weights = random_numbers(4, static_cast<size_t>(vocabulary));
                            for (double& w : p.weights) w += 1;
                            p.smoothing = smoothing;
                            p.reduction = reduction;
                            SCOPED_TRACE(::testing::Message() << vocabulary << " " << scale << " " << weighted << " "
                                                              << smoothing << " " << static_cast<int>(reduction));
                            const Result expected = reference(p);
                            const Result found = parallel(comm, tp, p);
                            expect_near(found.loss, expected.loss);
                            const Dims whole{static_cast<int64_t>(p.rows()), vocabulary};
                            expect_near(found.grad, part_of(expected.grad, whole, 1, comm.world_size(), comm.rank()));
                        }
                    }
                }
            }
        }
    }));
}

TEST(TpCrossEntropyRows, OfWhichAllAreIgnoredHaveNoMean) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        TensorParallel tp = any_model(mesh_of(comm));
        Problem p;
        p.targets = {ignored, ignored};
        p.logits = random_numbers(3, 14);
        const Result found = parallel(comm, tp, p);
        EXPECT_TRUE(std::isnan(found.loss[0]));  // as PyTorch's
        for (const double g : found.grad) EXPECT_EQ(g, 0);
    }));
}

// Two groups with different rows, of different numbers: their losses and gradients add up to those of all rows.
TEST(TpCrossEntropyRows, OfSeveralGroupsHaveOneMean) {
    expect_all_well(run_ranks(4, test_options(), [](Communicator& comm) {
        const DeviceMesh mesh(comm, MeshShape({"dp", "tp"}, {2, 2}));
        const DeviceMesh tp_mesh = mesh.slice(std::vector<std::string>{"tp"});
        TensorParallel tp = any_model(tp_mesh);
        Problem all;
        all.targets = {1, 2, ignored, 6, 3};
        all.logits = random_numbers(3, 35);
        const Result expected = reference(all);
        Problem own;
        const size_t first = mesh.coordinate(0) == 0 ? 0 : 3;
        const size_t count = mesh.coordinate(0) == 0 ? 3 : 2;
        own.targets.assign(all.targets.begin() + static_cast<long>(first),
                           all.targets.begin() + static_cast<long>(first + count));
        own.logits.assign(all.logits.begin() + static_cast<long>(first * 7),
                          all.logits.begin() + static_cast<long>((first + count) * 7));
        Result found = parallel(*tp_mesh.comm(0), tp, own, mesh.comm(0));
        const std::vector<double> grad(expected.grad.begin() + static_cast<long>(first * 7),
                                       expected.grad.begin() + static_cast<long>((first + count) * 7));
        expect_near(found.grad, part_of(grad, Dims{static_cast<int64_t>(count), 7}, 1, 2, mesh.coordinate(1)));
        const Tensor loss = tensor_of_shape(found.loss, Dims{});
        mesh.comm(0)->run(
            {.collective = Collective::all_reduce, .inputs = {}, .outputs = {&loss, 1}, .op = ReduceOp::sum});
        expect_near(found.loss, expected.loss);
    }));
}

// The same numbers as f32 and bf16: computed in f32, rounded once.
TEST(TpCrossEntropyRows, MayBeOfAnyFloatingPointDtype) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        TensorParallel tp = any_model(mesh_of(comm));
        Problem p;
        p.targets = {1, 6};
        p.logits = {0.5, -1, 2, 0, 0.25, 1, -3, 1, 1, 0, 0, -0.5, 2, 4};  // exact in bf16
        const Result expected = reference(p);
        const Dims own = part_shape(Dims{2, 7}, 1, 2, comm.rank());
        const std::vector<double> logits = part_of(p.logits, Dims{2, 7}, 1, 2, comm.rank());
        const std::vector<double> grads = part_of(expected.grad, Dims{2, 7}, 1, 2, comm.rank());
        CrossEntropyOptions options;
        options.vocabulary = 7;
        float loss = 0;
        const Tensor loss_tensor{reinterpret_cast<std::byte*>(&loss), Dims{}, DType::f32, {}};
        std::vector<float> single(logits.begin(), logits.end());
        const Tensor in_place{reinterpret_cast<std::byte*>(single.data()), own, DType::f32, {}};
        cross_entropy(tp, in_place, targets_of(p.targets, Dims{2}), options, loss_tensor, &in_place, nullptr, nullptr);
        EXPECT_NEAR(loss, expected.loss[0], 1e-6);
        for (size_t i = 0; i < grads.size(); ++i) EXPECT_NEAR(single[i], grads[i], 1e-6);
        std::vector<uint16_t> half;
        for (const double x : logits)
            half.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(x)) >> 16));
        const Tensor bf16{reinterpret_cast<std::byte*>(half.data()), own, DType::bf16, {}};
        cross_entropy(tp, bf16, targets_of(p.targets, Dims{2}), options, loss_tensor, &bf16, nullptr, nullptr);
        EXPECT_NEAR(loss, expected.loss[0], 1e-6);
        for (size_t i = 0; i < grads.size(); ++i) {
            EXPECT_NEAR(std::bit_cast<float>(static_cast<uint32_t>(half[i]) << 16), grads[i], 4e-3) << i;
        }
    }));
}

TEST(TpCrossEntropyRows, ThatAreWrongAreRefusedBeforeAnythingIsSent) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        TensorParallel tp = any_model(mesh_of(comm));
        const auto refusal = [&](const std::function<void(Problem&)>& change) -> std::string {
            Problem p;
            p.targets = {0, 6};
            p.logits = random_numbers(3, 14);
            change(p);
            try {
                (void)parallel(comm, tp, p);
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), Code::invalid_argument);
                return error.what();
            }
            return "accepted";
        };
        EXPECT_THAT(refusal([](Problem& p) { p.targets[1] = 7; }),
                    AllOf(HasSubstr("target 7 of row 1"), HasSubstr("0 to 6")));
        EXPECT_THAT(refusal([](Problem& p) { p.targets[0] = -1; }), HasSubstr("target -1"));
        EXPECT_THAT(refusal([](Problem& p) { p.smoothing = 1.5; }), HasSubstr("label_smoothing is 1.5"));
        EXPECT_THAT(refusal([](Problem& p) { p.reduction = static_cast<LossReduction>(3); }), HasSubstr("reduction 3"));
        EXPECT_THAT(refusal([](Problem& p) { p.vocabulary = 0, p.logits.clear(), p.targets.clear(); }),
                    HasSubstr("0 classes"));
        EXPECT_EQ(refusal([](Problem&) {}), "accepted");
    }));
}

}  // namespace
}  // namespace tsr
