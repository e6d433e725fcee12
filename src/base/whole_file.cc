#include "base/whole_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/error.hpp"
#include "base/fd.hpp"

namespace tsr {

void write_whole_file(const std::string& path, std::string_view text, mode_t mode) {
    const std::string draft = fmt::format("{}.{}", path, ::getpid());
    const auto fail = [&](int number) {
        ::unlink(draft.c_str());
        throw os_error(fmt::format("cannot write {}", path), number);
    };
    const Fd file(::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, mode));
    if (!file.valid()) throw os_error(fmt::format("cannot write {}", draft), errno);
    while (!text.empty()) {
        const ssize_t n = ::write(file.get(), text.data(), text.size());
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) fail(n < 0 ? errno : ENOSPC);
        text.remove_prefix(static_cast<size_t>(n));
    }
    if (::rename(draft.c_str(), path.c_str()) != 0) fail(errno);
}

}  // namespace tsr
