#include "parallel/fsdp/address_range.hpp"

#include <fmt/core.h>
#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "base/error.hpp"
#include "base/page_size.hpp"
#include "base/round_up.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace tsr {

namespace {

constexpr int empty_flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

}  // namespace

AddressRange::AddressRange(size_t size) : size_(round_up(size, page_size)) {
    if (size_ == 0) return;
    void* const reserved = ::mmap(nullptr, size_, PROT_NONE, empty_flags, -1, 0);
    if (reserved == MAP_FAILED) throw os_error(fmt::format("cannot reserve {} bytes of address space", size_), errno);
    data_ = static_cast<std::byte*>(reserved);
}

AddressRange::AddressRange(AddressRange&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(other.size_), shown_(other.shown_) {}

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(shown_, other.shown_);
    return *this;
}

AddressRange::~AddressRange() {
    if (data_ != nullptr) ::munmap(data_, size_);
}

void AddressRange::show(std::byte* memory) {
    if (data_ == nullptr || memory == shown_) return;
    // For a shared mapping, an old size of 0 creates a second mapping of the same pages (mremap(2)).
    if (::mremap(memory, 0, size_, MREMAP_MAYMOVE | MREMAP_FIXED, data_) == MAP_FAILED) {
        throw os_error(fmt::format("cannot map {} bytes of shared memory a second time", size_), errno);
    }
    shown_ = memory;
    // Fill the page table at once instead of by one fault per page. Best effort: kernels before 5.14 do not support it.
    ::madvise(data_, size_, MADV_POPULATE_WRITE);
#ifndef NDEBUG
    ::mprotect(data_, size_, PROT_READ);
#endif
}

void AddressRange::hide() {
    if (shown_ == nullptr) return;
    shown_ = nullptr;
    ::mmap(data_, size_, PROT_NONE, empty_flags | MAP_FIXED, -1, 0);
}

}  // namespace tsr
