// A perceptron of two layers, the first cut by columns and the second by rows: its outputs and gradients are those of one
// rank, for every width of the cut layer and number of ranks.
#include "parallel/tensor/mlp.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

namespace tsr {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t inputs = Mlp::inputs;
constexpr int64_t outputs = Mlp::outputs;
const std::vector<TpRule> rules = Mlp::rules();

void expect_near(const std::vector<double>& found, const std::vector<double>& expected, const std::string& what) {
    ASSERT_EQ(found.size(), expected.size()) << what;
    for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-12) << what << " " << i;
}

// One step on this rank; with `cut`, x and y are cut along the rows.
void expect_dense(Communicator& comm, Mlp& mlp, bool cut) {
    const int n = comm.world_size();
    StepResult expected;
    const std::vector<std::vector<double>> grads = dense_step(mlp, expected);
    std::vector<NamedTensor> params = mlp.named();
    if (comm.rank() != 0) {
        for (NamedTensor& param : params) param.tensor.data = nullptr;
    }
    std::vector<TpRule> own = rules;
    if (!cut) own.pop_back();  // each rank has the whole gradient of the gain
    TensorParallel tp(mesh_of(comm), params, own, {.sequence_parallel = cut});
    const auto part = [&](const std::vector<double>& whole, int64_t features) {
        return cut ? part_of(whole, Dims{Mlp::rows, features}, 0, n, comm.rank()) : whole;
    };
    const StepResult found = mlp_step(
        part(mlp.x, inputs), part(mlp.dy, outputs), static_cast<size_t>(tp.slice_shape(Mlp::b1)[0]),
        [&](size_t p) { return tp.slice(p).as<double>(); }, [&](size_t p) { return tp.grad(p).as<double>(); },
        moves_of(tp, cut, Mlp::rows));
    tp.sum_grads(nullptr);
    expect_near(found.y, part(expected.y, outputs), "y");
    expect_near(found.dx, part(expected.dx, inputs), "dx");
    for (size_t p = 0; p < Mlp::params; ++p) {
        const int dim = tp.param(p).cut;
        expect_near(numbers_of(tp.grad(p)), dim < 0 ? grads[p] : part_of(grads[p], mlp.shape(p), dim, n, comm.rank()),
                    "gradient of " + tp.param(p).name);
    }
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

TEST(TensorParallel, SlicesHaveTheValuesOfRank0) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Mlp mlp(13);
        if (comm.rank() != 0) mlp.values[Mlp::w1].assign(mlp.values[Mlp::w1].size(), 77);  // ignored
        const TensorParallel tp(mesh_of(comm), mlp.named(), rules, {});
        const Mlp original(13);
        EXPECT_EQ(numbers_of(tp.slice(0)), part_of(original.values[Mlp::w1], Dims{13, inputs}, 0, 3, comm.rank()));
        EXPECT_EQ(numbers_of(tp.slice(2)), part_of(original.values[Mlp::w2], Dims{outputs, 13}, 1, 3, comm.rank()));
        const TensorParallel own(mesh_of(comm), mlp.named(), rules, {.sync_values = false});
        EXPECT_EQ(numbers_of(own.slice(0)), part_of(mlp.values[Mlp::w1], Dims{13, inputs}, 0, 3, comm.rank()));
    }));
}

TEST(TensorParallel, AParameterWithoutValuesIsZero) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Mlp mlp(8);
        std::vector<NamedTensor> params = mlp.named();
        params[0].tensor.data = nullptr;
        TensorParallel tp(mesh_of(comm), params, rules, {});
        EXPECT_EQ(numbers_of(tp.slice(0)), std::vector<double>(4 * inputs, 0));
        EXPECT_EQ(numbers_of(tp.slice(1)), part_of(mlp.values[Mlp::b1], Dims{8}, 0, 2, comm.rank()));
        EXPECT_EQ(numbers_of(tp.grad(1)), std::vector<double>(4, 0));
    }));
}

// Over a mesh of several dimensions: a slice lies where its rank is along "tp", whatever the other coordinates.
TEST(TensorParallel, LayoutsAreOfAllRanksOfTheMesh) {
    expect_all_well(run_ranks(6, test_options(), [](Communicator& comm) {
        const DeviceMesh all(comm, MeshShape({"dp", "tp"}, {2, 3}));
        Mlp mlp(13);
        const TensorParallel tp(all.slice(std::vector<std::string>{"tp"}), mlp.named(), rules, {});
        const Held weight = tp.held(0);
        EXPECT_EQ(weight.layout.str(), "mesh [2, 3], R S(0)");
        EXPECT_EQ(weight.rank, comm.rank());
        EXPECT_EQ(tp.held(3).layout.str(), "mesh [2, 3], R R");
        const std::vector<Box> boxes = weight.layout.boxes_of(comm.rank());
        ASSERT_EQ(boxes.size(), 1U);
        EXPECT_EQ(boxes[0].sizes, tp.slice_shape(0));
        EXPECT_EQ(boxes[0].offsets[0], chunk(13, 3, comm.rank() % 3).begin);
        const DeviceMesh flat = all.flatten(comm, "all");
        const TensorParallel over_all(flat, mlp.named(), rules, {});
        const std::vector<Box> own = over_all.held(0).layout.boxes_of(comm.rank());
        EXPECT_EQ(own.size(), comm.rank() < 5 ? 1U : 0U);  // 3, 3, 3, 3, 1 and no rows
        if (!own.empty()) {
            EXPECT_EQ(own[0].offsets[0], 3 * comm.rank());
        }
    }));
}

TEST(TensorParallel, PlansThatDifferAreRefusedOnAllRanks) {
    const Outcomes outcomes = run_ranks(3, test_options(), [](Communicator& comm) {
        Mlp mlp(8);
        std::vector<TpRule> own = rules;
        if (comm.rank() == 2) own[1].style = TpStyle::replicate;
        const TensorParallel tp(mesh_of(comm), mlp.named(), own, {});
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
        const TensorParallel tp(mesh_of(comm), mlp.named(), own, {});
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::invalid_argument);
        EXPECT_THAT(outcome->what(), HasSubstr("\"fc3\""));
    }
    EXPECT_THAT(outcomes[0]->what(), HasSubstr("rank 1"));
}

TEST(TensorParallel, AMeshOfTwoDimensionsIsRefused) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Mlp mlp(8);
        const DeviceMesh all(comm, MeshShape({"dp", "tp"}, {1, 2}));
        try {
            const TensorParallel tp(all, mlp.named(), rules, {});
            ADD_FAILURE();
        } catch (const Error& error) {
            EXPECT_THAT(error.what(), AllOf(HasSubstr("dp 1, tp 2"), HasSubstr("slice")));
        }
    }));
}

TEST(TensorParallel, GradientsThatAreBeingSummedAreLeftAlone) {
    std::atomic<bool> tried = false;
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        Mlp mlp(8);
        TensorParallel tp(mesh_of(comm), mlp.named(), rules, {});
        tp.grad(Mlp::gain).as<double>()[0] = 1;
        WorkPtr work;
        if (comm.rank() == 1) {  // rank 0's sum is not done before this rank's begins
            wait_until([&] { return tried.load(); }, soon(), "rank 0");
        }
        tp.sum_grads(&work);
        if (comm.rank() == 0) {
            EXPECT_THROW(tp.zero_grad(), Error);
            EXPECT_THROW(tp.check_reduced_after(0), Error);
            tried = true;
        }
        work->wait(soon());
        EXPECT_EQ(tp.grad(Mlp::gain).as<double>()[0], 2);
        tp.check_reduced_after(0);
        tp.zero_grad();
        EXPECT_EQ(tp.grad(Mlp::gain).as<double>()[0], 0);
    }));
}

TEST(TensorParallel, WrappersAreNoPartOfNames) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        Mlp mlp(8);
        std::vector<NamedTensor> params = mlp.named();
        for (NamedTensor& param : params) param.name = "module._orig_mod." + param.name;
        EXPECT_EQ(TensorParallel(mesh_of(comm), params, rules, {}).param(0).name, "fc1.weight");
        params[1].name = "fc1.weight";
        EXPECT_THROW(TensorParallel(mesh_of(comm), params, rules, {}), Error);
    }));
}

TEST(TensorParallel, ABiasIsAddedOnce) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Mlp mlp(8);
        TensorParallel tp(mesh_of(comm), mlp.named(), rules, {});
        std::vector<double> y(6, comm.rank());
        std::vector<double> bias{10, 20, 30};
        const Tensor tensor = tensor_of_shape(y, Dims{2, 3});
        const Tensor added = tensor_of_shape(bias, Dims{3});
        tp.leave(tensor, tensor, -1, &added, nullptr, nullptr);
        EXPECT_THAT(y, ::testing::ElementsAre(13, 23, 33, 13, 23, 33));
    }));
}

TEST(TensorParallel, ABiasOfTheWrongSizeIsRefused) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Mlp mlp(8);
        TensorParallel tp(mesh_of(comm), mlp.named(), rules, {});
        std::vector<double> y(Mlp::rows * outputs, 0);
        std::vector<double> wrong(outputs + 1, 0);
        const Tensor tensor = tensor_of_shape(y, Dims{Mlp::rows, outputs});
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
