// A checkpoint of PyTorch's format that was damaged: each kind of damage is found, named with its file, and gives no tensor.
#include <gtest/gtest.h>

#include <filesystem>
#include <random>

#include "checkpoint/fixture.hpp"
#include "checkpoint/formats/torch_dcp/writer.hpp"
#include "fault/faulty_files.hpp"

namespace tsr::testing {
namespace {

class Damage : public ::testing::Test {
   protected:
    void SetUp() override {
        owned_.add_whole({"a", DType::f32, {300, 7}});
        owned_.add_whole({"b", DType::i64, {5}});
        owned_.fill();
        owned_.state.set_value("note", Json("text"));
        owned_.state.set_value("list", Json(Json::Array{Json(1), Json(2.5)}));
        SaverOptions options = saver_options();
        options.format = SaveFormat::torch_dcp;
        Saver saver(nullptr, dir_ / "root", options);
        saver.save(3, owned_.state);
        save_ = only_save(dir_ / "root");
        // As PyTorch would have written it: without a manifest of ours.
        foreign_ = dir_ / "foreign";
        std::filesystem::create_directory(foreign_);
        for (const char* name : {"/.metadata", "/__0_0.distcp"}) spill(foreign_ + name, slurp(save_ + name));
    }
    // Whether opening, checking or loading it fails; never with other contents than those saved.
    bool is_refused(const std::string& path) {
        try {
            const auto checkpoint = Checkpoint::open(path);
            const bool faulty = !checkpoint->verify(Checkpoint::Depth::everything).empty();
            owned_.poison();
            LoadOptions options;
            options.unexpected = Allow::yes;
            (void)checkpoint->load(owned_.state, options);
            EXPECT_EQ(owned_.differences(), 0);
            return faulty;
        } catch (const Error& error) {
            EXPECT_TRUE(error.code() == Code::corrupt || error.code() == Code::not_found ||
                        error.code() == Code::unsupported || error.code() == Code::mismatch)
                << error.what();
            return true;
        }
    }
    TempDir dir_;
    OwnedState owned_;
    std::string save_;
    std::string foreign_;
};

TEST_F(Damage, NoneIsFoundWhereThereIsNone) {
    EXPECT_FALSE(is_refused(save_));
    EXPECT_FALSE(is_refused(foreign_));
    EXPECT_EQ(Checkpoint::open(save_)->manifest().step, 3);
    EXPECT_EQ(Checkpoint::open(foreign_)->manifest().step, -1);
    EXPECT_EQ(Checkpoint::open(foreign_)->manifest().values.at("list").dump(), "[1,2.5]");
}

TEST_F(Damage, EveryTruncationOfTheDataIsFound) {
    const std::string data = slurp(foreign_ + "/__0_0.distcp");
    for (size_t size = 0; size < data.size(); size += 1 + size % 37) {
        spill(foreign_ + "/__0_0.distcp", data.substr(0, size));
        ASSERT_TRUE(is_refused(foreign_)) << size;
    }
}

TEST_F(Damage, EveryTruncationOfTheMetadataIsFound) {
    const std::string metadata = slurp(foreign_ + "/.metadata");
    for (size_t size = 0; size < metadata.size(); ++size) {
        spill(foreign_ + "/.metadata", metadata.substr(0, size));
        ASSERT_TRUE(is_refused(foreign_)) << size;
        spill(save_ + "/.metadata", metadata.substr(0, size));
        ASSERT_TRUE(is_refused(save_)) << size;
    }
}

// Bits between archives' entries mean nothing to anyone; all others are covered by a checksum or compared.
TEST_F(Damage, AFlippedBitNeverGivesAWrongTensor) {
    const uint32_t seed = 7;
    std::mt19937 random(seed);
    SCOPED_TRACE("seed " + std::to_string(seed));
    for (const char* name : {"/__0_0.distcp", "/.metadata"}) {
        const std::string sound = slurp(foreign_ + name);
        int found = 0;
        for (int i = 0; i < 1500; ++i) {
            std::string damaged = sound;
            damaged[random() % damaged.size()] ^= static_cast<char>(1 << random() % 8);
            spill(foreign_ + name, damaged);
            found += is_refused(foreign_) ? 1 : 0;
        }
        EXPECT_GT(found, 900) << name;
        spill(foreign_ + name, sound);
    }
}

TEST_F(Damage, EveryFlippedBitOfASavesMetadataIsFound) {
    const std::string sound = slurp(save_ + "/.metadata");
    for (size_t at = 0; at < sound.size(); at += 3) {
        std::string damaged = sound;
        damaged[at] ^= static_cast<char>(1 << at % 8);
        spill(save_ + "/.metadata", damaged);
        ASSERT_EQ(error_of([&] { (void)Checkpoint::open(save_); }).code(), Code::corrupt) << at;
    }
}

TEST_F(Damage, AFlippedBitOfATensorIsNamed) {
    std::string data = slurp(foreign_ + "/__0_0.distcp");
    const auto checkpoint = Checkpoint::open(foreign_);
    data[data.size() / 2] ^= 1;
    spill(foreign_ + "/__0_0.distcp", data);
    const Error error = error_of([&] { checkpoint->check(Checkpoint::Depth::everything); });
    EXPECT_EQ(error.code(), Code::corrupt);
    EXPECT_NE(std::string(error.what()).find("__0_0.distcp"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("tensor 'a'"), std::string::npos) << error.what();
}

// As a conversion reads: a batch at a time.
TEST(PartsOfAStorage, AreCheckedOnceAndReadOnce) {
    const TempDir dir;
    constexpr int64_t mib = int64_t{1} << 20;
    constexpr int64_t parts = 16;
    const Spec spec{"large", DType::u8, {parts, mib}};
    OwnedState owned;
    owned.add_whole(spec);
    owned.fill();
    SaverOptions options = saver_options();
    options.format = SaveFormat::torch_dcp;
    options.plan.split_bytes = INT64_MAX;
    Saver(nullptr, dir / "root", options).save(1, owned.state);
    const std::string save = only_save(dir / "root");

    std::atomic<int64_t> bytes{0};
    FaultyFiles files(posix_file_system(), [&](const FaultyFiles::Call& call) -> Verdict {
        bytes += static_cast<int64_t>(call.bytes);
        return {};
    });
    const auto read = [&](const Checkpoint& checkpoint, int64_t row) {
        std::vector<std::byte> memory(static_cast<size_t>(mib));
        const ReadPart part{spec.name, {{row, 0}, {1, mib}}, memory.data()};
        checkpoint.read(std::span(&part, 1));
        const uint64_t expected = Pattern(spec.name).at(row * mib + 5);
        EXPECT_EQ(memory[5], static_cast<std::byte>(expected));
    };
    const auto checkpoint = Checkpoint::open(save, files);
    for (int64_t row = 0; row < parts; ++row) read(*checkpoint, row);
    EXPECT_LT(bytes, 2 * parts * mib + mib);

    std::string data = slurp(save + "/__0_0.distcp");
    data[data.size() / 2] ^= 1;
    spill(save + "/__0_0.distcp", data);
    const auto damaged = Checkpoint::open(save);
    EXPECT_EQ(error_of([&] { read(*damaged, 0); }).code(), Code::corrupt);
    EXPECT_EQ(error_of([&] { read(*damaged, 0); }).code(), Code::corrupt);
    EXPECT_EQ(error_of([&] { read(*damaged, 1); }).code(), Code::corrupt);
    // A check finds what has changed since.
    EXPECT_EQ(checkpoint->verify(Checkpoint::Depth::everything).size(), 1u);
    EXPECT_EQ(error_of([&] { read(*checkpoint, 1); }).code(), Code::corrupt);
}

TEST_F(Damage, AMissingFileIsNamed) {
    std::filesystem::remove(foreign_ + "/__0_0.distcp");
    EXPECT_NE(std::string(error_of([&] { (void)Checkpoint::open(foreign_); }).what()).find("__0_0.distcp"),
              std::string::npos);
    std::filesystem::remove(foreign_ + "/.metadata");
    EXPECT_EQ(error_of([&] { (void)Checkpoint::open(foreign_); }).code(), Code::not_found);
}

TEST_F(Damage, ASaveThatFailsLeavesNothing) {
    const std::string root = dir_ / "root";
    SaverOptions options = saver_options();
    options.format = SaveFormat::torch_dcp;
    Saver saver(nullptr, root, options);
    EXPECT_EQ(error_of([&] { saver.save(-1, owned_.state); }).code(), Code::invalid_argument);
    EXPECT_EQ(only_save(root), save_);
    saver.save(4, owned_.state);
    EXPECT_EQ(Checkpoint::open(root)->manifest().step, 4);
}

}  // namespace
}  // namespace tsr::testing
