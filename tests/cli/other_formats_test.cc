// Every sub-command of `tessera ckpt` on what others write: safetensors as Hugging Face lays them out, DCP directories
// and files of torch.save, which `convert` made, and what PyTorch itself wrote.
#include <gmock/gmock.h>

#include "cli/command.hpp"
#include "places.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

class OtherFormats : public ::testing::TestWithParam<const char*> {
   protected:
    void SetUp() override {
        save_numbers(root_, 3);
        const Json json = json_of("convert --json " + root_ + " " + out_ + " --to " + GetParam());
        EXPECT_EQ(json.at("tensor_count").as_int(), 6);
    }
    [[nodiscard]] bool is_torch() const { return std::string(GetParam()).starts_with("torch_"); }
    [[nodiscard]] std::string data_file() const {
        if (!is_torch()) return out_ + "/model.safetensors";
        return out_ + (GetParam() == std::string("torch_dcp") ? "/__0_0.distcp" : "/model.pt");
    }

    TempDir dir_;
    std::string root_ = dir_ / "root";
    std::string out_ = dir_ / "out";
};

TEST_P(OtherFormats, AreListedAndTold) {
    const Json listed = json_of("ls --json " + out_);
    ASSERT_EQ(listed.as_array().size(), 1u);
    EXPECT_EQ(listed.as_array()[0].at("state").as_string(), "committed");
    EXPECT_EQ(tessera("ls " + out_).code, 0);
    const Json info = json_of("info --json " + out_);
    EXPECT_EQ(info.at("format").as_string(), is_torch() ? GetParam() : "safetensors");
    EXPECT_TRUE(info.at("step").is(Json::Kind::null));
    EXPECT_EQ(info.at("tensor_count").as_int(), 6);
    EXPECT_EQ(info.at("values").find("epoch") != nullptr, is_torch());
    EXPECT_EQ(tessera("info " + out_).code, 0);
}

TEST_P(OtherFormats, AreShown) {
    const Result tree = tessera("tree " + out_);
    EXPECT_EQ(tree.code, 0);
    EXPECT_THAT(tree.output, HasSubstr("grid"));
    EXPECT_THAT(tree.output, HasSubstr("[7, 5]"));
    EXPECT_EQ(json_of("tree --json " + out_).at("tensors").at("columns").at("dtype").as_string(), "i64");
    const Json shards = json_of("shards --json " + out_ + " grid");
    EXPECT_EQ(shards.at("tensors").at("grid").at("pieces").as_array().size(), 1u);
    EXPECT_EQ(json_of("cat --json " + out_ + " grid").at("max").as_double(), 34);
    EXPECT_EQ(json_of("cat --json " + out_ + " grid --slice 1,2").at("values").as_double(), 7);
}

TEST_P(OtherFormats, AreComparedAndConvertedBack) {
    const Json diff = json_of("diff --json " + root_ + " " + out_, is_torch() ? 0 : 1);
    EXPECT_EQ(diff.at("tensors").as_array().size(), 0u);
    EXPECT_EQ(diff.at("values").as_array().size(), 0u);
    EXPECT_EQ(diff.at("only_in_a").dump(), is_torch() ? "[]" : "[\"epoch\"]") << "safetensors have no values";
    const std::string back = dir_ / "back";
    EXPECT_EQ(tessera("convert " + out_ + " " + back + " --to native").code, 0);
    EXPECT_EQ(tessera("verify " + back).code, 0);
    EXPECT_TRUE(json_of("diff --json " + out_ + " " + back).at("same").as_bool());
}

TEST_P(OtherFormats, AreVerifiedAsFarAsTheFormatGoes) {
    const Json json = json_of("verify --json " + out_);
    EXPECT_TRUE(json.at("sound").as_bool());
    EXPECT_EQ(json.at("checksums").as_bool(), is_torch());
    const std::string said = tessera("verify " + out_).output;
    if (is_torch()) {
        EXPECT_THAT(said, HasSubstr("every byte checked"));
    } else {
        EXPECT_THAT(said, HasSubstr("no checksums"));
    }
    const std::string text = slurp(data_file());
    spill(data_file(), text.substr(0, text.size() - 1));
    EXPECT_EQ(tessera("verify " + out_).code, 1);
    EXPECT_EQ(tessera("verify --fast " + out_).code, 1);
}

TEST_P(OtherFormats, AreNotRenamed) {
    const std::string renamed = dir_ / "renamed";
    const Json refused = json_of("rename-keys --json " + out_ + " " + renamed + " --prefix model.", 2);
    EXPECT_EQ(refused.at("error").at("code").as_string(), "UNSUPPORTED");
    EXPECT_THAT(refused.at("error").at("message").as_string(),
                HasSubstr("is not a native checkpoint; convert it to one first"));
    EXPECT_FALSE(std::filesystem::exists(renamed));
}

INSTANTIATE_TEST_SUITE_P(Formats, OtherFormats, ::testing::Values("safetensors", "hf", "torch_dcp", "torch_save"),
                         [](const auto& one) { return std::string(one.param); });

// The numbers are those of tests/golden/torch_dcp/make.py.
TEST(OtherFormatsOfPyTorch, EverySubcommandTakesThem) {
    const TempDir dir;
    int versions = 0;
    for (const auto& version : std::filesystem::directory_iterator(source_dir() + "/tests/golden/torch_dcp")) {
        if (!version.path().filename().string().starts_with("2.")) continue;
        ++versions;
        const std::string both[] = {version.path() / "dcp", version.path() / "save.pt"};
        for (const std::string& path : both) {
            SCOPED_TRACE(path);
            EXPECT_EQ(json_of("ls --json " + path).as_array().at(0).at("state").as_string(), "committed");
            const Json info = json_of("info --json " + path);
            EXPECT_EQ(info.at("format").as_string(), path.ends_with("dcp") ? "torch_dcp" : "torch_save");
            EXPECT_EQ(info.at("tensor_count").as_int(), 9);
            EXPECT_EQ(info.at("values").at("note").as_string(), "größer");
            const Json tree = json_of("tree --json " + path);
            EXPECT_EQ(tree.at("tensors").at("model.brain").at("dtype").as_string(), "bf16");
            const size_t parts = path.ends_with("dcp") ? 2 : 1;
            const Json shards = json_of("shards --json " + path);
            EXPECT_EQ(shards.at("tensors").at("model.rows").at("pieces").as_array().size(), parts);
            const Json rows = json_of("cat --json " + path + " model.rows");
            EXPECT_EQ(rows.at("count").as_int(), 35);
            EXPECT_EQ(rows.at("max").as_double(), 34);
            EXPECT_EQ(json_of("cat --json " + path + " model.transposed --slice 3,1").at("values").as_double(), 7);
            const Json verified = json_of("verify --json " + path);
            EXPECT_TRUE(verified.at("sound").as_bool());
            EXPECT_TRUE(verified.at("checksums").as_bool());
        }
        const Json diff = json_of("diff --json " + both[0] + " " + both[1], 1);
        EXPECT_EQ(diff.at("compared").as_int(), 7);
        EXPECT_EQ(diff.at("only_in_a").dump(), R"(["model.columns","model.copies"])");
        EXPECT_EQ(diff.at("only_in_b").dump(), R"(["model.parameter","model.shared"])");
        EXPECT_EQ(diff.at("tensors").as_array().size() + diff.at("values").as_array().size(), 0u);
        const std::string converted = dir / version.path().filename().string();
        EXPECT_EQ(tessera("convert " + both[0] + " " + converted + " --to native").code, 0);
        EXPECT_TRUE(json_of("diff --json " + both[0] + " " + converted).at("same").as_bool());
    }
    EXPECT_GE(versions, 4);
}

TEST(OtherFormats, APointerOfGitLfsIsToldAsOne) {
    const TempDir dir;
    const std::string root = dir / "root";
    const std::string path = save_numbers(root, 2);
    for (const char* to : {"safetensors", "torch_dcp", "torch_save"}) {
        ASSERT_EQ(tessera("convert " + root + " " + (dir / to) + " --to " + to).code, 0);
    }
    ASSERT_EQ(tessera("convert " + root + " " + (dir / "hf") + " --to safetensors --shard-size 150B").code, 0);
    const std::string files[] = {dir / "safetensors/model.safetensors",
                                 dir / "torch_save/model.pt",
                                 dir / "hf/model-00002-of-00003.safetensors",
                                 dir / "hf/model.safetensors.index.json",
                                 dir / "torch_dcp/__0_0.distcp",
                                 dir / "torch_dcp/.metadata",
                                 path + "/rank-00001.safetensors",
                                 path + "/manifest.json"};
    for (const std::string& file : files) {
        SCOPED_TRACE(file);
        ASSERT_TRUE(std::filesystem::exists(file));
        std::ofstream(file) << "version https://git-lfs.github.com/spec/v1\noid sha256:" << std::string(64, 'a')
                            << "\nsize 2300000000\n";
        const bool is_a_file = file.ends_with(".pt") || file.ends_with("model.safetensors");
        const Result result = tessera("verify " + (is_a_file ? file : parent_of(file)));
        EXPECT_EQ(result.code, 1);
        EXPECT_THAT(result.output, HasSubstr(file + " is a Git LFS pointer, not the file itself"));
    }
}

TEST(OtherFormatsOfTwoModels, AreNotChosenBetween) {
    const TempDir dir;
    save_numbers(dir / "root", 1);
    for (const char* name : {"a", "b"}) {
        ASSERT_EQ(tessera("convert " + (dir / "root") + " " + (dir / name) + " --to hf").code, 0);
    }
    std::filesystem::rename(dir / "b/model.safetensors", dir / "a/other.safetensors");
    const Result result = tessera("info " + (dir / "a"));
    EXPECT_EQ(result.code, 2);
    EXPECT_THAT(result.output, HasSubstr("model.safetensors and "));
    EXPECT_EQ(tessera("info " + (dir / "a/other.safetensors")).code, 0);
}

TEST(OtherFormatsConvert, TheSizeOfFilesIsAnOptionOfSafetensorsAlone) {
    const TempDir dir;
    save_numbers(dir / "root", 1);
    for (const char* to : {"native", "torch_dcp", "torch_save"}) {
        const Result result =
            tessera("convert " + (dir / "root") + " " + (dir / "out") + " --max-shard-size 1KB --to " + to);
        EXPECT_EQ(result.code, 2) << to;
        EXPECT_FALSE(std::filesystem::exists(dir / "out"));
    }
    EXPECT_EQ(tessera("convert " + (dir / "root") + " " + (dir / "out") + " --max-shard-size 200B --to hf").code, 0);
    EXPECT_TRUE(std::filesystem::exists(dir / "out/model.safetensors.index.json"));
    EXPECT_THAT(tessera("tree " + (dir / "out")).output, HasSubstr("columns"));
}

}  // namespace
}  // namespace tsr::testing
