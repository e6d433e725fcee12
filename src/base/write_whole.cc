#include "base/write_whole.hpp"

#include <fcntl.h>
#include <fmt/core.h>

#include <cstdio>

#include "base/error.hpp"
#include "base/fd.hpp"

namespace tsr {

void write_whole_file(const std::string& path, std::string_view text, mode_t mode) {
    const std::string draft = fmt::format("{}.{}", path, ::getpid());
    const Fd file(::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, mode));
    if (!file.valid()) throw os_error(fmt::format("cannot write {}", draft), errno);
    if (write_whole(file.get(), text) && ::rename(draft.c_str(), path.c_str()) == 0) return;
    const int number = errno;
    ::unlink(draft.c_str());
    throw os_error(fmt::format("cannot write {}", path), number);
}

}  // namespace tsr
