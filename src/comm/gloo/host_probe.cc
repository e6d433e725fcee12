#include "comm/gloo/host_probe.hpp"

#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>

namespace tsr::gloo_transport {

namespace {

constexpr milliseconds longest_gap{2000};
constexpr milliseconds soonest{100};  // after which an error is tried again

bool is_no_answer(int error) {
    return error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN || error == ENETDOWN ||
           error == ETIMEDOUT;
}

}  // namespace

bool HostProbe::is_silent(const sockaddr_storage& address, Clock::time_point now) {
    const std::lock_guard lock(mutex_);
    if (now - last_call_ > longest_gap && silent_since_) silent_since_ = now;
    last_call_ = now;
    if (asking_.valid()) take_answer(now);
    // The kernel retries after 1, 2, 4, ... seconds; probing again ourselves finds a host that comes back sooner.
    if (asking_.valid() && now - asked_ >= std::max(patience_ / 8, milliseconds{200})) asking_.reset();
    if (!asking_.valid() && now >= next_) ask(address, now);
    return silent_since_ && now - *silent_since_ >= patience_;
}

bool HostProbe::is_asking() const {
    const std::lock_guard lock(mutex_);
    return asking_.valid();
}

void HostProbe::ask(const sockaddr_storage& address, Clock::time_point now) {
    asking_ = Fd(::socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!asking_.valid()) {  // this process is out of descriptors, which says nothing about the host
        silent_since_.reset();
        next_ = now + patience_ / 3;
        return;
    }
    asked_ = now;
    if (!silent_since_) silent_since_ = now;
    const socklen_t size = address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    if (::connect(asking_.get(), reinterpret_cast<const sockaddr*>(&address), size) == 0) return judge(0, now);
    if (errno != EINPROGRESS) judge(errno, now);
}

void HostProbe::take_answer(Clock::time_point now) {
    pollfd ready{asking_.get(), POLLOUT, 0};
    if (::poll(&ready, 1, 0) <= 0) return;
    int error = 0;
    socklen_t size = sizeof error;
    if (::getsockopt(asking_.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    judge(error, now);
}

void HostProbe::judge(int error, Clock::time_point now) {
    asking_.reset();
    if (is_no_answer(error)) {
        next_ = now + soonest;
        return;
    }
    silent_since_.reset();
    next_ = now + patience_ / 3;
}

}  // namespace tsr::gloo_transport
