// `tessera ckpt shards`: every element lies in one piece, and a drawing shows the pieces.
#include <gmock/gmock.h>

#include "cli/command.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

size_t count_of(const std::string& text, const std::string& part) {
    size_t count = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
    return count;
}

class Shards : public ::testing::TestWithParam<int> {};

TEST_P(Shards, PiecesCoverEachTensorOnce) {
    const TempDir dir;
    save_numbers(dir.path(), GetParam());
    const Json json = json_of("shards --json " + dir.path());
    EXPECT_EQ(json.at("world_size").as_int(), GetParam());
    EXPECT_EQ(json.at("tensors").as_object().size(), 6u);
    for (const Json::Member& tensor : json.at("tensors").as_object()) {
        int64_t whole = 1;
        for (const Json& size : tensor.value.at("shape").as_array()) whole *= size.as_int();
        int64_t covered = 0;
        for (const Json& piece : tensor.value.at("pieces").as_array()) {
            int64_t elements = 1;
            for (const Json& size : piece.at("sizes").as_array()) elements *= size.as_int();
            covered += elements;
            EXPECT_LT(piece.at("rank").as_int(), GetParam());
        }
        EXPECT_EQ(covered, whole) << tensor.key;
    }
    const Json::Array columns = json.at("tensors").at("columns").at("pieces").as_array();
    ASSERT_EQ(columns.size(), static_cast<size_t>(GetParam()));
    EXPECT_EQ(columns.back().at("file").as_string(), "rank-0000" + std::to_string(GetParam() - 1) + ".safetensors");
    EXPECT_EQ(columns.back().at("offsets").as_array()[1].as_int(), 6 - 6 / GetParam());
}

INSTANTIATE_TEST_SUITE_P(Worlds, Shards, ::testing::Values(1, 2, 3));

// The name of a file is anybody's where an index tells it.
TEST(ShardsCommand, ControlCharactersOfAFileNameDoNotReachTheTerminal) {
    const TempDir dir;
    const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
    std::string file(8, '\0');
    file[0] = static_cast<char>(header.size());
    spill(dir / "x\033[2J.safetensors", file + header + "z");
    spill(dir / "model.safetensors.index.json", R"({"weight_map":{"a":"x\u001b[2J.safetensors"}})");
    const Result shards = tessera("shards " + dir.path());
    EXPECT_EQ(shards.code, 0) << shards.output;
    EXPECT_THAT(shards.output, HasSubstr("x?[2J.safetensors  [0:1]"));
}

TEST(ShardsCommand, NamesAndPatternsChoose) {
    const TempDir dir;
    save_numbers(dir.path(), 2);
    const Result text = tessera("shards " + dir.path() + " 'g*'");
    EXPECT_EQ(text.code, 0);
    EXPECT_EQ(text.output,
              "grid  f32 [7, 5]\n  rank-00000.safetensors  [0:4, 0:5]  80 B\n"
              "  rank-00001.safetensors  [4:7, 0:5]  60 B\n");
    EXPECT_EQ(json_of("shards --json " + dir.path() + " half flags").at("tensors").as_object().size(), 2u);
    EXPECT_EQ(json_of("shards --json " + dir.path() + " grid nope", 2).at("error").at("code").as_string(),
              "INVALID_ARGUMENT");
}

TEST(ShardsCommand, TheDrawingHasARectangleAPieceAndNoMarkupOfNames) {
    const TempDir dir;
    Numbers numbers;
    numbers.prefix = "<script>&.";
    save_numbers(dir / "root", 3, numbers);
    const std::string svg = dir / "out.svg";
    const Result result = tessera("shards " + (dir / "root") + " --svg " + svg + " --html " + (dir / "out.html"));
    EXPECT_EQ(result.code, 0);
    EXPECT_EQ(result.output, "");
    const std::string text = slurp(svg);
    EXPECT_TRUE(text.starts_with("<svg ")) << text.substr(0, 100);
    EXPECT_THAT(text, Not(HasSubstr("<script")));
    EXPECT_THAT(text, HasSubstr("&lt;script&gt;&amp;.grid"));
    EXPECT_EQ(count_of(text, "columns\nrank "), 3u);
    EXPECT_EQ(count_of(text, "scalar\nrank "), 1u);
    const std::string page = slurp(dir / "out.html");
    EXPECT_THAT(page, HasSubstr(text));
    EXPECT_THAT(page, Not(::testing::ContainsRegex("(src|href)=")));
    EXPECT_EQ(tessera("shards " + (dir / "root") + " --svg " + (dir / "nowhere/out.svg")).code, 2);
}

}  // namespace
}  // namespace tsr::testing
