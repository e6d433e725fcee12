#include "launch/job_directory.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "base/error.hpp"

namespace tsr {

namespace {

constexpr std::string_view prefix = "tessera-run.";
constexpr const char* owner_file = "owner";

std::string temporary_place() {
    const char* base = std::getenv("TMPDIR");
    return base != nullptr && *base != '\0' ? base : "/tmp";
}

// Held until the descriptor is closed; ranks do not inherit it.
bool lock(int fd) { return ::flock(fd, LOCK_EX | LOCK_NB) == 0; }

// What another user may have put there is not touched, nor what a link leads to. One without an owner's file is of an agent
// that begins just now, or of an older version: nothing tells whether that lives.
void remove_if_left(const std::filesystem::path& directory) {
    if (!is_own_directory(directory)) return;
    const Fd owner(::open((directory / owner_file).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    if (!owner.valid() || !lock(owner.get())) return;
    std::error_code ignored;
    std::filesystem::remove_all(directory, ignored);
}

void remove_left_ones() {
    std::error_code failure;
    std::filesystem::directory_iterator entries(temporary_place(), failure);
    for (; !failure && entries != std::filesystem::directory_iterator(); entries.increment(failure)) {
        if (entries->path().filename().native().starts_with(prefix)) remove_if_left(entries->path());
    }
}

}  // namespace

std::string temporary_directory(std::string_view what) {
    std::string path = fmt::format("{}/tessera-{}.XXXXXX", temporary_place(), what);
    if (::mkdtemp(path.data()) == nullptr) throw os_error(fmt::format("making a directory like {}", path), errno);
    return path;
}

bool is_own_directory(const std::string& path) {
    struct stat info{};
    return ::lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == ::geteuid();
}

JobDirectory::JobDirectory() {
    remove_left_ones();
    path_ = temporary_directory("run");
    entry_ = Fd(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!entry_.valid()) throw os_error(fmt::format("opening {}", path_), errno);
    (void)lock(entry_.get());
    // Locked before it has the name by which others look for it. Where files cannot be locked nothing is ever taken for left.
    const std::string made = fmt::format("{}/{}.new", path_, owner_file);
    owner_ = Fd(::open(made.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!owner_.valid()) throw os_error(fmt::format("making {}", made), errno);
    if (!lock(owner_.get())) return;
    const std::string named = fmt::format("{}/{}", path_, owner_file);
    if (::rename(made.c_str(), named.c_str()) != 0) throw os_error(fmt::format("renaming {}", made), errno);
}

void JobDirectory::renew() const noexcept {
    const auto now = [](const std::filesystem::path& path) {
        (void)::utimensat(AT_FDCWD, path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
    };
    now(path_);
    std::error_code failure;
    std::filesystem::recursive_directory_iterator entries(path_, failure);
    for (; !failure && entries != std::filesystem::recursive_directory_iterator(); entries.increment(failure)) {
        now(entries->path());
    }
}

JobDirectory::~JobDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

}  // namespace tsr
