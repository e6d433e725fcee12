#include "base/fd.hpp"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cerrno>
#include <functional>

namespace tsr {
namespace {

bool is_null(int fd) {
    struct stat of_fd{};
    struct stat null{};
    return ::fstat(fd, &of_fd) == 0 && ::stat("/dev/null", &null) == 0 && of_fd.st_rdev == null.st_rdev;
}

// What a child process without standard descriptors answers.
int in_child_without_standard_descriptors(const std::function<int()>& ask) {
    const pid_t child = ::fork();
    if (child == 0) {
        for (int fd = 0; fd <= 2; ++fd) ::close(fd);
        ::_exit(ask());
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Fd, TakesNoNumberOfAStandardDescriptorThatIsClosed) {
    const auto ask = [] {
        const Fd file(::memfd_create("test", MFD_CLOEXEC));
        if (file.get() <= 2) return 1;
        if ((::fcntl(file.get(), F_GETFD) & FD_CLOEXEC) == 0) return 2;
        for (int fd = 0; fd <= 2; ++fd) {
            if (!is_null(fd)) return 10 + fd;
        }
        if (::write(2, "a line", 6) != 6) return 3;
        struct stat status{};
        if (::fstat(file.get(), &status) != 0 || status.st_size != 0) return 4;
        return 0;
    };
    EXPECT_EQ(in_child_without_standard_descriptors(ask), 0);
}

TEST(Fd, IsNoneWhereNoOtherNumberIsLeft) {
    const auto ask = [] {
        const rlimit most{3, 3};
        if (::setrlimit(RLIMIT_NOFILE, &most) != 0) return 1;
        const int low = ::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (low != 0) return 2;
        const Fd file(low);
        const int error = errno;
        if (file.valid()) return 3;
        return error == EMFILE ? 0 : 4;
    };
    EXPECT_EQ(in_child_without_standard_descriptors(ask), 0);
}

TEST(Fd, LeavesOtherNumbersAndFailuresAlone) {
    EXPECT_EQ(off_standard(-1), -1);
    const Fd file(::memfd_create("test", MFD_CLOEXEC));
    EXPECT_EQ(off_standard(file.get()), file.get());
}

}  // namespace
}  // namespace tsr
