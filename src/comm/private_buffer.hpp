// A buffer of a transport that reaches no other rank's memory: zeroed pages of this process.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>

#include "comm/communicator.hpp"

namespace tsr {

class PrivateBuffer final : public Buffer {
   public:
    explicit PrivateBuffer(size_t size) : size_(checked(size)), data_(::operator new(size, alignment)) {
        std::memset(data_, 0, size);
    }
    PrivateBuffer(const PrivateBuffer&) = delete;
    PrivateBuffer& operator=(const PrivateBuffer&) = delete;
    ~PrivateBuffer() override { ::operator delete(data_, alignment); }
    [[nodiscard]] std::byte* data() const override { return static_cast<std::byte*>(data_); }
    [[nodiscard]] size_t size() const override { return size_; }

   private:
    static constexpr std::align_val_t alignment{4096};
    // Rounding a size near the largest up to the alignment would make it small.
    static size_t checked(size_t size) {
        if (size > static_cast<size_t>(PTRDIFF_MAX)) throw std::bad_alloc();
        return size;
    }
    size_t size_;
    void* data_;
};

}  // namespace tsr
