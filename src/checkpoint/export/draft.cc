#include "checkpoint/export/draft.hpp"

#include <fmt/core.h>

#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "checkpoint/root/lease.hpp"

namespace tsr {

namespace {

std::string without_slashes(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path;
}

}  // namespace

std::string Draft::path_of(std::string place, std::string_view tag) {
    return fmt::format("{}.tmp-{}", without_slashes(std::move(place)), tag);
}

Draft::Draft(FileSystem& files, const std::string& place)
    : place_(without_slashes(place)), tag_(random_id().substr(0, 8)), path_(path_of(place_, tag_)) {
    if (place.empty()) throw Error(Code::invalid_argument, "the path of the new directory is empty");
    if (exists(files, place_) || is_link(files, place_)) {
        throw Error(Code::invalid_argument, fmt::format("{} already exists; pass a new directory", place_));
    }
    make_directories(files, parent_of(place_));
    parent_.emplace(files, parent_of(place_));
    const int64_t made = parent_->files().make_directory(path_);
    if (made < 0) throw os_error(fmt::format("cannot create the directory {}", path_), static_cast<int>(-made));
    try {
        own_.emplace(parent_->files(), path_);
    } catch (...) {
        (void)parent_->files().remove_directory(path_);
        throw;
    }
}

Draft::~Draft() {
    if (moved_) return;
    std::vector<std::string> names;
    (void)own_->files().list(path_, names);
    for (const std::string& name : names) (void)own_->files().remove_file(join(path_, name));
    if (parent_->files().remove_directory(path_) < 0) log::warning("could not remove {}", path_);
}

void Draft::move_to_its_place() {
    sync_directory(own_->files(), path_);
    const int64_t result = parent_->files().rename(path_, place_);
    if (result < 0) throw os_error(fmt::format("cannot rename {} to {}", path_, place_), static_cast<int>(-result));
    moved_ = true;
    sync_directory(parent_->files(), parent_of(place_));
}

}  // namespace tsr
