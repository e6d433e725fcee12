// The buffer of a transport without shared memory: zeroed pages of this process.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "comm/communicator.hpp"

namespace tsr {

class PrivateBuffer final : public Buffer {
   public:
    explicit PrivateBuffer(size_t size)
        : size_(size), data_(::mmap(nullptr, mapped(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
        if (data_ == MAP_FAILED) throw std::bad_alloc();
    }
    PrivateBuffer(const PrivateBuffer&) = delete;
    PrivateBuffer& operator=(const PrivateBuffer&) = delete;
    ~PrivateBuffer() override { ::munmap(data_, mapped()); }
    [[nodiscard]] std::byte* data() const override { return static_cast<std::byte*>(data_); }
    [[nodiscard]] size_t size() const override { return size_; }

   private:
    [[nodiscard]] size_t mapped() const { return std::max<size_t>(size_, 1); }

    size_t size_;
    void* data_;
};

}  // namespace tsr
