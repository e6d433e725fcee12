// DeepSpeed's files that were damaged, lost, renamed, mixed or are of kinds that are not read: each is refused with the
// file and the reason, and never gives other numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <random>

#include "base/crc32.hpp"
#include "written.hpp"

namespace tsr::testing {
namespace {

namespace fs = std::filesystem;

Error opening(const std::string& path) {
    return error_of([&] { (void)Checkpoint::open(path); });
}

void expect_words(const Error& error, const std::vector<std::string>& words) {
    for (const std::string& word : words) {
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << word << " in: " << error.what();
    }
}

std::vector<std::string> pt_files(const std::string& directory) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
}

std::string little_endian(uint32_t number) {
    std::string bytes(4, '\0');
    for (size_t i = 0; i < 4; ++i) bytes[i] = static_cast<char>(number >> 8 * i);
    return bytes;
}

class Damaged : public ::testing::TestWithParam<std::string> {
   protected:
    // Whether opening or checking it fails. What can be read without an error is right.
    bool is_refused() {
        try {
            const auto checkpoint = Checkpoint::open(copy_);
            for (const auto& [name, tensor] : checkpoint->manifest().tensors) {
                EXPECT_EQ(bytes_of(*checkpoint, name), bytes_of(*expected_, name)) << name;
            }
            return !checkpoint->verify(Depth::everything).empty();
        } catch (const Error& error) {
            EXPECT_TRUE(error.code() == Code::corrupt || error.code() == Code::not_found ||
                        error.code() == Code::unsupported)
                << error.what();
            return true;
        }
    }
    TempDir dir_;
    std::string copy_ = copy_of(GetParam(), dir_);
    std::shared_ptr<const Checkpoint> expected_ = expected_of(GetParam());
};

TEST_P(Damaged, NothingIsRefusedWhereNothingIsDamaged) { EXPECT_FALSE(is_refused()); }

TEST_P(Damaged, AFileThatWasCutIsNamed) {
    for (const std::string& name : pt_files(copy_)) {
        const std::string whole = slurp(copy_ + "/" + name);
        for (const size_t size : {size_t{0}, size_t{1}, whole.size() / 3, whole.size() - 100, whole.size() - 1}) {
            spill(copy_ + "/" + name, whole.substr(0, size));
            expect_words(opening(copy_), {name});
        }
        spill(copy_ + "/" + name, whole);
    }
}

TEST_P(Damaged, AFlippedBitIsFound) {
    for (const std::string& name : pt_files(copy_)) {
        const std::string whole = slurp(copy_ + "/" + name);
        size_t found = 0;
        size_t tried = 0;
        for (size_t at = 0; at < whole.size(); at += 211) {
            std::string damaged = whole;
            damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
            spill(copy_ + "/" + name, damaged);
            ++tried;
            if (is_refused()) ++found;
        }
        // The rest is padding between entries.
        EXPECT_GE(found, tried / 3) << name;
        spill(copy_ + "/" + name, whole);
    }
}

TEST_P(Damaged, AFlippedBitInATensorIsFoundByALoad) {
    const auto checkpoint = Checkpoint::open(copy_);
    const std::string master = bytes_of(*expected_, "model.hidden.weight");
    for (const std::string& name : pt_files(copy_)) {
        if (!name.ends_with("_optim_states.pt")) continue;  // the model has it too, and is not read
        std::string whole = slurp(copy_ + "/" + name);
        const size_t at = whole.find(master.substr(0, 16));
        if (at == std::string::npos) continue;
        whole[at] = static_cast<char>(whole[at] ^ 1);
        spill(copy_ + "/" + name, whole);
        const auto opened = Checkpoint::open(copy_);
        const Error error = error_of([&] { (void)bytes_of(*opened, "model.hidden.weight"); });
        EXPECT_EQ(error.code(), Code::corrupt);
        expect_words(error, {name, "checksum"});
        const auto faults = opened->verify(Depth::everything);
        ASSERT_EQ(faults.size(), 1u);
        EXPECT_NE(faults[0].find(name), std::string::npos) << faults[0];
        return;
    }
    FAIL() << "no file has the parameter";
}

TEST_P(Damaged, ALostFileIsNamed) {
    const auto names = pt_files(copy_);
    for (const std::string& name : names) {
        const std::string whole = slurp(copy_ + "/" + name);
        fs::remove(copy_ + "/" + name);
        const Error error = opening(copy_);
        EXPECT_EQ(error.code(), Code::not_found) << error.what();
        const bool is_only = std::ranges::count_if(names, [&](const std::string& other) {
                                 return other.ends_with(name.substr(name.rfind("mp_rank")));
                             }) == 1;
        expect_words(error, {is_only ? "states" : name});
        spill(copy_ + "/" + name, whole);
    }
}

// A file's pickle, with its checksum put right after each change. What is then opened may be anything that the file says,
// but nothing is read outside of it.
TEST_P(Damaged, PicklesWithRandomChangesNeverCrash) {
    std::mt19937 random(20261128);
    for (const std::string& name : pt_files(copy_)) {
        const std::string whole = slurp(copy_ + "/" + name);
        const size_t begin = whole.find("\x80\x02}");
        const size_t end = whole.find("PK\x07\x08", begin);
        ASSERT_NE(end, std::string::npos) << name;
        const std::string_view pickle = std::string_view(whole).substr(begin, end - begin);
        const std::string before = little_endian(crc32(pickle));
        size_t opened = 0;
        constexpr size_t tries = 150;
        for (size_t i = 0; i < tries; ++i) {
            std::string damaged(whole);
            for (uint32_t edits = 1 + random() % 3; edits > 0; --edits) {
                char& one = damaged[begin + random() % pickle.size()];
                one = static_cast<char>(random() % 2 == 0 ? one ^ 1 << random() % 8 : random());
            }
            const std::string after = little_endian(crc32(std::string_view(damaged).substr(begin, pickle.size())));
            size_t copies = 0;  // after the data, and in the directory
            for (size_t at = damaged.find(before, end); at != std::string::npos; at = damaged.find(before, at + 4)) {
                damaged.replace(at, 4, after);
                ++copies;
            }
            ASSERT_EQ(copies, 2u) << name;
            spill(copy_ + "/" + name, damaged);
            try {
                const auto checkpoint = Checkpoint::open(copy_);
                ++opened;
                for (const auto& [tensor, saved] : checkpoint->manifest().tensors) (void)bytes_of(*checkpoint, tensor);
            } catch (const Error& error) {
                EXPECT_TRUE(error.code() == Code::corrupt || error.code() == Code::not_found ||
                            error.code() == Code::unsupported)
                    << error.what();
                EXPECT_EQ(std::string(error.what()).find("does not match its checksum"), std::string::npos)
                    << error.what();
            }
        }
        EXPECT_GT(opened, 0u) << name << ": no changed pickle was taken";
        EXPECT_LT(opened, tries) << name << ": no changed pickle was refused";
        spill(copy_ + "/" + name, whole);
    }
}

INSTANTIATE_TEST_SUITE_P(Cases, Damaged,
                         ::testing::Values("stage1-fp32-3", "stage1-bf16-2", "stage2-bf16-3", "stage3-fp32-2"),
                         [](const auto& one) {
                             std::string name = one.param;
                             std::ranges::replace(name, '-', '_');
                             return name;
                         });

std::string optimizer_file(int rank) { return "zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_optim_states.pt"; }

TEST(DeepSpeedFiles, OfExchangedRanksAreRefused) {
    for (const char* name : {"stage1-fp32-3", "stage3-fp32-2"}) {
        const TempDir dir;
        const std::string copy = copy_of(name, dir);
        fs::rename(copy + "/" + optimizer_file(0), copy + "/x");
        fs::rename(copy + "/" + optimizer_file(1), copy + "/" + optimizer_file(0));
        fs::rename(copy + "/x", copy + "/" + optimizer_file(1));
        const Error error = opening(copy);
        EXPECT_EQ(error.code(), Code::corrupt);
        expect_words(error, {optimizer_file(0) + " was written as zero_pp_rank_1_mp_rank_00_optim_states.pt"});
    }
}

TEST(DeepSpeedFiles, OfAnotherWorldSizeAreRefused) {
    const TempDir dir;
    const std::string copy = copy_of("stage1-fp32-3", dir);
    fs::remove(copy + "/" + optimizer_file(2));
    const Error fewer = opening(copy);
    EXPECT_EQ(fewer.code(), Code::not_found);
    expect_words(fewer, {"3 data-parallel ranks saved it, but 2 optimizer files are there", optimizer_file(2)});

    const std::string two = copy_of("stage2-fp32-2", dir);
    fs::copy(tag_of("stage1-fp32-3") + "/" + optimizer_file(2), two + "/" + optimizer_file(2));
    const Error more = opening(two);
    EXPECT_EQ(more.code(), Code::corrupt);
    expect_words(more, {"2 data-parallel ranks saved it, but 3 optimizer files are there"});

    fs::remove(two + "/" + optimizer_file(2));
    fs::copy(tag_of("stage1-fp32-3") + "/" + optimizer_file(1), two + "/" + optimizer_file(1),
             fs::copy_options::overwrite_existing);
    const Error other = opening(two);
    EXPECT_EQ(other.code(), Code::corrupt);
    expect_words(other, {optimizer_file(1), "cut for 3 ranks, but 2 saved"});
}

TEST(DeepSpeedFiles, OfOtherKindsOfParallelismAreRefused) {
    for (const char* name : {"mp_rank_01_model_states.pt", "layer_00-model_00-model_states.pt",
                             "layer_0_expert_0_mp_rank_00_model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt",
                             "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"}) {
        const TempDir dir;
        const std::string copy = copy_of("stage1-fp32-3", dir);
        spill(copy + "/" + name, "");
        const Error error = opening(copy);
        EXPECT_EQ(error.code(), Code::unsupported) << error.what();
        expect_words(error, {name, "not supported"});
    }
}

TEST(DeepSpeedFiles, OfTwoSavesAreRefused) {
    const TempDir dir;
    const std::string copy = copy_of("stage1-bf16-2", dir);
    spill(copy + "/" + optimizer_file(0), "");
    const Error optimizers = opening(copy);
    EXPECT_EQ(optimizers.code(), Code::corrupt);
    expect_words(optimizers, {"files of several saves", "bf16_"});
    fs::remove(copy + "/" + optimizer_file(0));
    spill(copy + "/zero_pp_rank_0_mp_rank_00_model_states.pt", "");
    expect_words(opening(copy), {"files of several saves", "mp_rank_00_model_states.pt"});
}

TEST(DeepSpeedFiles, WithoutTheFullPrecisionAreRefused) {
    for (const char* name : {"stage2-bf16-3", "stage3-bf16-3"}) {
        const TempDir dir;
        const std::string copy = copy_of(name, dir);
        for (const std::string& file : pt_files(copy)) {
            if (file.ends_with("_optim_states.pt")) fs::remove(copy + "/" + file);
        }
        const Error error = opening(copy);
        EXPECT_EQ(error.code(), Code::not_found);
        expect_words(error, {"optim_states.pt"});
    }
}

TEST(DeepSpeedFiles, ALatestThatNamesNoTagListsThem) {
    const TempDir dir;
    (void)copy_of("stage1-fp32-3", dir);
    (void)copy_of("stage3-fp32-2", dir);
    for (const char* tag : {"global_step7\n", "../elsewhere", "", "."}) {
        spill(dir / "latest", tag);
        const Error error = opening(dir.path());
        EXPECT_EQ(error.code(), Code::not_found) << tag;
        expect_words(error, {"latest", "stage1-fp32-3, stage3-fp32-2"});
    }
    spill(dir / "latest", "stage3-fp32-2\n");
    EXPECT_EQ(Checkpoint::open(dir.path())->path(), dir / "stage3-fp32-2");
    // As Hugging Face's Trainer leaves them.
    fs::copy(written() + "/stage3-fp32-2/expected/tensors.safetensors", dir / "model.safetensors");
    EXPECT_EQ(Checkpoint::open(dir.path())->manifest().format, "safetensors");
    EXPECT_EQ(Checkpoint::open(dir / "stage3-fp32-2")->manifest().format, "deepspeed");
    fs::remove(dir / "model.safetensors");
    fs::remove(dir / "latest");
    EXPECT_EQ(opening(dir.path()).code(), Code::not_found);
}

}  // namespace
}  // namespace tsr::testing
