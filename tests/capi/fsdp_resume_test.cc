// A sharded model that was saved by n ranks goes on at m ranks as if nothing had happened, for n and m from 1 to 5, cut by
// rows, by blocks of them or anywhere, as the number of ranks is.
#include <cmath>

#include "api.hpp"
#include "temporary_directory.hpp"

namespace {

constexpr int32_t most_ranks = 5;
constexpr int64_t saved_step = 6;
constexpr int64_t last_step = 14;
constexpr int64_t batch = 60;  // samples a step, which 1 to 5 ranks divide

// Parameters of every kind of rows: more than ranks, as many as some worlds have, fewer. Each learns what a sample wants of
// its elements; the loss is the mean square of what is missing.
struct Trainer {
    api::Array<float> weight{{7, 3}, 0.5F};
    api::Array<float> bias{{2}, -0.5F};
    api::Array<float> scale{{1, 4}, 0.25F};
    api::Array<float> last{{11}, 0};
    std::array<tsr_param, 2> first{{{"weight", weight.tensor()}, {"bias", bias.tensor()}}};
    std::array<tsr_param, 2> second{{{"scale", scale.tensor()}, {"last", last.tensor()}}};
    std::array<tsr_fsdp_unit, 2> units{{{"first", first.data(), 2, nullptr, 1, 0, 0, 0, 0, 0},
                                        {"second", second.data(), 2, nullptr, 1, 0, 0, 0, 0, 0}}};
    tsr_comm* comm;
    int32_t ranks = 0;
    int32_t rank = 0;
    api::Owned<tsr_fsdp> fsdp;
    api::Owned<tsr_optimizer> optimizer;
    api::Owned<tsr_state> state;

    explicit Trainer(tsr_comm* of) : comm(of) {
        EXPECT_OK(tsr_comm_world_size(comm, &ranks));
        EXPECT_OK(tsr_comm_rank(comm, &rank));
        for (tsr_fsdp_unit& unit : units) {
            unit.row_block = ranks % 3 == 1 ? 2 : 0;
            unit.flat = ranks % 3 == 2 ? 1 : 0;
        }
        EXPECT_OK(tsr_fsdp_create(comm, units.data(), units.size(), nullptr, fsdp.out()));
        tsr_adamw_options options;
        EXPECT_OK(tsr_adamw_options_init(&options, sizeof options));
        options.lr = 0.05;
        EXPECT_OK(tsr_fsdp_adamw(fsdp, &options, optimizer.out()));
        EXPECT_OK(tsr_state_create(state.out()));
        EXPECT_OK(tsr_state_add_fsdp(state, "model", fsdp));
        EXPECT_OK(tsr_state_add_optimizer(state, "optim", optimizer));
    }

    static float wanted(int64_t sample, size_t param, size_t element) {
        return std::sin(static_cast<float>(sample) + 3 * static_cast<float>(param) + static_cast<float>(element));
    }

    // Makes a step; returns the loss of the whole batch before it.
    double train(int64_t step) {
        const int64_t own = batch / ranks;
        const int64_t begin = step * batch + own * rank;
        api::Array<float> loss({1}, 0);
        for (const size_t unit : {1, 0}) {
            EXPECT_OK(tsr_fsdp_backward(fsdp, unit));
            for (const size_t i : {2 * unit, 2 * unit + 1}) {
                tsr_tensor whole{};
                tsr_tensor grad{};
                EXPECT_OK(tsr_fsdp_whole(fsdp, i, &whole));
                EXPECT_OK(tsr_fsdp_grad(fsdp, i, &grad));
                const auto* const values = static_cast<const float*>(whole.data);
                auto* const grads = static_cast<float*>(grad.data);
                size_t count = 1;
                for (int32_t d = 0; d < whole.ndim; ++d) count *= static_cast<size_t>(whole.shape[d]);
                for (size_t k = 0; k < count; ++k) {
                    grads[k] = 0;
                    for (int64_t sample = begin; sample < begin + own; ++sample) {
                        const float missing = values[k] - wanted(sample, i, k);
                        grads[k] += missing / static_cast<float>(own);
                        loss.values[0] += missing * missing / static_cast<float>(batch);
                    }
                }
            }
            EXPECT_OK(tsr_fsdp_grads_ready(fsdp, unit));
        }
        EXPECT_OK(tsr_fsdp_wait(fsdp));
        EXPECT_OK(tsr_optimizer_step(optimizer));
        const tsr_tensor tensor = loss.tensor();
        EXPECT_OK(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr));
        return loss.values[0];
    }
};

TEST(FsdpResume, AtEveryNumberOfRanksTheLossesGoOnOnTheSameCurve) {
    std::vector<double> curve;  // of one rank that is never interrupted
    for (int32_t saving = 1; saving <= most_ranks; ++saving) {
        const tsr::testing::TemporaryDirectory directory;
        api::run_ranks(saving, [&](tsr_comm* comm, int32_t rank) {
            Trainer trainer(comm);
            api::Owned<tsr_saver> saver;
            ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
            for (int64_t step = 0; step < (saving == 1 ? last_step : saved_step); ++step) {
                if (step == saved_step) {
                    ASSERT_OK(tsr_saver_save(saver, step, trainer.state));
                }
                const double loss = trainer.train(step);
                if (saving == 1) curve.push_back(loss);
                if (rank == 0) {
                    EXPECT_NEAR(loss, curve[static_cast<size_t>(step)], 1e-4 * loss) << saving << " ranks, " << step;
                }
            }
            if (saving > 1) {
                ASSERT_OK(tsr_saver_save(saver, saved_step, trainer.state));
            }
        });
        ASSERT_LT(curve.back(), 0.99 * curve[static_cast<size_t>(saved_step)]) << "it learns on";
        for (int32_t loading = 1; loading <= most_ranks; ++loading) {
            api::run_ranks(loading, [&](tsr_comm* comm, int32_t rank) {
                Trainer trainer(comm);
                api::Owned<tsr_saver> saver;
                ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
                int64_t from = 0;
                ASSERT_OK(tsr_saver_resume(saver, trainer.state, &from));
                ASSERT_EQ(from, saved_step);
                for (int64_t step = from; step < last_step; ++step) {
                    const double loss = trainer.train(step);
                    if (rank == 0) {
                        EXPECT_NEAR(loss, curve[static_cast<size_t>(step)], 1e-4 * loss)
                            << saving << " to " << loading << " ranks, step " << step;
                    }
                }
            });
        }
    }
}

}  // namespace
