#include "launch/agent_page.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/page_size.hpp"

namespace tsr {

namespace {

static_assert(sizeof(AgentWords) <= page_size);

// The page behind a descriptor; nullptr if there is none.
const AgentWords* map_page(int fd) {
    if (!is_memory(fd, page_size)) return nullptr;
    void* page = ::mmap(nullptr, page_size, PROT_READ, MAP_SHARED, fd, 0);
    return page == MAP_FAILED ? nullptr : static_cast<const AgentWords*>(page);
}

const AgentWords* find_page() noexcept {
    try {
        const auto fd = env_number("TESSERA_PREEMPT_FD", 0, 1 << 20);
        if (fd) {
            if (const AgentWords* page = map_page(static_cast<int>(*fd))) return page;
        }
        const auto path = env_text("TESSERA_PREEMPT_FILE");
        if (path) {
            const Fd file(::open(path->c_str(), O_RDONLY | O_CLOEXEC));
            if (const AgentWords* page = file.valid() ? map_page(file.get()) : nullptr) return page;
        }
        if (fd || path) {
            log::warning(
                "cannot map the launcher's page (TESSERA_PREEMPT_FD, TESSERA_PREEMPT_FILE); "
                "this rank will miss requests to stop or to write its flight records");
        }
    } catch (...) {
        log::warning("{}", current_error().what());
    }
    return nullptr;
}

}  // namespace

bool is_memory(int fd, size_t size) {
    struct stat info{};
    return ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_nlink == 0 &&
           info.st_size == static_cast<off_t>(size);
}

AgentPage::AgentPage()
    : writer_(::memfd_create("tessera-agent", MFD_CLOEXEC | MFD_ALLOW_SEALING)),
      asked_(::memfd_create("tessera-asked", MFD_CLOEXEC)) {
    if (!writer_.valid() || ::fchmod(writer_.get(), 0600) != 0 || ::ftruncate(writer_.get(), page_size) != 0 ||
        !asked_.valid() || ::fchmod(asked_.get(), 0600) != 0) {
        throw os_error("cannot create the agent's page", errno);
    }
    void* page = ::mmap(nullptr, page_size, PROT_READ | PROT_WRITE, MAP_SHARED, writer_.get(), 0);
    if (page == MAP_FAILED) throw os_error("cannot map the agent's page", errno);
    words_ = static_cast<AgentWords*>(page);
    // From here on no new writable mapping can be made. Kernels before 5.1 lack FUTURE_WRITE: ranks run as the same
    // user.
    (void)::fcntl(writer_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE);
    const std::string path = fmt::format("/proc/self/fd/{}", writer_.get());
    reader_ = Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!reader_.valid()) throw os_error("cannot open the agent's page", errno);
}

AgentPage::~AgentPage() { ::munmap(words_, page_size); }

void AgentPage::begin_round() {
    words_->preempt.store(0, std::memory_order_relaxed);
    if (::ftruncate(asked_.get(), 1) != 0) throw os_error("cannot reset the agent's page", errno);
}

bool AgentPage::somebody_listens() const {
    struct stat info{};
    return ::fstat(asked_.get(), &info) == 0 && info.st_size == 0;
}

void AgentPage::request_preemption() { words_->preempt.store(1, std::memory_order_relaxed); }

void AgentPage::request_flights(const std::string& directory) {
    if (directory.size() >= words_->flight_directory.size()) {
        throw Error(Code::invalid_argument,
                    fmt::format("the path of directory {} has {} bytes; at most {} are allowed", directory,
                                directory.size(), words_->flight_directory.size() - 1));
    }
    std::memcpy(words_->flight_directory.data(), directory.c_str(), directory.size() + 1);
    words_->flights.fetch_add(1, std::memory_order_release);
}

void tell_agent_of_listening() noexcept try {
    if (const auto fd = env_number("TESSERA_PREEMPT_ASKED_FD", 0, 1 << 20)) {
        const int file = static_cast<int>(*fd);
        if (is_memory(file, 1) && ::ftruncate(file, 0) == 0) return;
        if (is_memory(file, 0)) return;  // another rank was first
    }
    const auto path = env_text("TESSERA_PREEMPT_ASKED_FILE");
    if (!path) return;
    const Fd file(::open(path->c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (file.valid()) return;
    log::warning(
        "cannot tell the launcher that this rank polls for preemption: {}: {}; the launcher may stop the rank without "
        "waiting for a save",
        *path, std::generic_category().message(errno));
} catch (...) {
    log::warning("{}", current_error().what());
}

const AgentWords* agent_words() {
    static const AgentWords* const words = find_page();
    return words;
}

}  // namespace tsr
