// Tells a process from a child that it forked, which holds copies of its objects but none of its threads, and shares its
// shared memory: who uses such a copy would take part in the parent's name.
#pragma once

#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "base/page_size.hpp"

namespace tsr {

class ForkMark {
   public:
    ForkMark() {
        void* page = ::mmap(nullptr, page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) return;
        if (::madvise(page, page_size, MADV_WIPEONFORK) != 0) {  // before Linux 4.14
            ::munmap(page, page_size);
            return;
        }
        mark_ = static_cast<uint64_t*>(page);
        *mark_ = 1;
    }
    ~ForkMark() {
        if (mark_ != nullptr) ::munmap(mark_, page_size);
    }
    ForkMark(const ForkMark&) = delete;
    ForkMark& operator=(const ForkMark&) = delete;

    // A load, where a getpid() would be a call of the kernel.
    [[nodiscard]] bool in_child() const {
        return mark_ != nullptr ? *const_cast<const volatile uint64_t*>(mark_) == 0 : ::getpid() != owner_;
    }

   private:
    uint64_t* mark_ = nullptr;  // in a page that the kernel zeroes in a child
    const pid_t owner_ = ::getpid();
};

}  // namespace tsr
