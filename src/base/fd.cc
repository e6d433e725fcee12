#include "base/fd.hpp"

#include <fcntl.h>

#include <cerrno>

namespace tsr {

int off_standard(int fd) {
    if (fd < 0 || fd > STDERR_FILENO) return fd;
    const int moved = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    const int error = errno == EINVAL ? EMFILE : errno;  // EINVAL: the requested number is beyond the limit
    int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    while (null >= 0 && null <= STDERR_FILENO) null = ::open("/dev/null", O_RDWR | O_CLOEXEC);  // each takes the lowest
    if (null >= 0) {
        (void)::dup3(null, fd, O_CLOEXEC);  // at once: in between, another thread would get the number
        ::close(null);
    } else {
        ::close(fd);
    }
    errno = error;
    return moved;
}

}  // namespace tsr
