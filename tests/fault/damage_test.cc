// A checkpoint of three ranks with every kind of damage, by enumeration: each is refused with CORRUPT by load and by
// verify, and through the root no older checkpoint is taken for the newest. What must not happen is a crash, an error
// without a type, or a wrong tensor. corruption_test.cc says what the messages tell.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "fault/job.hpp"
#include "sampling.hpp"

namespace tsr::testing {
namespace {

constexpr int ranks = 3;
constexpr int64_t newest_step = 2;

class Damage : public ::testing::Test {
   protected:
    void SetUp() override {
        MemoryFiles files(disk_);
        for (const SavedStep& save : scan_root(files, root)) {
            if (save.committed) (save.step == newest_step ? newest_ : older_) = join(root, save.directory);
        }
        std::vector<std::string> names;
        ASSERT_EQ(files.list(newest_, names), 0);
        for (const std::string& name : names) {
            if (is_rank_file_name(name)) rank_files_.push_back(name);
        }
        ASSERT_GE(rank_files_.size(), static_cast<size_t>(ranks));
    }
    [[nodiscard]] std::string manifest() const { return join(newest_, manifest_name); }

    static std::optional<Error> load(FileSystem& files, const std::string& path) {
        OwnedState owned;
        build(owned, 0, 1);
        set_content(owned, 0, 99);
        owned.poison();
        try {
            const auto checkpoint = Checkpoint::open(path, files);
            (void)checkpoint->load(owned.state);
            EXPECT_EQ(checkpoint->manifest().step, newest_step) << "an older one was taken";
            EXPECT_TRUE(has_content(owned, 0, newest_step)) << "wrong tensors were loaded";
        } catch (...) {
            return current_error();
        }
        return std::nullopt;
    }
    // CORRUPT from load and verify, whether the save or the root is named.
    void expect_refused(const Disk& disk) {
        MemoryFiles files(disk);
        const auto expect_corrupt = [](const char* what, const std::optional<Error>& error) {
            ASSERT_TRUE(error) << what << " found nothing";
            EXPECT_EQ(error->code(), Code::corrupt) << what << ": " << error->what();
        };
        expect_corrupt("load of the save", load(files, newest_));
        expect_corrupt("load of the newest", load(files, root));
        std::optional<Error> error;
        try {
            Checkpoint::open(newest_, files)->check(Checkpoint::Depth::everything);
        } catch (...) {
            error = current_error();
        }
        expect_corrupt("verify", error);
        EXPECT_EQ(files.open_files(), 0);
    }
    // The same error on all ranks of a job that resumes.
    void expect_refused_on_all_ranks(const Disk& disk) {
        expect_refused(disk);
        MemoryFiles files(disk);
        Job job(files, ranks, 0);
        const Outcomes outcomes = job.run([](const Seat& seat) {
            OwnedState owned;
            build(owned, seat.rank, seat.ranks);
            set_content(owned, seat.rank, 99);
            Saver saver(seat.comm, root, job_options(seat.files, 2));
            (void)saver.resume(owned.state);
        });
        for (const auto& outcome : outcomes) {
            ASSERT_TRUE(outcome);
            EXPECT_EQ(outcome->code(), Code::corrupt) << outcome->what();
            EXPECT_STREQ(outcome->what(), outcomes[0]->what());
        }
    }
    static std::string with_bit_flipped(std::string text, size_t bit) {
        text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
        return text;
    }

    Disk disk_ = disk_before(Before::saves, ranks);
    std::string newest_;
    std::string older_;
    std::vector<std::string> rank_files_;
};

TEST_F(Damage, NoneIsSeenInASoundCheckpoint) {
    MemoryFiles files(disk_);
    EXPECT_FALSE(load(files, newest_));
    EXPECT_FALSE(load(files, root));
    EXPECT_TRUE(Checkpoint::open(newest_, files)->verify(Checkpoint::Depth::everything).empty());
}

TEST_F(Damage, AnyBitOfTheManifestIsFound) {
    const std::string sound = disk_.read(manifest());
    const Sample sample(sanitized ? 23 : 7);
    size_t count = 0;
    for (size_t bit = 0; bit < sound.size() * 8; ++bit) {
        if (!sample.takes(bit, sound.size() * 8)) continue;
        ++count;
        SCOPED_TRACE(fmt::format("bit {} of byte {}", bit % 8, bit / 8));
        Disk disk = disk_;
        disk.put(manifest(), with_bit_flipped(sound, bit));
        expect_refused(disk);
        if (count % 101 == 0) expect_refused_on_all_ranks(disk);
        if (HasFailure()) return;
    }
    fmt::print("manifest: {} bits flipped, one at a time, all found\n", count);
}

// The order of saves is read from the beginnings of manifests: none of them may make an older save the newest.
TEST_F(Damage, AnyBitOfAnOlderManifestIsHarmlessOrFound) {
    const std::string path = join(older_, manifest_name);
    const std::string sound = disk_.read(path);
    int64_t harmless = 0;
    int64_t found = 0;
    // The order is told in the first bytes.
    const Sample sample(sanitized ? 23 : 7);
    for (size_t bit = 0; bit < sound.size() * 8; ++bit) {
        if (bit >= 512 && !sample.takes(bit, sound.size() * 8)) continue;
        SCOPED_TRACE(fmt::format("bit {} of byte {}", bit % 8, bit / 8));
        Disk disk = disk_;
        disk.put(path, with_bit_flipped(sound, bit));
        MemoryFiles files(disk);
        const auto error = load(files, root);
        EXPECT_TRUE(!error || error->code() == Code::corrupt) << error->what();
        ++(error ? found : harmless);
        if (HasFailure()) return;
    }
    EXPECT_GT(found, 0);
    EXPECT_GT(harmless, 0);
    fmt::print("older manifest: {} bits flipped; {} found, {} leave the newest checkpoint to load\n", found + harmless,
               found, harmless);
}

TEST_F(Damage, AnyOfTenThousandBitsOfDataFilesIsFound) {
    const Seed seed;
    const int count = takes_all() ? 10'000 : sanitized ? 500 : 2000;
    std::mt19937_64 random(seed);
    std::map<std::string, int> flips;
    for (int i = 0; i < count; ++i) {
        const std::string& name = rank_files_[random() % rank_files_.size()];
        const std::string path = join(newest_, name);
        const std::string sound = disk_.read(path);
        const size_t bit = random() % (sound.size() * 8);
        SCOPED_TRACE(fmt::format("seed {}, flip {}: {}, bit {} of byte {}", unsigned{seed}, i, name, bit % 8, bit / 8));
        Disk disk = disk_;
        disk.put(path, with_bit_flipped(sound, bit));
        expect_refused(disk);
        ++flips[name];
        if (HasFailure()) return;
    }
    EXPECT_EQ(flips.size(), rank_files_.size());
    fmt::print("data files: {} random bits flipped, one at a time, in {} files, all found\n", count, flips.size());
}

TEST_F(Damage, AnyTruncationIsFound) {
    int64_t count = 0;
    const auto cut = [&](const std::string& path, size_t size, const std::string& sound) {
        SCOPED_TRACE(fmt::format("{} cut to {} of {} bytes", path, size, sound.size()));
        Disk disk = disk_;
        disk.put(path, sound.substr(0, size));
        expect_refused(disk);
        ++count;
    };
    const Sample sample(sanitized ? 11 : 3);
    const std::string sound_manifest = disk_.read(manifest());
    for (size_t size = 0; size < sound_manifest.size() && !HasFailure(); ++size) {
        if (sample.takes(size, sound_manifest.size())) cut(manifest(), size, sound_manifest);
    }
    for (const std::string& name : rank_files_) {
        const std::string path = join(newest_, name);
        const std::string sound = disk_.read(path);
        for (size_t size = 0; size < sound.size() && !HasFailure(); size += 512) cut(path, size, sound);
        cut(path, sound.size() - 1, sound);
        for (const size_t more : {1, 511, 512, 4096}) {
            SCOPED_TRACE(fmt::format("{} longer by {} bytes", path, more));
            Disk disk = disk_;
            disk.put(path, sound + std::string(more, '\0'));
            expect_refused(disk);
            ++count;
        }
    }
    fmt::print("{} truncations and extensions, all found\n", count);
}

TEST_F(Damage, MissingSwappedAndStaleFilesAreFound) {
    int64_t count = 0;
    const auto damaged = [&](const std::string& what, const std::function<void(Disk&)>& change) {
        SCOPED_TRACE(what);
        Disk disk = disk_;
        change(disk);
        expect_refused_on_all_ranks(disk);
        ++count;
    };
    for (const std::string& name : rank_files_) {
        const std::string path = join(newest_, name);
        damaged(name + " missing", [&](Disk& disk) { ASSERT_EQ(disk.remove(path, false), 0); });
        damaged(name + " of the save before", [&](Disk& disk) { disk.put(path, disk.read(join(older_, name))); });
        damaged(name + " empty", [&](Disk& disk) { disk.put(path, ""); });
        for (const std::string& other : rank_files_) {
            if (other == name) continue;
            damaged(name + " holds what is " + other + "'s",
                    [&](Disk& disk) { disk.put(path, disk.read(join(newest_, other))); });
            if (other < name) continue;
            damaged(name + " and " + other + " swapped", [&](Disk& disk) {
                const std::string mine = disk.read(path);
                disk.put(path, disk.read(join(newest_, other)));
                disk.put(join(newest_, other), mine);
            });
        }
    }
    damaged("the manifest of the save before",
            [&](Disk& disk) { disk.put(manifest(), disk.read(join(older_, manifest_name))); });
    damaged("all rank files of the save before", [&](Disk& disk) {
        for (const std::string& name : rank_files_) disk.put(join(newest_, name), disk.read(join(older_, name)));
    });
    fmt::print("{} sets of missing, swapped and stale files, all found on all ranks\n", count);
}

// A load reads what the manifest tells of and no more; verify tells of the rest.
TEST_F(Damage, AnExtraFileDoesNotReachALoadAndVerifyTellsOfIt) {
    for (const std::string& name : rank_files_) {
        Disk disk = disk_;
        const std::string extra = join(newest_, "rank-00003.safetensors");
        disk.put(extra, disk.read(join(newest_, name)));
        MemoryFiles files(disk);
        EXPECT_FALSE(load(files, newest_));
        const auto faults = Checkpoint::open(newest_, files)->verify(Checkpoint::Depth::headers);
        ASSERT_EQ(faults.size(), 1u);
        EXPECT_NE(faults[0].find(extra), std::string::npos) << faults[0];
    }
}

// Without its manifest a save is none; but while `latest` names it, the one before is not taken for the newest.
TEST_F(Damage, AMissingManifestIsFound) {
    Disk disk = disk_;
    ASSERT_EQ(disk.remove(manifest(), false), 0);
    MemoryFiles files(disk);
    const auto of_save = load(files, newest_);
    ASSERT_TRUE(of_save);
    EXPECT_EQ(of_save->code(), Code::not_found) << of_save->what();
    const auto of_root = load(files, root);
    ASSERT_TRUE(of_root);
    EXPECT_EQ(of_root->code(), Code::corrupt) << of_root->what();
    EXPECT_NE(std::string(of_root->what()).find(manifest() + " is missing"), std::string::npos) << of_root->what();
}

}  // namespace
}  // namespace tsr::testing
