// How data gets to disk and back: past the page cache, several requests at a time, and through it where direct I/O is
// refused or where the cache has the data. The answer that `tessera env` gives is the one that a save finds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "mounted.hpp"
#include "page_cache.hpp"
#include "patience.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t large_bytes = 3000 * 1001 * 8;  // 23 MiB, off every alignment

void expect_saves_and_loads(const std::string& root, FileSystem& files) {
    OwnedState owned;
    owned.add_whole({"large", DType::f64, {3000, 1001}});
    owned.fill(1);
    SaverOptions options = saver_options();
    options.files = &files;
    Saver saver(nullptr, root, options);
    saver.save(1, owned.state);
    owned.poison();
    EXPECT_EQ(saver.resume(owned.state), 1);
    EXPECT_EQ(owned.differences(1), 0);
}

// Several threads are refused at once; each goes on through the page cache.
TEST(WritePath, WhereDirectTransfersAreRefusedTheyGoThroughThePageCache) {
    const TempDir dir;
    std::atomic<int> refused{0};
    FaultyFiles files(posix_file_system(), [&](const FaultyFiles::Call& call) -> Verdict {
        if (!call.direct || call.bytes == 0) return {};
        ++refused;
        return {-EINVAL, 0};
    });
    const bool is_direct = find_write_path(posix_file_system(), dir.path()).direct;
    if (is_direct) {  // a test in a directory without direct I/O tests just that
        const WritePath path = find_write_path(files, dir.path());
        EXPECT_FALSE(path.direct);
        EXPECT_THAT(path.why, HasSubstr("refuses to write to them"));
        EXPECT_EQ(refused, 1);
    }
    expect_saves_and_loads(dir.path(), files);
    EXPECT_EQ(refused > 1, is_direct) << "the save itself was not direct";
    EXPECT_EQ(files.written_back(), large_bytes) << "what the cache holds is written back at once, not by fsync";
}

TEST(WritePath, WhatIsWrittenPastTheCacheIsNotWrittenBack) {
    const TempDir dir;
    FaultyFiles files;
    expect_saves_and_loads(dir.path(), files);
    const bool is_direct = find_write_path(posix_file_system(), dir.path()).direct;
    EXPECT_EQ(files.written_back(), is_direct ? 0 : large_bytes);
}

// The first files of such a program have the numbers of standard output and error.
TEST(WritePath, WithoutStandardDescriptorsWhatAProgramPrintsGetsIntoNoFile) {
    const TempDir dir;
    const std::string path = dir.path() + "/file";
    const pid_t child = ::fork();
    if (child == 0) {
        for (int fd = 0; fd <= 2; ++fd) ::close(fd);
        std::unique_ptr<File> file;
        const bool is_open = posix_file_system().open(path, OpenMode::create, file) == 0;
        for (int fd = 0; fd <= 2; ++fd) (void)!::write(fd, "printed", 7);
        ::_exit(is_open && file->size() == 0 ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

// Lets no large transfer of one kind go on before `wanted` of them are begun, and notes how many were at once.
class InFlight {
   public:
    explicit InFlight(int wanted) : wanted_(wanted) {}
    void begin() {
        std::unique_lock lock(mutex_);
        most_ = std::max(most_, ++now_);
        changed_.notify_all();
        const auto enough = [this] { return most_ >= wanted_ || given_up_; };
        if (!changed_.wait_for(lock, patience(std::chrono::seconds(10)), enough)) given_up_ = true;
        --now_;
    }
    int most() const { return most_; }

   private:
    const int wanted_;
    std::mutex mutex_;
    std::condition_variable changed_;
    int now_ = 0;
    int most_ = 0;
    bool given_up_ = false;
};

TEST(WritePath, FourRequestsAreInFlight) {
    const TempDir dir;
    InFlight writes(4);
    InFlight reads(4);
    FaultyFiles files(posix_file_system(), [&](const FaultyFiles::Call& call) -> Verdict {
        if (call.bytes >= 1 << 20 && call.name.ends_with(".safetensors")) {
            (call.name.starts_with("write ") ? writes : reads).begin();
        }
        return {};
    });
    expect_saves_and_loads(dir.path(), files);
    EXPECT_EQ(writes.most(), 4);
    EXPECT_EQ(reads.most(), 4);
}

TEST(WritePath, WhatIsCachedIsReadThroughTheCacheAndNothingElse) {
    const TempDir dir;
    std::atomic<int> direct{0};
    std::atomic<int> buffered{0};
    FaultyFiles files(posix_file_system(), [&](const FaultyFiles::Call& call) -> Verdict {
        if (call.bytes >= 1 << 20 && call.name.starts_with("read ")) ++(call.direct ? direct : buffered);
        return {};
    });
    OwnedState owned;
    owned.add_whole({"large", DType::f32, {6 << 20}});
    owned.fill(1);
    SaverOptions options = saver_options();
    options.files = &files;
    Saver saver(nullptr, dir.path(), options);
    saver.save(1, owned.state);
    const std::string file = only_save(dir.path()) + "/rank-00000.safetensors";
    if (drop_from_cache(file) && find_write_path(posix_file_system(), dir.path()).direct) {
        EXPECT_EQ(saver.resume(owned.state), 1);
        EXPECT_EQ(direct, 6);
        EXPECT_EQ(buffered, 0);
        direct = 0;
    }
    EXPECT_GT(slurp(file).size(), 24u << 20);  // now it is there
    owned.poison();
    EXPECT_EQ(saver.resume(owned.state), 1);
    EXPECT_EQ(owned.differences(1), 0);
    EXPECT_EQ(direct, 0);
    EXPECT_EQ(buffered, 6);
}

// Through the cache to any memory, past it to memory that is aligned: nothing is copied on. Past it to other memory: by
// way of a buffer.
TEST(WritePath, WhatIsReadGoesStraightToWhereItBelongs) {
    const TempDir dir;
    constexpr size_t bytes = 24 << 20;
    const AlignedBuffer memory(bytes + 8);
    std::atomic<int> straight{0};
    std::atomic<int> elsewhere{0};
    FaultyFiles files(posix_file_system(), [&](const FaultyFiles::Call& call) -> Verdict {
        if (call.bytes < 1 << 20 || !call.name.starts_with("read ")) return {};
        const std::byte* const end = memory.data() + memory.size();
        ++(call.memory >= memory.data() && call.memory + call.bytes <= end ? straight : elsewhere);
        return {};
    });
    const auto state_at = [&](size_t shift) {
        State state;
        state.add_tensor("w", {memory.data() + shift, {static_cast<int64_t>(bytes)}, DType::u8, {}});
        return state;
    };
    SaverOptions options = saver_options();
    options.files = &files;
    Saver saver(nullptr, dir.path(), options);
    const Pattern pattern("w", 1);
    pattern.write(memory.data(), 1, 0, bytes);
    State saved = state_at(0);
    saver.save(1, saved);
    const std::string file = only_save(dir.path()) + "/rank-00000.safetensors";
    const auto loads = [&](size_t shift) {
        straight = elsewhere = 0;
        std::fill_n(memory.data(), memory.size(), std::byte{0xcd});
        State state = state_at(shift);
        EXPECT_EQ(saver.resume(state), 1);
        EXPECT_EQ(pattern.differences(memory.data() + shift, 1, 0, bytes), 0);
    };
    for (const size_t shift : {0, 8}) {
        if (!drop_from_cache(file) || !find_write_path(posix_file_system(), dir.path()).direct) break;
        loads(shift);
        EXPECT_EQ(straight, shift == 0 ? 6 : 0);
        EXPECT_EQ(elsewhere, shift == 0 ? 0 : 6);
    }
    EXPECT_GT(slurp(file).size(), bytes);  // now it is in the cache
    for (const size_t shift : {0, 8}) {
        loads(shift);
        EXPECT_EQ(straight, 6) << shift;
        EXPECT_EQ(elsewhere, 0) << shift;
    }
}

TEST(WritePath, WhereFilesCannotBeReservedASaveGoesOn) {
    const TempDir dir;
    FaultyFiles files(posix_file_system(), [&](const FaultyFiles::Call& call) -> Verdict {
        return call.name.starts_with("fallocate ") ? Verdict{-EOPNOTSUPP, 0} : Verdict{};
    });
    EXPECT_FALSE(find_write_path(files, dir.path()).preallocates);
    expect_saves_and_loads(dir.path(), files);
}

TEST(WritePath, IsFoundWithoutLeavingAnything) {
    const TempDir dir;
    (void)find_write_path(posix_file_system(), dir.path());
    FaultyFiles full(posix_file_system(), [](const FaultyFiles::Call& call) -> Verdict {
        return call.name.starts_with("write ") ? Verdict{-ENOSPC, 0} : Verdict{};
    });
    EXPECT_EQ(error_of([&] { (void)find_write_path(full, dir.path()); }).code(), Code::io);
    EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

// What would be 5,000 requests one by one.
TEST(WritePath, SmallTensorsGoTogetherInLargeRequests) {
    const TempDir dir;
    OwnedState owned;
    for (int i = 0; i < 5000; ++i) owned.add_whole({fmt::format("t.{}", i), DType::u8, {1000}});
    owned.fill(1);
    FaultyFiles files;
    std::atomic<int> writes{0};
    std::atomic<int> reads{0};
    files.on_call = [&](int64_t, const std::string& name) {
        if (!name.ends_with(".safetensors")) return;
        writes += name.starts_with("write ") ? 1 : 0;
        reads += name.starts_with("read ") ? 1 : 0;
    };
    SaverOptions options = saver_options();
    options.files = &files;
    Saver saver(nullptr, dir.path(), options);
    saver.save(1, owned.state);
    EXPECT_GT(writes, 0);
    EXPECT_LE(writes, 8);
    owned.poison();
    EXPECT_EQ(saver.resume(owned.state), 1);
    EXPECT_EQ(owned.differences(1), 0);
    EXPECT_GT(reads, 0);
    EXPECT_LE(reads, 16);
}

TEST(WritePath, SavesAndLoadsWhereOpeningForDirectTransfersIsRefused) {
    const TempDir dir;
    const Mounted ramfs("ramfs", dir / "ramfs");
    if (!ramfs.is_there()) GTEST_SKIP() << "mounting takes a right that this process lacks";
    const WritePath found = find_write_path(posix_file_system(), ramfs.path());
    EXPECT_FALSE(found.direct);
    EXPECT_THAT(found.why, HasSubstr("refuses to open files with O_DIRECT"));
    EXPECT_TRUE(std::filesystem::is_empty(ramfs.path()));
    FaultyFiles files;
    expect_saves_and_loads(ramfs.path(), files);
    EXPECT_EQ(files.written_back(), large_bytes);
}

TEST(WritePath, SavesAndLoadsOnAnOverlay) {
    const TempDir dir;
    const Mounted tmpfs("tmpfs", dir / "base", "size=256m");
    if (!tmpfs.is_there()) GTEST_SKIP() << "mounting takes a right that this process lacks";
    const std::string& base = tmpfs.path();
    for (const char* name : {"/lower", "/upper", "/work"}) std::filesystem::create_directory(base + name);
    const Mounted overlay("overlay", dir / "overlay",
                          fmt::format("lowerdir={0}/lower,upperdir={0}/upper,workdir={0}/work", base));
    if (!overlay.is_there()) GTEST_SKIP() << "mounting takes a right that this process lacks";
    expect_saves_and_loads(overlay.path(), posix_file_system());
    EXPECT_FALSE(std::filesystem::is_empty(base + "/upper")) << "the save lies there";
}

TEST(WritePath, SavesAndLoadsInMemoryBackedFiles) {
    std::string root = "/dev/shm/tessera-test-XXXXXX";
    ASSERT_NE(::mkdtemp(root.data()), nullptr);
    expect_saves_and_loads(root, posix_file_system());
    EXPECT_TRUE(find_write_path(posix_file_system(), root).preallocates);
    std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace tsr::testing
