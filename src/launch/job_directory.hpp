// An agent's directory under TMPDIR for temporary files of its ranks. Removed when the agent ends or, if it was killed,
// by the next agent. A lock on a file in it shows whether its agent is alive: the kernel releases the lock however the
// agent ends, whereas a pid would say nothing about an agent in another container that shares the directory.
//
// Cleaners of TMPDIR do not touch it while the agent is alive: systemd-tmpfiles does not enter a directory with a
// flock() (tmpfiles.d(5), "Age"); others, such as tmpreaper, go by times, which renew() updates.
#pragma once

#include <string>
#include <string_view>

#include "base/dir_at.hpp"
#include "base/fd.hpp"

namespace tsr {

class JobDirectory {
   public:
    JobDirectory();  // removes directories abandoned by agents of this user
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

// Creates a private directory tessera-WHAT.XXXXXX under TMPDIR.
[[nodiscard]] std::string temporary_directory(std::string_view what);
// Whether it is still a directory of this user: in a world-writable place, another user may have created one with its
// name.
[[nodiscard]] bool is_own_directory(const std::string& path);

}  // namespace tsr
