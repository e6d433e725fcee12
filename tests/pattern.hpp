// The numbers that the checkpoint tests save: the content of one element follows from the tensor's name and the element's
// place in the whole tensor. Millions of them are written and compared in a test, so that this is in a library which is
// optimised also where the tests are not (tests/CMakeLists.txt).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tsr::testing {

class Pattern {
   public:
    // `salt` tells one filling from another.
    explicit Pattern(const std::string& name, uint64_t salt = 0);

    // Of the element at `place`, of which its lowest bytes count.
    [[nodiscard]] uint64_t at(int64_t place) const;
    // Writes `count` elements of `size` bytes (1, 2, 4 or 8), the first of which is at `place`.
    void write(std::byte* to, size_t size, int64_t place, int64_t count) const;
    // How many of them are not what write() writes.
    [[nodiscard]] int64_t differences(const std::byte* from, size_t size, int64_t place, int64_t count) const;

   private:
    uint64_t of_name_;
    uint64_t salt_;
};

}  // namespace tsr::testing
