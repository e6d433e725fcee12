// Savers of tessera/checkpoint.h through the C ABI: a job that goes on at another number of ranks, which saves stay,
// tied tensors, relative paths, and the step at which all ranks stop.
#include <filesystem>

#include "api.hpp"
#include "patience.hpp"

namespace {

using api::text_of;
using api::value_of;
using ::testing::Each;
using ::testing::HasSubstr;

std::string manifest_of(const tsr_checkpoint* checkpoint) {
    return text_of([&](auto... to) { return tsr_checkpoint_manifest(checkpoint, to...); });
}

std::string path_of(const tsr_checkpoint* checkpoint) {
    return text_of([&](auto... to) { return tsr_checkpoint_path(checkpoint, to...); });
}

// Of its rank files.
uintmax_t data_bytes(const tsr_checkpoint* checkpoint) {
    uintmax_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path_of(checkpoint))) {
        if (entry.path().extension() == ".safetensors") bytes += entry.file_size();
    }
    return bytes;
}

// One trainer: model, optimizer, sampler and a value, as every example has them.
struct Trainer {
    api::Array<float> weight{{40, 3}, 0.0F};
    api::Array<float> bias{{3}, 0.0F};
    api::Owned<tsr_ddp> ddp;
    api::Owned<tsr_optimizer> optimizer;
    api::Owned<tsr_sampler> sampler;
    api::Owned<tsr_state> state;
    api::Owned<tsr_saver> saver;

    Trainer(tsr_comm* comm, const std::string& root, float initial) {
        for (float& w : weight.values) w = initial;
        const std::array<tsr_param, 2> params{{{"weight", weight.tensor()}, {"bias", bias.tensor()}}};
        EXPECT_OK(tsr_ddp_create(comm, params.data(), params.size(), nullptr, ddp.out()));
        EXPECT_OK(tsr_ddp_adamw(ddp, nullptr, optimizer.out()));
        EXPECT_OK(tsr_sampler_create(comm, 100, nullptr, sampler.out()));
        EXPECT_OK(tsr_state_create(state.out()));
        EXPECT_OK(tsr_state_add_ddp(state, "model", ddp));
        EXPECT_OK(tsr_state_add_optimizer(state, "optim", optimizer));
        EXPECT_OK(tsr_state_add_sampler(state, "data", sampler));
        tsr_saver_options options;
        EXPECT_OK(tsr_saver_options_init(&options, sizeof options));
        EXPECT_EQ(options.keep_latest, 0);
        options.keep_latest = 2;
        options.timeout_ms = tsr::testing::patience_ms(30000);
        options.writer = "c++";
        EXPECT_EQ(options.check_replicas, 0);
        options.check_replicas = 1;
        EXPECT_OK(tsr_saver_create(comm, root.c_str(), &options, saver.out()));
    }

    void step() {
        std::array<int64_t, 5> indices{};
        size_t count = 0;
        EXPECT_OK(tsr_sampler_next(sampler, indices.data(), indices.size(), &count));
        for (size_t i = 0; i < 2; ++i) {
            tsr_tensor grad{};
            EXPECT_OK(tsr_ddp_grad(ddp, i, &grad));
            auto* g = reinterpret_cast<float*>(static_cast<char*>(grad.data) + grad.byte_offset);
            for (int64_t k = 0; k < (i == 0 ? 120 : 3); ++k) g[k] = static_cast<float>(k % 7) - 3.0F;
        }
        EXPECT_OK(tsr_ddp_ready_all(ddp));
        EXPECT_OK(tsr_ddp_wait(ddp));
        EXPECT_OK(tsr_optimizer_step(optimizer));
    }
};

TEST(SaverApi, OneRankSavesAndAllLoadAfterABarrier) {
    const api::TemporaryDirectory dir;
    api::run_ranks(3, [&](tsr_comm* comm, int32_t rank) {
        Trainer trainer(comm, dir.path() / "of all", 0.5F);
        trainer.step();
        const std::vector<float> saved = trainer.weight.values;
        const std::string root = dir.path() / "of one";
        if (rank == 0) {
            api::Owned<tsr_saver> saver;
            ASSERT_OK(tsr_saver_create(nullptr, root.c_str(), nullptr, saver.out()));
            EXPECT_OK(tsr_saver_save(saver, 1, trainer.state));
        }
        EXPECT_OK(tsr_comm_barrier(comm, nullptr));
        trainer.step();
        EXPECT_NE(trainer.weight.values, saved);
        api::Owned<tsr_checkpoint> checkpoint;
        ASSERT_OK(tsr_checkpoint_open(root.c_str(), checkpoint.out()));
        EXPECT_OK(tsr_checkpoint_load(checkpoint, trainer.state, nullptr));
        EXPECT_EQ(trainer.weight.values, saved);
    });
}

TEST(SaverApi, AJobGoesOnAtAnotherWorldSizeAsIfNothingHadHappened) {
    const api::TemporaryDirectory dir;
    // Gradients are the same on all ranks, so the world size does not change the numbers.
    std::vector<float> expected;
    api::run_ranks(1, [&](tsr_comm* comm, int32_t) {
        Trainer trainer(comm, dir.path() / "whole", 0.5F);
        for (int i = 0; i < 8; ++i) trainer.step();
        expected = trainer.weight.values;
    });
    const std::string root = dir.path() / "parts";
    api::run_ranks(3, [&](tsr_comm* comm, int32_t rank) {
        Trainer trainer(comm, root, 0.5F);
        int64_t step = -1;
        EXPECT_OK(tsr_saver_resume(trainer.saver, trainer.state, &step));
        EXPECT_EQ(step, 0);
        EXPECT_OK(tsr_optimizer_set_lr(trainer.optimizer, 0.001));
        for (int64_t i = 1; i <= 4; ++i) {
            trainer.step();
            EXPECT_OK(tsr_state_set_metric(trainer.state, "loss", 1.0 / static_cast<double>(i)));
            if (i % 2 == 0) {
                api::Owned<tsr_work> work;
                EXPECT_OK(tsr_saver_save_async(trainer.saver, i, trainer.state, work.out()));
                EXPECT_NE(static_cast<tsr_work*>(work), nullptr);
            } else {
                EXPECT_OK(tsr_saver_save(trainer.saver, i, trainer.state));
            }
        }
        EXPECT_OK(tsr_saver_wait(trainer.saver));
        if (rank == 0) {
            EXPECT_FAILS(tsr_saver_save(nullptr, 0, nullptr), TSR_E_INVALID_ARGUMENT, "saver is NULL");
        }
    });
    api::run_ranks(2, [&](tsr_comm* comm, int32_t) {
        Trainer trainer(comm, root, -9.0F);
        int64_t step = 0;
        EXPECT_OK(tsr_saver_resume(trainer.saver, trainer.state, &step));
        EXPECT_EQ(step, 4);
        int64_t steps = 0;
        EXPECT_OK(tsr_optimizer_steps(trainer.optimizer, &steps));
        EXPECT_EQ(steps, 4);
        int64_t consumed = 0;
        EXPECT_OK(tsr_sampler_position(trainer.sampler, nullptr, &consumed));
        EXPECT_EQ(consumed, 4 * 5 * 3);
        EXPECT_EQ(value_of(trainer.state, "optim.param_groups.0.lr"), "0.001");
        for (int i = 0; i < 4; ++i) trainer.step();
        EXPECT_EQ(trainer.weight.values, expected);
    });

    // And without any job.
    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(tsr_checkpoint_open((root + "/latest").c_str(), checkpoint.out()));
    int64_t step = 0;
    EXPECT_OK(tsr_checkpoint_step(checkpoint, &step));
    EXPECT_EQ(step, 4);
    size_t count = 0;
    EXPECT_OK(tsr_checkpoint_tensor_count(checkpoint, &count));
    ASSERT_EQ(count, 8U) << "two parameters; exp_avg, exp_avg_sq and step of each";
    const char* name = nullptr;
    const int64_t* shape = nullptr;
    tsr_dtype dtype = 0;
    int32_t ndim = 0;
    ASSERT_OK(tsr_checkpoint_tensor(checkpoint, 1, &name, &dtype, &shape, &ndim));
    EXPECT_STREQ(name, "model.weight");
    EXPECT_EQ(dtype, TSR_DTYPE_F32);
    ASSERT_EQ(ndim, 2);
    EXPECT_EQ(shape[0], 40);
    api::Array<float> weight({40, 3}, 0.0F);
    const tsr_tensor into = weight.tensor();
    ASSERT_OK(tsr_checkpoint_read(checkpoint, name, &into));
    EXPECT_NE(weight.values[0], 0.5F);
    EXPECT_OK(tsr_checkpoint_verify(checkpoint, 1));
    EXPECT_FAILS(tsr_checkpoint_verify(checkpoint, 2), TSR_E_INVALID_ARGUMENT, "full is 2");
    EXPECT_FAILS(tsr_checkpoint_read(checkpoint, "nope", &into), TSR_E_NOT_FOUND, "'nope'");
    EXPECT_FAILS(tsr_checkpoint_read(checkpoint, "model.bias", &into), TSR_E_MISMATCH, "[3]");
    EXPECT_FAILS(tsr_checkpoint_tensor(checkpoint, 8, &name, &dtype, &shape, &ndim), TSR_E_INVALID_ARGUMENT,
                 "tensor 8 does not exist; the checkpoint has 8 tensors");

    const std::string manifest = manifest_of(checkpoint);
    EXPECT_THAT(manifest, HasSubstr("\"language\":\"c++\""));
    EXPECT_THAT(manifest, HasSubstr("\"loss\":0.25"));
    EXPECT_THAT(path_of(checkpoint), HasSubstr("step-00000004-"));
}

TEST(SaverApi, RanksThatHoldOthersAreToldWhereItIsAskedFor) {
    const api::TemporaryDirectory dir;
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        api::Array<float> weights({1000}, static_cast<float>(rank));
        const auto state = api::state_of("w", weights);
        tsr_saver_options options;
        ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
        api::Owned<tsr_saver> saver;
        options.check_replicas = 2;
        EXPECT_FAILS(tsr_saver_create(comm, dir.path().c_str(), &options, saver.out()), TSR_E_INVALID_ARGUMENT,
                     "check_replicas is 2");
        options.check_replicas = 1;
        ASSERT_OK(tsr_saver_create(comm, dir.path().c_str(), &options, saver.out()));
        EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_MISMATCH,
                     "tensor 'w' differs between replicas: rank 1 differs from rank 0");
        weights.values.assign(weights.values.size(), 1.0F);
        EXPECT_OK(tsr_saver_save(saver, 1, state));
    });
}

TEST(SaverApi, KeepsTheUnionAndKnowsTheBest) {
    const api::TemporaryDirectory dir;
    api::Array<float> a({4}, 2.0F);
    const auto state = api::state_of("a", a);
    tsr_saver_options options;
    ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
    EXPECT_EQ(options.best_metric, nullptr);
    options.keep_best = 1;
    api::Owned<tsr_saver> saver;
    EXPECT_FAILS(tsr_saver_create(nullptr, dir.path().c_str(), &options, saver.out()), TSR_E_INVALID_ARGUMENT,
                 "best_metric");
    options.best_metric = "accuracy";
    options.best_is_higher = 1;
    options.keep_latest = 1;
    options.keep_every = 30;
    ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), &options, saver.out()));
    const std::array<double, 6> accuracy{0.1, 0.9, 0.3, 0.8, 0.5, 0.6};
    for (size_t i = 0; i < accuracy.size(); ++i) {
        ASSERT_OK(tsr_state_set_metric(state, "accuracy", accuracy[i]));
        ASSERT_OK(tsr_saver_save(saver, static_cast<int64_t>(10 * (i + 1)), state));
    }
    const auto step_of = [&](const std::string& name) {
        api::Owned<tsr_checkpoint> checkpoint;
        int64_t step = -1;
        EXPECT_OK(tsr_checkpoint_open((dir.path() / name).c_str(), checkpoint.out()));
        EXPECT_OK(tsr_checkpoint_step(checkpoint, &step));
        return step;
    };
    EXPECT_EQ(step_of("best"), 20);
    EXPECT_EQ(step_of("latest"), 60);
    size_t saves = 0;
    for (const auto& entry : std::filesystem::directory_iterator(dir.path())) saves += entry.is_directory() ? 1 : 0;
    EXPECT_EQ(saves, 3u) << "20 is the best, 30 and 60 are kept for ever";
}

// The process's own directory for as long as it lives.
class Inside {
   public:
    explicit Inside(const std::filesystem::path& directory) : before_(std::filesystem::current_path()) {
        std::filesystem::current_path(directory);
    }
    ~Inside() { std::filesystem::current_path(before_); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    std::filesystem::path before_;
};

// Programs go elsewhere after they began, as those of configuration frameworks do.
TEST(SaverApi, ARelativePathStaysWhereItWasWhenItWasOpened) {
    const api::TemporaryDirectory dir;
    const api::TemporaryDirectory elsewhere;
    api::Array<float> weights({1000}, 1.5F);
    const auto state = api::state_of("w", weights);
    api::Owned<tsr_saver> saver;
    api::Owned<tsr_checkpoint> checkpoint;
    {
        const Inside inside(dir.path());
        ASSERT_OK(tsr_saver_create(nullptr, "./runs/a/", nullptr, saver.out()));
        ASSERT_OK(tsr_saver_save(saver, 1, state));
        ASSERT_OK(tsr_checkpoint_open("runs/a", checkpoint.out()));
    }
    const Inside inside(elsewhere.path());
    ASSERT_OK(tsr_saver_save_async(saver, 2, state, nullptr));
    ASSERT_OK(tsr_saver_wait(saver));
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 2);
    EXPECT_TRUE(std::filesystem::is_empty(elsewhere.path()));

    const tsr_tensor tensor = weights.tensor();
    ASSERT_OK(tsr_checkpoint_read(checkpoint, "w", &tensor));
    ASSERT_OK(tsr_checkpoint_verify(checkpoint, 1));
    EXPECT_EQ(std::filesystem::path(path_of(checkpoint)).parent_path(), dir.path() / "runs/a");
}

// Two names of the same memory.
TEST(SaverApi, TiedTensorsAreSavedOnceLoadApartAndAreTiedAgain) {
    const api::TemporaryDirectory dir;
    api::Array<float> shared({1000}, 1.5F);
    const tsr_tensor second = shared.tensor();
    const auto tied = api::state_of("embed.weight", shared);
    ASSERT_OK(tsr_state_add_tensor(tied, "head.weight", &second));
    api::Owned<tsr_saver> saver;
    ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), nullptr, saver.out()));
    ASSERT_OK(tsr_saver_save(saver, 1, tied));
    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(tsr_checkpoint_open(dir.path().c_str(), checkpoint.out()));
    const std::string is_tied = R"("aliases":{"head.weight":"embed.weight"})";
    EXPECT_THAT(manifest_of(checkpoint), HasSubstr(is_tied));
    size_t count = 0;
    ASSERT_OK(tsr_checkpoint_tensor_count(checkpoint, &count));
    EXPECT_EQ(count, 2U);
    const uintmax_t once = data_bytes(checkpoint);

    api::Array<float> embed({1000}, 0.0F);
    api::Array<float> head({1000}, 0.0F);
    const tsr_tensor head_tensor = head.tensor();
    const auto apart = api::state_of("embed.weight", embed);
    ASSERT_OK(tsr_state_add_tensor(apart, "head.weight", &head_tensor));
    ASSERT_OK(tsr_checkpoint_load(checkpoint, apart, nullptr));
    EXPECT_THAT(embed.values, Each(1.5F));
    EXPECT_THAT(head.values, Each(1.5F));
    head.values.assign(1000, 2.5F);
    ASSERT_OK(tsr_saver_save(saver, 2, apart));
    api::Owned<tsr_checkpoint> of_both;
    ASSERT_OK(tsr_checkpoint_open(dir.path().c_str(), of_both.out()));
    EXPECT_EQ(data_bytes(of_both), once + 1000 * sizeof(float));
    head.values.assign(1000, 0.0F);
    ASSERT_OK(tsr_checkpoint_read(of_both, "head.weight", &head_tensor));
    EXPECT_THAT(head.values, Each(2.5F));

    shared.values.assign(1000, 0.0F);
    ASSERT_OK(tsr_checkpoint_load(checkpoint, tied, nullptr));
    EXPECT_THAT(shared.values, Each(1.5F));
    ASSERT_OK(tsr_saver_save(saver, 3, tied));
    ASSERT_OK(tsr_checkpoint_open(dir.path().c_str(), checkpoint.out()));
    EXPECT_THAT(manifest_of(checkpoint), HasSubstr(is_tied));
    EXPECT_EQ(data_bytes(checkpoint), once);
}

TEST(SaverApi, AllRanksStopAtOneStep) {
    const api::TemporaryDirectory dir;
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, dir.path().c_str(), nullptr, saver.out()));
        for (int64_t step = 1; step <= 5; ++step) {
            int32_t stop = -1;
            ASSERT_OK(tsr_saver_should_stop(saver, step, rank == 1 && step == 4 ? 1 : 0, &stop));
            EXPECT_EQ(stop, step >= 4 ? 1 : 0);
        }
        int32_t stop = -1;
        EXPECT_FAILS(tsr_saver_should_stop(saver, 6, 2, &stop), TSR_E_INVALID_ARGUMENT, "told is 2");
        EXPECT_FAILS(tsr_saver_should_stop(saver, 6, 0, nullptr), TSR_E_INVALID_ARGUMENT, "stop is NULL");
        EXPECT_FAILS(tsr_saver_trim(nullptr), TSR_E_INVALID_ARGUMENT, "saver is NULL");
    });
}

}  // namespace
