// DDP and FSDP over the slices of a tensor-parallel model: parts lie where PyTorch's FSDP2 over TP puts them, training is that
// of one rank, and norms count each element once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "optim/adam.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/tensor/mlp.hpp"
#include "train/optimizer_of.hpp"

namespace tsr {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Group {
    DeviceMesh mesh;
    DeviceMesh tp;

    explicit Group(Communicator& comm, int dp = 2, int width = 2)
        : mesh(comm, MeshShape({"dp", "tp"}, {dp, width})), tp(mesh.slice(std::vector<std::string>{"tp"})) {}
    [[nodiscard]] const std::shared_ptr<Communicator>& dp() const { return mesh.comm(0); }
};

std::shared_ptr<TensorParallel> sliced(const Group& group, std::vector<NamedTensor> params,
                                       const std::vector<TpRule>& rules, bool sequence = false) {
    return std::make_shared<TensorParallel>(group.tp, params, rules, TpOptions{.sequence_parallel = sequence});
}

std::vector<NamedTensor> slices_of(const TensorParallel& tp) {
    std::vector<NamedTensor> slices;
    for (size_t i = 0; i < tp.params(); ++i) slices.push_back({tp.param(i).name, tp.slice(i)});
    return slices;
}

std::string boxes_of(const Layout& layout, int rank) {
    std::string text;
    for (const Box& box : layout.boxes_of(rank)) text += box.str();
    return text;
}

// The layout of one matrix, cut by `style` over "tp" and sharded over "dp".
Layout layout_of(Communicator& comm, const Dims& shape, TpStyle style, const FsdpUnit& like = {}) {
    const Group group(comm);
    std::vector<double> values(static_cast<size_t>(shape.product()), 0);
    const auto tp = sliced(group, {{"w", tensor_of_shape(values, shape)}}, {{"w", style, 0, {}}});
    FsdpUnit unit = like;
    unit.name = "all";
    unit.params = slices_of(*tp);
    const FsdpOptions options;
    const Fsdp fsdp(group.dp(), {unit}, options, tp);
    EXPECT_EQ(fsdp.held(0).rank, comm.rank());
    int64_t own = 0;
    for (const Box& box : fsdp.held(0).layout.boxes_of(comm.rank())) own += box.numel();
    EXPECT_EQ(own, fsdp.shard(0).numel());
    return fsdp.held(0).layout;
}

// The vectors of PyTorch's tests: over-left-to-right cuts would give ranks 1 and 2 each other's rows.
TEST(FsdpOverTp, ShardsTheRowsOfASlice) {
    expect_all_well(run_ranks(4, test_options(), [](Communicator& comm) {
        const Layout columns = layout_of(comm, {8, 8}, TpStyle::column);
        EXPECT_EQ(boxes_of(columns, 0), "[0:2, 0:8]");
        EXPECT_EQ(boxes_of(columns, 1), "[4:6, 0:8]");
        EXPECT_EQ(boxes_of(columns, 2), "[2:4, 0:8]");
        EXPECT_EQ(boxes_of(columns, 3), "[6:8, 0:8]");
        const Layout rows = layout_of(comm, {8, 8}, TpStyle::row);
        EXPECT_EQ(boxes_of(rows, 0), "[0:4, 0:4]");
        EXPECT_EQ(boxes_of(rows, 1), "[0:4, 4:8]");
        EXPECT_EQ(boxes_of(rows, 2), "[4:8, 0:4]");
        EXPECT_EQ(boxes_of(rows, 3), "[4:8, 4:8]");
        const Layout uneven = layout_of(comm, {5, 1}, TpStyle::column);
        EXPECT_EQ(boxes_of(uneven, 0), "[0:2, 0:1]");
        EXPECT_EQ(boxes_of(uneven, 1), "[3:4, 0:1]");
        EXPECT_EQ(boxes_of(uneven, 2), "[2:3, 0:1]");
        EXPECT_EQ(boxes_of(uneven, 3), "[4:5, 0:1]");
        const Layout whole = layout_of(comm, {8, 8}, TpStyle::replicate);
        EXPECT_EQ(boxes_of(whole, 0), "[0:4, 0:8]");
        EXPECT_EQ(boxes_of(whole, 1), "[0:4, 0:8]");
        EXPECT_EQ(boxes_of(whole, 3), "[4:8, 0:8]");
        FsdpUnit flat;
        flat.flat = true;
        const Layout elements = layout_of(comm, {14, 7}, TpStyle::column, flat);  // 49 elements a slice
        EXPECT_EQ(boxes_of(elements, 1), "[7:11, 0:7][11:12, 0:4]");
        FsdpUnit blocks;
        blocks.row_block = 3;
        EXPECT_EQ(boxes_of(layout_of(comm, {14, 7}, TpStyle::column, blocks), 3), "[13:14, 0:7]");
    }));
}

// Parameters after some steps of AdamW with clipped gradients, and the norms, on one rank.
std::vector<double> dense_training(Mlp& mlp, int steps) {
    std::vector<double> norms;
    std::vector<std::vector<double>> grads;
    for (const std::vector<double>& value : mlp.values) grads.emplace_back(value.size(), 0);
    std::vector<OptimizerParam> params;
    for (size_t p = 0; p < Mlp::params; ++p) {
        params.push_back({mlp.named()[p].name, tensor_of_shape(mlp.values[p], mlp.shape(p)),
                          tensor_of_shape(grads[p], mlp.shape(p))});
    }
    Adam adam(params, {.lr = 0.02, .decay = Decay::decoupled}, nullptr);
    for (int i = 0; i < steps; ++i) {
        adam.zero_grad();
        (void)mlp_step(
            mlp.x, mlp.dy, mlp.hidden, [&](size_t p) { return std::span(mlp.values[p]); },
            [&](size_t p) { return std::span(grads[p]); }, {});
        norms.push_back(adam.clip_grad_norm(0.5, 2));
        adam.step();
    }
    return norms;
}

std::shared_ptr<Optimizer> adam_of(const auto& model) {
    return optimizer_of(model, [](std::vector<OptimizerParam> params, const std::shared_ptr<SharedCopy>& copy) {
        return std::make_shared<Adam>(std::move(params), AdamOptions{.lr = 0.02, .decay = Decay::decoupled}, copy);
    });
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected, const std::string& what) {
    ASSERT_EQ(found.size(), expected.size()) << what;
    for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-10) << what << " " << i;
}

constexpr int steps = 5;

// Ranks of one "dp" coordinate work on half of the rows, cut along the rows between regions.
struct Share {
    std::vector<double> x;
    std::vector<double> dy;

    Share(const Mlp& mlp, const Group& group) {
        const auto part = [&](const std::vector<double>& whole, int64_t features) {
            const std::vector<double> half = part_of(whole, Dims{Mlp::rows, features}, 0, 2, group.mesh.coordinate(0));
            return part_of(half, Dims{Mlp::rows / 2, features}, 0, 2, group.mesh.coordinate(1));
        };
        x = part(mlp.x, Mlp::inputs);
        dy = part(mlp.dy, Mlp::outputs);
    }
};

TEST(DdpOverTp, TrainsLikeOneRank) {
    Mlp expected(7);
    const std::vector<double> norms = dense_training(expected, steps);
    expect_all_well(run_ranks(4, test_options(), [&](Communicator& comm) {
        const Group group(comm);
        Mlp mlp(7);
        const auto tp = sliced(group, mlp.named(), Mlp::rules(), true);
        DdpOptions options;
        options.op = ReduceOp::sum;
        const auto ddp = std::make_shared<Ddp>(group.dp(), slices_of(*tp), options, tp);
        const auto adam = adam_of(ddp);
        const Share share(mlp, group);
        for (int i = 0; i < steps; ++i) {
            ddp->zero_grad();
            (void)mlp_step(
                share.x, share.dy, static_cast<size_t>(tp->slice_shape(Mlp::b1)[0]),
                [&](size_t p) { return ddp->param(p).tensor.as<double>(); },
                [&](size_t p) { return ddp->grad(p).as<double>(); }, moves_of(*tp, true, Mlp::rows / 2));
            ddp->ready_all();
            ddp->wait();
            EXPECT_NEAR(adam->clip_grad_norm(0.5, 2), norms[static_cast<size_t>(i)], 1e-10);
            adam->step();
        }
        for (size_t p = 0; p < Mlp::params; ++p) {
            EXPECT_EQ(ddp->held(p)->layout.world_size(), 4);
            expect_near(numbers_of(ddp->param(p).tensor), held_part(expected.values[p], *ddp->held(p)),
                        ddp->param(p).name);
        }
    }));
}

class FsdpOverTpTraining : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Flat, FsdpOverTpTraining, ::testing::Bool());

TEST_P(FsdpOverTpTraining, IsThatOfOneRank) {
    Mlp expected(7);
    const std::vector<double> norms = dense_training(expected, steps);
    expect_all_well(run_ranks(4, test_options(), [&](Communicator& comm) {
        const Group group(comm);
        Mlp mlp(7);
        const auto tp = sliced(group, mlp.named(), Mlp::rules(), true);
        FsdpOptions options;
        options.op = ReduceOp::sum;
        FsdpUnit unit;
        unit.name = "all";
        unit.params = slices_of(*tp);
        unit.flat = GetParam();
        const auto fsdp = std::make_shared<Fsdp>(group.dp(), std::vector{unit}, options, tp);
        const auto adam = adam_of(fsdp);
        const Share share(mlp, group);
        for (int i = 0; i < steps; ++i) {
            fsdp->forward(0);
            fsdp->backward(0);
            for (size_t p = 0; p < Mlp::params; ++p) std::ranges::fill(fsdp->grad(p).as<double>(), 0.0);
            (void)mlp_step(
                share.x, share.dy, static_cast<size_t>(tp->slice_shape(Mlp::b1)[0]),
                [&](size_t p) { return fsdp->whole(p).as<double>(); },
                [&](size_t p) { return fsdp->grad(p).as<double>(); }, moves_of(*tp, true, Mlp::rows / 2));
            fsdp->grads_ready(0);
            fsdp->wait();
            EXPECT_NEAR(adam->clip_grad_norm(0.5, 2), norms[static_cast<size_t>(i)], 1e-10);
            adam->step();
        }
        for (size_t p = 0; p < Mlp::params; ++p) {
            expect_near(numbers_of(fsdp->shard(p)), held_part(expected.values[p], fsdp->held(p)), fsdp->param(p).name);
        }
    }));
}

TEST(OverTp, WhatDoesNotFitIsRefusedOnAllRanks) {
    const auto refusal = [](const std::function<void(const Group&, const std::shared_ptr<TensorParallel>&)>& make) {
        std::string text;
        const Outcomes outcomes = run_ranks(4, test_options(), [&](Communicator& comm) {
            const Group group(comm);
            Mlp mlp(7);
            make(group, sliced(group, mlp.named(), Mlp::rules()));
        });
        for (const auto& outcome : outcomes) {
            EXPECT_TRUE(outcome);
            if (outcome) text += std::string(outcome->what()) + "\n";
        }
        return text;
    };
    EXPECT_THAT(refusal([](const Group& group, const std::shared_ptr<TensorParallel>& tp) {
                    DdpOptions options;
                    const Ddp ddp(group.mesh.comm(1), slices_of(*tp), options, tp);  // the wrong dimension
                }),
                AllOf(HasSubstr("2 ranks which hold the same slices"), HasSubstr("dp 2, tp 2")));
    EXPECT_THAT(refusal([](const Group& group, const std::shared_ptr<TensorParallel>& tp) {
                    DdpOptions options;
                    std::vector<NamedTensor> params = slices_of(*tp);
                    params[0].name = "fc9.weight";
                    const Ddp ddp(group.dp(), params, options, tp);
                }),
                HasSubstr("\"fc9.weight\" is not one of"));
    EXPECT_THAT(refusal([](const Group& group, const std::shared_ptr<TensorParallel>& tp) {
                    FsdpOptions options;
                    FsdpUnit unit;
                    unit.name = "all";
                    unit.params = slices_of(*tp);
                    unit.params[0].tensor.shape = Dims{1, 1};
                    const Fsdp fsdp(group.dp(), {unit}, options, tp);
                }),
                AllOf(HasSubstr("\"fc1.weight\" is f64 [1, 1]"), HasSubstr("this rank's slice")));
    EXPECT_THAT(refusal([](const Group& group, const std::shared_ptr<TensorParallel>& tp) {
                    DdpOptions options;
                    options.share_params = true;
                    const Ddp ddp(group.dp(), slices_of(*tp), options, tp);
                }),
                HasSubstr("share_params cannot be combined with a tensor-parallel model"));
}

}  // namespace
}  // namespace tsr
