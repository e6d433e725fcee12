// Files that real PyTorch versions wrote (tests/golden/torch_dcp/make.py), read to the last bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "checkpoint/fixture.hpp"
#include "places.hpp"
#include "tensor/convert.hpp"

namespace tsr::testing {
namespace {

const std::string golden = tsr::testing::source_dir() + "/tests/golden/torch_dcp";

std::vector<std::string> versions() {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(golden)) {
        if (entry.is_directory()) names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
}

// The tensor's elements in row-major order, as doubles.
std::vector<double> read(const Checkpoint& checkpoint, const std::string& name, const Dims& shape, DType dtype) {
    std::vector<std::byte> memory(static_cast<size_t>(shape.product()) * size_of(dtype) + 1);
    checkpoint.read(name, {memory.data(), shape, dtype, {}});
    std::vector<double> numbers(static_cast<size_t>(shape.product()));
    for (size_t i = 0; i < numbers.size(); ++i) {
        const std::byte* element = memory.data() + i * size_of(dtype);
        if (is_floating(dtype)) {
            convert(element, dtype, reinterpret_cast<std::byte*>(&numbers[i]), DType::f64, 1);
        } else {
            int64_t number = 0;
            std::memcpy(&number, element, size_of(dtype));
            numbers[i] = static_cast<double>(number);
        }
    }
    return numbers;
}

std::vector<double> counted(int n) {
    std::vector<double> numbers(static_cast<size_t>(n));
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<double>(i);
    return numbers;
}

class Golden : public ::testing::TestWithParam<std::string> {
   protected:
    static void expect_common(const Checkpoint& checkpoint) {
        EXPECT_EQ(read(checkpoint, "model.rows", {7, 5}, DType::f32), counted(35));
        EXPECT_EQ(read(checkpoint, "model.half", {6}, DType::f16), counted(6));
        EXPECT_EQ(read(checkpoint, "model.brain", {2, 3}, DType::bf16), counted(6));
        EXPECT_EQ(read(checkpoint, "model.transposed", {4, 3}, DType::f64),
                  (std::vector<double>{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11}));
        EXPECT_EQ(read(checkpoint, "model.scalar", {}, DType::i64), std::vector<double>{-3});
        EXPECT_EQ(read(checkpoint, "model.mask", {3}, DType::boolean), (std::vector<double>{1, 0, 1}));
        EXPECT_EQ(read(checkpoint, "model.empty", {0, 5}, DType::f32), std::vector<double>{});
        const Values& values = checkpoint.manifest().values;
        EXPECT_EQ(values.at("step").dump(), "7");
        EXPECT_EQ(values.at("lr").dump(), "0.5");
        EXPECT_EQ(values.at("note").as_string(), "größer");
        EXPECT_EQ(values.at("pair").dump(), R"({"~":"tuple","v":[1,[2,null]]})");
        EXPECT_EQ(values.at("config.deep.flag").dump(), "true");
        EXPECT_TRUE(checkpoint.manifest().unreadable.empty());
        EXPECT_TRUE(checkpoint.verify(Checkpoint::Depth::everything).empty());
        EXPECT_EQ(checkpoint.manifest().step, -1);
    }
};

TEST_P(Golden, TheDistributedCheckpointIsRead) {
    const auto checkpoint = Checkpoint::open(golden + "/" + GetParam() + "/dcp");
    expect_common(*checkpoint);
    EXPECT_EQ(checkpoint->manifest().format, "torch_dcp");
    EXPECT_EQ(checkpoint->manifest().world_size, 2);
    EXPECT_EQ(checkpoint->manifest().find("model.rows")->pieces.size(), 2u);
    EXPECT_EQ(read(*checkpoint, "model.columns", {3, 5}, DType::f32), counted(15));
    EXPECT_EQ(read(*checkpoint, "model.copies", {4}, DType::f32), counted(4));
    EXPECT_EQ(checkpoint->names().size(), 9u);
}

TEST_P(Golden, TheSavedFileIsRead) {
    const auto checkpoint = Checkpoint::open(golden + "/" + GetParam() + "/save.pt");
    expect_common(*checkpoint);
    EXPECT_EQ(checkpoint->manifest().format, "torch_save");
    EXPECT_EQ(read(*checkpoint, "model.shared", {2, 5}, DType::f32),
              (std::vector<double>{10, 11, 12, 13, 14, 15, 16, 17, 18, 19}));
    EXPECT_EQ(read(*checkpoint, "model.parameter", {3}, DType::f32), counted(3));
}

// Any box of any tensor, through both ways of reading and with a conversion.
TEST_P(Golden, EveryBoxOfTensorsIsRead) {
    for (const char* file : {"/dcp", "/save.pt"}) {
        const auto checkpoint = Checkpoint::open(golden + "/" + GetParam() + file);
        for (const std::string name : {"model.rows", "model.transposed"}) {
            const Dims shape = checkpoint->manifest().find(name)->shape;
            const DType dtype = checkpoint->manifest().find(name)->dtype;
            const std::vector<double> whole = read(*checkpoint, name, shape, dtype);
            for (int64_t r = 0; r < shape[0]; ++r) {
                for (int64_t c = 0; c < shape[1]; ++c) {
                    const Box box{{r, c}, {shape[0] - r, (shape[1] - c + 1) / 2}};
                    std::vector<float> piece(static_cast<size_t>(box.numel()), -1);
                    State state;
                    const Tensor tensor{reinterpret_cast<std::byte*>(piece.data()), box.sizes, DType::f32, {}};
                    const int count = 1;
                    state.add_sharded(name, Layout::from_boxes(shape, {&box, 1}, {&count, 1}), DType::f32, {&tensor, 1},
                                      0);
                    LoadOptions options;
                    options.unexpected = Allow::yes;
                    options.cast = Allow::yes;
                    options.verify = (r + c) % 2 == 0 ? Verify::blocks : Verify::none;
                    (void)checkpoint->load(state, options);
                    for (int64_t i = 0; i < box.numel(); ++i) {
                        const auto at = static_cast<size_t>((r + i / box.sizes[1]) * shape[1] + c + i % box.sizes[1]);
                        ASSERT_EQ(piece[static_cast<size_t>(i)], static_cast<float>(whole[at]))
                            << name << " " << box.str();
                    }
                }
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Versions, Golden, ::testing::ValuesIn(versions()), [](const auto& one) {
    std::string name = "torch_" + one.param;
    std::replace(name.begin(), name.end(), '.', '_');
    return name;
});

}  // namespace
}  // namespace tsr::testing
