#include "tensor/overlap.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace tsr {
namespace {

TEST(Overlap, IsFoundWhereverItIs) {
    std::vector<float> memory(100);
    const auto at = [&](size_t begin, int64_t elements) {
        return Tensor{reinterpret_cast<std::byte*>(memory.data() + begin), Dims{elements}, DType::f32, {}};
    };
    using Pair = std::pair<size_t, size_t>;
    EXPECT_EQ(find_overlap({}), std::nullopt);
    const std::vector<Tensor> apart{at(50, 50),
                                    at(0, 10),
                                    at(10, 40),
                                    at(10, 0),
                                    {nullptr, Dims{5}, DType::f32, {}},
                                    {nullptr, Dims{5}, DType::f32, {}}};
    EXPECT_EQ(find_overlap(apart), std::nullopt);
    EXPECT_EQ(find_overlap(std::vector{at(20, 1), at(5, 5), at(20, 1)}), (Pair{0, 2})) << "the same";
    EXPECT_EQ(find_overlap(std::vector{at(9, 5), at(50, 2), at(5, 5)}), (Pair{0, 2})) << "by an element";
    EXPECT_EQ(find_overlap(std::vector{at(60, 1), at(40, 1), at(0, 100)}), (Pair{1, 2})) << "one within another";
    EXPECT_EQ(find_overlap(std::vector{at(5, 0), at(0, 10)}), std::nullopt) << "nothing within another";
}

}  // namespace
}  // namespace tsr
