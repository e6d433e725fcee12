// Every file operation of a checkpoint goes through these two interfaces, so that a test can make any single call fail,
// write short, be interrupted or be the last one before a crash. The methods are as thin as system calls: they return
// bytes, or a negative errno, and never throw. The free functions below them are what the rest of checkpoint/ uses:
// they finish short transfers, repeat interrupted ones and throw tsr::Error naming the path.
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

// O_DIRECT asks for offsets, sizes and memory in multiples of this; data of a rank file begins at one.
inline constexpr int64_t direct_alignment = 4096;

// Readers of a save share a lock on its manifest; who removes it takes that lock for itself.
enum class FileLock { shared, exclusive };

// An open regular file; closed by its destructor. Reads and writes of different ranges may come from several threads.
class File {
   public:
    virtual ~File() = default;
    [[nodiscard]] virtual int64_t read(std::span<std::byte> into, int64_t offset) = 0;
    [[nodiscard]] virtual int64_t write(std::span<const std::byte> from, int64_t offset) = 0;
    [[nodiscard]] virtual int64_t size() = 0;
    [[nodiscard]] virtual int64_t allocate(int64_t size) = 0;  // reserves space; the size may grow
    [[nodiscard]] virtual int64_t truncate(int64_t size) = 0;
    [[nodiscard]] virtual int64_t sync() = 0;
    // Starts writing back what was written there, without waiting; a hint.
    virtual void start_writeback(int64_t offset, int64_t size) = 0;
    // Whether page cache is bypassed; leave_direct() turns that off for good (a file system may refuse it late).
    [[nodiscard]] virtual bool is_direct() const = 0;
    [[nodiscard]] virtual int64_t leave_direct() = 0;
    // Whether the byte at `offset` is in the page cache.
    [[nodiscard]] virtual bool is_cached(int64_t offset) = 0;
    // Takes an advisory lock without waiting; it ends with this object, or with the process. -EWOULDBLOCK: another has
    // it. A file system without locks says -EOPNOTSUPP or the like, and protects nobody.
    [[nodiscard]] virtual int64_t lock(FileLock) { return -EOPNOTSUPP; }
};

enum class OpenMode {
    read,         // page cache
    read_direct,  // O_DIRECT where the file system takes it
    create,       // must not exist
    create_direct,
    write,  // must exist
};

struct FileStatus {
    enum class Kind { file, directory, other };
    Kind kind = Kind::other;
    bool is_link = false;  // a symbolic link; all else is of what it leads to
    int64_t size = 0;
    std::optional<int64_t> modified_ns;  // the file system's clock, since 1970; nothing: it does not tell
};

class FileSystem {
   public:
    virtual ~FileSystem() = default;
    // Each returns 0 or a negative errno. Symbolic links are not followed in the last component when creating.
    [[nodiscard]] virtual int64_t open(const std::string& path, OpenMode mode, std::unique_ptr<File>& out) = 0;
    [[nodiscard]] virtual int64_t make_directory(const std::string& path) = 0;  // -EEXIST if it is there
    [[nodiscard]] virtual int64_t rename(const std::string& from, const std::string& to) = 0;
    [[nodiscard]] virtual int64_t link(const std::string& from, const std::string& to) = 0;  // -EEXIST if `to` exists
    [[nodiscard]] virtual int64_t remove_file(const std::string& path) = 0;
    [[nodiscard]] virtual int64_t remove_directory(const std::string& path) = 0;
    [[nodiscard]] virtual int64_t sync_directory(const std::string& path) = 0;
    [[nodiscard]] virtual int64_t list(const std::string& path, std::vector<std::string>& names) = 0;  // sorted
    // -ENOENT of a link that leads nowhere, with is_link set.
    [[nodiscard]] virtual int64_t status(const std::string& path, FileStatus& out) = 0;
    [[nodiscard]] virtual int64_t touch(const std::string& path) = 0;  // modified := now
    // The same files for who changes what lies below the directory `path`, which is looked up once: calls of `out` stay in
    // it, whoever renames it or puts another in its place. Their paths begin with `path`, -EXDEV else; on the way from
    // there links are followed to read, and never to make, write, rename, sync or remove: -ENOTDIR. A directory below one
    // that is held is no link itself: -ENOTDIR. None where no path can lead elsewhere, as keys of a storage.
    [[nodiscard]] virtual int64_t hold(const std::string&, std::unique_ptr<FileSystem>&) { return 0; }
    // Whether a file takes its bytes from the first to the last only, from one thread at a time.
    [[nodiscard]] virtual bool writes_in_order() const { return false; }
    // Writes the file whole, at once and durably, over one that is there. -EOPNOTSUPP where that takes a rename.
    [[nodiscard]] virtual int64_t put(const std::string&, std::span<const std::byte>) { return -EOPNOTSUPP; }
    // Whether the calling thread is in code of the program's that serves a call of this.
    [[nodiscard]] virtual bool is_in_callback() const { return false; }
};

// The operating system's files. Never destroyed.
[[nodiscard]] FileSystem& posix_file_system();

// The files below a directory that is held, for who changes something there.
class HeldDirectory {
   public:
    HeldDirectory(FileSystem& files, const std::string& path);  // NOT_FOUND if there is no such directory
    // The directory `below` of that in `path`.
    HeldDirectory(FileSystem& files, const std::string& path, const std::string& below);
    [[nodiscard]] FileSystem& files() const { return held_ ? *held_ : files_; }
    // False where there is nothing to hold.
    [[nodiscard]] bool holds() const { return held_ != nullptr; }

   private:
    FileSystem& files_;
    std::unique_ptr<FileSystem> held_;
};

[[nodiscard]] std::unique_ptr<File> open_file(FileSystem& files, const std::string& path, OpenMode mode);
// Reads until `into` is full; CORRUPT if the file ends before.
void read_all(File& file, const std::string& path, std::span<std::byte> into, int64_t offset);
// A direct write that the file system refuses (EINVAL) goes on through the page cache.
void write_all(File& file, const std::string& path, std::span<const std::byte> from, int64_t offset);
// Reserves room, so that a full disk is noticed before anything is written; a file system that cannot is none the worse:
// false.
bool reserve_file(File& file, const std::string& path, int64_t size);
// fsync. Never repeated: after a failure the kernel may have dropped the data.
void sync_file(File& file, const std::string& path);
void sync_directory(FileSystem& files, const std::string& path);
// Makes `path` and what is missing above it, durably. INVALID_ARGUMENT if it is a URL.
void make_directories(FileSystem& files, const std::string& path);
// The names in a directory, sorted; NOT_FOUND if there is none.
[[nodiscard]] std::vector<std::string> list_directory(FileSystem& files, const std::string& path);
[[nodiscard]] bool exists(FileSystem& files, const std::string& path);
[[nodiscard]] bool is_link(FileSystem& files, const std::string& path);  // also of one that leads nowhere
// A small file whole; CORRUPT beyond `max_size`.
[[nodiscard]] std::string read_text(FileSystem& files, const std::string& path, int64_t max_size);
[[nodiscard]] std::string read_text(File& file, const std::string& path, int64_t max_size);
// Throws CORRUPT if what a file begins with is a pointer of Git LFS, which stands where the file itself was not fetched.
void refuse_lfs_pointer(std::string_view begin, const std::string& path);
void refuse_lfs_pointer(File& file, const std::string& path);
// Puts it, or writes `<path>.tmp-<tag>`, fsyncs, renames it to `path` and fsyncs the directory: old or new, never half.
void replace_text(FileSystem& files, const std::string& path, std::string_view text, std::string_view tag);
void write_new_text(FileSystem& files, const std::string& path, std::string_view text);  // fsynced; must not exist

// How the data of a save goes into `directory`, found out by what a save does, on a file that is removed again.
struct WritePath {
    bool direct = false;
    bool preallocates = false;
    std::string why;  // it is not direct
};
[[nodiscard]] WritePath find_write_path(FileSystem& files, const std::string& directory);

[[nodiscard]] std::string join(std::string_view directory, std::string_view name);
[[nodiscard]] std::string parent_of(std::string_view path);
[[nodiscard]] std::string_view name_in_path(std::string_view path);
// What a path of the operating system's means now, wherever the process goes later. As it is if it is none, or where the
// working directory is gone or has no name in UTF-8.
[[nodiscard]] std::string absolute(std::string_view path);

// Page-aligned memory that the system has back on destruction: malloc would keep what a save of many MiB used.
class AlignedBuffer {
   public:
    AlignedBuffer() = default;
    explicit AlignedBuffer(size_t size);  // NO_MEMORY
    [[nodiscard]] std::byte* data() const { return memory_.get(); }
    [[nodiscard]] size_t size() const { return memory_.get_deleter().size; }
    [[nodiscard]] std::span<std::byte> first(size_t n) const { return {memory_.get(), n}; }

   private:
    struct Unmap {
        size_t size;  // what was asked for; of nothing: 0, as a unique_ptr makes it
        size_t mapped;
        void operator()(std::byte* memory) const;
    };
    std::unique_ptr<std::byte[], Unmap> memory_;
};

}  // namespace tsr
