// The size of a page of memory, in bytes. Where the kernel's are larger, memory is laid out in these all the same.
#pragma once

#include <cstddef>

namespace tsr {

inline constexpr size_t page_size = 4096;

}  // namespace tsr
