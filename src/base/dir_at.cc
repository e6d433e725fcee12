#include "base/dir_at.hpp"

#include <dirent.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

namespace tsr {

namespace {

int result_of(int returned) { return returned < 0 ? -errno : 0; }

int no_follow(DirAt::Links links) { return links == DirAt::Links::followed ? 0 : O_NOFOLLOW; }

}  // namespace

const DirAt& DirAt::working() {
    static const DirAt working = [] {
        DirAt made;
        made.is_working_ = true;
        return made;
    }();
    return working;
}

int DirAt::open_or_make(const std::string& path, DirAt& out) {
    std::error_code failure;
    std::filesystem::create_directories(path, failure);
    return failure ? -failure.value() : working().open(path, out, Links::followed);
}

int DirAt::open_or_make_below(const std::string& name, mode_t mode, DirAt& out) const {
    const int made = make_directory(name, mode);
    return made != 0 && made != -EEXIST ? made : open(name, out);
}

int DirAt::open(std::string_view name, DirAt& out, Links links) const {
    // O_PATH: a directory that may be written need not be one that may be listed.
    Fd found(::openat(at(), std::string(name).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC | no_follow(links)));
    if (!found.valid()) return errno == ELOOP ? -ENOTDIR : -errno;
    out.fd_ = std::move(found);
    return 0;
}

int DirAt::open_parent(const std::string& path, DirAt& out, std::string& name) {
    const size_t end = path.rfind('/') + 1;  // 0: it has none
    name = path.substr(end);
    return working().open(end == 0 ? "." : path.substr(0, end), out, Links::followed);
}

int DirAt::walk(std::string_view below, std::optional<DirAt>& parent, std::string& name) const {
    while (true) {
        below.remove_prefix(std::min(below.find_first_not_of('/'), below.size()));
        const size_t end = std::min(below.find('/'), below.size());
        const std::string_view first = below.substr(0, end);
        if (first == "..") return -EXDEV;
        below.remove_prefix(end);
        if (below.find_first_not_of('/') == std::string_view::npos) {
            name = first.empty() ? "." : first;
            return 0;
        }
        DirAt next;
        if (const int error = (parent ? *parent : *this).open(first, next); error != 0) return error;
        parent = std::move(next);
    }
}

int DirAt::open_file(const std::string& name, int flags, mode_t mode, Links links) const {
    const int fd = off_standard(::openat(at(), name.c_str(), flags | O_CLOEXEC | no_follow(links), mode));
    return fd < 0 ? -errno : fd;
}

int DirAt::replace_file(const std::string& name, int flags, mode_t mode) const {
    if (const int error = remove_file(name); error != 0 && error != -ENOENT) return error;
    return open_file(name, flags | O_CREAT | O_EXCL, mode);
}

int DirAt::make_directory(const std::string& name, mode_t mode) const {
    return result_of(::mkdirat(at(), name.c_str(), mode));
}

int DirAt::rename(const std::string& from, const DirAt& other, const std::string& to) const {
    return result_of(::renameat(at(), from.c_str(), other.at(), to.c_str()));
}

int DirAt::link(const std::string& from, const DirAt& other, const std::string& to) const {
    return result_of(::linkat(at(), from.c_str(), other.at(), to.c_str(), 0));
}

int DirAt::remove_file(const std::string& name) const { return result_of(::unlinkat(at(), name.c_str(), 0)); }

int DirAt::remove_directory(const std::string& name) const {
    return result_of(::unlinkat(at(), name.c_str(), AT_REMOVEDIR));
}

int DirAt::remove_contents() const {
    std::vector<std::string> names;
    int first = list(names);
    for (const std::string& name : names) {
        int error = remove_file(name);
        if (error == -EISDIR || error == -EPERM) {  // EPERM: POSIX's error for a directory
            DirAt below;
            if (error = open(name, below); error == 0) error = below.remove_contents();
            if (error == 0) error = remove_directory(name);
        }
        if (error != 0 && error != -ENOENT && first == 0) first = error;
    }
    return first;
}

int DirAt::touch(const std::string& name) const {
    return result_of(::utimensat(at(), name.c_str(), nullptr, AT_SYMLINK_NOFOLLOW));
}

int DirAt::list(std::vector<std::string>& names, const std::string& name, Links links) const {
    names.clear();
    const int fd = open_file(name, O_RDONLY | O_DIRECTORY, 0, links);
    if (fd < 0) return fd;
    const std::unique_ptr<DIR, int (*)(DIR*)> entries(::fdopendir(fd), &::closedir);
    if (entries == nullptr) {
        const int error = errno;
        ::close(fd);
        return -error;
    }
    errno = 0;
    while (const dirent* entry = ::readdir(entries.get())) {
        const std::string_view found = entry->d_name;
        if (found != "." && found != "..") names.emplace_back(found);
        errno = 0;
    }
    const int error = errno;
    std::sort(names.begin(), names.end());
    return -error;
}

int DirAt::status(const std::string& name, struct stat& out, Links links) const {
    const int flags = links == Links::followed ? 0 : AT_SYMLINK_NOFOLLOW;
    return result_of(::fstatat(at(), name.c_str(), &out, flags));
}

int DirAt::sync(const std::string& name, Links links) const {
    const int opened = open_file(name, O_RDONLY | O_DIRECTORY, 0, links);
    if (opened < 0) return opened;
    const Fd fd(opened);
    const int error = result_of(::fsync(fd.get()));
    return error == -EINVAL ? 0 : error;  // some file systems cannot sync a directory
}

}  // namespace tsr
