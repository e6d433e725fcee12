// `tessera ckpt latest` and `tessera ckpt gc`.
#include <gmock/gmock.h>

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "base/clock.hpp"
#include "checkpoint/root/root.hpp"
#include "cli/command.hpp"
#include "sampling.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

class Gc : public ::testing::Test {
   protected:
    void SetUp() override {
        for (int i = 0; i < 3; ++i) saves_.push_back(save_numbers(root_, i % 2 + 1));
    }
    // A save that was cut short, by a process that is gone or, with `holder`, by that one.
    std::string leave(const std::string& holder) {
        const std::string path = root_ + "/step-00000077-0123abcd";
        std::filesystem::create_directory(path);
        spill(path + "/rank-00000.safetensors", std::string(1000, 'x'));
        spill(path + "/.writing", holder);
        return path;
    }
    std::string dead() {
        Holder holder = Holder::this_process("dead");
        holder.start_time -= 1;  // another process had this pid
        return holder.dump();
    }
    size_t count() { return scan_root(posix_file_system(), root_).size(); }

    TempDir dir_;
    std::string root_ = dir_ / "root";
    std::vector<std::string> saves_;
};

TEST_F(Gc, LatestIsThePathOfTheNewest) {
    EXPECT_EQ(tessera("latest " + root_).output, saves_.back() + "\n");
    EXPECT_EQ(json_of("latest --json " + root_).at("path").as_string(), saves_.back());
    (void)leave(dead());
    EXPECT_EQ(tessera("latest " + root_).output, saves_.back() + "\n");
    std::filesystem::create_directory(dir_ / "empty");
    EXPECT_EQ(json_of("latest --json " + (dir_ / "empty"), 1).at("error").at("code").as_string(), "NOT_FOUND");
    EXPECT_EQ(tessera("latest " + (dir_ / "nope")).code, 2);
}

TEST_F(Gc, RemovesWhatACutSaveLeftAndNothingElse) {
    const std::string left = leave(dead());
    const std::string foreign = root_ + "/step-00000078-0123abcd";  // a copy on its way: no one's to remove
    std::filesystem::create_directory(foreign);
    spill(foreign + "/rank-00000.safetensors", "copy");
    const Result dry = tessera("gc --dry-run " + root_);
    EXPECT_EQ(dry.code, 0);
    EXPECT_THAT(dry.output, HasSubstr("would remove " + left + ": left by an interrupted save, 1.1 KiB\n"));
    EXPECT_THAT(dry.output, ::testing::ContainsRegex("would remove: (1 directory|[0-9]+ directories), "));
    EXPECT_TRUE(std::filesystem::exists(left));
    const Json json = json_of("gc --json " + root_);
    ASSERT_EQ(json.at("removed").as_array().size(), 1u);
    EXPECT_EQ(json.at("removed").as_array()[0].at("path").as_string(), left);
    EXPECT_GT(json.at("size_bytes").as_int(), 1000);
    EXPECT_FALSE(std::filesystem::exists(left));
    EXPECT_TRUE(std::filesystem::exists(foreign));
    EXPECT_EQ(count(), 4u);
    EXPECT_FALSE(std::filesystem::exists(root_ + "/.owner"));
    EXPECT_TRUE(json_of("gc --json " + root_).at("removed").as_array().empty());
}

TEST_F(Gc, KeepLeavesTheNewest) {
    EXPECT_EQ(json_of("gc --json --dry-run --keep 1 " + root_).at("removed").as_array().size(), 2u);
    EXPECT_EQ(count(), 3u);
    const Result result = tessera("gc --keep 2 " + root_);
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.output, HasSubstr("removed " + saves_[0] + ": beyond --keep"));
    EXPECT_FALSE(std::filesystem::exists(saves_[0]));
    EXPECT_EQ(tessera("verify " + saves_[1]).code, 0);
    EXPECT_EQ(tessera("latest " + root_).output, saves_[2] + "\n");
    EXPECT_EQ(tessera("gc --keep 0 " + root_).code, 2);
    EXPECT_EQ(tessera("gc --keep 9 " + root_).code, 0);
    EXPECT_EQ(count(), 2u);
}

TEST_F(Gc, TheBestAndWhatIsOpenStay) {
    {
        SaverOptions options;
        options.retention.rule = BestRule{"loss", Better::lower};
        Saver saver(nullptr, root_, options);
        OwnedState owned;
        owned.add_whole({"w", DType::f32, {4}});
        for (const int64_t step : {101, 102, 103}) {
            owned.state.set_metric("loss", static_cast<double>(step));
            saver.save(step, owned.state);
        }
    }
    const std::string best = Checkpoint::open(root_ + "/best")->path();
    auto reader = Checkpoint::open(saves_[1]);
    EXPECT_EQ(json_of("gc --json --keep 1 " + root_).at("removed").as_array().size(), 3u);
    EXPECT_EQ(count(), 3u);
    EXPECT_EQ(tessera("verify " + saves_[1]).code, 0);
    reader.reset();
    EXPECT_EQ(json_of("gc --json --keep 1 " + root_).at("removed").as_array().size(), 1u);
    EXPECT_EQ(count(), 2u);
    EXPECT_EQ(Checkpoint::open(root_ + "/best")->path(), best);
}

TEST_F(Gc, NothingGoesWhereTheNewestIsNotCertain) {
    spill(saves_.back() + "/manifest.json", "{}");
    EXPECT_EQ(json_of("gc --json --keep 1 " + root_, 1).at("error").at("code").as_string(), "CORRUPT");
    EXPECT_EQ(count(), 3u);
}

TEST_F(Gc, NothingIsDoneWhereALiveJobSaves) {
    const std::string left = leave(dead());
    {
        const Lease lease(posix_file_system(), root_, random_id());
        for (const char* arguments : {"gc --json ", "gc --json --dry-run ", "gc --json --keep 1 "}) {
            const Json error = json_of(arguments + root_, 2).at("error");
            EXPECT_EQ(error.at("code").as_string(), "INVALID_STATE");
            EXPECT_THAT(error.at("message").as_string(), HasSubstr("process " + std::to_string(::getpid())));
        }
    }
    EXPECT_TRUE(std::filesystem::exists(left));
    EXPECT_EQ(count(), 4u);
}

TEST_F(Gc, ALiveWritersDirectoryStays) {
    const std::string written = leave(Holder::this_process("live").dump());
    EXPECT_TRUE(json_of("gc --json " + root_).at("removed").as_array().empty());
    EXPECT_TRUE(std::filesystem::exists(written));
}

TEST_F(Gc, OneThatCannotBeRemovedKeepsNoOther) {
    const std::string stays = leave(dead());
    std::filesystem::create_directory(stays + "/manifest.json.tmp-0");  // a file's name
    const Json error = json_of("gc --json --keep 1 " + root_, 2).at("error");
    EXPECT_THAT(error.at("message").as_string(), HasSubstr("cannot remove " + stays));
    EXPECT_TRUE(std::filesystem::exists(stays + "/.writing"));
    EXPECT_EQ(count(), 2u);
}

TEST_F(Gc, OfSomethingElseIsTwo) {
    EXPECT_EQ(tessera("gc " + (dir_ / "nope")).code, 2);
    const Result one = tessera("gc " + saves_[0]);
    EXPECT_EQ(one.code, 2);
    EXPECT_THAT(one.output, HasSubstr("is a checkpoint, not a root; pass its root"));
}

// As fast as it can the owner of a root swaps what is left there, and the root, for links to another's save and root,
// while somebody who may write in both collects.
TEST_F(Gc, NothingGoesWhereASwappedLinkLeads) {
    const std::string name = "step-00000077-0123abcd";
    const std::string victim = dir_ / "victim";
    const std::string save = victim + "/" + name;
    const auto files_of = [](const std::string& directory) {
        std::vector<std::string> names;
        for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
            names.push_back(entry.path().string());
        }
        std::ranges::sort(names);
        return names;
    };
    (void)leave(dead());
    std::filesystem::copy(saves_.back(), root_ + "/" + name, std::filesystem::copy_options::overwrite_existing);
    std::filesystem::remove(root_ + "/" + name + "/.writing");
    std::filesystem::rename(root_, victim);  // its save has the name of what is left
    for (int i = 0; i < 200; ++i) spill(save + fmt::format("/__{}_0.distcp", i), "");
    spill(victim + "/.owner", Holder::this_process("live").dump());
    const std::vector<std::string> before = files_of(victim);
    const std::string links = dir_ / "links";
    std::filesystem::create_directory(links);
    std::filesystem::create_symlink(save, links + "/save");
    std::filesystem::create_symlink(victim, links + "/root");
    std::filesystem::create_directory(root_);

    std::atomic<bool> stop{false};
    std::thread attacker([&] {
        const auto swap = [](const std::string& one, const std::string& other) {
            return ::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0;
        };
        bool away = false;  // the root, for a link
        for (unsigned turn = 0; !stop; ++turn) {
            (void)swap((away ? links + "/root/" : root_ + "/") + name, links + "/save");
            if (turn % 64 < 2 && swap(root_, links + "/root")) away = !away;
        }
    });
    const auto until = Clock::now() + std::chrono::milliseconds(takes_all() ? 60000 : 1000);
    int removed = 0;
    for (bool first = true; first || Clock::now() < until; first = false) {
        const std::string made = dir_ / "made";
        std::filesystem::remove_all(made);
        std::filesystem::create_directory(made);
        for (int i = 0; i < 200; ++i) spill(made + fmt::format("/__{}_0.distcp", i), "");
        spill(made + "/.writing", dead());
        // Into the root, wherever the attacker has it now.
        for (const std::string& root : {root_, links + "/root"}) {
            std::error_code ignored;
            if (std::filesystem::is_symlink(root, ignored)) continue;
            std::filesystem::rename(made, root + "/" + name, ignored);
        }
        removed += tessera("gc " + root_, ">/dev/null 2>&1").code == 0 ? 1 : 0;
        if (files_of(victim) != before) break;
    }
    stop = true;
    attacker.join();
    EXPECT_EQ(files_of(victim), before);
    EXPECT_GT(removed, 0);
}

}  // namespace
}  // namespace tsr::testing
