// All file operations of a checkpoint go through these two interfaces, so that a test can make any single call fail,
// write short, be interrupted or be the last one before a crash. The methods are as thin as system calls: they return a
// number of bytes or a negative errno and never throw. The rest of checkpoint/ uses the free functions below, which
// finish short transfers, repeat interrupted ones and throw tsr::Error naming the path.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tsr {

class DeviceApi;

// O_DIRECT requires offsets, sizes and memory addresses in multiples of this; so does the start of a rank file's data.
inline constexpr int64_t direct_alignment = 4096;

// Readers of a save share a lock on its manifest; its remover takes the lock exclusively.
enum class FileLock { shared, exclusive };

// An open regular file; closed by its destructor. Reads and writes of different ranges may come from several threads.
class File {
   public:
    virtual ~File() = default;
    [[nodiscard]] virtual int64_t read(std::span<std::byte> into, int64_t offset) = 0;
    // The same into the memory of a device, past the host, and in the order of no stream. Any failure leaves the caller to
    // read() and copy.
    [[nodiscard]] virtual int64_t read_to_device(DeviceApi&, std::byte* /*to*/, int64_t /*size*/, int64_t /*offset*/) {
        return -EOPNOTSUPP;
    }
    [[nodiscard]] virtual int64_t write(std::span<const std::byte> from, int64_t offset) = 0;
    [[nodiscard]] virtual int64_t size() = 0;
    [[nodiscard]] virtual int64_t allocate(int64_t size) = 0;  // reserves space; the size may grow
    [[nodiscard]] virtual int64_t truncate(int64_t size) = 0;
    [[nodiscard]] virtual int64_t sync() = 0;
    // Starts writing back that range without waiting; a hint.
    virtual void start_writeback(int64_t offset, int64_t size) = 0;
    // Whether the page cache is bypassed; leave_direct() ends that for good (a file system may refuse O_DIRECT late).
    [[nodiscard]] virtual bool is_direct() const = 0;
    [[nodiscard]] virtual int64_t leave_direct() = 0;
    // Whether the byte at `offset` is in the page cache.
    [[nodiscard]] virtual bool is_cached(int64_t offset) = 0;
    // Takes an advisory lock without waiting, until this object or the process ends. -EWOULDBLOCK: it is taken. A file
    // system without locks returns -EOPNOTSUPP or the like and gives no protection.
    [[nodiscard]] virtual int64_t lock(FileLock) { return -EOPNOTSUPP; }
};

enum class OpenMode {
    read,         // page cache
    read_direct,  // O_DIRECT where the file system supports it
    create,       // must not exist
    create_direct,
    write,  // must exist
};

struct FileStatus {
    enum class Kind { file, directory, other };
    Kind kind = Kind::other;
    bool is_link = false;  // a symbolic link; the other members describe its target
    int64_t size = 0;
    std::optional<int64_t> modified_ns;  // by the file system's clock, since 1970; nullopt: unknown
};

class FileSystem {
   public:
    virtual ~FileSystem() = default;
    // Each returns 0 or a negative errno. Symbolic links are not followed in the last component when creating.
    [[nodiscard]] virtual int64_t open(const std::string& path, OpenMode mode, std::unique_ptr<File>& out) = 0;
    [[nodiscard]] virtual int64_t make_directory(const std::string& path) = 0;  // -EEXIST if it exists
    [[nodiscard]] virtual int64_t rename(const std::string& from, const std::string& to) = 0;
    [[nodiscard]] virtual int64_t link(const std::string& from, const std::string& to) = 0;  // -EEXIST if `to` exists
    [[nodiscard]] virtual int64_t remove_file(const std::string& path) = 0;
    [[nodiscard]] virtual int64_t remove_directory(const std::string& path) = 0;
    [[nodiscard]] virtual int64_t sync_directory(const std::string& path) = 0;
    [[nodiscard]] virtual int64_t list(const std::string& path, std::vector<std::string>& names) = 0;  // sorted
    // For a dangling link, -ENOENT with is_link set.
    [[nodiscard]] virtual int64_t status(const std::string& path, FileStatus& out) = 0;
    [[nodiscard]] virtual int64_t touch(const std::string& path) = 0;  // modified := now
    // The same files for changes below the directory `path`, which is looked up once: calls of `out` stay in it even if
    // it is renamed or replaced. Their paths must begin with `path` (otherwise -EXDEV). Below it, links are followed to
    // read, but never to create, write, rename, sync or remove (-ENOTDIR). A directory held below a held one must not
    // be a link (-ENOTDIR). `out` stays empty where no path can lead elsewhere, as with keys of a storage.
    [[nodiscard]] virtual int64_t hold(const std::string&, std::unique_ptr<FileSystem>&) { return 0; }
    // Whether a file must be written from first to last byte, by one thread at a time.
    [[nodiscard]] virtual bool writes_in_order() const { return false; }
    // Writes the complete file atomically and durably, replacing an existing one. -EOPNOTSUPP where that takes a
    // rename.
    [[nodiscard]] virtual int64_t put(const std::string&, std::span<const std::byte>) { return -EOPNOTSUPP; }
    // Whether the calling thread is in a callback of the program that serves a call of this file system.
    [[nodiscard]] virtual bool is_in_callback() const { return false; }
};

// The operating system's files. Never destroyed.
[[nodiscard]] FileSystem& posix_file_system();

// The files below a held directory, for making changes there; see FileSystem::hold().
class HeldDirectory {
   public:
    HeldDirectory(FileSystem& files, const std::string& path);  // NOT_FOUND if it does not exist
    // The directory `below`, a path within the directory `path`.
    HeldDirectory(FileSystem& files, const std::string& path, const std::string& below);
    [[nodiscard]] FileSystem& files() const { return held_ ? *held_ : files_; }
    // False if the file system has nothing to hold.
    [[nodiscard]] bool holds() const { return held_ != nullptr; }

   private:
    FileSystem& files_;
    std::unique_ptr<FileSystem> held_;
};

[[nodiscard]] std::unique_ptr<File> open_file(FileSystem& files, const std::string& path, OpenMode mode);
// Reads until `into` is full. CORRUPT if the file ends early.
void read_all(File& file, const std::string& path, std::span<std::byte> into, int64_t offset);
// If the file system refuses a direct write (EINVAL), continues through the page cache.
void write_all(File& file, const std::string& path, std::span<const std::byte> from, int64_t offset);
// Reserves space, so that a full disk is noticed before anything is written. False if the file system cannot.
bool reserve_file(File& file, const std::string& path, int64_t size);
// fsync. Never repeated: after a failure the kernel may have dropped the data.
void sync_file(File& file, const std::string& path);
void sync_directory(FileSystem& files, const std::string& path);
// Creates `path` and its missing parents, durably. INVALID_ARGUMENT if it is a URL.
void make_directories(FileSystem& files, const std::string& path);
// The names in a directory, sorted; NOT_FOUND if there is none.
[[nodiscard]] std::vector<std::string> list_directory(FileSystem& files, const std::string& path);
[[nodiscard]] bool exists(FileSystem& files, const std::string& path);
[[nodiscard]] bool is_link(FileSystem& files, const std::string& path);  // also for a dangling link
// The contents of a small file; CORRUPT if it is larger than `max_size`.
[[nodiscard]] std::string read_text(FileSystem& files, const std::string& path, int64_t max_size);
[[nodiscard]] std::string read_text(File& file, const std::string& path, int64_t max_size);
// Throws CORRUPT if a file begins like a Git LFS pointer, which stands in for a file that was not fetched.
void refuse_lfs_pointer(std::string_view begin, const std::string& path);
void refuse_lfs_pointer(File& file, const std::string& path);
// Replaces a file atomically: by put(), or by writing and fsyncing `<path>.tmp-<tag>`, renaming it to `path` and
// fsyncing the directory.
void replace_text(FileSystem& files, const std::string& path, std::string_view text, std::string_view tag);
void write_new_text(FileSystem& files, const std::string& path, std::string_view text);  // fsynced; must not exist

// How a save can write data into `directory`, found by doing so with a temporary file.
struct WritePath {
    bool direct = false;
    bool preallocates = false;
    std::string why;  // the reason if it is not direct
};
[[nodiscard]] WritePath find_write_path(FileSystem& files, const std::string& directory);

[[nodiscard]] std::string join(std::string_view directory, std::string_view name);
[[nodiscard]] std::string parent_of(std::string_view path);
[[nodiscard]] std::string_view name_in_path(std::string_view path);
// Makes a path of the operating system absolute, so that it stays valid if the process changes its directory. Returned
// unchanged if it is not such a path, or if the working directory is gone or its name is not UTF-8.
[[nodiscard]] std::string absolute(std::string_view path);

// Page-aligned memory that is returned to the system on destruction; malloc would keep the many MiB of a save.
class AlignedBuffer {
   public:
    AlignedBuffer() = default;
    explicit AlignedBuffer(size_t size);  // NO_MEMORY
    [[nodiscard]] std::byte* data() const { return memory_.get(); }
    [[nodiscard]] size_t size() const { return memory_.get_deleter().size; }
    [[nodiscard]] std::span<std::byte> first(size_t n) const { return {memory_.get(), n}; }

   private:
    struct Unmap {
        size_t size;  // as requested; 0 if default-constructed
        size_t mapped;
        void operator()(std::byte* memory) const;
    };
    std::unique_ptr<std::byte[], Unmap> memory_;
};

}  // namespace tsr
