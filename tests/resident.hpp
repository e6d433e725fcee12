// Whether all pages of a range of memory, which begins with one, are in memory.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace tsr::testing {

inline bool is_resident(std::span<const std::byte> memory) {
    std::vector<unsigned char> pages((memory.size() + 4095) / 4096);
    auto* begin = const_cast<std::byte*>(memory.data());  // mincore writes to the vector alone
    EXPECT_EQ(::mincore(begin, memory.size(), pages.data()), 0);
    return std::all_of(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1U) != 0; });
}

}  // namespace tsr::testing
