// A directory by its descriptor: what is done in it stays in it, whatever its name or a name in it leads to by then.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/dir_at.hpp"
#include "base/error.hpp"
#include "base/write_whole.hpp"
#include "temporary_directory.hpp"

namespace tsr {
namespace {

using ::testing::ElementsAre;

namespace fs = std::filesystem;

class DirAtTest : public ::testing::Test {
   protected:
    DirAtTest() {
        fs::create_directory(top_ / "own");
        fs::create_directory(top_ / "other");
        spill(top_ / "other/kept", "kept");
        fs::create_directory_symlink(top_ / "other", top_ / "own/link");
        EXPECT_EQ(DirAt::working().open((top_ / "own").string(), own_, DirAt::Links::followed), 0);
    }
    static void spill(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }
    static std::string slurp(const fs::path& path) {
        std::ifstream file(path);
        return {std::istreambuf_iterator<char>(file), {}};
    }
    static std::vector<std::string> names_in(const DirAt& directory) {
        std::vector<std::string> names;
        EXPECT_EQ(directory.list(names), 0);
        return names;
    }

    testing::TemporaryDirectory temporary_;
    fs::path top_ = temporary_.path();
    DirAt own_;
};

TEST_F(DirAtTest, ALinkIsFollowedWhereItIsSaidAlone) {
    DirAt below;
    std::vector<std::string> names;
    EXPECT_EQ(own_.open("link", below), -ENOTDIR);
    EXPECT_EQ(own_.open("nothing", below), -ENOENT);
    EXPECT_NE(own_.list(names, "link"), 0);
    EXPECT_NE(own_.sync("link"), 0);
    EXPECT_EQ(own_.open("link", below, DirAt::Links::followed), 0);
    EXPECT_THAT(names_in(below), ElementsAre("kept"));
    EXPECT_EQ(own_.list(names, "link", DirAt::Links::followed), 0);
    fs::create_symlink(top_ / "other/kept", top_ / "own/file");
    EXPECT_EQ(own_.open_file("file", O_RDONLY), -ELOOP);
    EXPECT_EQ(own_.open_file("file", O_WRONLY | O_CREAT | O_TRUNC), -ELOOP);
    EXPECT_EQ(slurp(top_ / "other/kept"), "kept");
}

TEST_F(DirAtTest, ItIsThatDirectoryWhateverItsNameLeadsTo) {
    fs::rename(top_ / "own", top_ / "moved");
    fs::create_directory_symlink(top_ / "other", top_ / "own");
    EXPECT_EQ(own_.make_directory("made", 0700), 0);
    EXPECT_EQ(own_.remove_file("kept"), -ENOENT);
    EXPECT_THAT(names_in(own_), ElementsAre("link", "made"));
    EXPECT_EQ(own_.remove_directory("made"), 0);
    EXPECT_FALSE(fs::exists(top_ / "other/made"));
}

TEST_F(DirAtTest, AWalkFollowsNoLinkAndLeavesByNoName) {
    std::optional<DirAt> parent;
    std::string name;
    EXPECT_EQ(own_.walk("a", parent, name), 0);
    EXPECT_FALSE(parent);
    EXPECT_EQ(name, "a");
    fs::create_directories(top_ / "own/a/b");
    EXPECT_EQ(own_.walk("a//b/c/", parent, name), 0);
    ASSERT_TRUE(parent);
    EXPECT_EQ(name, "c");
    EXPECT_EQ(parent->make_directory(name, 0700), 0);
    EXPECT_TRUE(fs::exists(top_ / "own/a/b/c"));
    for (const auto& [below, error] :
         {std::pair{"link/kept", -ENOTDIR}, {"../other/kept", -EXDEV}, {"a/..", -EXDEV}, {"none/kept", -ENOENT}}) {
        parent.reset();
        EXPECT_EQ(own_.walk(below, parent, name), error) << below;
    }
}

TEST_F(DirAtTest, AllThatIsInItIsRemovedAndNothingElse) {
    fs::create_directories(top_ / "own/a/b/c");
    spill(top_ / "own/a/b/file", "x");
    fs::create_directory_symlink(top_ / "other", top_ / "own/a/b/link");
    EXPECT_EQ(own_.remove_contents(), 0);
    EXPECT_TRUE(names_in(own_).empty());
    EXPECT_EQ(slurp(top_ / "other/kept"), "kept");
    EXPECT_EQ(DirAt().remove_contents(), -EBADF);
}

TEST_F(DirAtTest, AFileIsReplacedAndNotWrittenThrough) {
    fs::create_symlink(top_ / "other/kept", top_ / "own/link-to-file");
    fs::create_hard_link(top_ / "other/kept", top_ / "own/hard");
    for (const char* name : {"link-to-file", "hard", "new"}) {
        const Fd file(own_.replace_file(name, O_WRONLY, 0600));
        ASSERT_TRUE(file.valid()) << name;
        EXPECT_TRUE(write_whole(file.get(), "ours"));
        EXPECT_EQ(slurp(top_ / "own" / name), "ours");
    }
    EXPECT_EQ(slurp(top_ / "other/kept"), "kept");
}

TEST_F(DirAtTest, AFileThatIsWrittenWholeLeavesNoDraft) {
    const std::string path = (top_ / "own/whole").string();
    write_whole_file(path, "one", 0600);
    write_whole_file(path, "two", 0600);
    EXPECT_EQ(slurp(path), "two");
    EXPECT_THAT(names_in(own_), ElementsAre("link", "whole"));
    EXPECT_THROW(write_whole_file((top_ / "none/whole").string(), "", 0600), Error);
    EXPECT_THROW(write_whole_file((top_ / "own/link").string() + "/", "", 0600), Error);
}

TEST_F(DirAtTest, AUsersDirectoryIsMadeWithWhatIsMissingAboveIt) {
    DirAt made;
    EXPECT_EQ(DirAt::open_or_make((top_ / "own/link/a/b").string(), made), 0);
    EXPECT_TRUE(fs::is_directory(top_ / "other/a/b"));
    DirAt below;
    EXPECT_EQ(made.open_or_make_below("c", 0700, below), 0);
    EXPECT_EQ(made.open_or_make_below("c", 0700, below), 0);
    EXPECT_EQ(own_.open_or_make_below("link", 0700, below), -ENOTDIR);
    EXPECT_EQ(DirAt::open_or_make((top_ / "other/kept").string(), made), -ENOTDIR);
}

}  // namespace
}  // namespace tsr
