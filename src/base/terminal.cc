#include "base/terminal.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>

namespace tsr {

size_t terminal_width(int fd) {
    winsize size{};
    return ::ioctl(fd, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

bool wants_colours(int fd) { return ::isatty(fd) == 1 && std::getenv("NO_COLOR") == nullptr; }

}  // namespace tsr
