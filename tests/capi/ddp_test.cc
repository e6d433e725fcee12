// tessera/ddp.h, optim.h and data.h through the C ABI.
#include <cmath>

#include "api.hpp"

namespace {

using ::testing::Each;
using ::testing::ElementsAre;

std::span<float> floats(const tsr_tensor& tensor) {
    size_t count = 1;
    for (int32_t d = 0; d < tensor.ndim; ++d) count *= static_cast<size_t>(tensor.shape[d]);
    return {reinterpret_cast<float*>(static_cast<char*>(tensor.data) + tensor.byte_offset), count};
}

struct Model {
    api::Array<float> weight;
    api::Array<float> bias;
    explicit Model(float value) : weight({3, 2}, value), bias({3}, value) {}
    std::array<tsr_param, 2> params() { return {{{"module.weight", weight.tensor()}, {"module.bias", bias.tensor()}}}; }
};

TEST(DdpApi, TrainsAModelOnThreeRanks) {
    api::run_ranks(3, [](tsr_comm* comm, int32_t rank) {
        Model model(static_cast<float>(rank + 1));
        const auto params = model.params();
        api::Owned<tsr_ddp> ddp;
        ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), nullptr, ddp.out()));
        EXPECT_THAT(model.weight.values, Each(1.0F)) << "rank 0's values";

        size_t count = 0;
        EXPECT_OK(tsr_ddp_param_count(ddp, &count));
        EXPECT_EQ(count, 2U);
        tsr_param param{};
        EXPECT_OK(tsr_ddp_param(ddp, 0, &param));
        EXPECT_STREQ(param.name, "weight") << "without the wrapper's prefix";
        EXPECT_EQ(param.tensor.data, model.weight.values.data());
        EXPECT_EQ(param.tensor.ndim, 2);

        tsr_sgd_options options;
        ASSERT_OK(tsr_sgd_options_init(&options, sizeof options));
        options.lr = 0.5;
        api::Owned<tsr_optimizer> optimizer;
        ASSERT_OK(tsr_ddp_sgd(ddp, &options, optimizer.out()));
        tsr_tensor grad{};
        ASSERT_OK(tsr_ddp_grad(ddp, 0, &grad));
        EXPECT_EQ(grad.shape[0], 3);
        EXPECT_EQ(grad.shape[1], 2);
        for (float& g : floats(grad)) g = static_cast<float>(rank);
        EXPECT_OK(tsr_ddp_ready(ddp, 0));
        EXPECT_FAILS(tsr_ddp_ready(ddp, 0), TSR_E_INVALID_STATE, "\"weight\" was said to be ready twice");
        EXPECT_FAILS(tsr_ddp_ready(ddp, 2), TSR_E_INVALID_ARGUMENT, "parameter 2 of a model with 2");
        EXPECT_FAILS(tsr_ddp_wait(ddp), TSR_E_INVALID_STATE, "\"bias\"");
        EXPECT_FAILS(tsr_optimizer_step(optimizer), TSR_E_INVALID_STATE, "being reduced");
        EXPECT_FAILS(tsr_optimizer_zero_grad(optimizer), TSR_E_INVALID_STATE, "being reduced");
        EXPECT_FAILS(tsr_ddp_zero_grad(ddp), TSR_E_INVALID_STATE, "being reduced");
        EXPECT_OK(tsr_ddp_ready_all(ddp));
        EXPECT_OK(tsr_ddp_wait(ddp));
        EXPECT_THAT(floats(grad), Each(1.0F)) << "the average of 0, 1, 2";
        EXPECT_OK(tsr_optimizer_step(optimizer));
        EXPECT_THAT(model.weight.values, Each(0.5F));
        EXPECT_THAT(model.bias.values, Each(1.0F));
        EXPECT_OK(tsr_ddp_zero_grad(ddp));
        EXPECT_THAT(floats(grad), Each(0.0F));
    });
}

TEST(DdpApi, DestroyingTheCommunicatorEndsABackward) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        tsr_comm* group = nullptr;
        ASSERT_OK(tsr_comm_split(comm, 0, rank, nullptr, &group));
        Model model(1.0F);
        const auto params = model.params();
        api::Owned<tsr_ddp> ddp;
        ASSERT_OK(tsr_ddp_create(group, params.data(), params.size(), nullptr, ddp.out()));
        if (rank == 0) {  // rank 1's backward never ends
            EXPECT_OK(tsr_ddp_ready_all(ddp));
            tsr_comm_destroy(group);
            EXPECT_FAILS(tsr_ddp_wait(ddp), TSR_E_ABORTED, "destroyed while it had work");
        }
        EXPECT_OK(tsr_comm_barrier(comm, nullptr));
        if (rank == 1) {
            EXPECT_FAILS(tsr_comm_barrier(group, nullptr), TSR_E_ABORTED, "destroyed while it had work");
            tsr_comm_destroy(group);
        }
    });
}

TEST(DdpApi, AnIdleModelOfADestroyedCommunicatorSaysSo) {
    api::run_ranks(1, [](tsr_comm* comm, int32_t rank) {
        tsr_comm* group = nullptr;
        ASSERT_OK(tsr_comm_split(comm, 0, rank, nullptr, &group));
        Model model(1.0F);
        const auto params = model.params();
        api::Owned<tsr_ddp> ddp;
        ASSERT_OK(tsr_ddp_create(group, params.data(), params.size(), nullptr, ddp.out()));
        tsr_comm_destroy(group);
        tsr_status status = tsr_ddp_ready_all(ddp);
        if (status == TSR_OK) status = tsr_ddp_wait(ddp);
        EXPECT_EQ(status, TSR_E_INVALID_STATE) << tsr_error_message(tsr_error_last());
    });
}

TEST(DdpApi, OptimizerAndDdpMayBeDestroyedInAnyOrder) {
    const api::Owned<tsr_comm> comm = api::alone();
    Model model(1);
    const auto params = model.params();
    api::Owned<tsr_ddp> ddp;
    ASSERT_OK(tsr_ddp_create(comm, params.data(), 2, nullptr, ddp.out()));
    api::Owned<tsr_optimizer> adam;
    api::Owned<tsr_optimizer> adamw;
    ASSERT_OK(tsr_ddp_adam(ddp, nullptr, adam.out()));
    ASSERT_OK(tsr_ddp_adamw(ddp, nullptr, adamw.out()));
    ddp.reset();
    EXPECT_OK(tsr_optimizer_step(adam)) << "the buckets live as long as an optimizer uses them";
    EXPECT_OK(tsr_optimizer_zero_grad(adamw));
}

TEST(DdpApi, DifferingRanksAllGetTheMismatch) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Model model(1);
        auto params = model.params();
        if (rank == 1) params[1].name = "offset";
        api::Owned<tsr_ddp> ddp;
        EXPECT_FAILS(tsr_ddp_create(comm, params.data(), 2, nullptr, ddp.out()), TSR_E_MISMATCH,
                     "rank 1 has parameter 1 \"offset\" f32 [3], rank 0 has parameter 1 \"bias\" f32 [3]");
        EXPECT_EQ(ddp, nullptr);
        EXPECT_EQ(tsr_error_peer(tsr_error_last()), 1);
        EXPECT_EQ(tsr_error_rank(tsr_error_last()), rank);
    });
}

TEST(DdpApi, BadArgumentsAreRefused) {
    const api::Owned<tsr_comm> comm = api::alone();
    Model model(1);
    auto params = model.params();
    api::Owned<tsr_ddp> ddp;
    EXPECT_FAILS(tsr_ddp_create(comm, params.data(), 0, nullptr, ddp.out()), TSR_E_INVALID_ARGUMENT,
                 "without parameters");
    EXPECT_FAILS(tsr_ddp_create(comm, nullptr, 2, nullptr, ddp.out()), TSR_E_INVALID_ARGUMENT, "params is NULL");
    EXPECT_FAILS(tsr_ddp_create(comm, params.data(), 2, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "out is NULL");
    params[1].name = nullptr;
    EXPECT_FAILS(tsr_ddp_create(comm, params.data(), 2, nullptr, ddp.out()), TSR_E_INVALID_ARGUMENT, "name is NULL");
    params[1].name = "weight";
    EXPECT_FAILS(tsr_ddp_create(comm, params.data(), 2, nullptr, ddp.out()), TSR_E_INVALID_ARGUMENT, "two parameters");
    params[1].name = "";
    EXPECT_FAILS(tsr_ddp_create(comm, params.data(), 2, nullptr, ddp.out()), TSR_E_INVALID_ARGUMENT, "empty");
    params = model.params();
    params[1].tensor.dtype = TSR_DTYPE_I32;
    EXPECT_FAILS(tsr_ddp_create(comm, params.data(), 2, nullptr, ddp.out()), TSR_E_INVALID_ARGUMENT, "\"bias\" is i32");
    params[1].tensor.dtype = 77;
    EXPECT_FAILS(tsr_ddp_create(comm, params.data(), 2, nullptr, ddp.out()), TSR_E_INVALID_ARGUMENT,
                 "parameter 1 (\"module.bias\") has the unknown dtype 77");
    params = model.params();
    params[0].tensor.device_type = TSR_DEVICE_CUDA;
    EXPECT_FAILS(tsr_ddp_create(comm, params.data(), 2, nullptr, ddp.out()), TSR_E_UNSUPPORTED, "not on the CPU");
    tsr_ddp_options options;
    ASSERT_OK(tsr_ddp_options_init(&options, sizeof options));
    options.op = TSR_REDUCE_MAX;
    EXPECT_FAILS(tsr_ddp_create(comm, model.params().data(), 2, &options, ddp.out()), TSR_E_INVALID_ARGUMENT,
                 "AVG or SUM");
}

TEST(OptimizerApi, UpdatesTheCallersMemory) {
    api::Array<double> value({1.0, 2.0});
    api::Array<double> grad({0.5, -0.5});
    const tsr_param param{"w", value.tensor()};
    const tsr_tensor g = grad.tensor();
    tsr_sgd_options options;
    ASSERT_OK(tsr_sgd_options_init(&options, sizeof options));
    options.lr = 1;
    api::Owned<tsr_optimizer> optimizer;
    ASSERT_OK(tsr_sgd_create(&param, &g, 1, &options, optimizer.out()));
    EXPECT_OK(tsr_optimizer_step(optimizer));
    EXPECT_THAT(value.values, ElementsAre(0.5, 2.5));
    EXPECT_OK(tsr_optimizer_set_lr(optimizer, 2));
    double lr = 0;
    EXPECT_OK(tsr_optimizer_lr(optimizer, &lr));
    EXPECT_EQ(lr, 2);
    EXPECT_OK(tsr_optimizer_step(optimizer));
    EXPECT_THAT(value.values, ElementsAre(-0.5, 3.5));
    int64_t steps = 0;
    EXPECT_OK(tsr_optimizer_steps(optimizer, &steps));
    EXPECT_EQ(steps, 2);
    EXPECT_FAILS(tsr_optimizer_set_lr(optimizer, -1), TSR_E_INVALID_ARGUMENT, "lr is -1");
    EXPECT_OK(tsr_optimizer_zero_grad(optimizer));
    EXPECT_THAT(grad.values, Each(0.0));
}

TEST(OptimizerApi, BadParametersAreRefused) {
    api::Array<float> value({4}, 1.0F);
    api::Array<float> grad({3}, 1.0F);
    const tsr_param param{"w", value.tensor()};
    tsr_tensor g = grad.tensor();
    api::Owned<tsr_optimizer> optimizer;
    EXPECT_FAILS(tsr_adam_create(&param, &g, 1, nullptr, optimizer.out()), TSR_E_INVALID_ARGUMENT,
                 "shape [4], its gradient [3]");
    EXPECT_FAILS(tsr_adam_create(&param, nullptr, 1, nullptr, optimizer.out()), TSR_E_INVALID_ARGUMENT,
                 "grads is NULL");
    EXPECT_FAILS(tsr_adam_create(nullptr, &g, 1, nullptr, optimizer.out()), TSR_E_INVALID_ARGUMENT, "params is NULL");
    EXPECT_FAILS(tsr_adam_create(&param, &g, 0, nullptr, optimizer.out()), TSR_E_INVALID_ARGUMENT,
                 "without parameters");
    g.dtype = 0;
    EXPECT_FAILS(tsr_adam_create(&param, &g, 1, nullptr, optimizer.out()), TSR_E_INVALID_ARGUMENT,
                 "the gradient of parameter 0 (\"w\") has the unknown dtype 0");
    tsr_adam_options options;
    ASSERT_OK(tsr_adam_options_init(&options, sizeof options));
    options.beta1 = NAN;
    g = value.tensor();
    EXPECT_FAILS(tsr_adam_create(&param, &g, 1, &options, optimizer.out()), TSR_E_INVALID_ARGUMENT, "beta1 is nan");
}

TEST(SamplerApi, RanksTakeDisjointSamples) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        tsr_sampler_options options;
        ASSERT_OK(tsr_sampler_options_init(&options, sizeof options));
        options.shuffle = 0;
        api::Owned<tsr_sampler> sampler;
        ASSERT_OK(tsr_sampler_create(comm, 5, &options, sampler.out()));
        std::array<int64_t, 4> indices{-1, -1, -1, -1};
        size_t count = 0;
        ASSERT_OK(tsr_sampler_next(sampler, indices.data(), 2, &count));
        EXPECT_EQ(count, 2U);
        EXPECT_THAT(indices, ElementsAre(rank, rank + 2, -1, -1));
        int64_t epoch = -1;
        int64_t consumed = -1;
        EXPECT_OK(tsr_sampler_position(sampler, &epoch, &consumed));
        EXPECT_EQ(epoch, 0);
        EXPECT_EQ(consumed, 4);
        ASSERT_OK(tsr_sampler_next(sampler, indices.data(), 4, &count));
        EXPECT_EQ(count, 1U) << "the end of the epoch";
        EXPECT_EQ(indices[0], rank == 0 ? 4 : 0);
        EXPECT_OK(tsr_sampler_position(sampler, &epoch, nullptr));
        EXPECT_EQ(epoch, 1);
        EXPECT_OK(tsr_sampler_set_epoch(sampler, 7));
        EXPECT_OK(tsr_sampler_position(sampler, &epoch, &consumed));
        EXPECT_EQ(epoch, 7);
        EXPECT_EQ(consumed, 0);
        EXPECT_FAILS(tsr_sampler_set_epoch(sampler, -1), TSR_E_INVALID_ARGUMENT, "epoch -1");
        EXPECT_FAILS(tsr_sampler_next(sampler, indices.data(), 0, &count), TSR_E_INVALID_ARGUMENT, "at least 1");
        EXPECT_FAILS(tsr_sampler_next(sampler, nullptr, 1, &count), TSR_E_INVALID_ARGUMENT, "indices is NULL");
        EXPECT_FAILS(tsr_sampler_next(sampler, indices.data(), 1, nullptr), TSR_E_INVALID_ARGUMENT, "count is NULL");
        api::Owned<tsr_sampler> none;
        EXPECT_FAILS(tsr_sampler_create(comm, 0, nullptr, none.out()), TSR_E_INVALID_ARGUMENT, "0 samples");
    });
}

}  // namespace
