// A range of addresses that is kept for life and shows one piece of shared memory or another there, page for page: views
// into it stay where they are while what they show comes and goes. Owned by one thread.
#pragma once

#include <cstddef>

namespace tsr {

class AddressRange {
   public:
    AddressRange() = default;
    explicit AddressRange(size_t size);  // throws NO_MEMORY
    AddressRange(AddressRange&& other) noexcept;
    AddressRange& operator=(AddressRange&& other) noexcept;
    ~AddressRange();

    [[nodiscard]] std::byte* data() const { return data_; }
    // `memory`: pages of a MAP_SHARED mapping of this process, the range's size; they live on while they are shown.
    void show(std::byte* memory);
    // Who touches it from here on ends by SIGSEGV rather than with what is not meant.
    void hide();

   private:
    std::byte* data_ = nullptr;
    size_t size_ = 0;
    std::byte* shown_ = nullptr;
};

}  // namespace tsr
