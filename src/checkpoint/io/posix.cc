// The operating system's files behind the FileSystem interface: one system call a method.
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>

#include "base/fd.hpp"
#include "base/file_limit.hpp"
#include "checkpoint/io/file_system.hpp"

namespace tsr {

namespace {

constexpr int64_t page_bytes = 4096;

int64_t result_of(int64_t returned) { return returned < 0 ? -int64_t{errno} : returned; }

class PosixFile final : public File {
   public:
    PosixFile(int fd, bool direct) : fd_(fd), direct_(direct) {}
    ~PosixFile() override { ::close(fd_); }
    PosixFile(const PosixFile&) = delete;
    PosixFile& operator=(const PosixFile&) = delete;

    int64_t read(std::span<std::byte> into, int64_t offset) override {
        return result_of(::pread(fd_, into.data(), into.size(), offset));
    }
    int64_t write(std::span<const std::byte> from, int64_t offset) override {
        return result_of(::pwrite(fd_, from.data(), from.size(), offset));
    }
    int64_t size() override {
        struct stat status{};
        return ::fstat(fd_, &status) < 0 ? -int64_t{errno} : int64_t{status.st_size};
    }
    int64_t allocate(int64_t size) override {
        return within_file_limit(static_cast<uint64_t>(size)) ? result_of(::fallocate(fd_, 0, 0, size))
                                                              : -int64_t{EFBIG};
    }
    int64_t truncate(int64_t size) override {
        return within_file_limit(static_cast<uint64_t>(size)) ? result_of(::ftruncate(fd_, size)) : -int64_t{EFBIG};
    }
    int64_t sync() override { return result_of(::fsync(fd_)); }
    void start_writeback(int64_t offset, int64_t size) override {
        (void)::sync_file_range(fd_, offset, size, SYNC_FILE_RANGE_WRITE);
    }
    bool is_direct() const override { return direct_.load(std::memory_order_relaxed); }
    int64_t leave_direct() override {
        const int flags = ::fcntl(fd_, F_GETFL);
        if (flags < 0 || ::fcntl(fd_, F_SETFL, flags & ~O_DIRECT) < 0) return -int64_t{errno};
        direct_.store(false, std::memory_order_relaxed);
        return 0;
    }
    // mincore on a mapped page leaves the cache as it is; a read that must not wait has the kernel fetch what it did not
    // find (docs/PERFORMANCE.md). But of a file that this user may only read mincore says yes to everything, so that a yes
    // is asked for again.
    bool is_cached(int64_t offset) override {
        const int64_t page = offset / page_bytes * page_bytes;
        void* mapped = ::mmap(nullptr, page_bytes, PROT_READ, MAP_SHARED, fd_, page);
        if (mapped == MAP_FAILED) return false;
        unsigned char resident = 0;
        const bool known = ::mincore(mapped, page_bytes, &resident) == 0;
        ::munmap(mapped, page_bytes);
        if (!known || (resident & 1) == 0) return false;
        std::byte byte{};
        iovec part{&byte, 1};
        return ::preadv2(fd_, &part, 1, offset, RWF_NOWAIT) >= 0 || errno != EAGAIN;
    }

    int64_t lock(FileLock kind) override {
        return result_of(::flock(fd_, (kind == FileLock::shared ? LOCK_SH : LOCK_EX) | LOCK_NB));
    }

   private:
    int fd_;
    std::atomic<bool> direct_;
};

class PosixFileSystem final : public FileSystem {
   public:
    int64_t open(const std::string& path, OpenMode mode, std::unique_ptr<File>& out) override {
        const bool creates = mode == OpenMode::create || mode == OpenMode::create_direct;
        bool direct = mode == OpenMode::read_direct || mode == OpenMode::create_direct;
        // What is read may be a link, as in the cache of Hugging Face's hub; what is written is the file itself. Without
        // O_NONBLOCK, which means nothing to a file, a pipe of that name would be waited for.
        const int flags = O_CLOEXEC | (creates                   ? O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW
                                       : mode == OpenMode::write ? O_RDWR | O_NOFOLLOW | O_NONBLOCK
                                                                 : O_RDONLY | O_NONBLOCK);
        int fd = off_standard(::open(path.c_str(), flags | (direct ? O_DIRECT : 0), 0666));
        if (fd < 0 && direct && errno == EINVAL) {
            direct = false;
            // Linux may have created the file before it refused O_DIRECT.
            if (creates) (void)::unlink(path.c_str());
            fd = off_standard(::open(path.c_str(), flags, 0666));
        }
        if (fd < 0) return -int64_t{errno};
        auto file = std::make_unique<PosixFile>(fd, direct);
        struct stat status{};
        if (::fstat(fd, &status) < 0) return -int64_t{errno};
        if (!S_ISREG(status.st_mode)) return -(S_ISDIR(status.st_mode) ? EISDIR : EINVAL);
        out = std::move(file);
        return 0;
    }
    int64_t make_directory(const std::string& path) override { return result_of(::mkdir(path.c_str(), 0777)); }
    int64_t rename(const std::string& from, const std::string& to) override {
        return result_of(::rename(from.c_str(), to.c_str()));
    }
    int64_t link(const std::string& from, const std::string& to) override {
        return result_of(::link(from.c_str(), to.c_str()));
    }
    int64_t remove_file(const std::string& path) override { return result_of(::unlink(path.c_str())); }
    int64_t remove_directory(const std::string& path) override { return result_of(::rmdir(path.c_str())); }
    int64_t sync_directory(const std::string& path) override {
        const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0) return -int64_t{errno};
        const int64_t result = result_of(::fsync(fd));
        ::close(fd);
        return result == -EINVAL ? 0 : result;  // some file systems cannot sync a directory
    }
    int64_t list(const std::string& path, std::vector<std::string>& names) override {
        names.clear();
        DIR* directory = ::opendir(path.c_str());
        if (directory == nullptr) return -int64_t{errno};
        errno = 0;
        while (const dirent* entry = ::readdir(directory)) {
            const std::string_view name = entry->d_name;
            if (name != "." && name != "..") names.emplace_back(name);
        }
        const int64_t result = -int64_t{errno};
        ::closedir(directory);
        std::sort(names.begin(), names.end());
        return result;
    }
    int64_t status(const std::string& path, FileStatus& out) override {
        struct stat found{};
        if (::lstat(path.c_str(), &found) < 0) return -int64_t{errno};
        out.is_link = S_ISLNK(found.st_mode);
        if (out.is_link && ::stat(path.c_str(), &found) < 0) return -int64_t{errno};
        out.kind = S_ISREG(found.st_mode)   ? FileStatus::Kind::file
                   : S_ISDIR(found.st_mode) ? FileStatus::Kind::directory
                                            : FileStatus::Kind::other;
        out.size = found.st_size;
        // Some file systems keep times that nanoseconds of 64 bits do not.
        constexpr int64_t most = INT64_MAX / 1'000'000'000 - 1;
        out.modified_ns =
            std::clamp(int64_t{found.st_mtim.tv_sec}, -most, most) * 1'000'000'000 + found.st_mtim.tv_nsec;
        return 0;
    }
    int64_t touch(const std::string& path) override {
        return result_of(::utimensat(AT_FDCWD, path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW));
    }
};

}  // namespace

FileSystem& posix_file_system() {
    static auto* instance = new PosixFileSystem;
    return *instance;
}

}  // namespace tsr
