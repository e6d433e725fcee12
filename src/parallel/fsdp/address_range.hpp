// A range of addresses that stays reserved for the object's life and maps one piece of shared memory after another,
// page by page. Views into it keep their addresses while the memory behind them changes. Owned by one thread.
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
    // `memory`: pages of a MAP_SHARED mapping of this process, of the range's size; they stay alive while they are
    // mapped here.
    void show(std::byte* memory);
    // Later accesses fail with SIGSEGV instead of reading other data.
    void hide();

   private:
    std::byte* data_ = nullptr;
    size_t size_ = 0;
    std::byte* shown_ = nullptr;
};

}  // namespace tsr
