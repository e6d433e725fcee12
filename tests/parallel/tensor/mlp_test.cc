// A perceptron of two layers, the first cut by columns and the second by rows: its outputs and gradients are those of one
// rank, for every width of the cut layer and number of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parallel/tensor/helpers.hpp"
#include "parallel/tensor/tensor_parallel.hpp"

namespace tsr {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t rows = 6;  // of the batch
constexpr size_t inputs = 5;
constexpr size_t outputs = 4;

// Parameters, batch and all that a step computes, for a hidden layer of `hidden` units.
struct Mlp {
    size_t hidden;
    std::vector<double> w1, b1, w2, b2;
    std::vector<double> x, dy;

    explicit Mlp(size_t width)
        : hidden(width),
          w1(random_numbers(1, width * inputs)),
          b1(random_numbers(2, width)),
          w2(random_numbers(3, outputs * width)),
          b2(random_numbers(4, outputs)),
          x(random_numbers(5, rows * inputs)),
          dy(random_numbers(6, rows * outputs)) {}

    [[nodiscard]] std::vector<NamedTensor> params() {
        const auto h = static_cast<int64_t>(hidden);
        return {{"fc1.weight", tensor_of_shape(w1, Dims{h, inputs})},
                {"fc1.bias", tensor_of_shape(b1, Dims{h})},
                {"fc2.weight", tensor_of_shape(w2, Dims{outputs, h})},
                {"fc2.bias", tensor_of_shape(b2, Dims{outputs})}};
    }
};

struct Step {
    std::vector<double> y, dx, dw1, db1, dw2, db2;
};

// tanh between the layers. `width` units, of which w1, b1 and w2 are parts. The second bias is not added.
struct Half {
    std::vector<double> h;
    std::vector<double> y;

    Half(std::span<const double> x, std::span<const double> w1, std::span<const double> b1, std::span<const double> w2,
         size_t width, size_t count)
        : h(count * width, 0), y(count * outputs, 0) {
        multiply_transposed(x, w1, h, count, width, inputs);
        for (size_t i = 0; i < h.size(); ++i) h[i] = std::tanh(h[i] + b1[i % width]);
        multiply_transposed(h, w2, y, count, outputs, width);
    }

    // Adds to the gradients; returns this part's summand of the gradient by x.
    std::vector<double> backward(std::span<const double> x, std::span<const double> dy, std::span<const double> w1,
                                 std::span<const double> w2, size_t width, size_t count, std::span<double> dw1,
                                 std::span<double> db1, std::span<double> dw2) const {
        multiply_first_transposed(dy, h, dw2, outputs, width, count);
        std::vector<double> dh(count * width, 0);
        multiply(dy, w2, dh, count, width, outputs);
        for (size_t i = 0; i < dh.size(); ++i) dh[i] *= 1 - h[i] * h[i];
        for (size_t i = 0; i < dh.size(); ++i) db1[i % width] += dh[i];
        multiply_first_transposed(dh, x, dw1, width, inputs, count);
        std::vector<double> dx(count * inputs, 0);
        multiply(dh, w1, dx, count, inputs, width);
        return dx;
    }
};

Step dense(const Mlp& mlp) {
    Step step;
    const Half half(mlp.x, mlp.w1, mlp.b1, mlp.w2, mlp.hidden, rows);
    step.y = half.y;
    for (size_t i = 0; i < step.y.size(); ++i) step.y[i] += mlp.b2[i % outputs];
    step.dw1.resize(mlp.w1.size());
    step.db1.resize(mlp.b1.size());
    step.dw2.resize(mlp.w2.size());
    step.db2.resize(mlp.b2.size());
    step.dx = half.backward(mlp.x, mlp.dy, mlp.w1, mlp.w2, mlp.hidden, rows, step.dw1, step.db1, step.dw2);
    for (size_t i = 0; i < mlp.dy.size(); ++i) step.db2[i % outputs] += mlp.dy[i];
    return step;
}

const std::vector<TpRule> rules{{"fc1", TpStyle::column, 0, {}}, {"fc2", TpStyle::row, 0, {}}};

std::vector<double> numbers_of(const Tensor& tensor) {
    const std::span<double> values = tensor.as<double>();
    return {values.begin(), values.end()};
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected, const char* what) {
    ASSERT_EQ(found.size(), expected.size()) << what;
    for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-12) << what << " " << i;
}

// One step of the tensor-parallel perceptron on this rank; with `cut`, x and y are cut along the rows.
void expect_dense(Communicator& comm, Mlp& mlp, bool cut) {
    const Step expected = dense(mlp);
    const int n = comm.world_size();
    const int rank = comm.rank();
    const int dim = cut ? 0 : -1;
    std::vector<NamedTensor> params = mlp.params();
    if (rank != 0) {
        for (NamedTensor& param : params) param.tensor.data = nullptr;
    }
    TensorParallel tp(mesh_of(comm), params, rules, {.sequence_parallel = cut});
    const auto width = static_cast<size_t>(tp.slice_shape(1)[0]);
    const Dims x_shape{rows, inputs};
    const Dims y_shape{rows, outputs};
    const Dims own_x = cut ? part_shape(x_shape, 0, n, rank) : x_shape;
    const Dims own_y = cut ? part_shape(y_shape, 0, n, rank) : y_shape;

    std::vector<double> x = cut ? part_of(mlp.x, x_shape, 0, n, rank) : mlp.x;
    std::vector<double> entered;
    tp.enter(tensor_of_shape(x, own_x), tensor_of_shape(entered, x_shape), dim, nullptr, nullptr);
    EXPECT_EQ(entered, mlp.x);
    Half half(entered, tp.slice(0).as<double>(), tp.slice(1).as<double>(), tp.slice(2).as<double>(), width, rows);
    std::vector<double> y;
    const Tensor bias = tp.slice(3);
    tp.leave(tensor_of_shape(half.y, y_shape), tensor_of_shape(y, own_y), dim, &bias, nullptr, nullptr);
    expect_near(y, cut ? part_of(expected.y, y_shape, 0, n, rank) : expected.y, "y");

    std::vector<double> dy = cut ? part_of(mlp.dy, y_shape, 0, n, rank) : mlp.dy;
    const std::span<double> db2 = tp.grad(3).as<double>();
    for (size_t i = 0; i < dy.size(); ++i) db2[i % outputs] += dy[i];
    std::vector<double> left;
    tp.leave_backward(tensor_of_shape(dy, own_y), tensor_of_shape(left, y_shape), dim, nullptr, nullptr);
    std::vector<double> summand =
        half.backward(entered, left, tp.slice(0).as<double>(), tp.slice(2).as<double>(), width, rows,
                      tp.grad(0).as<double>(), tp.grad(1).as<double>(), tp.grad(2).as<double>());
    std::vector<double> dx;
    tp.enter_backward(tensor_of_shape(summand, x_shape), tensor_of_shape(dx, own_x), dim, nullptr, nullptr);
    tp.sum_grads(nullptr);
    expect_near(dx, cut ? part_of(expected.dx, x_shape, 0, n, rank) : expected.dx, "dx");
    const auto h = static_cast<int64_t>(mlp.hidden);
    expect_near(numbers_of(tp.grad(0)), part_of(expected.dw1, Dims{h, inputs}, 0, n, rank), "dw1");
    expect_near(numbers_of(tp.grad(1)), part_of(expected.db1, Dims{h}, 0, n, rank), "db1");
    expect_near(numbers_of(tp.grad(2)), part_of(expected.dw2, Dims{outputs, h}, 1, n, rank), "dw2");
    expect_near(numbers_of(tp.grad(3)), expected.db2, "db2");
}

class TpMlp : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, TpMlp, ::testing::Values(1, 2, 3, 4));

TEST_P(TpMlp, OutputsAndGradientsAreThoseOfOneRank) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        for (const size_t hidden : {size_t{8}, size_t{13}, size_t{1}}) {
            Mlp mlp(hidden);
            expect_dense(comm, mlp, false);
            expect_dense(comm, mlp, true);
        }
    }));
}

// A step of Adam on slices gives each element what it gets on one rank, and clipping counts each element once.
TEST(TensorParallel, SlicesHaveTheValuesOfRank0) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Mlp mlp(13);
        if (comm.rank() != 0) mlp.w1.assign(mlp.w1.size(), 77);  // ignored
        const TensorParallel tp(mesh_of(comm), mlp.params(), rules, {});
        const Mlp original(13);
        EXPECT_EQ(numbers_of(tp.slice(0)), part_of(original.w1, Dims{13, inputs}, 0, 3, comm.rank()));
        EXPECT_EQ(numbers_of(tp.slice(2)), part_of(original.w2, Dims{outputs, 13}, 1, 3, comm.rank()));
        const TensorParallel own(mesh_of(comm), mlp.params(), rules, {.sync_values = false});
        EXPECT_EQ(numbers_of(own.slice(0)), part_of(mlp.w1, Dims{13, inputs}, 0, 3, comm.rank()));
    }));
}

TEST(TensorParallel, AParameterWithoutValuesIsZero) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Mlp mlp(8);
        std::vector<NamedTensor> params = mlp.params();
        params[0].tensor.data = nullptr;
        TensorParallel tp(mesh_of(comm), params, rules, {});
        EXPECT_EQ(numbers_of(tp.slice(0)), std::vector<double>(4 * inputs, 0));
        EXPECT_EQ(numbers_of(tp.slice(1)), part_of(mlp.b1, Dims{8}, 0, 2, comm.rank()));
        EXPECT_EQ(numbers_of(tp.grad(1)), std::vector<double>(4, 0));
    }));
}

// Over a mesh of several dimensions: a slice lies where its rank is along "tp", whatever the other coordinates.
TEST(TensorParallel, LayoutsAreOfAllRanksOfTheMesh) {
    expect_all_well(run_ranks(6, test_options(), [](Communicator& comm) {
        const DeviceMesh all(comm, MeshShape({"dp", "tp"}, {2, 3}));
        Mlp mlp(13);
        const TensorParallel tp(all.slice(std::vector<std::string>{"tp"}), mlp.params(), rules, {});
        const Held weight = tp.held(0);
        EXPECT_EQ(weight.layout.str(), "mesh [2, 3], R S(0)");
        EXPECT_EQ(weight.rank, comm.rank());
        EXPECT_EQ(tp.held(3).layout.str(), "mesh [2, 3], R R");
        const std::vector<Box> boxes = weight.layout.boxes_of(comm.rank());
        ASSERT_EQ(boxes.size(), 1U);
        EXPECT_EQ(boxes[0].sizes, tp.slice_shape(0));
        EXPECT_EQ(boxes[0].offsets[0], chunk(13, 3, comm.rank() % 3).begin);
        const DeviceMesh flat = all.flatten(comm, "all");
        const TensorParallel over_all(flat, mlp.params(), rules, {});
        EXPECT_EQ(over_all.held(0).layout.boxes_of(comm.rank())[0].offsets[0], chunk(13, 6, comm.rank()).begin);
    }));
}

TEST(TensorParallel, PlansThatDifferAreRefusedOnAllRanks) {
    const Outcomes outcomes = run_ranks(3, test_options(), [](Communicator& comm) {
        Mlp mlp(8);
        std::vector<TpRule> own = rules;
        if (comm.rank() == 2) own[1].style = TpStyle::replicate;
        const TensorParallel tp(mesh_of(comm), mlp.params(), own, {});
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(),
                    AllOf(HasSubstr("plans of the ranks differ"), HasSubstr("rank 2"), HasSubstr("fc2.weight")));
    }
}

TEST(TensorParallel, APatternWithoutAMatchOnOneRankIsRefusedOnAll) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        Mlp mlp(8);
        std::vector<TpRule> own = rules;
        if (comm.rank() == 1) own.push_back({"fc3", TpStyle::column, 0, {}});
        const TensorParallel tp(mesh_of(comm), mlp.params(), own, {});
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::invalid_argument);
        EXPECT_THAT(outcome->what(), AllOf(HasSubstr("rank 1"), HasSubstr("\"fc3\"")));
    }
}

TEST(TensorParallel, AMeshOfTwoDimensionsIsRefused) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Mlp mlp(8);
        const DeviceMesh all(comm, MeshShape({"dp", "tp"}, {1, 2}));
        try {
            const TensorParallel tp(all, mlp.params(), rules, {});
            ADD_FAILURE();
        } catch (const Error& error) {
            EXPECT_THAT(error.what(), AllOf(HasSubstr("dp 1, tp 2"), HasSubstr("slice")));
        }
    }));
}

TEST(TensorParallel, ABiasOfTheWrongSizeIsRefused) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Mlp mlp(8);
        TensorParallel tp(mesh_of(comm), mlp.params(), rules, {});
        std::vector<double> y(rows * outputs, 0);
        std::vector<double> wrong(outputs + 1, 0);
        const Tensor tensor = tensor_of_shape(y, Dims{rows, outputs});
        const Tensor bias = tensor_of_shape(wrong, Dims{outputs + 1});
        try {
            tp.leave(tensor, tensor, -1, &bias, nullptr, nullptr);
            ADD_FAILURE();
        } catch (const Error& error) {
            EXPECT_THAT(error.what(), AllOf(HasSubstr("[5]"), HasSubstr("4 elements")));
        }
    }));
}

}  // namespace
}  // namespace tsr
