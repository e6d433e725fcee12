#include "base/stream_copy.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace tsr::testing {
namespace {

TEST(StreamCopyTest, CopiesEverySizeToEveryPlaceAndNothingElse) {
    constexpr size_t largest = 70000;
    std::vector<std::byte> from(largest + 200);
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 31 + i / 251 + 1);
    for (const size_t size : {size_t{0}, size_t{1}, size_t{63}, size_t{4096}, size_t{16383}, size_t{16384},
                              size_t{16385}, size_t{16447}, size_t{32768}, size_t{40000}, largest}) {
        for (const size_t to_offset : {0, 1, 16, 63, 64, 100}) {
            for (const size_t from_offset : {0, 1, 8, 63}) {
                std::vector<std::byte> to(largest + 200, std::byte{0xcd});
                stream_copy(to.data() + to_offset, from.data() + from_offset, size);
                for (size_t i = 0; i < to.size(); ++i) {
                    const bool inside = i >= to_offset && i < to_offset + size;
                    ASSERT_EQ(to[i], inside ? from[i - to_offset + from_offset] : std::byte{0xcd})
                        << size << " bytes to " << to_offset << " from " << from_offset << ", at " << i;
                }
            }
        }
    }
}

}  // namespace
}  // namespace tsr::testing
