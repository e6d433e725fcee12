// The operating system's files behind the FileSystem interface: one system call per method, plus one for each directory
// on the way below a held one.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "base/attempt.hpp"
#include "base/dir_at.hpp"
#include "base/file_limit.hpp"
#include "checkpoint/io/cufile.hpp"
#include "checkpoint/io/file_system.hpp"

namespace tsr {

namespace {

constexpr int64_t page_bytes = 4096;

int64_t result_of(int64_t returned) { return returned < 0 ? -int64_t{errno} : returned; }

class PosixFile final : public File {
   public:
    PosixFile(int fd, bool direct) : fd_(fd), direct_(direct) {}
    ~PosixFile() override {
        registered_.reset();
        ::close(fd_);
    }
    PosixFile(const PosixFile&) = delete;
    PosixFile& operator=(const PosixFile&) = delete;

    int64_t read(std::span<std::byte> into, int64_t offset) override {
        return result_of(::pread(fd_, into.data(), into.size(), offset));
    }
    int64_t read_to_device(DeviceApi& device, std::byte* to, int64_t size, int64_t offset) override {
        if (!is_direct()) return -EOPNOTSUPP;
        int64_t got = -EOPNOTSUPP;
        const auto failed = attempt([&] {
            std::call_once(asked_, [&] { registered_ = cufile::Registered::of(fd_, device); });
            if (registered_ != nullptr) got = registered_->read(device, to, size, offset);
        });
        return failed ? -EIO : got;
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
    // mincore on a mapped page leaves the cache unchanged, while a read with RWF_NOWAIT makes the kernel fetch a
    // missing page (docs/PERFORMANCE.md). But for a file that this user may only read mincore always says yes, so a yes
    // is checked again.
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
    std::once_flag asked_;  // for registered_
    std::unique_ptr<cufile::Registered> registered_;
};

// Either all files, by the process's paths, or those below one held directory.
class PosixFileSystem final : public FileSystem {
   public:
    PosixFileSystem() = default;
    PosixFileSystem(DirAt directory, std::string path) : held_(std::move(directory)), path_(std::move(path)) {
        while (path_.size() > 1 && path_.ends_with('/')) path_.pop_back();
    }

    int64_t hold(const std::string& path, std::unique_ptr<FileSystem>& out) override {
        const Place place = place_of(path);
        if (place.error != 0) return place.error;
        DirAt found;
        // A path from the user may be a link; below it links are refused.
        const auto links = held_ ? DirAt::Links::refused : DirAt::Links::followed;
        if (const int error = place.at().open(place.name, found, links); error != 0) return error;
        out = std::make_unique<PosixFileSystem>(std::move(found), path);
        return 0;
    }
    int64_t open(const std::string& path, OpenMode mode, std::unique_ptr<File>& out) override {
        const bool creates = mode == OpenMode::create || mode == OpenMode::create_direct;
        const bool reads = !creates && mode != OpenMode::write;
        bool direct = mode == OpenMode::read_direct || mode == OpenMode::create_direct;
        const Place place = reads ? place_to_read(path) : place_of(path);
        if (place.error != 0) return place.error;
        // A file to read may be a link, as in the cache of Hugging Face's hub; a file to write must not. Without
        // O_NONBLOCK, which does not affect regular files, opening a pipe of that name would block.
        const int flags = creates ? O_RDWR | O_CREAT | O_EXCL : (reads ? O_RDONLY : O_RDWR) | O_NONBLOCK;
        const auto links = reads ? DirAt::Links::followed : DirAt::Links::refused;
        int fd = place.at().open_file(place.name, flags | (direct ? O_DIRECT : 0), 0666, links);
        if (fd == -EINVAL && direct) {
            direct = false;
            // Linux may have created the file before it refused O_DIRECT.
            if (creates) (void)place.at().remove_file(place.name);
            fd = place.at().open_file(place.name, flags, 0666, links);
        }
        if (fd < 0) return fd;
        auto file = std::make_unique<PosixFile>(fd, direct);
        struct stat status{};
        if (::fstat(fd, &status) < 0) return -int64_t{errno};
        if (!S_ISREG(status.st_mode)) return -(S_ISDIR(status.st_mode) ? EISDIR : EINVAL);
        out = std::move(file);
        return 0;
    }
    int64_t make_directory(const std::string& path) override {
        return at(path, [](const DirAt& in, const std::string& name) { return in.make_directory(name, 0777); });
    }
    int64_t rename(const std::string& from, const std::string& to) override {
        return at(from, [&](const DirAt& in, const std::string& name) {
            return at(
                to, [&](const DirAt& other, const std::string& new_name) { return in.rename(name, other, new_name); });
        });
    }
    int64_t link(const std::string& from, const std::string& to) override {
        return at(from, [&](const DirAt& in, const std::string& name) {
            return at(to,
                      [&](const DirAt& other, const std::string& new_name) { return in.link(name, other, new_name); });
        });
    }
    int64_t remove_file(const std::string& path) override {
        return at(path, [](const DirAt& in, const std::string& name) { return in.remove_file(name); });
    }
    int64_t remove_directory(const std::string& path) override {
        return at(path, [](const DirAt& in, const std::string& name) { return in.remove_directory(name); });
    }
    int64_t sync_directory(const std::string& path) override {
        const auto links = held_ ? DirAt::Links::refused : DirAt::Links::followed;
        return at(path, [&](const DirAt& in, const std::string& name) { return in.sync(name, links); });
    }
    int64_t list(const std::string& path, std::vector<std::string>& names) override {
        const Place place = place_to_read(path);
        return place.error != 0 ? place.error : place.at().list(names, place.name, DirAt::Links::followed);
    }
    int64_t status(const std::string& path, FileStatus& out) override {
        const Place place = place_to_read(path);
        if (place.error != 0) return place.error;
        struct stat found{};
        if (const int error = place.at().status(place.name, found); error != 0) return error;
        out.is_link = S_ISLNK(found.st_mode);
        if (out.is_link) {
            const int error = place.at().status(place.name, found, DirAt::Links::followed);
            if (error != 0) return error;
        }
        out.kind = S_ISREG(found.st_mode)   ? FileStatus::Kind::file
                   : S_ISDIR(found.st_mode) ? FileStatus::Kind::directory
                                            : FileStatus::Kind::other;
        out.size = found.st_size;
        // Some file systems keep times outside the range of 64-bit nanoseconds.
        constexpr int64_t most = INT64_MAX / 1'000'000'000 - 1;
        out.modified_ns =
            std::clamp(int64_t{found.st_mtim.tv_sec}, -most, most) * 1'000'000'000 + found.st_mtim.tv_nsec;
        return 0;
    }
    int64_t touch(const std::string& path) override {
        return at(path, [](const DirAt& in, const std::string& name) { return in.touch(name); });
    }

   private:
    struct Place {
        int error = 0;
        const DirAt* base = nullptr;
        std::optional<DirAt> below;  // set if the name is not directly in the base
        std::string name;

        [[nodiscard]] const DirAt& at() const { return below ? *below : *base; }
    };

    // A place to change: links below the held directory are not followed.
    Place place_of(const std::string& path) const {
        Place place = place_to_read(path);
        if (!held_ || place.error != 0) return place;
        const std::string rest = std::exchange(place.name, {});
        place.error = held_->walk(rest, place.below, place.name);
        return place;
    }
    Place place_to_read(const std::string& path) const {
        if (!held_) return {0, &DirAt::working(), {}, path};
        std::string_view rest = path;
        const bool relative = path_ == "." && !rest.starts_with("./");  // "name", as "./name"
        if (!relative) {
            if (!rest.starts_with(path_)) return outside();
            rest.remove_prefix(path_.size());
            // "/a/bc" is not below "/a/b".
            if (!rest.empty() && !rest.starts_with('/') && !path_.ends_with('/')) return outside();
        } else if (rest.starts_with('/')) {
            return outside();
        }
        rest.remove_prefix(std::min(rest.find_first_not_of('/'), rest.size()));
        return {0, &*held_, {}, rest.empty() ? "." : std::string(rest)};
    }
    static Place outside() { return {-EXDEV, nullptr, {}, {}}; }
    template <class Call>
    int64_t at(const std::string& path, const Call& call) const {
        const Place place = place_of(path);
        return place.error != 0 ? int64_t{place.error} : int64_t{call(place.at(), place.name)};
    }

    std::optional<DirAt> held_;
    std::string path_;  // of held_, as its callers' paths begin
};

}  // namespace

FileSystem& posix_file_system() {
    static auto* instance = new PosixFileSystem;
    return *instance;
}

}  // namespace tsr
