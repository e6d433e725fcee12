#include "launch/preempt.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/log.hpp"

namespace tsr {

namespace {

constexpr size_t page_size = 4096;
// Relaxed on both sides: nothing else is published by the flag.
using Flag = std::atomic<uint32_t>;
static_assert(Flag::is_always_lock_free);

// The page behind a descriptor; nullptr if it is something else, such as a file that a program opened in its place.
const Flag* map_page(int fd) {
    struct stat info{};
    if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_nlink != 0 ||
        info.st_size != static_cast<off_t>(page_size)) {
        return nullptr;
    }
    void* page = ::mmap(nullptr, page_size, PROT_READ, MAP_SHARED, fd, 0);
    return page == MAP_FAILED ? nullptr : static_cast<const Flag*>(page);
}

// Tells the agent that this rank listens. Without it the rank may be ended before it has saved.
void tell_agent() noexcept try {
    const auto path = env_text("TESSERA_PREEMPT_ASKED_FILE");
    if (!path) return;
    const Fd file(::open(path->c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (file.valid()) return;
    log::warning(
        "the launcher cannot be told that this rank listens for preemption: {}: {}; it may end the rank at once when "
        "it "
        "is asked to stop",
        *path, std::generic_category().message(errno));
} catch (...) {
    log::warning("{}", current_error().what());
}

const Flag* find_page() noexcept {
    try {
        const auto fd = env_number("TESSERA_PREEMPT_FD", 0, 1 << 20);
        if (fd) {
            if (const Flag* page = map_page(static_cast<int>(*fd))) return page;
        }
        const auto path = env_text("TESSERA_PREEMPT_FILE");
        if (path) {
            const Fd file(::open(path->c_str(), O_RDONLY | O_CLOEXEC));
            if (const Flag* page = file.valid() ? map_page(file.get()) : nullptr) return page;
        }
        if (fd || path) {
            log::warning(
                "the launcher's preemption flag cannot be read (TESSERA_PREEMPT_FD, TESSERA_PREEMPT_FILE): "
                "this rank will not see a request to stop");
        }
    } catch (...) {
        log::warning("{}", current_error().what());
    }
    return nullptr;
}

}  // namespace

PreemptPage::PreemptPage() : writer_(::memfd_create("tessera-preempt", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    if (!writer_.valid() || ::fchmod(writer_.get(), 0600) != 0 || ::ftruncate(writer_.get(), page_size) != 0) {
        throw os_error("making the preemption flag", errno);
    }
    void* page = ::mmap(nullptr, page_size, PROT_READ | PROT_WRITE, MAP_SHARED, writer_.get(), 0);
    if (page == MAP_FAILED) throw os_error("mapping the preemption flag", errno);
    flag_ = static_cast<Flag*>(page);
    // From here on no new writable mapping can be made. Kernels before 5.1 lack FUTURE_WRITE: ranks run as the same user.
    (void)::fcntl(writer_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE);
    const std::string path = fmt::format("/proc/self/fd/{}", writer_.get());
    reader_ = Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!reader_.valid()) throw os_error("opening the preemption flag", errno);
}

PreemptPage::~PreemptPage() { ::munmap(flag_, page_size); }

void PreemptPage::request() { flag_->store(1, std::memory_order_relaxed); }

bool preempt_requested() {
    static const Flag* const page = [] {
        const Flag* found = find_page();
        if (found != nullptr) tell_agent();
        return found;
    }();
    return page != nullptr && page->load(std::memory_order_relaxed) != 0;
}

}  // namespace tsr
