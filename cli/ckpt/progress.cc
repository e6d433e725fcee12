#include "ckpt/progress.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>

#include "ckpt/print.hpp"

namespace tsr::cli {

namespace {

constexpr milliseconds pause{200};
constexpr const char* clear_line = "\r\033[K";

}  // namespace

Progress::Progress(std::string what, int64_t total_bytes)
    : what_(std::move(what)), total_(total_bytes), shown_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
    if (shown_ && done_ > 0) fmt::print(stderr, "{}", clear_line);
}

void Progress::add(int64_t bytes) {
    if (!shown_) return;
    const std::lock_guard lock(mutex_);
    done_ += bytes;
    const auto now = Clock::now();
    if (now < next_) return;
    next_ = now + pause;
    const double part = total_ > 0 ? static_cast<double>(done_) / static_cast<double>(total_) : 1;
    fmt::print(stderr, "{}{}: {:.0f} % of {}", clear_line, what_, 100 * part, size_text(total_));
    (void)std::fflush(stderr);
}

}  // namespace tsr::cli
