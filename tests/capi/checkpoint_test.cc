// Checkpoints of tessera/checkpoint.h through the C ABI: loaded by options, read where PyTorch wrote them, exported,
// and destroyed by the callback of a call that uses them.
#include <filesystem>
#include <numeric>

#include "api.hpp"
#include "places.hpp"

namespace {

using api::value_of;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

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
                     "already exists");
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
                 "format is 'zip'; it must be 'safetensors', 'torch_dcp', 'torch_save' or 'npz'");
    options.format = "torch_save";
    options.max_file_bytes = 1000;
    EXPECT_FAILS(tsr_checkpoint_export(checkpoint, nullptr, "/nowhere", &options), TSR_E_INVALID_ARGUMENT,
                 "a file size limit is not supported for torch_save");
    options.max_file_bytes = 0;
    options.format = nullptr;
    options.timeout_ms = 0;
    EXPECT_FAILS(tsr_checkpoint_export(checkpoint, nullptr, "/nowhere", &options), TSR_E_INVALID_ARGUMENT,
                 "timeout is 0 ms");
    EXPECT_FAILS(tsr_checkpoint_export(checkpoint, nullptr, nullptr, nullptr), TSR_E_INVALID_ARGUMENT,
                 "directory is NULL");
}

}  // namespace
