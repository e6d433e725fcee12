// A directory of an agent's own under TMPDIR, where ranks leave what is not kept: removed at the agent's end, and, if it was
// killed, by the next agent. Who lives is told by a lock on a file in it, which the kernel lets go of when the agent has ended in
// whatever way; a pid would say nothing of an agent in another container that shares the directory.
//
// Cleaners of TMPDIR leave it alone while the agent lives: systemd-tmpfiles does not enter a directory on which somebody has a
// flock() (tmpfiles.d(5), "Age"); others, such as tmpreaper, go by times, which renew() sets.
#pragma once

#include <string>
#include <string_view>

#include "base/dir_at.hpp"
#include "base/fd.hpp"

namespace tsr {

class JobDirectory {
   public:
    JobDirectory();  // removes those that agents of this user left
    ~JobDirectory();
    JobDirectory(const JobDirectory&) = delete;
    JobDirectory& operator=(const JobDirectory&) = delete;

    [[nodiscard]] const std::string& path() const { return path_; }
    void renew() const noexcept;

   private:
    [[nodiscard]] std::string name() const;

    std::string path_;
    DirAt place_;      // TMPDIR
    DirAt directory_;  // in it
    Fd entry_;
    Fd owner_;
};

// A new directory under TMPDIR, tessera-WHAT.XXXXXX, of this user alone.
[[nodiscard]] std::string temporary_directory(std::string_view what);
// Whether it still is one of this user's: where everybody may write, another may have made one of its name.
[[nodiscard]] bool is_own_directory(const std::string& path);

}  // namespace tsr
