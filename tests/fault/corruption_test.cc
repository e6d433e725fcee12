// What is wrong with a committed checkpoint is noticed and named: no flipped bit, no cut, no foreign file loads as data.
#include <gtest/gtest.h>

#include <random>

#include "base/crc32c.hpp"
#include "checkpoint/fixture.hpp"

namespace tsr::testing {
namespace {

void build(OwnedState& owned) {
    owned.add_whole({"model.a", DType::f32, {1024, 3}});
    owned.add_whole({"model.b", DType::f32, {700000}});  // spans blocks
    owned.add_whole({"model.c", DType::u8, {11}});
    owned.state.set_value("epoch", Json(int64_t{1}));
    owned.state.set_value("lr", Json(0.1));
}

class Corruption : public ::testing::Test {
   protected:
    void SetUp() override {
        expect_all_well(run_meeting(2, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            build(owned);
            owned.fill();
            Saver saver(comm, root_, saver_options());
            saver.save(1, owned.state);
        }));
        save_ = only_save(root_);
    }

    // Loading and verifying must both refuse, with CORRUPT and a message that has `told`.
    void expect_refused(const std::string& told) {
        const auto expect = [&](const char* what, auto&& body) {
            const Error error = error_of(body);
            EXPECT_EQ(error.code(), Code::corrupt) << what << ": " << error.what();
            EXPECT_NE(std::string(error.what()).find(told), std::string::npos) << what << ": " << error.what();
        };
        expect("verify", [&] { Checkpoint::open(save_)->check(Checkpoint::Depth::everything); });
        expect("load", [&] {
            OwnedState owned;
            build(owned);
            (void)Checkpoint::open(save_)->load(owned.state);
        });
    }

    TempDir dir_;
    std::string root_ = dir_ / "root";
    std::string save_;
};

TEST_F(Corruption, TheSaveIsSound) {
    Checkpoint::open(save_)->check(Checkpoint::Depth::everything);
    EXPECT_TRUE(std::filesystem::exists(save_ + "/rank-00001.safetensors"));
}

TEST_F(Corruption, EveryBitOfTheManifestCounts) {
    const std::string path = save_ + "/manifest.json";
    const std::string sound = slurp(path);
    ASSERT_LT(sound.size(), 2000u);
    for (size_t byte = 0; byte < sound.size(); ++byte) {
        for (int bit = 0; bit < 8; ++bit) {
            std::string broken = sound;
            broken[byte] = static_cast<char>(broken[byte] ^ (1 << bit));
            const Error error = error_of([&] { (void)Manifest::parse(broken, path); });
            ASSERT_EQ(error.code(), Code::corrupt) << "byte " << byte << " bit " << bit;
            ASSERT_NE(std::string(error.what()).find(path), std::string::npos);
        }
    }
    // Cut anywhere, or longer by anything.
    for (size_t size = 0; size < sound.size(); ++size) {
        ASSERT_THROW((void)Manifest::parse(sound.substr(0, size), path), Error) << size;
    }
    EXPECT_THROW((void)Manifest::parse(sound + "\n", path), Error);
    EXPECT_THROW((void)Manifest::parse(sound + sound, path), Error);
    // And through the file, once.
    std::string broken = sound;
    broken[sound.size() / 2] ^= 1;
    spill(path, broken);
    expect_refused("manifest.json");
}

TEST_F(Corruption, FlippedBitsOfRankFilesAreFoundAndPlaced) {
    const uint32_t seed = 4711;
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    for (const char* name : {"/rank-00000.safetensors", "/rank-00001.safetensors"}) {
        const std::string path = save_ + name;
        const std::string sound = slurp(path);
        for (int i = 0; i < 60; ++i) {
            // The first ones in the header, the rest anywhere.
            const size_t byte = i < 20 ? random() % 4096 : random() % sound.size();
            std::string broken = sound;
            broken[byte] = static_cast<char>(broken[byte] ^ (1 << random() % 8));
            spill(path, broken);
            const Error error = error_of([&] { Checkpoint::open(save_)->check(Checkpoint::Depth::everything); });
            ASSERT_EQ(error.code(), Code::corrupt);
            const std::string message = error.what();
            ASSERT_NE(message.find(name), std::string::npos) << message;
            int64_t begin = -1;
            int64_t end = -1;
            const size_t at = message.find("bytes ");
            if (at != std::string::npos) std::sscanf(message.c_str() + at, "bytes %ld to %ld", &begin, &end);
            if (byte >= 8) {
                EXPECT_LE(begin, static_cast<int64_t>(byte)) << message;
                EXPECT_GT(end, static_cast<int64_t>(byte)) << message;
            }
            OwnedState owned;
            build(owned);
            ASSERT_THROW((void)Checkpoint::open(save_)->load(owned.state), Error);
        }
        spill(path, sound);
    }
    Checkpoint::open(save_)->check(Checkpoint::Depth::everything);
}

TEST_F(Corruption, TruncatedFilesAreNamed) {
    const std::string path = save_ + "/rank-00001.safetensors";
    const std::string sound = slurp(path);
    for (size_t size :
         {size_t{0}, size_t{7}, size_t{8}, size_t{4095}, size_t{4096}, sound.size() / 2, sound.size() - 1}) {
        spill(path, sound.substr(0, size));
        expect_refused("rank-00001.safetensors: it has " + std::to_string(size) + " bytes");
    }
    spill(path, sound + "x");
    expect_refused("rank-00001.safetensors");
}

TEST_F(Corruption, MissingSwappedAndStaleFilesAreNamed) {
    const std::string first = save_ + "/rank-00000.safetensors";
    const std::string second = save_ + "/rank-00001.safetensors";
    const std::string a = slurp(first);
    const std::string b = slurp(second);

    std::filesystem::remove(second);
    expect_refused("rank-00001.safetensors is missing");

    spill(first, b);
    spill(second, a);
    expect_refused("rank-0000");
    spill(first, a);
    spill(second, b);

    // The same rank's file of another save of equal shape.
    const std::string other_root = dir_ / "other";
    expect_all_well(run_meeting(2, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        build(owned);
        owned.fill();
        Saver saver(comm, other_root, saver_options());
        saver.save(1, owned.state);
    }));
    std::filesystem::copy_file(only_save(other_root) + "/rank-00001.safetensors", second,
                               std::filesystem::copy_options::overwrite_existing);
    expect_refused("rank-00001.safetensors");
}

TEST_F(Corruption, AnExtraFileIsFoundByVerify) {
    std::filesystem::copy_file(save_ + "/rank-00001.safetensors", save_ + "/rank-00002.safetensors");
    const Error error = error_of([&] { Checkpoint::open(save_)->check(Checkpoint::Depth::headers); });
    EXPECT_EQ(error.code(), Code::corrupt);
    EXPECT_NE(std::string(error.what()).find("rank-00002.safetensors is not a file of this save"), std::string::npos);
}

TEST_F(Corruption, FastVerifyReadsHeadersOnly) {
    const std::string path = save_ + "/rank-00001.safetensors";
    std::string text = slurp(path);
    text.back() = static_cast<char>(text.back() ^ 1);
    spill(path, text);
    EXPECT_TRUE(Checkpoint::open(save_)->verify(Checkpoint::Depth::headers).empty());
    EXPECT_EQ(Checkpoint::open(save_)->verify(Checkpoint::Depth::everything).size(), 1u);
}

TEST_F(Corruption, EveryFaultIsListed) {
    for (const char* name : {"/rank-00000.safetensors", "/rank-00001.safetensors"}) {
        std::string text = slurp(save_ + name);
        text.back() = static_cast<char>(text.back() ^ 1);
        spill(save_ + name, text);
    }
    const Error error = error_of([&] { Checkpoint::open(save_)->check(Checkpoint::Depth::everything); });
    ASSERT_NE(error.record()->cause, nullptr);
    EXPECT_NE(error.record()->cause->message.find("rank-00001"), std::string::npos);
}

TEST_F(Corruption, WithoutManifestThereIsNoCheckpoint) {
    std::filesystem::remove(save_ + "/manifest.json");
    const Error error = error_of([&] { (void)Checkpoint::open(save_); });
    EXPECT_EQ(error.code(), Code::not_found);
    EXPECT_NE(std::string(error.what()).find("has no manifest.json"), std::string::npos) << error.what();
    const Error of_newest = error_of([&] { (void)Checkpoint::open(root_); });
    EXPECT_EQ(of_newest.code(), Code::corrupt);
    EXPECT_NE(std::string(of_newest.what()).find("manifest.json is missing"), std::string::npos) << of_newest.what();
    std::filesystem::remove(root_ + "/latest");
    const Error of_root = error_of([&] { (void)Checkpoint::open(root_); });
    EXPECT_EQ(of_root.code(), Code::not_found);
    EXPECT_NE(std::string(of_root.what()).find("is not committed"), std::string::npos) << of_root.what();
}

TEST_F(Corruption, ADamagedNewestManifestIsNotPassedOverSilently) {
    {
        OwnedState owned;
        build(owned);
        Saver saver(nullptr, root_, saver_options());
        saver.save(2, owned.state);
    }
    std::string newest;
    for (const auto& entry : std::filesystem::directory_iterator(root_)) {
        if (entry.is_directory() && entry.path().string() != save_) newest = entry.path().string();
    }
    spill(newest + "/manifest.json", "");
    OwnedState owned;
    build(owned);
    Saver saver(nullptr, root_, saver_options());
    EXPECT_EQ(error_of([&] { (void)saver.resume(owned.state); }).code(), Code::corrupt);
    EXPECT_NO_THROW((void)Checkpoint::open(save_));
}

TEST_F(Corruption, ANewerFormatIsAVersionError) {
    std::string text = slurp(save_ + "/manifest.json");
    const size_t at = text.find("\"version\":1");
    text.replace(at, 11, "\"version\":2");
    text.resize(text.rfind("\"crc32c\""));
    text += "\"crc32c\":\"" + hex8(crc32c(text)) + "\"}\n";
    spill(save_ + "/manifest.json", text);
    EXPECT_EQ(error_of([&] { (void)Checkpoint::open(save_); }).code(), Code::version);
}

}  // namespace
}  // namespace tsr::testing
