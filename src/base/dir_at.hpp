// A directory that is held by its descriptor. Who lists, makes, writes or removes by a path may be led elsewhere: whoever
// may write in a directory on the way can put a link, or another directory, in the place of the next. Here the directory
// is looked up once, and names in it are single components of which no link is followed but where a method says so.
// All that lists, writes or removes below a directory that a user named goes through this (tests/docs/test_paths.py).
//
// The methods are as thin as system calls: 0 or a negative errno, and they never throw but for want of memory. One
// directory may be used by several threads.
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
    // Whether a link in the place of a name is looked through.
    enum class Links { refused, followed };

    DirAt() = default;  // none: -EBADF
    // Where paths begin that a user named: there a name may be any path, and links on its way are followed.
    [[nodiscard]] static const DirAt& working();
    // That directory of a user's, and all that is missing above it made.
    [[nodiscard]] static int open_or_make(const std::string& path, DirAt& out);
    // The directory in which `path` lies, a file that the user named, and its name there.
    [[nodiscard]] static int open_parent(const std::string& path, DirAt& out, std::string& name);
    // The directory of that path. -ENOTDIR also of a link that is refused.
    [[nodiscard]] int open(std::string_view name, DirAt& out, Links links = Links::refused) const;
    // The same, made if it is not there.
    [[nodiscard]] int open_or_make_below(const std::string& name, mode_t mode, DirAt& out) const;
    // The directory in which the last name of the relative path `below` lies, if that is not this one (then `parent` stays
    // as it is), and that name. No link on the way there is followed, and no name may be `..`: -EXDEV.
    [[nodiscard]] int walk(std::string_view below, std::optional<DirAt>& parent, std::string& name) const;

    // The descriptor of a file, or a negative errno. `flags` as open(2) has them, beside O_CLOEXEC.
    [[nodiscard]] int open_file(const std::string& name, int flags, mode_t mode = 0666,
                                Links links = Links::refused) const;
    // A new file of that name; one that was there is removed, and what a link of that name leads to is let be.
    [[nodiscard]] int replace_file(const std::string& name, int flags, mode_t mode) const;
    [[nodiscard]] int make_directory(const std::string& name, mode_t mode) const;  // -EEXIST
    [[nodiscard]] int rename(const std::string& from, const std::string& to) const { return rename(from, *this, to); }
    [[nodiscard]] int rename(const std::string& from, const DirAt& other, const std::string& to) const;
    [[nodiscard]] int link(const std::string& from, const DirAt& other, const std::string& to) const;
    [[nodiscard]] int remove_file(const std::string& name) const;
    [[nodiscard]] int remove_directory(const std::string& name) const;  // an empty one
    // All that is in this directory, to any depth; it goes on behind what cannot be removed, and says why the first could
    // not.
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
