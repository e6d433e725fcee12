#include "tensor/mesh_shape.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.hpp"

namespace tsr {
namespace {

using ::testing::HasSubstr;

TEST(MeshShape, RanksAreRowMajor) {
    const MeshShape mesh({"pp", "dp", "tp"}, {2, 3, 4});
    EXPECT_EQ(mesh.rank_count(), 24);
    int rank = 0;
    for (int pp = 0; pp < 2; ++pp) {
        for (int dp = 0; dp < 3; ++dp) {
            for (int tp = 0; tp < 4; ++tp, ++rank) {
                EXPECT_EQ(mesh.coordinate(rank, 0), pp);
                EXPECT_EQ(mesh.coordinate(rank, 1), dp);
                EXPECT_EQ(mesh.coordinate(rank, 2), tp);
            }
        }
    }
}

TEST(MeshShape, GroupsOfADimensionDifferInThatCoordinateAlone) {
    const MeshShape mesh({"dp", "tp"}, {3, 4});
    for (int dim = 0; dim < 2; ++dim) {
        for (int a = 0; a < 12; ++a) {
            for (int b = 0; b < 12; ++b) {
                const bool same_elsewhere = mesh.coordinate(a, 1 - dim) == mesh.coordinate(b, 1 - dim);
                EXPECT_EQ(mesh.first_of_group(a, dim) == mesh.first_of_group(b, dim), same_elsewhere);
            }
        }
    }
    EXPECT_EQ(mesh.first_of_group(6, 0), 2);
    EXPECT_EQ(mesh.first_of_group(6, 1), 4);
}

TEST(MeshShape, DimensionsAreFoundByName) {
    const MeshShape mesh({"dp", "tp"}, {3, 4});
    EXPECT_EQ(mesh.dim("tp"), 1);
    EXPECT_EQ(mesh.str(), "dp 3, tp 4");
    try {
        (void)mesh.dim("pp");
        ADD_FAILURE() << "an unknown dimension was found";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::not_found);
        EXPECT_THAT(error.what(), HasSubstr("\"pp\"; it has dp, tp"));
    }
}

TEST(MeshShape, BadShapesAreRefused) {
    EXPECT_THROW(MeshShape({}, {}), Error);
    EXPECT_THROW(MeshShape({"dp"}, {2, 2}), Error);
    EXPECT_THROW(MeshShape({"dp", "dp"}, {2, 2}), Error);
    EXPECT_THROW(MeshShape({"dp", ""}, {2, 2}), Error);
    EXPECT_THROW(MeshShape({"dp"}, {0}), Error);
    EXPECT_THROW(MeshShape({"a", "b", "c"}, {65536, 65536, 2}), Error);
    EXPECT_THROW(MeshShape(std::vector<std::string>(9, "x"), std::vector<int>(9, 1)), Error);
}

}  // namespace
}  // namespace tsr
