// What is below a directory that is held: paths as its callers have them, whatever that path leads to by then.
#include <gtest/gtest.h>

#include <filesystem>

#include "fixture.hpp"

namespace tsr::testing {
namespace {

namespace fs = std::filesystem;

class HeldTest : public ::testing::Test {
   protected:
    HeldTest() {
        fs::create_directories(dir_ / "real/save");
        fs::create_directory(dir_ / "other");
        spill(dir_ / "real/save/file", "ours");
        spill(dir_ / "other/file", "theirs");
        fs::create_directory_symlink("real", dir_ / "root");
        fs::create_directory_symlink(dir_ / "other", dir_ / "real/link");
    }
    TempDir dir_;
    FileSystem& all_ = posix_file_system();
};

TEST_F(HeldTest, ItsPathMayBeALinkAndEndWithSlashes) {
    for (const std::string& path : {dir_ / "real", dir_ / "root", dir_ / "root/", dir_ / "real//"}) {
        const HeldDirectory held(all_, path);
        EXPECT_TRUE(held.holds());
        EXPECT_EQ(read_text(held.files(), join(path, "save/file"), 100), "ours");
        EXPECT_TRUE(exists(held.files(), path));
        write_new_text(held.files(), join(path, "save/new"), "new");
        EXPECT_EQ(held.files().rename(join(path, "save/new"), join(path, "renamed")), 0);
        EXPECT_EQ(slurp(dir_ / "real/renamed"), "new");
        EXPECT_EQ(held.files().remove_file(join(path, "renamed")), 0);
        EXPECT_EQ(held.files().sync_directory(join(path, "save")), 0);
        // Below it, a directory is held in turn.
        const HeldDirectory save(held.files(), join(path, "save"));
        EXPECT_EQ(read_text(save.files(), join(path, "save/file"), 100), "ours");
    }
    EXPECT_EQ(error_of([&] { HeldDirectory(all_, dir_ / "none"); }).code(), Code::not_found);
    EXPECT_NE(HeldDirectory(all_, "/").files().make_directory("/proc/self"), 0);
}

TEST_F(HeldTest, NothingOutsideOfItIsReached) {
    const std::string path = dir_ / "real";
    const HeldDirectory held(all_, path);
    FileSystem& files = held.files();
    std::unique_ptr<File> file;
    for (const std::string& outside : {dir_ / "other/file", dir_ / "realer", dir_.path(), std::string("file")}) {
        EXPECT_EQ(files.open(outside, OpenMode::read, file), -EXDEV) << outside;
        EXPECT_EQ(files.remove_file(outside), -EXDEV) << outside;
    }
    EXPECT_EQ(files.remove_file(path + "/../other/file"), -EXDEV);
    EXPECT_EQ(files.rename(path + "/save/file", dir_ / "other/moved"), -EXDEV);
    EXPECT_EQ(slurp(dir_ / "other/file"), "theirs");
}

TEST_F(HeldTest, ALinkBelowItIsFollowedToReadAlone) {
    const std::string path = dir_ / "root";
    const HeldDirectory held(all_, path);
    FileSystem& files = held.files();
    const std::string link = path + "/link";
    EXPECT_EQ(read_text(files, link + "/file", 100), "theirs");
    EXPECT_TRUE(is_link(files, link));
    std::unique_ptr<File> file;
    std::unique_ptr<FileSystem> below;
    EXPECT_EQ(files.hold(link, below), -ENOTDIR);
    EXPECT_EQ(files.open(link + "/file", OpenMode::write, file), -ENOTDIR);
    EXPECT_EQ(files.open(link + "/new", OpenMode::create, file), -ENOTDIR);
    EXPECT_EQ(files.make_directory(link + "/new"), -ENOTDIR);
    EXPECT_EQ(files.remove_file(link + "/file"), -ENOTDIR);
    EXPECT_EQ(files.remove_directory(link + "/new"), -ENOTDIR);
    EXPECT_EQ(files.rename(path + "/save/file", link + "/new"), -ENOTDIR);
    EXPECT_EQ(files.link(path + "/save/file", link + "/new"), -ENOTDIR);
    EXPECT_EQ(files.touch(link + "/file"), -ENOTDIR);
    EXPECT_NE(files.sync_directory(link), 0);
}

TEST_F(HeldTest, ItIsTheDirectoryThatItWas) {
    const std::string path = dir_ / "root";
    const HeldDirectory held(all_, path);
    const HeldDirectory save(all_, path, path + "/save");
    fs::remove(path);
    fs::create_directory_symlink("other", path);
    fs::rename(dir_ / "real/save", dir_ / "real/moved");
    fs::create_directory_symlink(dir_ / "other", dir_ / "real/save");
    EXPECT_EQ(held.files().remove_file(path + "/file"), -ENOENT);
    EXPECT_EQ(held.files().remove_file(path + "/save/file"), -ENOTDIR);
    EXPECT_EQ(read_text(save.files(), path + "/save/file", 100), "ours");
    EXPECT_EQ(save.files().remove_file(path + "/save/file"), 0);
    EXPECT_FALSE(fs::exists(dir_ / "real/moved/file"));
    EXPECT_EQ(slurp(dir_ / "other/file"), "theirs");
}

TEST_F(HeldTest, TheWorkingDirectoryMayBeHeldUnderItsShortName) {
    const fs::path before = fs::current_path();
    fs::current_path(dir_ / "real");
    {
        const HeldDirectory held(all_, ".");
        for (const char* name : {"new", "./new", ".new", "././/new"}) {
            write_new_text(held.files(), name, "x");
            EXPECT_TRUE(exists(held.files(), name)) << name;
            EXPECT_EQ(held.files().remove_file(name), 0) << name;
        }
        EXPECT_EQ(held.files().remove_file("/new"), -EXDEV);
    }
    fs::current_path(before);
}

}  // namespace
}  // namespace tsr::testing
