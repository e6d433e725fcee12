#include "tensor/layout.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "base/error.hpp"

namespace tsr {
namespace {

Layout placed(const Dims& shape, std::vector<int> mesh, std::vector<Placement> placements) {
    return Layout::placed(shape, mesh, placements);
}

TEST(Chunk, CutsAsTorchChunkDoes) {
    // torch.chunk(arange(10), 4): 3, 3, 3, 1; torch.chunk(arange(5), 4): 2, 2, 1 and DTensor's empty last one.
    const auto sizes = [](int64_t size, int64_t parts) {
        std::vector<int64_t> out;
        for (int64_t i = 0; i < parts; ++i) out.push_back(chunk(size, parts, i).end - chunk(size, parts, i).begin);
        return out;
    };
    EXPECT_EQ(sizes(10, 4), (std::vector<int64_t>{3, 3, 3, 1}));
    EXPECT_EQ(sizes(5, 4), (std::vector<int64_t>{2, 2, 1, 0}));
    EXPECT_EQ(sizes(0, 3), (std::vector<int64_t>{0, 0, 0}));
    EXPECT_EQ(sizes(2, 5), (std::vector<int64_t>{1, 1, 0, 0, 0}));
    EXPECT_EQ(chunk(INT64_MAX, 3, 2).end, INT64_MAX);
    EXPECT_EQ(chunk(INT64_MAX - 1, 1 << 20, (1 << 20) - 1).end, INT64_MAX - 1);
}

TEST(Layout, RowsOverFourRanks) {
    const Layout layout = placed({10, 4}, {4}, {Placement::shard(0)});
    EXPECT_EQ(layout.boxes_of(0), (std::vector<Box>{{{0, 0}, {3, 4}}}));
    EXPECT_EQ(layout.boxes_of(3), (std::vector<Box>{{{9, 0}, {1, 4}}}));
    EXPECT_EQ(layout.shard_count(), 4);
    EXPECT_EQ(layout.replica_count(), 1);
}

TEST(Layout, EmptyShardsAreLeftOut) {
    const Layout layout = placed({2}, {4}, {Placement::shard(0)});
    EXPECT_TRUE(layout.boxes_of(3).empty());
    EXPECT_EQ(layout.boxes_of(1), (std::vector<Box>{{{1}, {1}}}));
}

TEST(Layout, ATensorWithoutElementsAndAScalarHaveOneBox) {
    EXPECT_EQ(placed({0, 3}, {2}, {Placement::shard(0)}).boxes_of(1).size(), 1u);
    EXPECT_EQ(Layout::replicated({}, 3).boxes_of(2), (std::vector<Box>{Box{}}));
}

TEST(Layout, MeshDimensionsApplyInOrder) {
    // 2 x 3 mesh, rows first, then columns: rank 4 is row part 1, column part 1.
    const Layout grid = placed({8, 9}, {2, 3}, {Placement::shard(0), Placement::shard(1)});
    EXPECT_EQ(grid.boxes_of(4), (std::vector<Box>{{{4, 3}, {4, 3}}}));
    // Both cut the rows: 8 -> 4 + 4, then each 4 into 2, 2, 0.
    const Layout twice = placed({8}, {2, 3}, {Placement::shard(0), Placement::shard(0)});
    EXPECT_EQ(twice.boxes_of(4), (std::vector<Box>{{{6}, {2}}}));
    EXPECT_TRUE(twice.boxes_of(2).empty());
}

TEST(Layout, ReplicasHoldTheSameShard) {
    const Layout hybrid = placed({8}, {2, 2}, {Placement::replicate(), Placement::shard(0)});
    EXPECT_EQ(hybrid.boxes_of(1), hybrid.boxes_of(3));
    EXPECT_EQ(hybrid.shard_of(3), 1);
    EXPECT_EQ(hybrid.replica_of(3), 1);
    EXPECT_EQ(hybrid.rank_of(1, 0), 1);
}

TEST(Layout, AnotherShapeSharesMeshAndPlacements) {
    const int mesh[] = {2, 2};
    const Placement placements[] = {Placement::replicate(), Placement::shard(1)};
    const Layout layout = Layout::placed({4, 6}, mesh, placements);
    const Layout other = layout.of_shape({3, 5, 2});
    EXPECT_EQ(other, Layout::placed({3, 5, 2}, mesh, placements));
    EXPECT_TRUE(other.same_placements(layout));
    EXPECT_FALSE(other == layout);
    EXPECT_THROW((void)layout.of_shape({4}), Error);
    EXPECT_FALSE(layout.same_placements(Layout::replicated({4, 6}, 4)));
}

TEST(Layout, RefusesWhatMakesNoSense) {
    EXPECT_THROW(placed({8}, {2}, {Placement::shard(1)}), Error);
    EXPECT_THROW(placed({8}, {0}, {Placement::shard(0)}), Error);
    EXPECT_THROW(placed({8}, {2, 2}, {Placement::shard(0)}), Error);
    EXPECT_THROW(placed({8}, {}, {}), Error);
    EXPECT_THROW(placed({8}, {1 << 15, 1 << 15}, {Placement::shard(0), Placement::replicate()}), Error);
    EXPECT_THROW((void)placed({8}, {2}, {Placement::shard(0)}).boxes_of(2), Error);
}

// Every element is held by exactly replica_count ranks, rank_of inverts shard_of, and overlaps are those that a scan
// over all shards finds.
TEST(Layout, RandomLayoutsCoverEveryElement) {
    const uint32_t seed = 20261121;
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
    for (int round = 0; round < 400; ++round) {
        Dims shape = below(3) == 0 ? Dims{1 + below(12)} : Dims{1 + below(7), 1 + below(7), 1 + below(3)};
        std::vector<int> mesh;
        std::vector<Placement> placements;
        for (int m = 0; m <= below(3); ++m) {
            mesh.push_back(1 + below(4));
            placements.push_back(below(3) == 0 ? Placement::replicate() : Placement::shard(below(shape.ndim())));
        }
        const Layout layout = placed(shape, mesh, placements);
        std::map<std::array<int64_t, 3>, int> held;
        for (int rank = 0; rank < layout.world_size(); ++rank) {
            ASSERT_EQ(layout.rank_of(layout.shard_of(rank), layout.replica_of(rank)), rank);
            for (const Box& box : layout.boxes_of(rank)) {
                ASSERT_TRUE(box.inside(shape));
                const auto size = [&](int d) { return d < shape.ndim() ? box.sizes[d] : 1; };
                const auto offset = [&](int d) { return d < shape.ndim() ? box.offsets[d] : 0; };
                for (int64_t i = 0; i < size(0); ++i)
                    for (int64_t j = 0; j < size(1); ++j)
                        for (int64_t k = 0; k < size(2); ++k) ++held[{offset(0) + i, offset(1) + j, offset(2) + k}];
            }
        }
        ASSERT_EQ(static_cast<int64_t>(held.size()), shape.product()) << layout.str();
        for (const auto& [element, count] : held) ASSERT_EQ(count, layout.replica_count()) << layout.str();

        Box wanted = Box::whole(shape);
        for (int d = 0; d < shape.ndim(); ++d) {
            wanted.offsets[d] = below(static_cast<int>(shape[d]));
            wanted.sizes[d] = below(static_cast<int>(shape[d] - wanted.offsets[d]) + 1);
        }
        std::vector<int> expected;
        for (int s = 0; s < layout.shard_count(); ++s) {
            if (!layout.shard(s).intersect(wanted).empty()) expected.push_back(s);
        }
        std::vector<int> found;
        layout.for_each_overlap(wanted, [&](int s, const Box& box) {
            EXPECT_EQ(box, layout.shard(s));
            found.push_back(s);
        });
        ASSERT_EQ(found, expected) << layout.str() << " wanted " << wanted.str();
    }
}

// Every range of elements of some shapes, against counting.
TEST(BoxesOfRange, AreItsElementsInOrder) {
    for (const Dims& shape : {Dims{}, Dims{1}, Dims{5}, Dims{3, 4}, Dims{1, 6}, Dims{4, 1, 3}, Dims{2, 3, 2, 2}}) {
        for (int64_t begin = 0; begin <= shape.product(); ++begin) {
            for (int64_t end = begin; end <= shape.product(); ++end) {
                const std::vector<Box> boxes = boxes_of_range(shape, {begin, end});
                ASSERT_LE(boxes.size(), static_cast<size_t>(std::max(1, 2 * shape.ndim() - 1)));
                int64_t next = begin;
                for (const Box& box : boxes) {
                    ASSERT_TRUE(box.inside(shape) && !box.empty());
                    for (int64_t i = 0; i < box.numel(); ++i, ++next) {
                        int64_t rest = i;
                        int64_t element = 0;
                        int64_t stride = 1;
                        for (int d = shape.ndim() - 1; d >= 0; --d) {
                            element += (box.offsets[d] + rest % box.sizes[d]) * stride;
                            rest /= box.sizes[d];
                            stride *= shape[d];
                        }
                        ASSERT_EQ(element, next) << shape.str() << " from " << begin << " to " << end;
                    }
                }
                ASSERT_EQ(next, end) << shape.str();
            }
        }
    }
    EXPECT_TRUE(boxes_of_range(Dims{0, 4}, {0, 0}).empty());
}

TEST(ExplicitLayout, KeepsEachRanksBoxesAndReplicas) {
    const std::vector<Box> boxes{{{0, 0}, {2, 4}}, {{2, 0}, {1, 2}}, {{0, 0}, {2, 4}}};
    const Layout layout = Layout::from_boxes({3, 4}, boxes, std::vector<int>{2, 0, 1});
    EXPECT_EQ(layout.world_size(), 3);
    EXPECT_EQ(layout.boxes_of(0).size(), 2u);
    EXPECT_TRUE(layout.boxes_of(1).empty());
    EXPECT_EQ(layout.boxes_of(2)[0], boxes[0]);
}

TEST(ExplicitLayout, RefusesPartialOverlapAndWhatLiesOutside) {
    const auto make = [](std::vector<Box> boxes) {
        return Layout::from_boxes({4, 4}, boxes, std::vector<int>{static_cast<int>(boxes.size())});
    };
    EXPECT_THROW(make({{{0, 0}, {2, 4}}, {{1, 0}, {2, 4}}}), Error);
    EXPECT_THROW(make({{{0, 0}, {4, 2}}, {{0, 1}, {4, 2}}}), Error);
    EXPECT_THROW(make({{{0, 0}, {5, 4}}}), Error);
    EXPECT_THROW(make({{{-1, 0}, {2, 4}}}), Error);
    EXPECT_THROW(make({{{1, 0}, {INT64_MAX, 4}}}), Error);
    EXPECT_THROW((void)Layout::from_boxes({4}, std::vector<Box>{{{0}, {4}}}, std::vector<int>{0}), Error);
    EXPECT_NO_THROW(make({{{0, 0}, {2, 4}}, {{2, 0}, {2, 4}}}));
    try {
        const std::vector<Box> boxes{{{0}, {1}}, {{1}, {1}}, {{3}, {1}}, {{1}, {3}}};
        (void)Layout::from_boxes({4}, boxes, std::vector<int>{1, 0, 2, 1});
        FAIL() << "two overlap";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("[1:2] of rank 2 and [1:4] of rank 3"), std::string::npos)
            << error.what();
    }
}

// Long along the first dimension, each within those before it, and one row apart along the second. To compare every two
// takes minutes.
TEST(ExplicitLayout, ManyBoxesThatOneDimensionSeparatesAreComparedAlongIt) {
    constexpr int64_t count = 200'000;
    std::vector<Box> boxes;
    for (int64_t i = 0; i < count; ++i) boxes.push_back({{i, i}, {count - i, 1}});
    const int all = static_cast<int>(count);
    EXPECT_EQ(Layout::from_boxes({count, count}, boxes, std::span(&all, 1)).boxes_of(0).size(), boxes.size());
    boxes.push_back({{count - 1, 5}, {1, 1}});
    const int more = all + 1;
    EXPECT_THROW((void)Layout::from_boxes({count, count}, boxes, std::span(&more, 1)), Error);
}

// Every dimension alone leaves n/5 boxes beside each other. To compare those takes minutes.
TEST(ExplicitLayout, AGridIsTakenApartDimensionByDimension) {
    const Dims shape{5, 5, 5, 5, 5, 5, 5, 5};
    std::vector<Box> boxes;
    for (int64_t n = 0; n < shape.product(); ++n) {
        Box box{shape, {1, 1, 1, 1, 1, 1, 1, 1}};
        for (int64_t d = 0, rest = n; d < 8; ++d, rest /= 5) box.offsets[static_cast<int>(d)] = rest % 5;
        boxes.push_back(box);
    }
    const int all = static_cast<int>(boxes.size());
    EXPECT_NO_THROW((void)Layout::from_boxes(shape, boxes, std::span(&all, 1)));
    boxes[1000].sizes[7] = 2;
    EXPECT_THROW((void)Layout::from_boxes(shape, boxes, std::span(&all, 1)), Error);
}

// Four blocks of bars around a hole: no plane passes between them.
TEST(ExplicitLayout, BarsThatInterlockAreComparedUpToABound) {
    const auto pinwheel = [](int64_t a, int64_t b) {
        std::vector<Box> boxes;
        for (int64_t i = 0; i < a; ++i) {
            boxes.push_back({{i, 0}, {1, b}});
            boxes.push_back({{0, b + i}, {b, 1}});
            boxes.push_back({{b + i, a}, {1, b}});
            boxes.push_back({{a, i}, {b, 1}});
        }
        return boxes;
    };
    const auto make = [](const std::vector<Box>& boxes, int64_t size) {
        const int all = static_cast<int>(boxes.size());
        return Layout::from_boxes({size, size}, boxes, std::span(&all, 1));
    };
    std::vector<Box> boxes = pinwheel(30, 50);
    EXPECT_NO_THROW((void)make(boxes, 80));
    boxes.push_back({{30, 30}, {20, 20}});  // the hole
    EXPECT_NO_THROW((void)make(boxes, 80));
    boxes.back().sizes[1] = 21;
    EXPECT_THROW((void)make(boxes, 80), Error);
    try {
        (void)make(pinwheel(20'000, 30'000), 50'000);
        ADD_FAILURE() << "it was taken";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_NE(std::string(error.what()).find("checking 80000 interlocked boxes"), std::string::npos)
            << error.what();
    }
}

}  // namespace
}  // namespace tsr
