// The file system in memory answers as the real one does, so that what is shown on it holds there.
#include <gtest/gtest.h>

#include "checkpoint/fixture.hpp"
#include "fault/memory_files.hpp"

namespace tsr::testing {
namespace {

// What a program sees of `files` below `base`, call by call.
std::vector<std::string> answers(FileSystem& files, const std::string& base) {
    std::vector<std::string> told;
    const auto tell = [&](const std::string& call, int64_t result) {
        told.push_back(call + " = " + std::to_string(result));
    };
    const auto at = [&](const char* name) { return base + "/" + name; };
    const auto open = [&](const char* name, OpenMode mode) {
        std::unique_ptr<File> file;
        tell(std::string("open ") + name, files.open(at(name), mode, file));
        return file;
    };
    const auto list = [&](const char* name) {
        std::vector<std::string> names;
        tell(std::string("list ") + name, files.list(at(name), names));
        for (const std::string& one : names) told.push_back("  " + one);
    };
    const auto status = [&](const char* name) {
        FileStatus found;
        tell(std::string("status ") + name, files.status(at(name), found));
        told.push_back(found.kind == FileStatus::Kind::file        ? "file " + std::to_string(found.size)
                       : found.kind == FileStatus::Kind::directory ? "directory"
                                                                   : "nothing");
    };
    const auto content = [&](File& file) {
        std::string text(100, '?');
        const int64_t got = file.read(std::as_writable_bytes(std::span(text)), 0);
        tell("read", got);
        told.push_back(text.substr(0, got < 0 ? 0 : static_cast<size_t>(got)));
        tell("read beyond the end", file.read(std::as_writable_bytes(std::span(text)), 1000));
        tell("size", file.size());
    };
    const auto bytes = [](std::string_view text) { return std::as_bytes(std::span(text)); };

    tell("mkdir d", files.make_directory(at("d")));
    tell("mkdir d again", files.make_directory(at("d")));
    tell("mkdir in nothing", files.make_directory(at("x/y")));
    (void)open("d/absent", OpenMode::read);
    {
        const auto file = open("d/a", OpenMode::create);
        tell("write", file->write(bytes("hello"), 0));
        tell("write past the end", file->write(bytes("!"), 9));
        content(*file);
        tell("truncate", file->truncate(3));
        tell("truncate longer", file->truncate(6));
        tell("allocate", file->allocate(8));
        tell("allocate less", file->allocate(2));
        content(*file);
        tell("fsync", file->sync());
        (void)open("d/a", OpenMode::create);
        tell("unlink while open", files.remove_file(at("d/a")));
        content(*file);
    }
    status("d/a");
    (void)open("d/b", OpenMode::create);
    (void)open("d", OpenMode::read);
    (void)open("d/b/c", OpenMode::read);
    (void)open("x/c", OpenMode::create);
    tell("link", files.link(at("d/b"), at("d/c")));
    tell("link again", files.link(at("d/b"), at("d/c")));
    tell("link of nothing", files.link(at("d/none"), at("d/e")));
    list("d");
    list("d/b");
    list("x");
    {
        const auto file = open("d/z", OpenMode::create);
        tell("write", file->write(bytes("new"), 0));
    }
    tell("rename onto", files.rename(at("d/z"), at("d/c")));
    tell("rename of nothing", files.rename(at("d/z"), at("d/c")));
    content(*open("d/c", OpenMode::read));
    content(*open("d/b", OpenMode::read));
    tell("rmdir not empty", files.remove_directory(at("d")));
    tell("rmdir of a file", files.remove_directory(at("d/b")));
    tell("unlink of a directory", files.remove_file(at("d")));
    tell("unlink of nothing", files.remove_file(at("d/none")));
    tell("fsync directory", files.sync_directory(at("d")));
    tell("fsync no directory", files.sync_directory(at("x")));
    tell("touch", files.touch(at("d/b")));
    tell("touch nothing", files.touch(at("d/none")));
    status("d");
    status("d/c");
    status("d/c/e");
    tell("unlink", files.remove_file(at("d/b")));
    tell("unlink", files.remove_file(at("d/c")));
    tell("rmdir", files.remove_directory(at("d")));
    tell("rmdir again", files.remove_directory(at("d")));
    return told;
}

TEST(MemoryFiles, AnswerAsTheRealOnes) {
    const TempDir dir;
    MemoryFiles memory;
    ASSERT_EQ(memory.make_directory("/base"), 0);
    EXPECT_EQ(answers(memory, "/base"), answers(posix_file_system(), dir.path()));
    EXPECT_EQ(memory.open_files(), 0);
}

}  // namespace
}  // namespace tsr::testing
