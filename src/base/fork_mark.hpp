// Distinguishes a process from its forked children. A child has copies of the parent's objects but none of its threads,
// and shares its shared memory: using such a copy would act in the parent's name.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <new>

#include "base/clock.hpp"
#include "base/page_size.hpp"

namespace tsr {

// Identifies the process that created it.
class ForkMark {
   public:
    // A single load; getpid() would be a system call.
    [[nodiscard]] bool in_child() const {
        return page_ != nullptr ? page_->load(std::memory_order_relaxed) != made_by_ : pid() != made_by_;
    }

   private:
    using Number = std::atomic<uint64_t>;

    static uint64_t pid() { return static_cast<uint64_t>(::getpid()); }
    static uint64_t this_process() {
        [[maybe_unused]] static const bool made = make_page();
        if (page_ == nullptr) return pid();
        uint64_t number = page_->load(std::memory_order_relaxed);
        if (number != 0) return number;
        // Different from that of every ancestor, even one with the same pid.
        const auto now = static_cast<uint64_t>(Clock::now().time_since_epoch().count());
        const uint64_t fresh = (now << 22 ^ pid()) | 1;
        return page_->compare_exchange_strong(number, fresh) ? fresh : number;
    }
    static bool make_page() {
        void* page = ::mmap(nullptr, page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) return false;
        if (::madvise(page, page_size, MADV_WIPEONFORK) != 0) {  // before Linux 4.14
            ::munmap(page, page_size);
            return false;
        }
        page_ = new (page) Number(0);
        return true;
    }

    // In a page that the kernel zeroes in a child; never freed. Set before the first mark is created.
    inline static Number* page_ = nullptr;
    uint64_t made_by_ = this_process();
};

}  // namespace tsr
