// Directories that their owner swaps for links, or for each other, at any file operation of one who saves, collects or
// exports there with the right to write elsewhere: nothing changes in what the links lead to. The swap is made between two
// calls, at each of them in turn.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "checkpoint/export/export.hpp"
#include "checkpoint/export/rewrite.hpp"
#include "checkpoint/fixture.hpp"
#include "checkpoint/root/collect.hpp"
#include "checkpoint/root/root.hpp"
#include "checkpoint/save/agreement.hpp"
#include "fault/faulty_files.hpp"
#include "sampling.hpp"

namespace tsr::testing {
namespace {

namespace fs = std::filesystem;

using Content = std::map<std::string, std::string>;  // of each file below a directory; of a directory: "directory"

Content content_of(const std::string& path) {
    Content content;
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
        const std::string name = fs::relative(entry.path(), path).string();
        content[name] = entry.is_directory() ? "directory" : slurp(entry.path().string());
    }
    return content;
}

// Each has the other's name; nothing where one of them is not there.
void exchange(const std::string& a, const std::string& b) {
    if (!fs::exists(fs::symlink_status(a)) || !fs::exists(fs::symlink_status(b))) return;
    fs::rename(a, a + ".between");
    fs::rename(b, a);
    fs::rename(a + ".between", b);
}

// Two directories with the same names in them: one of the attacker's, and one that nobody gave away.
class Swapped : public ::testing::Test {
   protected:
    Swapped() {
        owned_.add_whole({"w", DType::f32, {100}});
        Saver saver(nullptr, dir_ / "made", saver_options());
        for (const int64_t step : {1, 2}) saver.save(step, owned_.state);
        saves_ = {scan_root(posix_file_system(), dir_ / "made")[0].directory,
                  scan_root(posix_file_system(), dir_ / "made")[1].directory};
        Holder dead = Holder::this_process("dead");
        dead.start_time -= 1;
        fs::create_directory(dir_ / "made/" + left_);
        spill(dir_ / "made/" + left_ + "/rank-00000.safetensors", "left");
        spill(dir_ / "made/" + left_ + "/.writing", dead.dump());
    }

    void begin_anew() {
        for (const char* name : {"mine", "victim", "links"}) fs::remove_all(dir_ / name);
        for (const char* name : {"mine", "victim"}) {
            fs::copy(dir_ / "made", dir_ / name, fs::copy_options::recursive);
            fs::remove(dir_ / name + "/.owner");
        }
        // A live job saves there.
        spill(dir_ / "victim/.owner", Holder::this_process("other").dump());
        spill(dir_ / "victim/" + saves_[1] + "/model.safetensors", "another's");
        fs::create_directory(dir_ / "links");
        for (const std::string& name : {saves_[0], saves_[1], left_}) {
            fs::create_symlink(dir_ / "victim/" + name, dir_ / "links/" + name);
        }
        fs::create_symlink(dir_ / "victim", dir_ / "links/root");
    }

    void swap_root() { exchange(dir_ / "mine", dir_ / "links/root"); }
    void swap_saves() {
        for (const std::string& name : {saves_[0], saves_[1], left_}) {
            exchange(dir_ / "mine/" + name, dir_ / "links/" + name);
        }
        if (made_.empty()) return;
        const std::string link = dir_ / "links/made";
        if (!fs::exists(fs::symlink_status(link))) fs::create_symlink(dir_ / "victim/" + saves_[1], link);
        exchange(made_, link);
    }
    // Both are directories of the root: a save that stays has the name of one that goes.
    void swap_names(const std::string& name) { exchange(dir_ / "mine/" + saves_[1], dir_ / "mine/" + name); }
    void swap_with_made() {
        if (!made_.empty()) exchange(dir_ / "mine/" + saves_[1], made_);
    }

    // Calls job(files, arm) again and again; the n-th call of `files` after arm() finds what `swap` did.
    using Job = std::function<void(FaultyFiles& files, const std::function<void()>& arm)>;
    void at_each_call(const Job& job, const std::function<void()>& swap) {
        static const Sample sample(16);
        int64_t count = 0;
        for (int64_t at = -1; at < count; ++at) {
            if (at >= 0 && !sample.takes(static_cast<uint64_t>(at), static_cast<uint64_t>(count))) continue;
            SCOPED_TRACE(::testing::Message() << "swapped before call " << at << " of " << count);
            begin_anew();
            const Content before = content_of(dir_ / "victim");
            made_.clear();
            std::string called;
            // Durability is not what is tested here.
            FaultyFiles files(posix_file_system(), [](const FaultyFiles::Call& call) -> Verdict {
                return {0, SIZE_MAX, call.name.starts_with("fsync ")};
            });
            int64_t first = -1;
            const auto arm = [&] {
                first = files.calls();
                files.on_call = [&](int64_t call, const std::string& name) {
                    if (at >= 0 && call - first == at) {
                        swap();
                        called = name;
                    }
                    if (name.starts_with("mkdir ")) made_ = name.substr(6);
                };
            };
            const auto failed = attempt([&] { job(files, arm); });
            if (at < 0) {
                ASSERT_FALSE(failed) << failed->what();
                count = files.calls() - first;
                ASSERT_GT(count, 10);
                continue;
            }
            EXPECT_EQ(content_of(dir_ / "victim"), before) << called;
            expect_the_newest_whole();
        }
    }
    void save_with(FaultyFiles& files, const std::function<void()>& arm) {
        SaverOptions options = saver_options();
        options.files = &files;
        options.write.threads = 1;
        options.retention.latest = 2;
        Saver saver(nullptr, dir_ / "mine", options);
        arm();
        saver.save(3, owned_.state);
    }
    void collect_with(FaultyFiles& files, const std::function<void()>& arm) {
        const std::string root = dir_ / "mine";
        arm();
        const HeldDirectory held(files, root);
        Lease lease(held.files(), root, "collects");
        CollectOptions options{{1, 0, std::nullopt, 0}, "collects", {}};
        const std::vector<SavedStep> saves = scan_root(held.files(), root);
        const std::vector<RankedSave> ranked = rank_saves(held.files(), root, saves, std::nullopt);
        for_each_unneeded(held.files(), root, saves, ranked, options,
                          [](const Unneeded&, const Remove& remove) { (void)attempt([&] { (void)remove(); }); });
    }
    // Wherever it is by now.
    void expect_the_newest_whole() {
        const Content wanted = content_of(dir_ / "made/" + saves_[1]);
        bool found = false;
        for (const char* place : {"mine", "links", "links/root"}) {  // it may be swapped away
            if (!fs::is_directory(fs::path(dir_ / place))) continue;
            for (const auto& entry : fs::directory_iterator(dir_ / place)) {
                found =
                    found || (fs::is_directory(entry.symlink_status()) && content_of(entry.path().string()) == wanted);
            }
        }
        EXPECT_TRUE(found);
    }

    TempDir dir_;
    OwnedState owned_;
    std::vector<std::string> saves_;
    const std::string left_ = "step-00000077-0123abcd";
    std::string made_;  // the directory that the job made last
};

TEST_F(Swapped, ASaveStaysInItsRoot) {
    const Job job = [this](FaultyFiles& files, const std::function<void()>& arm) { save_with(files, arm); };
    at_each_call(job, [this] { swap_root(); });
    at_each_call(job, [this] { swap_saves(); });
    at_each_call(job, [this] { swap_with_made(); });
}

TEST_F(Swapped, RetentionRemovesWhatItLookedAt) {
    const Job job = [this](FaultyFiles& files, const std::function<void()>& arm) { save_with(files, arm); };
    at_each_call(job, [this] { swap_names(left_); });
    at_each_call(job, [this] { swap_names(saves_[0]); });
}

TEST_F(Swapped, ACollectionRemovesWhatItLookedAt) {
    const Job job = [this](FaultyFiles& files, const std::function<void()>& arm) { collect_with(files, arm); };
    at_each_call(job, [this] { swap_root(); });
    at_each_call(job, [this] { swap_saves(); });
    at_each_call(job, [this] { swap_names(left_); });
    at_each_call(job, [this] { swap_names(saves_[0]); });
}

TEST_F(Swapped, AnExportWritesIntoItsOwnDirectory) {
    const auto source = Checkpoint::open(dir_ / "made");
    const Job job = [&](FaultyFiles& files, const std::function<void()>& arm) {
        arm();
        Peers alone(nullptr);
        (void)export_checkpoint(*source, alone, dir_ / "mine/out", {}, files);
    };
    at_each_call(job, [this] { swap_saves(); });
}

TEST_F(Swapped, ARewriteWritesIntoItsOwnSave) {
    const auto source = Checkpoint::open(dir_ / "made");
    const Job job = [&](FaultyFiles& files, const std::function<void()>& arm) {
        arm();
        (void)rewrite_checkpoint(*source, dir_ / "mine", {}, files);
    };
    at_each_call(job, [this] { swap_saves(); });
    at_each_call(job, [this] { swap_root(); });
}

}  // namespace
}  // namespace tsr::testing
