// An owned file descriptor: closed once, movable, not copyable. Open it with O_CLOEXEC.
#pragma once

#include <unistd.h>

#include <utility>

namespace tsr {

// Moves `fd` to a number other than the three standard descriptors'; returns -1 with errno on failure, and a negative
// `fd` unchanged. If a program was started without standard descriptors, the next opened file would take their numbers,
// and anything logged or printed would go into a checkpoint, to a peer or into shared memory. They refer to /dev/null
// afterwards.
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
