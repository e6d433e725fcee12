// The file store beyond what every store does: processes, crashes, rights, and what former jobs left.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "soon.hpp"
#include "stores.hpp"

namespace tsr {
namespace {

using testing::test_store_options;

Deadline soon() { return testing::soon(); }

class FileStoreTest : public ::testing::Test {
   protected:
    std::shared_ptr<Store> open(const StoreOptions& options = test_store_options()) {
        return Store::open("file://" + directory_.path().string() + "/store", options);
    }
    testing::TemporaryDirectory directory_;
};

TEST_F(FileStoreTest, AddIsAtomicBetweenProcesses) {
    constexpr int processes = 3;
    constexpr int rounds = 40;
    std::vector<pid_t> children;
    for (int p = 0; p < processes; ++p) {
        const pid_t child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
            const auto store = open();
            for (int i = 0; i < rounds; ++i) store->add("n", 1, soon());
            ::_exit(0);
        }
        children.push_back(child);
    }
    for (const pid_t child : children) {
        int status = -1;
        ASSERT_EQ(::waitpid(child, &status, 0), child);
        EXPECT_EQ(status, 0);
    }
    EXPECT_EQ(open()->get("n", soon()), std::to_string(processes * rounds));
}

TEST_F(FileStoreTest, KeysOfAnotherJobOrEpochAreNotSeen) {
    open()->set("k", "old", soon());
    StoreOptions options = test_store_options();
    options.epoch += 1;
    EXPECT_EQ(open(options)->get("k", soon()), std::nullopt);
    options = test_store_options();
    options.job_id = "../escape";
    open(options)->set("k", "other", soon());
    EXPECT_EQ(open()->get("k", soon()), "old");
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_.path()), {}), 1) << "all stays inside";
}

TEST_F(FileStoreTest, DraftOfAKilledWriterDoesNoHarm) {
    open()->set("k", "whole", soon());
    std::filesystem::path scope = *std::filesystem::directory_iterator(directory_.path() / "store");
    std::ofstream(scope / ".draft") << "half of a val";
    EXPECT_EQ(open()->get("k", soon()), "whole");
    open()->set("k", "w", soon());
    EXPECT_EQ(open()->get("k", soon()), "w");
}

TEST_F(FileStoreTest, DirectoryThatEverybodyMayWriteIsRefused) {
    const std::filesystem::path path = directory_.path() / "store";
    std::filesystem::create_directory(path);
    ::chmod(path.c_str(), 0777);
    EXPECT_EQ(testing::code_of([&] { (void)open(); }), Code::permission);
    StoreOptions options = test_store_options();
    options.insecure = true;
    EXPECT_EQ(testing::code_of([&] { (void)open(options); }), std::nullopt);
}

TEST_F(FileStoreTest, PlantedLinksAreNotFollowed) {
    open()->set("k", "v", soon());
    const std::filesystem::path scope = *std::filesystem::directory_iterator(directory_.path() / "store");
    const std::filesystem::path victim = directory_.path() / "victim";
    std::ofstream(victim) << "precious";
    std::filesystem::create_symlink(victim, scope / ".draft");
    EXPECT_EQ(testing::code_of([&] { open()->set("k", "w", soon()); }), Code::io);
    std::string content;
    std::ifstream(victim) >> content;
    EXPECT_EQ(content, "precious");
}

TEST_F(FileStoreTest, LockedStoreIsATimeoutNotAHang) {
    const auto store = open();
    store->set("k", "v", soon());
    const std::filesystem::path scope = *std::filesystem::directory_iterator(directory_.path() / "store");
    const Fd lock(::open((scope / ".lock").c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
    EXPECT_EQ(testing::code_of([&] { store->set("k", "w", Deadline::in(milliseconds{30})); }), Code::timeout);
    EXPECT_EQ(store->get("k", soon()), "v");
}

TEST(StoreOpen, RefusesAddressesItDoesNotKnow) {
    for (const char* uri : {"", "file://relative/path", "http://host:1", "tcp:/host:1"}) {
        EXPECT_EQ(testing::code_of([&] { (void)Store::open(uri, test_store_options()); }), Code::invalid_argument)
            << uri;
    }
}

}  // namespace
}  // namespace tsr
