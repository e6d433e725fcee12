// The page size in bytes that memory layouts use, even where the kernel's pages are larger.
#pragma once

#include <cstddef>

namespace tsr {

inline constexpr size_t page_size = 4096;

}  // namespace tsr
