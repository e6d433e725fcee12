#include "launch/job_directory.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <vector>

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

// Does not touch another user's files, nor follow links. A directory without an owner file belongs to an agent that is
// just starting, or to an older version: whether that is alive is unknown.
void remove_if_left(const DirAt& place, const std::string& name) {
    DirAt directory;
    struct stat info{};
    if (place.open(name, directory) != 0 || directory.status(".", info) != 0 || info.st_uid != ::geteuid()) return;
    const Fd owner(directory.open_file(owner_file, O_RDONLY | O_NONBLOCK));
    if (!owner.valid() || !lock(owner.get())) return;
    (void)directory.remove_contents();
    (void)place.remove_directory(name);
}

void remove_left_ones(const DirAt& place) {
    std::vector<std::string> names;
    (void)place.list(names);
    for (const std::string& name : names) {
        if (name.starts_with(prefix)) remove_if_left(place, name);
    }
}

void renew_all_in(const DirAt& directory) {
    std::vector<std::string> names;
    (void)directory.list(names);
    for (const std::string& name : names) {
        (void)directory.touch(name);
        DirAt below;
        if (directory.open(name, below) == 0) renew_all_in(below);
    }
}

}  // namespace

std::string temporary_directory(std::string_view what) {
    std::string path = fmt::format("{}/tessera-{}.XXXXXX", temporary_place(), what);
    if (::mkdtemp(path.data()) == nullptr)
        throw os_error(fmt::format("cannot create a directory like {}", path), errno);
    return path;
}

bool is_own_directory(const std::string& path) {
    struct stat info{};
    return ::lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == ::geteuid();
}

JobDirectory::JobDirectory() {
    if (DirAt::working().open(temporary_place(), place_, DirAt::Links::followed) == 0) remove_left_ones(place_);
    path_ = temporary_directory("run");
    if (const int error = place_.open(name(), directory_); error != 0) {
        throw os_error(fmt::format("cannot open {}", path_), -error);
    }
    entry_ = Fd(place_.open_file(name(), O_RDONLY | O_DIRECTORY));
    if (entry_.valid()) (void)lock(entry_.get());
    // Locked before it gets the name that other agents look for. Where files cannot be locked, nothing counts as
    // abandoned.
    const std::string made = fmt::format("{}.new", owner_file);
    const int opened = directory_.open_file(made, O_WRONLY | O_CREAT | O_EXCL, 0600);
    if (opened < 0) throw os_error(fmt::format("cannot create {}/{}", path_, made), -opened);
    owner_ = Fd(opened);
    if (!lock(owner_.get())) return;
    const int renamed = directory_.rename(made, owner_file);
    if (renamed != 0) throw os_error(fmt::format("cannot rename {}/{}", path_, made), -renamed);
}

void JobDirectory::renew() const noexcept {
    (void)place_.touch(name());
    renew_all_in(directory_);
}

JobDirectory::~JobDirectory() {
    (void)directory_.remove_contents();
    (void)place_.remove_directory(name());
}

std::string JobDirectory::name() const { return path_.substr(path_.rfind('/') + 1); }

}  // namespace tsr
