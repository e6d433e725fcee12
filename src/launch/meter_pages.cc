#include "launch/meter_pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <limits>

#include "base/dir_at.hpp"
#include "base/env.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/meter.hpp"
#include "base/page_size.hpp"
#include "launch/agent_page.hpp"
#include "launch/job.hpp"

namespace tsr {

namespace {

int64_t number(const std::atomic<uint64_t>& counter) {
    constexpr uint64_t most = std::numeric_limits<int64_t>::max();
    return static_cast<int64_t>(std::min(counter.load(std::memory_order_relaxed), most));
}

Meter* map_page(int fd, size_t page) {
    // Only the launcher's own memory, which nobody can shorten, is written to; other files have no such seals.
    constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW;
    const int has = ::fcntl(fd, F_GET_SEALS);
    if (has < 0 || (has & seals) != seals) return nullptr;
    void* at = ::mmap(nullptr, page_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(page * page_size));
    return at == MAP_FAILED ? nullptr : static_cast<Meter*>(at);
}

Meter* find_page() {
    const auto pages = env_number("TESSERA_METER_PAGES", 1, max_ranks);
    const auto place = env_number("TESSERA_LOCAL_RANK", 0, max_ranks - 1);
    if (!pages || !place || *place >= *pages) return nullptr;
    const size_t size = static_cast<size_t>(*pages) * page_size;
    if (const auto fd = env_number("TESSERA_METER_FD", 0, 1 << 20); fd && is_memory(static_cast<int>(*fd), size)) {
        if (Meter* page = map_page(static_cast<int>(*fd), static_cast<size_t>(*place))) return page;
    }
    const auto path = env_text("TESSERA_METER_FILE");
    if (!path) return nullptr;
    const Fd file(DirAt::working().open_file(*path, O_RDWR, 0, DirAt::Links::followed));
    return file.valid() && is_memory(file.get(), size) ? map_page(file.get(), static_cast<size_t>(*place)) : nullptr;
}

}  // namespace

MeterPages::MeterPages(size_t ranks)
    : ranks_(ranks), file_(::memfd_create("tessera-meters", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    const size_t size = ranks_ * page_size;
    if (!file_.valid() || ::fchmod(file_.get(), 0600) != 0 || ::ftruncate(file_.get(), static_cast<off_t>(size)) != 0 ||
        ::fcntl(file_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        throw os_error("cannot create the ranks' meters", errno);
    }
    void* pages = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file_.get(), 0);
    if (pages == MAP_FAILED) throw os_error("cannot map the ranks' meters", errno);
    pages_ = static_cast<const std::byte*>(pages);
}

MeterPages::~MeterPages() { ::munmap(const_cast<std::byte*>(pages_), ranks_ * page_size); }

void MeterPages::clear(size_t place) {
    static constexpr std::array<char, page_size> zeros{};
    const ssize_t written = ::pwrite(file_.get(), zeros.data(), zeros.size(), static_cast<off_t>(place * page_size));
    if (written != static_cast<ssize_t>(zeros.size())) log::warning("cannot clear a rank's meter: errno {}", errno);
}

RankFigures MeterPages::read(size_t place) const {
    const auto& meter = *reinterpret_cast<const Meter*>(pages_ + place * page_size);
    const TickScale::Mark now = TickScale::Mark::now();
    const TickScale scale(made_, now);
    const double utc = static_cast<double>(now.utc_ns) * 1e-9;
    const auto time_of = [&](const std::atomic<uint64_t>& ticks) {
        const uint64_t at = ticks.load(std::memory_order_relaxed);
        return at == 0 ? 0 : std::max(utc - scale.seconds_since(at), 0.0);
    };
    const auto span_of = [&](const std::atomic<uint64_t>& ticks) {
        return scale.seconds(ticks.load(std::memory_order_relaxed));
    };
    RankFigures figures;
    figures.steps = number(meter.steps);
    figures.step = meter.step.load(std::memory_order_relaxed);
    figures.step_time = time_of(meter.step_ended);
    figures.step_s = span_of(meter.step_ticks);
    figures.exposed_s = span_of(meter.waited);
    figures.bytes = number(meter.bytes);
    figures.saves = number(meter.saves);
    figures.failed_saves = number(meter.failed_saves);
    figures.saved_bytes = number(meter.saved_bytes);
    figures.save.step = meter.save_step.load(std::memory_order_relaxed);
    figures.save.time = time_of(meter.save_ended);
    figures.save.duration_s = span_of(meter.save_ticks);
    return figures;
}

void count_for_agent() {
    static const bool done = [] {
        Meter* page = nullptr;
        try {
            page = find_page();
        } catch (const Error& error) {
            log::warning("{}; `tessera top` will show no figures of this rank", error.what());
        }
        if (page != nullptr) count_in(*page);
        return true;
    }();
    (void)done;
}

}  // namespace tsr
