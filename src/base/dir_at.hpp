// A directory held by its descriptor. Operations by path can be redirected: anyone who can write to a directory on the
// way can replace the next component with a link or another directory. Here the directory is looked up once; names in
// it are single components, and links are not followed unless a method says so. Everything that lists, writes or
// removes below a directory named by a user goes through this class (tests/docs/test_paths.py).
//
// The methods are thin wrappers of system calls: they return 0 or a negative errno, and throw only when out of memory.
// Thread-safe: several threads may use one directory.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.hpp"

namespace tsr {

class DirAt {
   public:
    // Whether a symbolic link at the name is followed.
    enum class Links { refused, followed };

    DirAt() = default;  // none: -EBADF
    // The start of paths named by a user: there a name may be any path, and links on the way are followed.
    [[nodiscard]] static const DirAt& working();
    // Opens a directory named by a user, creating it and missing parents.
    [[nodiscard]] static int open_or_make(const std::string& path, DirAt& out);
    // Opens the directory of `path`, a file named by a user, and returns its name there.
    [[nodiscard]] static int open_parent(const std::string& path, DirAt& out, std::string& name);
    // Opens a directory. -ENOTDIR also for a refused link.
    [[nodiscard]] int open(std::string_view name, DirAt& out, Links links = Links::refused) const;
    // Likewise, creating it if missing.
    [[nodiscard]] int open_or_make_below(const std::string& name, mode_t mode, DirAt& out) const;
    // Opens the directory that contains the last component of the relative path `below`, and returns that component;
    // `parent` is unchanged if it is this directory. Follows no links on the way; a component `..` is -EXDEV.
    [[nodiscard]] int walk(std::string_view below, std::optional<DirAt>& parent, std::string& name) const;

    // Returns the descriptor of a file, or a negative errno. `flags` are those of open(2); O_CLOEXEC is added.
    [[nodiscard]] int open_file(const std::string& name, int flags, mode_t mode = 0666,
                                Links links = Links::refused) const;
    // Creates a new file; removes an existing file or link of that name, without touching the link's target.
    [[nodiscard]] int replace_file(const std::string& name, int flags, mode_t mode) const;
    [[nodiscard]] int make_directory(const std::string& name, mode_t mode) const;  // -EEXIST
    [[nodiscard]] int rename(const std::string& from, const std::string& to) const { return rename(from, *this, to); }
    [[nodiscard]] int rename(const std::string& from, const DirAt& other, const std::string& to) const;
    [[nodiscard]] int link(const std::string& from, const DirAt& other, const std::string& to) const;
    [[nodiscard]] int remove_file(const std::string& name) const;
    [[nodiscard]] int remove_directory(const std::string& name) const;  // an empty one
    // Removes everything in this directory, recursively. Continues after failures, and returns the first one.
    [[nodiscard]] int remove_contents() const;
    [[nodiscard]] int touch(const std::string& name) const;  // modified := now
    // Sorted, without . and ..
    [[nodiscard]] int list(std::vector<std::string>& names, const std::string& name = ".",
                           Links links = Links::refused) const;
    [[nodiscard]] int status(const std::string& name, struct stat& out, Links links = Links::refused) const;
    [[nodiscard]] int sync(const std::string& name = ".", Links links = Links::refused) const;  // fsync of a directory

   private:
    [[nodiscard]] int at() const { return is_working_ ? AT_FDCWD : fd_.get(); }

    Fd fd_;
    bool is_working_ = false;
};

}  // namespace tsr
