// tessera/layout.h, state.h and checkpoint.h through the C ABI.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <mutex>
#include <numeric>

#include "api.hpp"
#include "patience.hpp"
#include "places.hpp"

namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What `get(text, capacity, size)` gives.
template <class Get>
std::string text_of(Get&& get) {
    size_t size = 0;
    EXPECT_OK(get(nullptr, 0, &size));
    std::string text(size, '\0');
    EXPECT_OK(get(text.data(), text.size(), &size));
    text.resize(size - 1);  // without the final 0
    return text;
}

std::string value_of(const tsr_state* state, const char* name) {
    return text_of([&](auto... to) { return tsr_state_get_value(state, name, to...); });
}

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

TEST(LayoutApi, TellsWhoHoldsWhat) {
    const std::array<int64_t, 2> shape{10, 4};
    const std::array<int32_t, 2> mesh{2, 2};
    const std::array<tsr_placement, 2> placements{{{TSR_PLACE_REPLICATE, 0}, {TSR_PLACE_SHARD, 0}}};
    api::Owned<tsr_layout> layout;
    ASSERT_OK(tsr_layout_create(shape.data(), 2, mesh.data(), placements.data(), 2, layout.out()));
    int32_t count = 0;
    ASSERT_OK(tsr_layout_box_count(layout, 3, &count));
    EXPECT_EQ(count, 1);
    tsr_box box{};
    ASSERT_OK(tsr_layout_box(layout, 3, 0, &box));
    EXPECT_THAT(box.offsets, ElementsAre(5, 0, 0, 0, 0, 0, 0, 0));
    EXPECT_THAT(box.sizes, ElementsAre(5, 4, 0, 0, 0, 0, 0, 0));

    EXPECT_FAILS(tsr_layout_box(layout, 3, 1, &box), TSR_E_INVALID_ARGUMENT, "box 1 of rank 3");
    EXPECT_FAILS(tsr_layout_box_count(layout, 4, &count), TSR_E_INVALID_ARGUMENT, "rank 4 of a layout of 4 ranks");
    EXPECT_FAILS(tsr_layout_box_count(nullptr, 0, &count), TSR_E_INVALID_ARGUMENT, "layout is NULL");
    api::Owned<tsr_layout> other;
    EXPECT_FAILS(tsr_layout_create(shape.data(), 9, mesh.data(), placements.data(), 2, other.out()),
                 TSR_E_INVALID_ARGUMENT, "9 dimensions");
    EXPECT_FAILS(tsr_layout_create(shape.data(), 2, nullptr, placements.data(), 2, other.out()), TSR_E_INVALID_ARGUMENT,
                 "mesh_sizes is NULL");
    EXPECT_FAILS(tsr_layout_create(shape.data(), 1, mesh.data(), placements.data(), 9, other.out()),
                 TSR_E_INVALID_ARGUMENT, "mesh of 9 dimensions");
    const std::array<tsr_placement, 1> unknown{{{7, 0}}};
    EXPECT_FAILS(tsr_layout_create(shape.data(), 2, mesh.data(), unknown.data(), 1, other.out()),
                 TSR_E_INVALID_ARGUMENT, "unknown kind 7");
    EXPECT_EQ(static_cast<tsr_layout*>(other), nullptr);
}

TEST(LayoutApi, TakesExplicitBoxes) {
    const std::array<int64_t, 1> shape{6};
    std::array<tsr_box, 2> boxes{};
    boxes[0].sizes[0] = 4;
    boxes[1].offsets[0] = 4;
    boxes[1].sizes[0] = 2;
    const std::array<int32_t, 2> counts{0, 2};
    api::Owned<tsr_layout> layout;
    ASSERT_OK(tsr_layout_from_boxes(shape.data(), 1, boxes.data(), counts.data(), 2, layout.out()));
    int32_t count = -1;
    ASSERT_OK(tsr_layout_box_count(layout, 0, &count));
    EXPECT_EQ(count, 0);
    ASSERT_OK(tsr_layout_box_count(layout, 1, &count));
    EXPECT_EQ(count, 2);
    boxes[1].offsets[0] = 3;
    EXPECT_FAILS(tsr_layout_from_boxes(shape.data(), 1, boxes.data(), counts.data(), 2, layout.out()),
                 TSR_E_INVALID_ARGUMENT, "overlap in part");
}

// Rank 1 holds rows 1 and 2 of a tensor of 4 rows, rank 0 the others; nobody tells a rank what the other has.
TEST(LayoutApi, RanksGatherWhatEachHolds) {
    const api::TemporaryDirectory directory;
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        const std::array<int64_t, 2> shape{4, 3};
        std::array<tsr_box, 2> boxes{};
        for (tsr_box& box : boxes) box.sizes[1] = 3;
        boxes[0] = {{rank == 0 ? 0 : 1}, {rank == 0 ? 1 : 2, 3}};
        boxes[1] = {{3}, {1, 3}};
        api::Owned<tsr_layout> layout;
        ASSERT_OK(tsr_layout_gather(comm, shape.data(), 2, boxes.data(), rank == 0 ? 2 : 1, layout.out()));
        int32_t count = 0;
        ASSERT_OK(tsr_layout_box_count(layout, 0, &count));
        EXPECT_EQ(count, 2);
        tsr_box box{};
        ASSERT_OK(tsr_layout_box(layout, 1, 0, &box));
        EXPECT_EQ(box.offsets[0], 1);

        api::Array<float> first(rank == 0 ? std::vector<float>{0, 1, 2} : std::vector<float>{3, 4, 5, 6, 7, 8});
        api::Array<float> last({9, 10, 11});
        first.shape = {rank == 0 ? 1 : 2, 3};
        last.shape = {1, 3};
        const std::array<tsr_tensor, 2> pieces{first.tensor(), last.tensor()};
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        ASSERT_OK(tsr_state_add_sharded(state, "rows", layout, TSR_DTYPE_F32, pieces.data(), rank));
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
        ASSERT_OK(tsr_saver_save(saver, 1, state));

        // What is wrong on one rank is told to both, and leaves the communicator whole.
        EXPECT_FAILS(tsr_layout_gather(comm, shape.data(), rank == 0 ? 2 : 9, nullptr, 0, layout.out()),
                     TSR_E_INVALID_ARGUMENT, "rank 1: shape has 9 dimensions");
        EXPECT_FAILS(tsr_layout_gather(comm, shape.data(), 2, nullptr, rank == 0 ? 1 : 0, layout.out()),
                     TSR_E_INVALID_ARGUMENT, "rank 0: boxes is NULL");
        EXPECT_FAILS(tsr_layout_gather(comm, shape.data(), 2, boxes.data(), -rank, layout.out()),
                     TSR_E_INVALID_ARGUMENT, "rank 1: -1 boxes");
        EXPECT_FAILS(tsr_layout_gather(comm, shape.data(), 2 - rank, nullptr, 0, layout.out()), TSR_E_MISMATCH,
                     "rank 1 gives boxes of a tensor of shape [4], rank 0 of one of [4, 3]");
        EXPECT_EQ(static_cast<tsr_layout*>(layout), nullptr);
        EXPECT_OK(tsr_comm_barrier(comm, nullptr));
    });
    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(tsr_checkpoint_open(directory.path().c_str(), checkpoint.out()));
    api::Array<float> rows({4, 3}, 0.0F);
    const tsr_tensor tensor = rows.tensor();
    ASSERT_OK(tsr_checkpoint_read(checkpoint, "rows", &tensor));
    for (size_t i = 0; i < 12; ++i) EXPECT_EQ(rows.values[i], static_cast<float>(i));
}

TEST(StateApi, ValuesKeepTheirKinds) {
    api::Owned<tsr_state> state;
    ASSERT_OK(tsr_state_create(state.out()));
    EXPECT_OK(tsr_state_set_int64(state, "i", INT64_MIN));
    EXPECT_OK(tsr_state_set_double(state, "d", NAN));
    EXPECT_OK(tsr_state_set_value(state, "v", R"({"a": [1, 2.50, {"~":"bytes","v":"AAE="}]})"));
    int64_t integer = 0;
    double number = 0;
    EXPECT_OK(tsr_state_get_int64(state, "i", &integer));
    EXPECT_EQ(integer, INT64_MIN);
    EXPECT_OK(tsr_state_get_double(state, "d", &number));
    EXPECT_TRUE(std::isnan(number));
    EXPECT_EQ(value_of(state, "d"), R"({"~":"double","v":"nan"})");
    EXPECT_EQ(value_of(state, "v"), R"({"a":[1,2.5,{"~":"bytes","v":"AAE="}]})");
    char small[4] = "abc";
    size_t size = 0;
    EXPECT_OK(tsr_state_get_value(state, "v", small, sizeof small, &size));
    EXPECT_STREQ(small, "abc") << "what does not fit is not written";

    EXPECT_FAILS(tsr_state_get_int64(state, "d", &integer), TSR_E_INVALID_ARGUMENT, "not an integer");
    EXPECT_FAILS(tsr_state_get_double(state, "i", &number), TSR_E_INVALID_ARGUMENT, "not a floating-point number");
    EXPECT_FAILS(tsr_state_get_int64(state, "x", &integer), TSR_E_NOT_FOUND, "'x'");
    EXPECT_FAILS(tsr_state_set_value(state, "v", "{\"a\":"), TSR_E_INVALID_ARGUMENT, "value 'v' is not valid JSON");
    EXPECT_FAILS(tsr_state_set_value(state, "v", R"([{"~":"bytes","v":"?"}])"), TSR_E_INVALID_ARGUMENT, "at [0].v");
    EXPECT_FAILS(tsr_state_set_int64(state, nullptr, 1), TSR_E_INVALID_ARGUMENT, "name is NULL");
    EXPECT_FAILS(tsr_state_set_int64(state, "", 1), TSR_E_INVALID_ARGUMENT, "is empty");
    EXPECT_FAILS(tsr_state_set_int64(nullptr, "i", 1), TSR_E_INVALID_ARGUMENT, "state is NULL");
    EXPECT_EQ(value_of(state, "v"), R"({"a":[1,2.5,{"~":"bytes","v":"AAE="}]})") << "a refused value changes nothing";
}

TEST(StateApi, TensorsAreChecked) {
    api::Owned<tsr_state> state;
    ASSERT_OK(tsr_state_create(state.out()));
    api::Array<float> array({4, 2}, 1.0F);
    tsr_tensor tensor = array.tensor();
    EXPECT_OK(tsr_state_add_tensor(state, "module.w", &tensor));
    EXPECT_FAILS(tsr_state_add_tensor(state, "w", &tensor), TSR_E_INVALID_ARGUMENT, "has the name 'w' already");
    EXPECT_FAILS(tsr_state_add_tensor(state, "module.", &tensor), TSR_E_INVALID_ARGUMENT, "'module.'");
    const std::array<int64_t, 2> strides{1, 4};
    tensor.strides = strides.data();
    EXPECT_FAILS(tsr_state_add_tensor(state, "t", &tensor), TSR_E_INVALID_ARGUMENT, "not contiguous");
    tensor.strides = nullptr;
    tensor.device_type = TSR_DEVICE_CUDA;
    EXPECT_FAILS(tsr_state_add_tensor(state, "t", &tensor), TSR_E_INVALID_ARGUMENT, "not on the CPU");

    const std::array<int64_t, 1> shape{5};
    const std::array<int32_t, 1> mesh{2};
    const std::array<tsr_placement, 1> rows{{{TSR_PLACE_SHARD, 0}}};
    api::Owned<tsr_layout> layout;
    ASSERT_OK(tsr_layout_create(shape.data(), 1, mesh.data(), rows.data(), 1, layout.out()));
    api::Array<float> piece({3}, 1.0F);
    const tsr_tensor three = piece.tensor();
    EXPECT_FAILS(tsr_state_add_sharded(state, "s", layout, TSR_DTYPE_F32, &three, 1), TSR_E_INVALID_ARGUMENT,
                 "gives rank 1 the box [3:5]");
    EXPECT_FAILS(tsr_state_add_sharded(state, "s", layout, TSR_DTYPE_F64, &three, 0), TSR_E_INVALID_ARGUMENT, "of f64");
    EXPECT_FAILS(tsr_state_add_sharded(state, "s", layout, TSR_DTYPE_F32, nullptr, 0), TSR_E_INVALID_ARGUMENT, "NULL");
    EXPECT_OK(tsr_state_add_sharded(state, "s", layout, TSR_DTYPE_F32, &three, 0));
}

TEST(StateApi, AnOptimizerIsAddedWholeOrNotAtAll) {
    api::Array<float> weight({4}, 1.0F);
    api::Array<float> gradient({4}, 0.0F);
    const tsr_param param{"w", weight.tensor()};
    const tsr_tensor grad = gradient.tensor();
    api::Owned<tsr_optimizer> optimizer;
    ASSERT_OK(tsr_adamw_create(&param, &grad, 1, nullptr, optimizer.out()));
    api::Owned<tsr_state> state;
    ASSERT_OK(tsr_state_create(state.out()));
    const tsr_tensor tensor = weight.tensor();
    ASSERT_OK(tsr_state_add_tensor(state, "optim.state.w.exp_avg_sq", &tensor));
    EXPECT_FAILS(tsr_state_add_optimizer(state, "optim", optimizer), TSR_E_INVALID_ARGUMENT,
                 "has the name 'optim.state.w.exp_avg_sq' already");
    EXPECT_OK(tsr_state_add_tensor(state, "optim.state.w.exp_avg", &tensor)) << "the moment before it is not there";
    EXPECT_OK(tsr_state_set_double(state, "optim.param_groups.0.lr", 1)) << "nor are the settings";
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
    EXPECT_FAILS(tsr_checkpoint_tensor(checkpoint, 8, &name, &dtype, &shape, &ndim), TSR_E_INVALID_ARGUMENT, "8 of 8");

    const std::string manifest = manifest_of(checkpoint);
    EXPECT_THAT(manifest, HasSubstr("\"language\":\"c++\""));
    EXPECT_THAT(manifest, HasSubstr("\"loss\":0.25"));
    EXPECT_THAT(path_of(checkpoint), HasSubstr("step-00000004-"));
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

struct Told {
    std::mutex mutex;  // where a part is written before the call returns, two threads tell at once
    std::map<int32_t, int64_t> done;
    std::map<int32_t, int64_t> total;
};

void tell(int32_t phase, int64_t done, int64_t total, void* user_data) {
    auto* told = static_cast<Told*>(user_data);
    const std::lock_guard lock(told->mutex);
    told->done[phase] = done;
    told->total[phase] = total;
}

TEST(SaverApi, TellsItsProgressKeepsToItsOptionsAndGivesMemoryBack) {
    const api::TemporaryDirectory dir;
    api::Array<float> a({3 << 20}, 2.0F);
    const auto bytes = static_cast<int64_t>(a.values.size() * sizeof(float));
    const auto state = api::state_of("a", a);
    Told told;
    tsr_saver_options options;
    ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
    options.progress = tell;
    options.progress_data = &told;
    options.low_priority = 1;
    options.write_bytes_per_s = 1 << 30;
    options.staging_bytes = 8 << 20;
    options.when_busy = 3;
    api::Owned<tsr_saver> saver;
    EXPECT_FAILS(tsr_saver_create(nullptr, dir.path().c_str(), &options, saver.out()), TSR_E_INVALID_ARGUMENT,
                 "when_busy is 3");
    options.when_busy = TSR_BUSY_REPLACE;
    ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), &options, saver.out()));
    ASSERT_OK(tsr_saver_save_async(saver, 1, state, nullptr));
    a.values.assign(a.values.size(), 3.0F);
    ASSERT_OK(tsr_saver_wait(saver));
    for (const int32_t phase : {TSR_PHASE_STAGE, TSR_PHASE_WRITE}) {
        EXPECT_EQ(told.done[phase], bytes) << phase;
        EXPECT_EQ(told.total[phase], bytes) << phase;
    }
    EXPECT_TRUE(told.done.contains(TSR_PHASE_COMMIT));
    ASSERT_OK(tsr_saver_trim(saver));
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 1);
    EXPECT_THAT(a.values, Each(2.0F));
    EXPECT_EQ(told.done[TSR_PHASE_READ], bytes);

    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(tsr_checkpoint_open(dir.path().c_str(), checkpoint.out()));
    told.done.clear();
    tsr_load_options load;
    ASSERT_OK(tsr_load_options_init(&load, sizeof load));
    load.progress = tell;
    load.progress_data = &told;
    ASSERT_OK(tsr_checkpoint_load(checkpoint, state, &load));
    EXPECT_EQ(told.done[TSR_PHASE_READ], bytes);
    ASSERT_OK(tsr_checkpoint_verify_progress(checkpoint, 1, tell, &told));
    EXPECT_GE(told.done[TSR_PHASE_VERIFY], bytes);
    EXPECT_FAILS(tsr_checkpoint_verify_progress(checkpoint, 2, tell, &told), TSR_E_INVALID_ARGUMENT, "full is 2");
}

TEST(SaverApi, LowPriorityIsThatOfTheThreadsThatWrite) {
    const api::TemporaryDirectory dir;
    api::Array<float> a({1000}, 2.0F);
    const auto state = api::state_of("a", a);
    std::atomic<int> told{-100};  // the nice value of the thread that tells that it writes
    tsr_saver_options options;
    ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
    options.progress = [](int32_t phase, int64_t, int64_t, void* user_data) {
        if (phase != TSR_PHASE_WRITE) return;
        *static_cast<std::atomic<int>*>(user_data) = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()));
    };
    options.progress_data = &told;
    const int own = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()));
    for (const int32_t low : {0, 1}) {
        options.low_priority = low;
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), &options, saver.out()));
        ASSERT_OK(tsr_saver_save_async(saver, 1 + low, state, nullptr));
        ASSERT_OK(tsr_saver_wait(saver));
        EXPECT_EQ(told, low == 1 ? std::max(own, 10) : own);
    }
}

// Destroys the saver whose save tells it of its progress.
struct Destroyer {
    tsr_saver* saver = nullptr;
    std::atomic<int> told_after{-1};  // calls since the destroy; -1 before it
    static void tell(int32_t phase, int64_t, int64_t, void* user_data) {
        auto* own = static_cast<Destroyer*>(user_data);
        if (own->told_after >= 0) {
            ++own->told_after;
        } else if (phase == TSR_PHASE_WRITE) {
            own->told_after = 0;
            tsr_saver_destroy(own->saver);
        }
    }
};

TEST(SaverApi, DestroyedWhileItsSaveTellsOfItsProgressItEndsAfterThatSave) {
    const api::TemporaryDirectory dir;
    api::Array<float> a({3 << 20}, 2.0F);
    const auto state = api::state_of("a", a);
    Destroyer destroyer;
    tsr_saver_options options;
    ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
    options.progress = Destroyer::tell;
    options.progress_data = &destroyer;
    ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), &options, &destroyer.saver));
    api::Owned<tsr_work> work;
    ASSERT_OK(tsr_saver_save_async(destroyer.saver, 1, state, work.out()));
    ASSERT_OK(tsr_work_wait(work, -1));
    EXPECT_EQ(destroyer.told_after, 0);
    EXPECT_FAILS(tsr_saver_wait(destroyer.saver), TSR_E_INVALID_STATE, "destroyed");
    // The root is given back a moment after the save.
    tsr_saver* next = nullptr;
    ASSERT_TRUE(api::becomes_true([&] {
        return tsr_saver_create(nullptr, dir.path().c_str(), nullptr, &next) == TSR_OK;
    })) << api::message();
    int64_t step = 0;
    EXPECT_OK(tsr_saver_resume(next, state, &step));
    EXPECT_EQ(step, 1);
    tsr_saver_destroy(next);
    // So it is where the caller's own thread saves.
    ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), &options, &destroyer.saver));
    destroyer.told_after = -1;
    EXPECT_OK(tsr_saver_save(destroyer.saver, 2, state));
    EXPECT_EQ(destroyer.told_after, 0);
}

// Holds the first save in the background until it is opened.
struct Gate {
    std::promise<void> reached;
    std::promise<void> opened;
    std::shared_future<void> open = opened.get_future().share();
    std::atomic<bool> was_reached{false};
    static void hold(int32_t phase, int64_t, int64_t, void* user_data) {
        auto* gate = static_cast<Gate*>(user_data);
        if (phase != TSR_PHASE_WRITE || gate->was_reached.exchange(true)) return;
        gate->reached.set_value();
        EXPECT_EQ(gate->open.wait_for(tsr::testing::patience(std::chrono::seconds(60))), std::future_status::ready);
    }
};

// A saver whose first save in the background is held at its gate.
struct GatedSaver {
    api::TemporaryDirectory dir;
    Gate gate;
    tsr_saver_options options{};
    api::Owned<tsr_saver> saver;  // ends before its gate

    explicit GatedSaver(int32_t when_busy) {
        EXPECT_OK(tsr_saver_options_init(&options, sizeof options));
        EXPECT_EQ(options.copy_on_demand, 0);
        options.when_busy = when_busy;
        options.progress = Gate::hold;
        options.progress_data = &gate;
    }
    tsr_status create() { return tsr_saver_create(nullptr, dir.path().c_str(), &options, saver.out()); }
    // Returns when it is held.
    void save_and_hold(int64_t step, tsr_state* state, tsr_work** work = nullptr) {
        ASSERT_OK(tsr_saver_save_async(saver, step, state, work));
        ASSERT_EQ(gate.reached.get_future().wait_for(tsr::testing::patience(std::chrono::seconds(60))),
                  std::future_status::ready);
    }
};

// Makes the optimizer of one parameter, "w", and adds it to the state.
void add_adamw(tsr_state* state, api::Array<float>& weight, api::Array<float>& gradient,
               api::Owned<tsr_optimizer>& optimizer) {
    const tsr_param param{"w", weight.tensor()};
    const tsr_tensor grad = gradient.tensor();
    ASSERT_OK(tsr_adamw_create(&param, &grad, 1, nullptr, optimizer.out()));
    ASSERT_OK(tsr_state_add_optimizer(state, "optim", optimizer));
}

TEST(SaverApi, WhatAnOptimizerOwnsIsCopiedBeforeItsNextStepChangesIt) {
    api::Array<float> weight({3 << 20}, 1.0F);
    api::Array<float> gradient({3 << 20}, 0.5F);
    api::Owned<tsr_optimizer> optimizer;
    const auto state = api::state_of("w", weight);
    add_adamw(state, weight, gradient, optimizer);
    GatedSaver gated(TSR_BUSY_REPLACE);
    const auto& saver = gated.saver;
    gated.options.copy_on_demand = 2;
    EXPECT_FAILS(gated.create(), TSR_E_INVALID_ARGUMENT, "copy_on_demand");
    gated.options.copy_on_demand = 1;
    ASSERT_OK(gated.create());
    ASSERT_NO_FATAL_FAILURE(gated.save_and_hold(1, state));
    ASSERT_OK(tsr_optimizer_step(optimizer));
    const std::vector<float> expected = weight.values;
    ASSERT_OK(tsr_saver_save_async(saver, 2, state, nullptr));  // behind the first: nothing of it is copied by itself
    ASSERT_OK(tsr_optimizer_step(optimizer));
    EXPECT_NE(weight.values, expected);
    gated.gate.opened.set_value();
    ASSERT_OK(tsr_saver_wait(saver));
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 2);
    EXPECT_EQ(weight.values, expected);
    ASSERT_OK(tsr_optimizer_steps(optimizer, &step));
    EXPECT_EQ(step, 1);
}

TEST(SaverApi, WhatIsWrittenAfterTheFirstFenceIsNotSaved) {
    const api::TemporaryDirectory dir;
    api::Array<float> weight({3 << 20}, 1.0F);
    api::Array<float> gradient({3 << 20}, 0.5F);
    api::Owned<tsr_optimizer> optimizer;
    const auto state = api::state_of("w", weight);
    add_adamw(state, weight, gradient, optimizer);
    Gate gate;  // holds the save before its first byte
    tsr_saver_options options;
    ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
    options.progress = Gate::hold;
    options.progress_data = &gate;
    options.copy_on_demand = 1;
    api::Owned<tsr_saver> saver;
    ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), &options, saver.out()));
    api::Owned<tsr_work> save;
    ASSERT_OK(tsr_saver_save_async(saver, 1, state, save.out()));
    api::Owned<tsr_work> staged;
    ASSERT_OK(tsr_work_staged(save, staged.out()));
    ASSERT_OK(tsr_work_wait(staged, tsr::testing::patience_ms(60000)));
    int32_t done = -1;
    EXPECT_OK(tsr_work_test(save, &done));
    EXPECT_EQ(done, 0);
    weight.values.assign(weight.values.size(), -1.0F);
    gate.opened.set_value();
    ASSERT_OK(tsr_work_wait(save, -1));
    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(tsr_checkpoint_open(dir.path().c_str(), checkpoint.out()));
    const tsr_tensor into = weight.tensor();
    ASSERT_OK(tsr_checkpoint_read(checkpoint, "w", &into));
    EXPECT_THAT(weight.values, Each(1.0F));

    api::Owned<tsr_work> none;
    EXPECT_FAILS(tsr_work_staged(staged, none.out()), TSR_E_INVALID_ARGUMENT, "not one of tsr_saver_save_async");
    EXPECT_EQ(static_cast<tsr_work*>(none), nullptr);
}

TEST(SaverApi, ABusySaverCanRefuse) {
    api::Array<float> a({4}, 2.0F);
    const auto state = api::state_of("a", a);
    GatedSaver gated(TSR_BUSY_REFUSE);
    const auto& saver = gated.saver;
    ASSERT_OK(gated.create());
    ASSERT_NO_FATAL_FAILURE(gated.save_and_hold(1, state));
    api::Owned<tsr_work> refused;
    EXPECT_FAILS(tsr_saver_save_async(saver, 2, state, refused.out()), TSR_E_NOT_READY, "when_busy refuses another");
    EXPECT_EQ(static_cast<tsr_work*>(refused), nullptr);
    gated.gate.opened.set_value();
    ASSERT_OK(tsr_saver_wait(saver));
    ASSERT_OK(tsr_saver_save_async(saver, 3, state, nullptr));
    ASSERT_OK(tsr_saver_wait(saver));
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 3);
}

TEST(SaverApi, ABusySaverReplacesWhatWaits) {
    api::Array<float> a({4}, 2.0F);
    const auto state = api::state_of("a", a);
    GatedSaver gated(TSR_BUSY_REPLACE);
    const auto& saver = gated.saver;
    ASSERT_OK(gated.create());
    std::array<api::Owned<tsr_work>, 3> works;
    ASSERT_NO_FATAL_FAILURE(gated.save_and_hold(1, state, works[0].out()));
    ASSERT_OK(tsr_saver_save_async(saver, 2, state, works[1].out()));
    a.values.assign(4, 3.0F);
    ASSERT_OK(tsr_saver_save_async(saver, 3, state, works[2].out()));
    EXPECT_FAILS(tsr_work_wait(works[1], 0), TSR_E_ABORTED, "the save of step 2 was replaced");
    gated.gate.opened.set_value();
    EXPECT_OK(tsr_work_wait(works[0], tsr::testing::patience_ms(60000)));
    EXPECT_OK(tsr_work_wait(works[2], tsr::testing::patience_ms(60000)));
    ASSERT_OK(tsr_saver_wait(saver));
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 3);
    EXPECT_THAT(a.values, testing::Each(3.0F));
    for (const auto& entry : std::filesystem::directory_iterator(gated.dir.path())) {
        EXPECT_FALSE(entry.path().filename().string().starts_with("step-00000002")) << entry.path();
    }
}

TEST(SaverApi, ABackgroundSaveThatFailsIsToldByItsWorkAndOnceByTheNextCall) {
    const api::TemporaryDirectory dir;
    const std::filesystem::path root = dir.path() / "root";
    const std::filesystem::path away = dir.path() / "away";
    api::Array<float> a({4}, 2.0F);
    const auto state = api::state_of("a", a);
    api::Owned<tsr_saver> saver;
    ASSERT_OK(tsr_saver_create(nullptr, root.c_str(), nullptr, saver.out()));
    ASSERT_OK(tsr_saver_save(saver, 1, state));
    std::filesystem::rename(root, away);
    std::ofstream(root) << "no directory";
    {
        api::Owned<tsr_work> work;
        ASSERT_OK(tsr_saver_save_async(saver, 2, state, work.out()));
        EXPECT_FAILS(tsr_work_wait(work, tsr::testing::patience_ms(60000)), TSR_E_IO, "root");
    }
    EXPECT_FAILS(tsr_saver_save_async(saver, 3, state, nullptr), TSR_E_IO, "root");
    std::filesystem::remove(root);
    std::filesystem::rename(away, root);
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 1);
    ASSERT_OK(tsr_saver_save_async(saver, 4, state, nullptr));
    ASSERT_OK(tsr_saver_wait(saver));
    ASSERT_OK(tsr_saver_resume(saver, state, &step));
    EXPECT_EQ(step, 4);
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

// Its state holds the optimizer on; the memory is the caller's.
TEST(SaverApi, WhatAnOptimizerOwnsIsCopiedBeforeItIsDestroyed) {
    api::Array<float> weight({3 << 20}, 1.0F);
    api::Array<float> gradient({3 << 20}, 0.5F);
    api::Owned<tsr_optimizer> optimizer;
    const auto state = api::state_of("w", weight);
    add_adamw(state, weight, gradient, optimizer);
    GatedSaver gated(TSR_BUSY_REPLACE);
    const auto& saver = gated.saver;
    gated.options.copy_on_demand = 1;
    ASSERT_OK(gated.create());
    ASSERT_NO_FATAL_FAILURE(gated.save_and_hold(1, state));
    ASSERT_OK(tsr_saver_save_async(saver, 2, state, nullptr));  // behind the first: nothing of it is copied by itself
    optimizer.reset();
    weight.values.assign(weight.values.size(), -1.0F);
    gated.gate.opened.set_value();
    ASSERT_OK(tsr_saver_wait(saver));
    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(tsr_checkpoint_open(gated.dir.path().c_str(), checkpoint.out()));
    const tsr_tensor into = weight.tensor();
    ASSERT_OK(tsr_checkpoint_read(checkpoint, "w", &into));
    EXPECT_THAT(weight.values, Each(1.0F));
}

// The call that tells of its progress holds what it works on.
TEST(CheckpointApi, AProgressCallbackMayDestroyIt) {
    const api::TemporaryDirectory dir;
    const std::string root = (dir.path() / "root").string();
    const std::string exported = (dir.path() / "exported").string();
    api::Array<float> a({1 << 20}, 2.0F);
    const auto state = api::state_of("a", a);
    {
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(nullptr, root.c_str(), nullptr, saver.out()));
        ASSERT_OK(tsr_saver_save(saver, 1, state));
    }
    const tsr_progress_fn destroy = [](int32_t, int64_t, int64_t, void* checkpoint) {
        tsr_checkpoint_destroy(*static_cast<tsr_checkpoint**>(checkpoint));
    };
    tsr_checkpoint* checkpoint = nullptr;
    ASSERT_OK(tsr_checkpoint_open(root.c_str(), &checkpoint));
    EXPECT_OK(tsr_checkpoint_verify_progress(checkpoint, 1, destroy, &checkpoint));
    ASSERT_OK(tsr_checkpoint_open(root.c_str(), &checkpoint));
    tsr_load_options load;
    ASSERT_OK(tsr_load_options_init(&load, sizeof load));
    load.progress = destroy;
    load.progress_data = &checkpoint;
    EXPECT_OK(tsr_checkpoint_load(checkpoint, state, &load));
    ASSERT_OK(tsr_checkpoint_open(root.c_str(), &checkpoint));
    tsr_export_options options;
    ASSERT_OK(tsr_export_options_init(&options, sizeof options));
    options.progress = destroy;
    options.progress_data = &checkpoint;
    EXPECT_OK(tsr_checkpoint_export(checkpoint, nullptr, exported.c_str(), &options));
    EXPECT_FAILS(tsr_checkpoint_verify(checkpoint, 1), TSR_E_INVALID_STATE, "destroyed");
}

TEST(CheckpointApi, LoadsByOptions) {
    const api::TemporaryDirectory dir;
    api::Array<float> a({4}, 2.0F);
    api::Array<float> b({4}, 3.0F);
    const tsr_tensor ta = a.tensor();
    const tsr_tensor tb = b.tensor();
    {
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        ASSERT_OK(tsr_state_add_tensor(state, "a", &ta));
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(nullptr, dir.path().c_str(), nullptr, saver.out()));
        ASSERT_OK(tsr_saver_save(saver, 1, state));
        api::Owned<tsr_saver> second;
        EXPECT_FAILS(tsr_saver_create(nullptr, dir.path().c_str(), nullptr, second.out()), TSR_E_INVALID_STATE,
                     "another live job saves into");
    }
    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(tsr_checkpoint_open(dir.path().c_str(), checkpoint.out()));
    api::Owned<tsr_state> state;
    ASSERT_OK(tsr_state_create(state.out()));
    ASSERT_OK(tsr_state_add_tensor(state, "b", &tb));
    EXPECT_FAILS(tsr_checkpoint_load(checkpoint, state, nullptr), TSR_E_MISMATCH, "'b' is missing");
    EXPECT_THAT(api::message(), HasSubstr("'a' is unexpected"));
    tsr_load_options options;
    ASSERT_OK(tsr_load_options_init(&options, sizeof options));
    EXPECT_EQ(options.verify, 1);
    options.allow_missing = 1;
    options.allow_unexpected = 1;
    EXPECT_OK(tsr_checkpoint_load(checkpoint, state, &options));
    EXPECT_THAT(b.values, Each(3.0F));
    ASSERT_OK(tsr_state_add_tensor(state, "a", &ta));
    a.values.assign(4, 0.0F);
    options.verify = 0;
    EXPECT_OK(tsr_checkpoint_load(checkpoint, state, &options));
    EXPECT_THAT(a.values, Each(2.0F));
    options.allow_cast = 2;
    EXPECT_FAILS(tsr_checkpoint_load(checkpoint, state, &options), TSR_E_INVALID_ARGUMENT, "allow_cast is 2");
    EXPECT_FAILS(tsr_checkpoint_open((dir.path() / "nope").c_str(), checkpoint.out()), TSR_E_NOT_FOUND, "nope");
    EXPECT_FAILS(tsr_checkpoint_open(nullptr, checkpoint.out()), TSR_E_INVALID_ARGUMENT, "path is NULL");
}

std::vector<float> counted(size_t begin, size_t end) {
    std::vector<float> numbers(end - begin);
    std::iota(numbers.begin(), numbers.end(), static_cast<float>(begin));
    return numbers;
}

// What tests/golden/torch_dcp/make.py wrote: read whole, and loaded as either of two ranks would.
void expect_numbers_of_pytorch(const tsr_checkpoint* checkpoint) {
    api::Array<float> whole({7, 5}, -1.0F);
    const tsr_tensor all_rows = whole.tensor();
    ASSERT_OK(tsr_checkpoint_read(checkpoint, "model.rows", &all_rows));
    EXPECT_EQ(whole.values, counted(0, 35));

    const std::array<int64_t, 2> shape{7, 5};
    const std::array<int32_t, 1> mesh{2};
    const std::array<tsr_placement, 1> by_rows{{{TSR_PLACE_SHARD, 0}}};
    api::Owned<tsr_layout> layout;
    ASSERT_OK(tsr_layout_create(shape.data(), 2, mesh.data(), by_rows.data(), 1, layout.out()));
    for (const int32_t rank : {0, 1}) {
        api::Array<float> rows({rank == 0 ? 4 : 3, 5}, -1.0F);
        api::Array<int64_t> scalar(std::vector<int64_t>{}, 0);
        const tsr_tensor piece = rows.tensor();
        const tsr_tensor zero_d = scalar.tensor();
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        ASSERT_OK(tsr_state_add_sharded(state, "model.rows", layout, TSR_DTYPE_F32, &piece, rank));
        ASSERT_OK(tsr_state_add_tensor(state, "model.scalar", &zero_d));
        ASSERT_OK(tsr_state_set_int64(state, "step", 0));
        ASSERT_OK(tsr_state_set_value(state, "note", "null"));
        tsr_load_options options;
        ASSERT_OK(tsr_load_options_init(&options, sizeof options));
        options.allow_unexpected = 1;
        ASSERT_OK(tsr_checkpoint_load(checkpoint, state, &options));
        EXPECT_EQ(rows.values, rank == 0 ? counted(0, 20) : counted(20, 35));
        EXPECT_THAT(scalar.values, ElementsAre(-3));
        int64_t step = 0;
        EXPECT_OK(tsr_state_get_int64(state, "step", &step));
        EXPECT_EQ(step, 7);
        EXPECT_EQ(value_of(state, "note"), "\"größer\"");
    }
}

TEST(CheckpointApi, ReadsWhatPyTorchWrote) {
    int versions = 0;
    const std::filesystem::path golden = tsr::testing::source_dir() + "/tests/golden/torch_dcp";
    for (const auto& version : std::filesystem::directory_iterator(golden)) {
        if (!version.is_directory()) continue;
        ++versions;
        for (const char* name : {"dcp", "save.pt"}) {
            const std::string path = version.path() / name;
            SCOPED_TRACE(path);
            api::Owned<tsr_checkpoint> checkpoint;
            ASSERT_OK(tsr_checkpoint_open(path.c_str(), checkpoint.out()));
            ASSERT_NO_FATAL_FAILURE(expect_numbers_of_pytorch(checkpoint));
            EXPECT_OK(tsr_checkpoint_verify(checkpoint, 1));
            api::Array<float> columns({3, 5}, -1.0F);
            const tsr_tensor tensor = columns.tensor();
            if (path.ends_with("dcp")) {
                ASSERT_OK(tsr_checkpoint_read(checkpoint, "model.columns", &tensor));
                EXPECT_EQ(columns.values, counted(0, 15));
            } else {
                EXPECT_FAILS(tsr_checkpoint_read(checkpoint, "model.columns", &tensor), TSR_E_NOT_FOUND,
                             "model.columns");
            }
        }
    }
    EXPECT_GE(versions, 4);
}

TEST(CheckpointApi, IsExportedToOtherFormats) {
    const api::TemporaryDirectory dir;
    api::Array<float> a{{4}, 2.0F};
    api::Owned<tsr_state> state;
    ASSERT_OK(tsr_state_create(state.out()));
    const tsr_tensor ta = a.tensor();
    ASSERT_OK(tsr_state_add_tensor(state, "model.a", &ta));
    const std::string root = (dir.path() / "root").string();
    api::Owned<tsr_saver> saver;
    ASSERT_OK(tsr_saver_create(nullptr, root.c_str(), nullptr, saver.out()));
    ASSERT_OK(tsr_saver_save(saver, 1, state));
    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(tsr_checkpoint_open(root.c_str(), checkpoint.out()));

    int calls = 0;
    tsr_export_options options;
    ASSERT_OK(tsr_export_options_init(&options, sizeof options));
    EXPECT_EQ(options.format, nullptr);
    EXPECT_EQ(options.max_file_bytes, 0);
    options.under = "model.";
    options.progress = [](int32_t phase, int64_t, int64_t total, void* user_data) {
        EXPECT_EQ(phase, TSR_PHASE_WRITE);
        EXPECT_EQ(total, 16);
        ++*static_cast<int*>(user_data);
    };
    options.progress_data = &calls;
    for (const char* format : {"safetensors", "torch_dcp", "torch_save"}) {
        options.format = format;
        const std::string out = (dir.path() / format).string();
        ASSERT_OK(tsr_checkpoint_export(checkpoint, nullptr, out.c_str(), &options));
        EXPECT_FAILS(tsr_checkpoint_export(checkpoint, nullptr, out.c_str(), &options), TSR_E_INVALID_ARGUMENT,
                     "is there already");
        api::Owned<tsr_checkpoint> exported;
        ASSERT_OK(tsr_checkpoint_open(out.c_str(), exported.out()));
        api::Array<float> read{{4}, 0.0F};
        const tsr_tensor tensor = read.tensor();
        ASSERT_OK(tsr_checkpoint_read(exported, "a", &tensor));
        EXPECT_THAT(read.values, Each(2.0F));
        int64_t step = 0;
        ASSERT_OK(tsr_checkpoint_step(exported, &step));
        EXPECT_EQ(step, -1);
    }
    EXPECT_GE(calls, 6);
    options.format = "zip";
    EXPECT_FAILS(tsr_checkpoint_export(checkpoint, nullptr, "/nowhere", &options), TSR_E_INVALID_ARGUMENT,
                 "format is 'zip'; it is 'safetensors', 'torch_dcp', 'torch_save' or 'npz'");
    options.format = "torch_save";
    options.max_file_bytes = 1000;
    EXPECT_FAILS(tsr_checkpoint_export(checkpoint, nullptr, "/nowhere", &options), TSR_E_INVALID_ARGUMENT,
                 "has no size to be cut at");
    options.max_file_bytes = 0;
    options.format = nullptr;
    options.timeout_ms = 0;
    EXPECT_FAILS(tsr_checkpoint_export(checkpoint, nullptr, "/nowhere", &options), TSR_E_INVALID_ARGUMENT,
                 "timeout is 0 ms");
    EXPECT_FAILS(tsr_checkpoint_export(checkpoint, nullptr, nullptr, nullptr), TSR_E_INVALID_ARGUMENT,
                 "directory is NULL");
}

}  // namespace
