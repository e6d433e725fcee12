// tessera/ddp.h, optim.h and data.h through the C ABI.
#include <array>
#include <cmath>

#include "api.hpp"

namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

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
        EXPECT_FAILS(tsr_ddp_ready(ddp, 0), TSR_E_INVALID_STATE, "\"weight\" was marked ready twice");
        EXPECT_FAILS(tsr_ddp_ready(ddp, 2), TSR_E_INVALID_ARGUMENT,
                     "parameter 2 does not exist; the model has 2 parameters (0 to 1)");
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

tsr_ddp_options ddp_options() {
    tsr_ddp_options options;
    EXPECT_OK(tsr_ddp_options_init(&options, sizeof options));
    return options;
}

// Each rank would update its parameters with its own gradients, and nobody would learn that they differ.
TEST(DdpApi, AnOptimizerStepsOnceForGradientsThatWereReduced) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t) {
        Model model(1);
        const auto params = model.params();
        api::Owned<tsr_ddp> ddp;
        ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), nullptr, ddp.out()));
        api::Owned<tsr_optimizer> sgd;
        ASSERT_OK(tsr_ddp_sgd(ddp, nullptr, sgd.out()));
        EXPECT_FAILS(tsr_optimizer_step(sgd), TSR_E_INVALID_STATE, "before any gradients were reduced");
        for (int step = 0; step < 2; ++step) {
            EXPECT_OK(tsr_ddp_ready_all(ddp));
            EXPECT_OK(tsr_ddp_wait(ddp));
            EXPECT_OK(tsr_optimizer_step(sgd));
            EXPECT_FAILS(tsr_optimizer_step(sgd), TSR_E_INVALID_STATE, "no gradients were reduced since its last step");
        }
        api::Owned<tsr_optimizer> late;
        ASSERT_OK(tsr_ddp_adam(ddp, nullptr, late.out()));
        EXPECT_OK(tsr_optimizer_step(late)) << "of the gradients that are there";
        int64_t steps = 0;
        EXPECT_OK(tsr_optimizer_steps(sgd, &steps));
        EXPECT_EQ(steps, 2);
        EXPECT_OK(tsr_ddp_set_sync(ddp, 0));
        EXPECT_OK(tsr_optimizer_step(sgd)) << "steps of a rank's own are wanted";
        EXPECT_OK(tsr_optimizer_step(sgd));
        EXPECT_OK(tsr_ddp_set_sync(ddp, 1));
        EXPECT_FAILS(tsr_optimizer_step(sgd), TSR_E_INVALID_STATE, "no gradients were reduced");
    });
}

TEST(DdpApi, AccumulatesFindsUnusedAndTellsStatistics) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Model model(0);
        const auto params = model.params();
        tsr_ddp_options options = ddp_options();
        options.find_unused = 1;
        options.reduce_dtype = TSR_DTYPE_BF16;
        api::Owned<tsr_ddp> ddp;
        ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), &options, ddp.out()));
        tsr_tensor grad{};
        ASSERT_OK(tsr_ddp_grad(ddp, 0, &grad));
        EXPECT_FAILS(tsr_ddp_set_sync(ddp, 2), TSR_E_INVALID_ARGUMENT, "sync is 2");
        EXPECT_OK(tsr_ddp_set_sync(ddp, 0));
        for (float& g : floats(grad)) g += static_cast<float>(rank);
        EXPECT_OK(tsr_ddp_ready(ddp, 0));
        EXPECT_FAILS(tsr_ddp_set_sync(ddp, 1), TSR_E_INVALID_STATE, "synchronisation cannot be changed");
        EXPECT_OK(tsr_ddp_wait(ddp));
        EXPECT_OK(tsr_ddp_set_sync(ddp, 1));
        EXPECT_OK(tsr_ddp_wait(ddp));
        EXPECT_THAT(floats(grad), Each(0.5F));
        int32_t used = -1;
        EXPECT_OK(tsr_ddp_used(ddp, 0, &used));
        EXPECT_EQ(used, 1);
        EXPECT_OK(tsr_ddp_used(ddp, 1, &used));
        EXPECT_EQ(used, 0);
        size_t buckets = 0;
        EXPECT_OK(tsr_ddp_bucket_count(ddp, &buckets));
        EXPECT_EQ(buckets, 1U);
        tsr_bucket_stats stats{};
        EXPECT_FAILS(tsr_ddp_stats(ddp, 0, &stats), TSR_E_INVALID_ARGUMENT, "struct_size");
        stats.struct_size = sizeof stats;
        EXPECT_OK(tsr_ddp_stats(ddp, 0, &stats));
        EXPECT_EQ(stats.params, 2U);
        EXPECT_EQ(stats.size_bytes, 128U);
        EXPECT_GT(stats.end_ns, stats.start_ns);
        EXPECT_FAILS(tsr_ddp_stats(ddp, 1, &stats), TSR_E_INVALID_ARGUMENT,
                     "bucket 1 does not exist; the model has 1 buckets (0 to 0)");
    });
}

// Two models in one step, the gradients of one between those of the other, both in flight at once; over communicators of
// their own, where ranks may wait for them in another order, and over one.
TEST(DdpApi, TwoModelsTrainInOneProcess) {
    for (const bool own_communicators : {true, false}) {
        api::run_ranks(3, [&](tsr_comm* comm, int32_t rank) {
            std::array<api::Owned<tsr_comm>, 2> comms;
            std::array<Model, 2> models{Model(10), Model(20)};
            std::array<api::Owned<tsr_ddp>, 2> ddps;
            std::array<api::Owned<tsr_optimizer>, 2> optimizers;
            tsr_ddp_options options = ddp_options();
            options.bucket_bytes = options.first_bucket_bytes = 1;  // a bucket each, bias before weight
            tsr_sgd_options sgd;
            ASSERT_OK(tsr_sgd_options_init(&sgd, sizeof sgd));
            sgd.lr = 0.5;
            for (size_t m = 0; m < 2; ++m) {
                if (own_communicators) {
                    ASSERT_OK(tsr_comm_split(comm, 0, rank, nullptr, comms.at(m).out()));
                }
                const auto params = models.at(m).params();
                ASSERT_OK(tsr_ddp_create(own_communicators ? static_cast<tsr_comm*>(comms.at(m)) : comm, params.data(),
                                         params.size(), &options, ddps.at(m).out()));
                ASSERT_OK(tsr_ddp_sgd(ddps.at(m), &sgd, optimizers.at(m).out()));
            }
            const auto grad_of = [&](size_t m, size_t index) {
                tsr_tensor grad{};
                EXPECT_OK(tsr_ddp_grad(ddps.at(m), index, &grad));
                return floats(grad);
            };
            for (int step = 1; step <= 3; ++step) {
                // The average over the ranks is 100 m + 10 step + index + 1.
                for (const auto& [m, index] : {std::pair{0, 0}, {1, 1}, {0, 1}, {1, 0}}) {
                    const auto model = static_cast<size_t>(m);
                    const auto param = static_cast<size_t>(index);
                    for (float& g : grad_of(model, param)) g = static_cast<float>(100 * m + 10 * step + index + rank);
                    EXPECT_OK(tsr_ddp_ready(ddps.at(model), param));
                }
                const size_t first = own_communicators && rank == 1 ? 1 : 0;
                EXPECT_OK(tsr_ddp_wait(ddps.at(first)));
                EXPECT_OK(tsr_optimizer_step(optimizers.at(first)));
                EXPECT_OK(tsr_ddp_wait(ddps.at(1 - first)));
                EXPECT_OK(tsr_optimizer_step(optimizers.at(1 - first)));
                for (size_t m = 0; m < 2; ++m) {
                    for (size_t index = 0; index < 2; ++index) {
                        EXPECT_THAT(grad_of(m, index),
                                    Each(static_cast<float>(100 * m + index + 1) + static_cast<float>(10 * step)))
                            << "model " << m << ", parameter " << index << ", step " << step;
                    }
                }
            }
            for (size_t m = 0; m < 2; ++m) {
                const auto base = static_cast<float>(10 * (m + 1));
                const auto sum_of_steps = static_cast<float>(3 * 100 * m + 60);
                EXPECT_THAT(models.at(m).weight.values, Each(base - 0.5F * (sum_of_steps + 3)));
                EXPECT_THAT(models.at(m).bias.values, Each(base - 0.5F * (sum_of_steps + 6)));
            }
        });
    }
}

struct MaxHook {
    int32_t failing_rank = -1;
    int32_t rank = 0;
    int calls = 0;
    int* freed = nullptr;
};

int32_t reduce_by_max(const tsr_ddp_bucket* bucket, void* user_data) {
    auto& hook = *static_cast<MaxHook*>(user_data);
    ++hook.calls;
    EXPECT_EQ(bucket->bucket, 0U);
    EXPECT_EQ(bucket->n, 2U);
    if (hook.rank == hook.failing_rank) return 42;
    if (tsr_comm_all_reduce(bucket->comm, bucket->grads, bucket->n, TSR_REDUCE_MAX, nullptr, nullptr) != TSR_OK)
        return 1;
    return 0;
}

TEST(DdpApi, AHookReducesAndItsNumberComesBack) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Model model(0);
        const auto params = model.params();
        int freed = 0;
        MaxHook hook{-1, rank, 0, &freed};
        {
            api::Owned<tsr_ddp> ddp;
            ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), nullptr, ddp.out()));
            ASSERT_OK(tsr_ddp_set_hook(ddp, reduce_by_max, &hook,
                                       [](void* user_data) { ++*static_cast<MaxHook*>(user_data)->freed; }));
            tsr_tensor grad{};
            ASSERT_OK(tsr_ddp_grad(ddp, 1, &grad));
            for (float& g : floats(grad)) g = static_cast<float>(rank);
            EXPECT_OK(tsr_ddp_ready_all(ddp));
            EXPECT_FAILS(tsr_ddp_set_hook(ddp, nullptr, nullptr, nullptr), TSR_E_INVALID_STATE, "the hook cannot be");
            EXPECT_OK(tsr_ddp_wait(ddp));
            EXPECT_THAT(floats(grad), Each(1.0F));
            EXPECT_EQ(hook.calls, 1);
            hook.failing_rank = 1;
            EXPECT_EQ(freed, 0);
            EXPECT_OK(tsr_ddp_ready_all(ddp));
            const tsr_status status = tsr_ddp_wait(ddp);
            EXPECT_EQ(status, rank == 1 ? TSR_E_USER : TSR_E_ABORTED);
            EXPECT_THAT(tsr_error_message(tsr_error_last()), HasSubstr("rank 1: the hook for bucket 0 returned 42"));
            if (rank == 1) {
                int32_t domain = 0;
                EXPECT_EQ(tsr_error_native(tsr_error_last(), &domain), 42);
                EXPECT_EQ(domain, TSR_NATIVE_USER);
            }
        }
        EXPECT_EQ(freed, 1);
    });
}

TEST(DdpApi, AnOptimizerThatStepsInBackwardMayGoAtAnyTime) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t) {
        Model model(1);
        const auto params = model.params();
        api::Owned<tsr_ddp> ddp;
        ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), nullptr, ddp.out()));
        tsr_sgd_options options;
        ASSERT_OK(tsr_sgd_options_init(&options, sizeof options));
        options.lr = 0.5;
        for (int round = 0; round < 20; ++round) {
            api::Owned<tsr_optimizer> optimizer;
            ASSERT_OK(tsr_ddp_sgd(ddp, &options, optimizer.out()));
            EXPECT_OK(tsr_ddp_step_in_backward(ddp, optimizer));
            EXPECT_FAILS(tsr_ddp_step_in_backward(ddp, optimizer), TSR_E_INVALID_STATE, "steps in backward");
            EXPECT_FAILS(tsr_optimizer_step(optimizer), TSR_E_INVALID_STATE, "the step is already done");
            EXPECT_OK(tsr_ddp_ready_all(ddp));
            EXPECT_FAILS(tsr_optimizer_set_lr(optimizer, 1), TSR_E_INVALID_STATE, "being reduced");
            if (round % 2 == 0) optimizer.reset();
            EXPECT_OK(tsr_ddp_wait(ddp));
        }
        EXPECT_THAT(model.weight.values, Each(1.0F)) << "of gradients of zero";
    });
}

// It would not be known when it ends.
TEST(DdpApi, AnOptimizerThatIsNotTheModelsDoesNotStepInBackwardThoughItHasItsGradients) {
    const api::Owned<tsr_comm> comm = api::alone();
    Model model(1);
    const auto params = model.params();
    api::Owned<tsr_ddp> ddp;
    api::Owned<tsr_ddp> other;
    ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), nullptr, ddp.out()));
    ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), nullptr, other.out()));
    std::array<tsr_tensor, 2> grads{};
    for (size_t i = 0; i < grads.size(); ++i) ASSERT_OK(tsr_ddp_grad(ddp, i, &grads[i]));
    {
        api::Owned<tsr_optimizer> strangers;
        ASSERT_OK(tsr_sgd_create(params.data(), grads.data(), grads.size(), nullptr, strangers.out()));
        EXPECT_FAILS(tsr_ddp_step_in_backward(ddp, strangers), TSR_E_INVALID_ARGUMENT,
                     "was not created from this model");
        api::Owned<tsr_optimizer> anothers;
        ASSERT_OK(tsr_ddp_sgd(other, nullptr, anothers.out()));
        EXPECT_FAILS(tsr_ddp_step_in_backward(ddp, anothers), TSR_E_INVALID_ARGUMENT,
                     "was not created from this model");
    }
    EXPECT_OK(tsr_ddp_ready_all(ddp));
    EXPECT_OK(tsr_ddp_wait(ddp));
}

TEST(DdpApi, RanksJoinWithTheirBuffers) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Model model(0);
        const auto params = model.params();
        tsr_ddp_options options = ddp_options();
        api::Owned<tsr_ddp> plain;
        ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), &options, plain.out()));
        EXPECT_FAILS(tsr_ddp_join(plain, 1), TSR_E_INVALID_STATE, "without the join option");
        EXPECT_FAILS(tsr_ddp_broadcast_buffers(plain), TSR_E_INVALID_STATE, "no buffers were registered");
        options.join = TSR_DDP_JOIN_DIVIDE_BY_ACTIVE;
        api::Owned<tsr_ddp> ddp;
        ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), &options, ddp.out()));
        api::Array<float> mean({4}, static_cast<float>(rank + 3));
        const tsr_param buffer{"mean", mean.tensor()};
        ASSERT_OK(tsr_ddp_register_buffers(ddp, &buffer, 1));
        EXPECT_THAT(mean.values, Each(3.0F));
        tsr_tensor grad{};
        ASSERT_OK(tsr_ddp_grad(ddp, 0, &grad));
        for (int step = 0; step < 1 + 2 * rank; ++step) {
            mean.values.assign(4, static_cast<float>(10 * step + rank));
            EXPECT_OK(tsr_ddp_broadcast_buffers(ddp));
            EXPECT_THAT(mean.values, Each(static_cast<float>(step == 0 ? 0 : 10 * step + 1)));
            for (float& g : floats(grad)) g = static_cast<float>(rank + 1);
            EXPECT_OK(tsr_ddp_ready_all(ddp));
            EXPECT_OK(tsr_ddp_wait(ddp));
            EXPECT_THAT(floats(grad), Each(step == 0 ? 1.5F : 2.0F));
        }
        EXPECT_FAILS(tsr_ddp_join(ddp, 5), TSR_E_INVALID_ARGUMENT, "sync_params is 5");
        EXPECT_OK(tsr_ddp_join(ddp, 1));
        EXPECT_THAT(mean.values, Each(21.0F)) << "rank 1's, which made most steps";
    });
}

TEST(DdpApi, BuffersThatOneRankRegistersBadlyAreRefusedOnAll) {
    static const std::array<int64_t, 1> steps{2};
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Model model(0);
        const auto params = model.params();
        api::Owned<tsr_ddp> ddp;
        ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), nullptr, ddp.out()));
        api::Array<float> mean({2}, static_cast<float>(rank + 3));
        tsr_param buffer{"mean", mean.tensor()};
        if (rank == 1) buffer.tensor.strides = steps.data();
        EXPECT_FAILS(tsr_ddp_register_buffers(ddp, &buffer, 1), TSR_E_INVALID_ARGUMENT, "is not contiguous");
        if (rank == 0) {
            EXPECT_THAT(api::message(), ::testing::StartsWith("rank 1: "));
        }
        buffer.tensor.strides = nullptr;
        EXPECT_OK(tsr_ddp_register_buffers(ddp, &buffer, 1));
        EXPECT_THAT(mean.values, Each(3.0F));
    });
}

TEST(DdpApi, TheRanksOfAHostShareTheParameters) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        Model model(1.0F);
        const auto params = model.params();
        tsr_ddp_options options = ddp_options();
        api::Owned<tsr_ddp> plain;
        ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), &options, plain.out()));
        int64_t steps = -1;
        EXPECT_FAILS(tsr_ddp_shared_step(plain, &steps), TSR_E_INVALID_STATE, "create it with share_params");
        options.share_params = 1;
        options.find_unused = 1;
        api::Owned<tsr_ddp> ddp;
        EXPECT_FAILS(tsr_ddp_create(comm, params.data(), params.size(), &options, ddp.out()), TSR_E_UNSUPPORTED,
                     "share_params cannot be combined with find_unused");
        options.find_unused = 0;
        ASSERT_OK(tsr_ddp_create(comm, params.data(), params.size(), &options, ddp.out()));
        tsr_param weight{};
        ASSERT_OK(tsr_ddp_param(ddp, 0, &weight));
        EXPECT_NE(weight.tensor.data, params[0].tensor.data);
        EXPECT_FAILS(tsr_ddp_ready_all(ddp), TSR_E_INVALID_STATE, "needs an optimizer");
        tsr_sgd_options sgd{};
        ASSERT_OK(tsr_sgd_options_init(&sgd, sizeof sgd));
        sgd.lr = 0.5;
        api::Owned<tsr_optimizer> optimizer;
        ASSERT_OK(tsr_ddp_sgd(ddp, &sgd, optimizer.out()));
        EXPECT_FAILS(tsr_ddp_step_in_backward(ddp, optimizer), TSR_E_INVALID_STATE, "steps in backward");
        tsr_tensor grad{};
        ASSERT_OK(tsr_ddp_grad(ddp, 0, &grad));
        for (float& g : floats(grad)) g = static_cast<float>(rank);
        EXPECT_OK(tsr_ddp_ready_all(ddp));
        EXPECT_OK(tsr_ddp_wait(ddp));
        EXPECT_THAT(floats(weight.tensor), Each(0.75F));
        EXPECT_THAT(model.weight.values, Each(1.0F)) << "what was registered is not used any more";
        EXPECT_OK(tsr_ddp_shared_step(ddp, &steps));
        EXPECT_EQ(steps, 1);
        EXPECT_OK(tsr_comm_barrier(comm, nullptr));
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
    EXPECT_OK(tsr_ddp_ready_all(ddp));
    EXPECT_OK(tsr_ddp_wait(ddp));
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
                 "the model has no parameters");
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
    EXPECT_FAILS(tsr_ddp_create(comm, params.data(), 2, nullptr, ddp.out()), TSR_E_INVALID_ARGUMENT,
                 "all parameters of a model must be in one place");
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
                 "shape [4], but its gradient has shape [3]");
    EXPECT_FAILS(tsr_adam_create(&param, nullptr, 1, nullptr, optimizer.out()), TSR_E_INVALID_ARGUMENT,
                 "grads is NULL");
    EXPECT_FAILS(tsr_adam_create(nullptr, &g, 1, nullptr, optimizer.out()), TSR_E_INVALID_ARGUMENT, "params is NULL");
    EXPECT_FAILS(tsr_adam_create(&param, &g, 0, nullptr, optimizer.out()), TSR_E_INVALID_ARGUMENT,
                 "the optimizer has no parameters");
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
        EXPECT_FAILS(tsr_sampler_set_epoch(sampler, -1), TSR_E_INVALID_ARGUMENT, "epoch is -1");
        EXPECT_FAILS(tsr_sampler_next(sampler, indices.data(), 0, &count), TSR_E_INVALID_ARGUMENT, "at least 1");
        EXPECT_FAILS(tsr_sampler_next(sampler, nullptr, 1, &count), TSR_E_INVALID_ARGUMENT, "indices is NULL");
        EXPECT_FAILS(tsr_sampler_next(sampler, indices.data(), 1, nullptr), TSR_E_INVALID_ARGUMENT, "count is NULL");
        api::Owned<tsr_sampler> none;
        EXPECT_FAILS(tsr_sampler_create(comm, 0, nullptr, none.out()), TSR_E_INVALID_ARGUMENT,
                     "the sampler's length is 0");
    });
}

}  // namespace
