// An owned file descriptor: closed once, moved, never copied. Those who open one do so with O_CLOEXEC.
#pragma once

#include <unistd.h>

#include <utility>

namespace tsr {

// The file of `fd` under a number that is none of the three standard descriptors', or -1 with an errno; a negative `fd`
// as it is. Where a program was started without them, the next file that is opened takes their numbers, and what anybody
// logs or prints goes into a checkpoint, to a peer or into shared memory. /dev/null has them from then on.
[[nodiscard]] int off_standard(int fd);

class Fd {
   public:
    Fd() = default;
    explicit Fd(int fd) : fd_(off_standard(fd)) {}
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&& other) noexcept {
        if (this != &other) {
            reset();
            fd_ = std::exchange(other.fd_, -1);
        }
        return *this;
    }
    ~Fd() { reset(); }

    [[nodiscard]] int get() const { return fd_; }
    [[nodiscard]] bool valid() const { return fd_ >= 0; }
    [[nodiscard]] int release() { return std::exchange(fd_, -1); }
    void reset() {
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }

   private:
    int fd_ = -1;
};

}  // namespace tsr
