#include "checkpoint/io/file_system.hpp"

#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/round_up.hpp"

namespace tsr {

namespace {

void check(int64_t result, std::string_view what, const std::string& path) {
    if (result >= 0) return;
    throw os_error(fmt::format("cannot {} {}", what, path), static_cast<int>(-result));
}

}  // namespace

HeldDirectory::HeldDirectory(FileSystem& files, const std::string& path) : files_(files) {
    const int64_t result = files.hold(path, held_);
    if (result == -ENOENT) throw Error(Code::not_found, fmt::format("directory {} does not exist", path));
    check(result, "open the directory", path);
}

HeldDirectory::HeldDirectory(FileSystem& files, const std::string& path, const std::string& below)
    : files_(files), held_(HeldDirectory(HeldDirectory(files, path).files(), below).held_.release()) {}

std::unique_ptr<File> open_file(FileSystem& files, const std::string& path, OpenMode mode) {
    std::unique_ptr<File> file;
    const int64_t result = files.open(path, mode, file);
    const bool creates = mode == OpenMode::create || mode == OpenMode::create_direct;
    if (result == -ENOENT && !creates) throw Error(Code::not_found, fmt::format("file {} does not exist", path));
    check(result, creates ? "create" : "open", path);
    return file;
}

void read_all(File& file, const std::string& path, std::span<std::byte> into, int64_t offset) {
    while (!into.empty()) {
        const bool direct = file.is_direct();  // before: another thread may leave it meanwhile
        const int64_t got = file.read(into, offset);
        if (got == -EINTR || got == -EAGAIN) continue;
        if (got == -EINVAL && direct) {
            check(file.leave_direct(), "read", path);
            continue;
        }
        if (got < 0) throw os_error(fmt::format("cannot read {} at byte {}", path, offset), static_cast<int>(-got));
        if (got == 0) {
            throw Error(Code::corrupt, fmt::format("{} ends at byte {}, {} bytes too early: it was truncated", path,
                                                   offset, into.size()));
        }
        into = into.subspan(static_cast<size_t>(got));
        offset += got;
    }
}

void write_all(File& file, const std::string& path, std::span<const std::byte> from, int64_t offset) {
    while (!from.empty()) {
        const bool direct = file.is_direct();  // before: another thread may leave it meanwhile
        const int64_t put = file.write(from, offset);
        if (put == -EINTR || put == -EAGAIN) continue;
        if (put == -EINVAL && direct) {
            check(file.leave_direct(), "write", path);
            continue;
        }
        if (put < 0) throw os_error(fmt::format("cannot write {} at byte {}", path, offset), static_cast<int>(-put));
        if (put == 0) throw os_error(fmt::format("cannot write {} at byte {}", path, offset), EIO);
        // A short direct write may end off the alignment; the rest then goes through the page cache.
        if (static_cast<size_t>(put) < from.size() && put % direct_alignment != 0 && file.is_direct()) {
            check(file.leave_direct(), "write", path);
        }
        from = from.subspan(static_cast<size_t>(put));
        offset += put;
    }
}

void sync_file(File& file, const std::string& path) { check(file.sync(), "fsync", path); }

bool reserve_file(File& file, const std::string& path, int64_t size) {
    const int64_t reserved = file.allocate(size);
    if (reserved == -ENOSPC || reserved == -EDQUOT || reserved == -EFBIG || reserved == -EIO) {
        throw os_error(fmt::format("cannot reserve {} bytes for {}", size, path), static_cast<int>(-reserved));
    }
    return reserved >= 0;
}

WritePath find_write_path(FileSystem& all_files, const std::string& directory) {
    const HeldDirectory held(all_files, directory);
    FileSystem& files = held.files();
    const std::string path = join(directory, fmt::format(".tessera-probe-{}", ::getpid()));
    WritePath found;
    auto file = open_file(files, path, OpenMode::create_direct);
    const bool opened_direct = file->is_direct();
    try {
        found.preallocates = reserve_file(*file, path, direct_alignment);
        const AlignedBuffer block(static_cast<size_t>(direct_alignment));
        std::memset(block.data(), 0, block.size());
        write_all(*file, path, block.first(block.size()), 0);
    } catch (...) {
        file.reset();
        (void)files.remove_file(path);
        throw;
    }
    found.direct = file->is_direct();
    if (!found.direct) {
        found.why = opened_direct ? "it opens files with O_DIRECT, but refuses to write to them (EINVAL)"
                                  : "it refuses to open files with O_DIRECT (EINVAL)";
    }
    file.reset();
    (void)files.remove_file(path);
    return found;
}

void sync_directory(FileSystem& files, const std::string& path) { check(files.sync_directory(path), "fsync", path); }

void make_directories(FileSystem& files, const std::string& path) {
    if (path.find("://") != std::string::npos) {  // it would be a directory "s3:" of this machine
        throw Error(Code::invalid_argument,
                    fmt::format("{} is a URL; pass a path, or a storage and the key in it", path));
    }
    FileStatus status;
    const int64_t found = files.status(path, status);
    if (found == 0) {
        if (status.kind == FileStatus::Kind::directory) return;
        throw Error(Code::invalid_argument, fmt::format("{} is not a directory", path));
    }
    if (found != -ENOENT) check(found, "stat", path);
    if (status.is_link) {
        throw Error(Code::invalid_argument, fmt::format("{} is a dangling symbolic link", path));
    }
    const std::string parent = parent_of(path);
    if (parent != path) make_directories(files, parent);
    const int64_t made = files.make_directory(path);
    if (made != -EEXIST) check(made, "create the directory", path);
    sync_directory(files, parent);
}

std::vector<std::string> list_directory(FileSystem& files, const std::string& path) {
    std::vector<std::string> names;
    const int64_t result = files.list(path, names);
    if (result == -ENOENT) throw Error(Code::not_found, fmt::format("directory {} does not exist", path));
    if (result < 0) throw os_error(fmt::format("cannot list {}", path), static_cast<int>(-result));
    return names;
}

bool exists(FileSystem& files, const std::string& path) {
    FileStatus status;
    const int64_t found = files.status(path, status);
    if (found == -ENOENT || found == -ENOTDIR) return false;
    check(found, "stat", path);
    return true;
}

bool is_link(FileSystem& files, const std::string& path) {
    FileStatus status;
    (void)files.status(path, status);
    return status.is_link;
}

std::string read_text(FileSystem& files, const std::string& path, int64_t max_size) {
    return read_text(*open_file(files, path, OpenMode::read), path, max_size);
}

std::string read_text(File& file, const std::string& path, int64_t max_size) {
    const int64_t size = file.size();
    check(size, "stat", path);
    if (size > max_size) {
        throw Error(Code::corrupt, fmt::format("{} has {} bytes; the limit is {}", path, size, max_size));
    }
    std::string text(static_cast<size_t>(size), '\0');
    read_all(file, path, std::as_writable_bytes(std::span(text)), 0);
    refuse_lfs_pointer(text, path);
    return text;
}

namespace {

constexpr std::string_view lfs_begin = "version https://git-lfs.";

}  // namespace

void refuse_lfs_pointer(std::string_view begin, const std::string& path) {
    if (!begin.starts_with(lfs_begin)) return;
    throw Error(Code::corrupt,
                fmt::format("{} is a Git LFS pointer, not the file itself; run `git lfs pull` to fetch it", path));
}

void refuse_lfs_pointer(File& file, const std::string& path) {
    if (file.size() < static_cast<int64_t>(lfs_begin.size())) return;
    std::string begin(lfs_begin.size(), '\0');
    read_all(file, path, std::as_writable_bytes(std::span(begin)), 0);
    refuse_lfs_pointer(begin, path);
}

void write_new_text(FileSystem& files, const std::string& path, std::string_view text) {
    const auto file = open_file(files, path, OpenMode::create);
    write_all(*file, path, std::as_bytes(std::span(text)), 0);
    sync_file(*file, path);
}

void replace_text(FileSystem& files, const std::string& path, std::string_view text, std::string_view tag) {
    if (const int64_t put = files.put(path, std::as_bytes(std::span(text))); put != -EOPNOTSUPP) {
        return check(put, "write", path);
    }
    const std::string temporary = fmt::format("{}.tmp-{}", path, tag);
    (void)files.remove_file(temporary);  // a leftover of a process that died here
    try {
        write_new_text(files, temporary, text);
        check(files.rename(temporary, path), "rename to", path);
    } catch (...) {
        (void)files.remove_file(temporary);
        throw;
    }
    sync_directory(files, parent_of(path));
}

std::string join(std::string_view directory, std::string_view name) {
    if (directory.empty()) return std::string(name);
    if (directory.back() == '/') return fmt::format("{}{}", directory, name);
    return fmt::format("{}/{}", directory, name);
}

std::string parent_of(std::string_view path) {
    while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
    const size_t slash = path.rfind('/');
    if (slash == std::string_view::npos) return ".";
    if (slash == 0) return "/";
    return std::string(path.substr(0, slash));
}

std::string absolute(std::string_view path) {
    if (path.empty() || path.front() == '/' || path.find("://") != path.npos) return std::string(path);
    std::error_code failure;
    const std::string here = std::filesystem::current_path(failure).string();
    if (failure || !is_utf8(here)) return std::string(path);
    while (path.starts_with("./")) {
        path.remove_prefix(2);
        while (path.starts_with('/')) path.remove_prefix(1);
    }
    return path.empty() || path == "." ? here : join(here, path);
}

std::string_view name_in_path(std::string_view path) {
    while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
    const size_t slash = path.rfind('/');
    return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

// Uses huge pages where the system has them: a request of 4 MiB then has two segments instead of a thousand, and a
// block device takes only a few hundred at once.
AlignedBuffer::AlignedBuffer(size_t size) {
    constexpr size_t huge_page = size_t{2} << 20;
    const size_t bytes = round_up(std::max<size_t>(size, 1), static_cast<size_t>(direct_alignment));
    const size_t spare = bytes >= huge_page ? huge_page : 0;
    void* mapped = ::mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw Error(Code::no_memory, fmt::format("cannot allocate a buffer of {} bytes", size));
    auto* begin = static_cast<std::byte*>(mapped);
    if (spare > 0) {
        const size_t before =
            round_up(reinterpret_cast<uintptr_t>(begin), huge_page) - reinterpret_cast<uintptr_t>(begin);
        if (before > 0) ::munmap(begin, before);
        begin += before;
        ::munmap(begin + bytes, spare - before);
        (void)::madvise(begin, bytes, MADV_HUGEPAGE);  // only a hint
    }
    memory_ = std::unique_ptr<std::byte[], Unmap>(begin, Unmap{size, bytes});
}

void AlignedBuffer::Unmap::operator()(std::byte* memory) const { ::munmap(memory, mapped); }

}  // namespace tsr
