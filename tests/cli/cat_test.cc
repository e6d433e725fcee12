// `tessera ckpt cat`: statistics, slices, bytes and values, of checkpoints of several world sizes.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "checkpoint/model/batches.hpp"
#include "cli/command.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

class Cat : public ::testing::TestWithParam<int> {
   protected:
    TempDir dir_;
    std::string root_ = dir_ / "root";
};

TEST_P(Cat, StatisticsAreOfTheWholeTensor) {
    save_numbers(root_, GetParam());
    const Json grid = json_of("cat --json " + root_ + " grid");
    EXPECT_EQ(grid.at("dtype").as_string(), "f32");
    EXPECT_EQ(grid.at("count").as_int(), 35);
    EXPECT_EQ(grid.at("zero").as_int(), 1);
    EXPECT_EQ(grid.at("min").as_double(), 0);
    EXPECT_EQ(grid.at("max").as_double(), 34);
    EXPECT_EQ(grid.at("mean").as_double(), 17);
    EXPECT_DOUBLE_EQ(grid.at("norm").as_double(), std::sqrt(34.0 * 35 * 69 / 6));
    ASSERT_EQ(grid.at("first").as_array().size(), 8u);
    EXPECT_EQ(grid.at("first").as_array()[7].as_double(), 7);
    EXPECT_EQ(json_of("cat --json " + root_ + " columns").at("max").as_int(), 23 * 23);
    const Json half = json_of("cat --json " + root_ + " half");
    EXPECT_EQ(half.at("min").as_double(), -3);
    EXPECT_EQ(half.at("max").as_double(), 1);
    EXPECT_FALSE(json_of("cat --json " + root_ + " flags").at("min").as_bool());
    EXPECT_EQ(json_of("cat --json " + root_ + " scalar").at("mean").as_double(), 2.5);
    EXPECT_TRUE(json_of("cat --json " + root_ + " empty").at("min").is(Json::Kind::null));
    const Result text = tessera("cat " + root_ + " grid");
    EXPECT_EQ(text.code, 0);
    EXPECT_THAT(text.output, HasSubstr("shape   [7, 5], 35 elements, 140 B\n"));
    EXPECT_THAT(text.output, HasSubstr("first   0 1 2 3 4 5 6 7 ...\n"));
}

TEST_P(Cat, ASliceIsAsNumPyHasIt) {
    save_numbers(root_, GetParam());
    const auto values = [&](const std::string& name, const std::string& slice) {
        return json_of("cat --json " + root_ + " " + name + " --slice='" + slice + "'").at("values").dump();
    };
    EXPECT_EQ(values("grid", "1:3, 3:"), "[[8.0,9.0],[13.0,14.0]]");
    EXPECT_EQ(values("grid", "-1"), "[30.0,31.0,32.0,33.0,34.0]");
    EXPECT_EQ(values("grid", "[:, 1]"), "[1.0,6.0,11.0,16.0,21.0,26.0,31.0]");
    EXPECT_EQ(values("columns", "2,5"), "289");
    EXPECT_EQ(values("grid", "3:3"), "[]");
    EXPECT_EQ(values("scalar", "[]"), "2.5");
    EXPECT_EQ(tessera("cat " + root_ + " grid --slice '2:4,:2'").output, "[2, 0:2]  10 11\n[3, 0:2]  15 16\n");
    for (const char* wrong : {"9", "a", "1:2:3", "0,0,0", "1.5:"}) {
        const Result result = tessera("cat " + root_ + " grid --slice " + wrong);
        EXPECT_EQ(result.code, 2) << wrong;
        EXPECT_THAT(result.output, HasSubstr("of a tensor of shape [7, 5]")) << wrong;
    }
}

TEST_P(Cat, RawIsTheBytes) {
    save_numbers(root_, GetParam());
    const Result result = tessera("cat --raw " + root_ + " columns --slice 1");
    EXPECT_EQ(result.code, 0);
    ASSERT_EQ(result.output.size(), 6 * sizeof(int64_t));
    for (int64_t i = 0; i < 6; ++i) {
        int64_t value = 0;
        std::memcpy(&value, result.output.data() + static_cast<size_t>(i) * sizeof value, sizeof value);
        EXPECT_EQ(value, (6 + i) * (6 + i));
    }
    EXPECT_EQ(tessera("cat --raw --json " + root_ + " columns").code, 2);
}

INSTANTIATE_TEST_SUITE_P(Worlds, Cat, ::testing::Values(1, 2, 3));

TEST(CatCommand, NaNAndInfinityAreCountedAndLeftOut) {
    const TempDir dir;
    Numbers numbers;
    numbers.grid = [](int64_t i) {
        return i == 3 ? std::nanf("") : i == 4 ? std::numeric_limits<float>::infinity() : 1.0F;
    };
    numbers.columns = [](int64_t i) { return std::numeric_limits<int64_t>::max() - i; };
    save_numbers(dir.path(), 2, numbers);
    const Json grid = json_of("cat --json " + dir.path() + " grid");
    EXPECT_EQ(grid.at("nan").as_int(), 1);
    EXPECT_EQ(grid.at("infinite").as_int(), 1);
    EXPECT_EQ(grid.at("max").as_double(), 1);
    EXPECT_EQ(grid.at("mean").as_double(), 1);
    EXPECT_EQ(grid.at("first").as_array()[3].at("v").as_string(), "nan");
    EXPECT_EQ(json_of("cat --json " + dir.path() + " columns").at("min").as_int(),
              std::numeric_limits<int64_t>::max() - 23);
}

TEST(CatCommand, ValuesAreJsonAndUnknownNamesSaySo) {
    const TempDir dir;
    Numbers numbers;
    numbers.values = {{"args", Json::parse(R"({"lr":0.5,"name":"a\u001b[2Jb\u009b"})", "args")}};
    const std::string save = save_numbers(dir.path(), 1, numbers);
    EXPECT_EQ(json_of("cat --json " + save + " args").at("value").at("lr").as_double(), 0.5);
    const Result text = tessera("cat " + save + " args");
    EXPECT_EQ(text.code, 0);
    EXPECT_THAT(text.output, ::testing::Not(HasSubstr("\u009b")));
    EXPECT_EQ(tessera("cat --raw " + save + " args").code, 2);
    const Result unknown = tessera("cat " + save + " col");
    EXPECT_EQ(unknown.code, 2);
    EXPECT_THAT(unknown.output, HasSubstr("has no tensor or value 'col'; similar names: 'columns'"));
    EXPECT_EQ(json_of("cat --json " + save + " nope", 2).at("error").at("code").as_string(), "INVALID_ARGUMENT");
}

TEST(CatCommand, DamageEndsWithOneAndNothingOfIt) {
    const TempDir dir;
    const std::string save = save_numbers(dir.path(), 1);
    const std::string path = save + "/rank-00000.safetensors";
    std::string bytes = slurp(path);
    bytes[4096 + 3] ^= 1;
    spill(path, bytes);
    EXPECT_EQ(json_of("cat --json " + save + " columns", 1).at("error").at("code").as_string(), "CORRUPT");
}

// Parts in order are the tensors' content in order, whatever the size of a batch.
TEST(Batches, AreTheContentInOrder) {
    const std::vector<TypedBox> boxes{{{{1, 2, 0}, {3, 4, 5}}, DType::f32},
                                      {{{}, {}}, DType::f64},
                                      {{{0, 0}, {0, 3}}, DType::f32},
                                      {{{5}, {100}}, DType::u8}};
    for (const int64_t batch_bytes : {1, 8, 20, 37, 80, 1000}) {
        SCOPED_TRACE(batch_bytes);
        std::vector<int64_t> seen(boxes.size(), 0);
        size_t last = 0;
        for_each_batch(boxes, batch_bytes, [&](std::span<const BatchPart> parts, int64_t bytes) {
            EXPECT_LE(bytes, std::max<int64_t>(batch_bytes, 8));
            EXPECT_LE(bytes, largest_batch(boxes, batch_bytes));
            int64_t begin = 0;
            for (const BatchPart& part : parts) {
                EXPECT_GE(part.index, last);
                last = part.index;
                const TypedBox& whole = boxes[part.index];
                EXPECT_EQ(part.first, seen[part.index]);
                EXPECT_EQ(part.begin, begin);
                int64_t place = 0;
                for (int d = 0; d < whole.box.sizes.ndim(); ++d) {
                    place = place * whole.box.sizes[d] + part.box.offsets[d] - whole.box.offsets[d];
                }
                EXPECT_EQ(place, part.first);
                EXPECT_EQ(part.box.intersect(whole.box), part.box);
                seen[part.index] += part.box.numel();
                begin += part.box.numel() * static_cast<int64_t>(size_of(whole.dtype));
            }
            EXPECT_EQ(begin, bytes);
        });
        for (size_t i = 0; i < boxes.size(); ++i) EXPECT_EQ(seen[i], boxes[i].box.numel());
    }
}

}  // namespace
}  // namespace tsr::testing
