#include "base/write_whole.hpp"

#include <fmt/core.h>

#include "base/dir_at.hpp"
#include "base/error.hpp"
#include "base/fd.hpp"

namespace tsr {

void write_whole_file(const std::string& path, std::string_view text, mode_t mode) {
    DirAt directory;
    std::string name;
    int error = DirAt::open_parent(path, directory, name);
    const std::string draft = fmt::format("{}.{}", name, ::gettid());
    const int opened = error != 0 ? error : directory.replace_file(draft, O_WRONLY, mode);
    if (opened < 0) throw os_error(fmt::format("cannot write {}.{}", path, ::gettid()), -opened);
    const Fd file(opened);
    if (!write_whole(file.get(), text)) error = -errno;
    if (error == 0) error = directory.rename(draft, name);
    if (error == 0) return;
    (void)directory.remove_file(draft);
    throw os_error(fmt::format("cannot write {}", path), -error);
}

}  // namespace tsr
