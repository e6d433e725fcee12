// Safetensors of the Hugging Face kind, opened as checkpoints: which files make one, and what of them is refused.
#include <gmock/gmock.h>

#include <filesystem>
#include <numeric>

#include "checkpoint/formats/safetensors/files.hpp"
#include "checkpoint/safetensors/file_maker.hpp"

namespace tsr::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class T>
std::vector<T> read(const Checkpoint& checkpoint, const std::string& name) {
    const SavedTensor& tensor = *checkpoint.manifest().find(name);
    std::vector<T> numbers(static_cast<size_t>(tensor.shape.product()));
    EXPECT_EQ(sizeof(T), size_of(tensor.dtype));
    checkpoint.read(name, {reinterpret_cast<std::byte*>(numbers.data()), tensor.shape, tensor.dtype, {}});
    return numbers;
}

std::vector<float> counted(int64_t n, float first = 0) {
    std::vector<float> numbers(static_cast<size_t>(n));
    std::iota(numbers.begin(), numbers.end(), first);
    return numbers;
}

class Safetensors : public ::testing::Test {
   protected:
    void write(const std::string& name, const std::string& text) const { spill(dir_ / name, text); }
    void write_index(const std::string& map) const {
        write("model.safetensors.index.json", "{\"metadata\":{\"total_size\":1},\"weight_map\":{" + map + "}}");
    }
    [[nodiscard]] std::string refusal(const std::string& path, Code code = Code::corrupt) const {
        try {
            (void)Checkpoint::open(path);
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), code) << error.what();
            return error.what();
        }
        ADD_FAILURE() << path << " was opened";
        return "";
    }

    TempDir dir_;
    const Part a_{"a", "F32", "[2,3]", bytes_of(counted(6)), ""};
    const Part b_{"b", "I64", "[2]", bytes_of(std::vector<int64_t>{7, -8}), ""};
};

TEST_F(Safetensors, OneFileIsACheckpoint) {
    write(
        "any.safetensors",
        safetensors_file(
            {a_, b_, {"none", "F16", "[0,4]", "", ""}, {"0-d", "F64", "[]", bytes_of(std::vector<double>{2.5}), ""}}));
    const auto checkpoint = Checkpoint::open(dir_ / "any.safetensors");
    EXPECT_THAT(checkpoint->names(), ElementsAre("0-d", "a", "b", "none"));
    EXPECT_EQ(read<float>(*checkpoint, "a"), counted(6));
    EXPECT_EQ(read<int64_t>(*checkpoint, "b"), (std::vector<int64_t>{7, -8}));
    EXPECT_EQ(read<double>(*checkpoint, "0-d"), std::vector<double>{2.5});
    EXPECT_EQ(checkpoint->manifest().format, "safetensors");
    EXPECT_EQ(checkpoint->manifest().step, -1);
    EXPECT_FALSE(checkpoint->has_checksums());
    EXPECT_THAT(checkpoint->verify(Depth::everything), ElementsAre());
    EXPECT_THAT(checkpoint->manifest_text(), HasSubstr("\"format\":\"safetensors\""));
}

TEST_F(Safetensors, AFileOfTheHubsCacheIsKnownByItsBeginAndThroughALink) {
    write("0a1b", safetensors_file({a_}));
    std::filesystem::create_directory(dir_ / "snapshot");
    std::filesystem::create_symlink("../0a1b", dir_ / "snapshot/model.safetensors");
    EXPECT_EQ(read<float>(*Checkpoint::open(dir_ / "0a1b"), "a"), counted(6));
    EXPECT_EQ(read<float>(*Checkpoint::open(dir_ / "snapshot"), "a"), counted(6));
}

TEST_F(Safetensors, ADirectoryWithoutAnIndexIsAllItsFiles) {
    write("model-00001-of-00002.safetensors", safetensors_file({a_}));
    write("model-00002-of-00002.safetensors", safetensors_file({b_}));
    write("config.json", "{}");
    const auto checkpoint = Checkpoint::open(dir_.path());
    EXPECT_THAT(checkpoint->names(), ElementsAre("a", "b"));
    EXPECT_EQ(read<int64_t>(*checkpoint, "b"), (std::vector<int64_t>{7, -8}));
}

TEST_F(Safetensors, ATensorInTwoFilesIsRefusedAndBothAreNamed) {
    write("one.safetensors", safetensors_file({a_}));
    write("two.safetensors", safetensors_file({b_, a_}));
    const std::string why = refusal(dir_.path(), Code::invalid_argument);
    EXPECT_THAT(why, HasSubstr("tensor 'a'"));
    EXPECT_THAT(why, HasSubstr("/one.safetensors"));
    EXPECT_THAT(why, HasSubstr("/two.safetensors"));
    EXPECT_EQ(read<float>(*Checkpoint::open(dir_ / "one.safetensors"), "a"), counted(6));
}

TEST_F(Safetensors, AnIndexSaysWhichFilesBelongTogether) {
    write("model-1.safetensors", safetensors_file({a_}));
    write("model-2.safetensors", safetensors_file({b_, {"more", "U8", "[1]", "x", ""}}));
    write("consolidated.safetensors", safetensors_file({a_, b_}));
    write_index(R"("a":"model-1.safetensors","b":"model-2.safetensors")");
    for (const std::string& path : {dir_.path(), dir_ / "model.safetensors.index.json"}) {
        const auto checkpoint = Checkpoint::open(path);
        EXPECT_THAT(checkpoint->names(), ElementsAre("a", "b", "more"))
            << "what a named file holds besides is read too";
        EXPECT_EQ(checkpoint->manifest().files.size(), 2u);
    }
}

TEST_F(Safetensors, OfATensorThatTwoFilesHoldTheIndexNamesOne) {
    write("model-1.safetensors", safetensors_file({a_, b_}));
    write("model-2.safetensors", safetensors_file({{"a", "F32", "[2,3]", bytes_of(counted(6, 10)), ""}}));
    write_index(R"("a":"model-2.safetensors","b":"model-1.safetensors")");
    EXPECT_EQ(read<float>(*Checkpoint::open(dir_.path()), "a"), counted(6, 10));
}

TEST_F(Safetensors, AnIndexThatDoesNotFitIsRefused) {
    write("model-1.safetensors", safetensors_file({a_}));
    write_index(R"("a":"model-1.safetensors","c":"model-1.safetensors")");
    EXPECT_THAT(refusal(dir_.path()), HasSubstr("it lists tensor 'c' in model-1.safetensors, which does not hold it"));
    write_index(R"("a":"model-1.safetensors","c":"model-3.safetensors")");
    EXPECT_THAT(refusal(dir_.path()), HasSubstr("/model-3.safetensors is missing"));
    for (const char* outside : {"../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "", ".safetensors",
                                "x.bin", "x\\\\y.safetensors", "x\\u0000.safetensors"}) {
        write_index(std::string(R"("a":")") + outside + "\"");
        EXPECT_THAT(refusal(dir_.path()), HasSubstr("not the name of a safetensors file beside the index")) << outside;
    }
    for (const char* text :
         {"", "[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{"a":1}})",
          R"({"weight_map":{"a":"m.safetensors","a":"m.safetensors"}})", R"({"weight_map":{"":"m.safetensors"}})"}) {
        write("model.safetensors.index.json", text);
        EXPECT_THAT(refusal(dir_.path()), HasSubstr("index.json")) << text;
    }
}

TEST_F(Safetensors, TwoModelsInOneDirectoryAreNotChosenBetween) {
    write("model.safetensors", safetensors_file({a_}));
    write("model-1.safetensors", safetensors_file({a_}));
    write_index(R"("a":"model-1.safetensors")");
    EXPECT_THAT(refusal(dir_.path(), Code::invalid_argument), HasSubstr("both model.safetensors and"));
    std::filesystem::remove(dir_ / "model.safetensors.index.json");
    write("x.safetensors.index.json", R"({"weight_map":{}})");
    write("y.safetensors.index.json", R"({"weight_map":{}})");
    EXPECT_THAT(refusal(dir_.path(), Code::invalid_argument), HasSubstr("several models"));
}

// As PyTorch's HuggingFaceStorageWriter(save_distributed=True) names them.
TEST_F(Safetensors, PartsOfATensorInSeveralFilesAreOne) {
    write("shard-00001-model-00001-of-00001.safetensors",
          safetensors_file({{"w", "F32", "[2,3]", bytes_of(counted(6)), "[0,0]"},
                            {"s", "F32", "[]", bytes_of(counted(1, 4)), "[]"}}));
    write("shard-00002-model-00001-of-00001.safetensors",
          safetensors_file({{"w", "F32", "[1,3]", bytes_of(counted(3, 6)), "[2,0]"}}));
    const auto checkpoint = Checkpoint::open(dir_.path());
    EXPECT_EQ(checkpoint->manifest().find("w")->shape, (Dims{3, 3}));
    EXPECT_EQ(checkpoint->manifest().world_size, 2);
    EXPECT_EQ(read<float>(*checkpoint, "w"), counted(9));
    EXPECT_EQ(read<float>(*checkpoint, "s"), counted(1, 4));
    std::vector<float> column(2);
    const ReadPart part{"w", {{1, 2}, {2, 1}}, reinterpret_cast<std::byte*>(column.data())};
    checkpoint->read(std::span(&part, 1));
    EXPECT_THAT(column, ElementsAre(5, 8));
    EXPECT_EQ(rank_of_shard_name("shard-00002-model-00001-of-00001.safetensors"), 1);
    EXPECT_EQ(rank_of_shard_name("model-00002-of-00002.safetensors"), -1);
}

TEST_F(Safetensors, PartsThatDoNotMakeTheWholeAreRefused) {
    const Part top{"w", "F32", "[2,3]", bytes_of(counted(6)), "[0,0]"};
    const Part bottom{"w", "F32", "[1,3]", bytes_of(counted(3, 6)), "[2,0]"};
    write("2.safetensors", safetensors_file({bottom}));
    EXPECT_THAT(refusal(dir_.path()), HasSubstr("3 of 9 elements are present"));
    write("1.safetensors", safetensors_file({{"w", "F32", "[3,3]", bytes_of(counted(9)), "[0,0]"}}));
    EXPECT_THAT(refusal(dir_.path()), HasSubstr("overlap"));
    write("1.safetensors", safetensors_file({bottom}));
    write("0.safetensors", safetensors_file({top}));
    EXPECT_THAT(refusal(dir_.path()), HasSubstr("overlap")) << "the same part twice";
    write("1.safetensors", safetensors_file({{"w", "F64", "[1,1]", std::string(8, 'x'), "[2,0]"}}));
    EXPECT_THAT(refusal(dir_.path()), HasSubstr("differ in dtype"));
    write("1.safetensors", safetensors_file({{"w", "F32", "[1,1]", std::string(4, 'x'), "[9223372036854775807,0]"}}));
    EXPECT_THAT(refusal(dir_.path()), HasSubstr("2^63"));
    write("1.safetensors",
          safetensors_file({{"w", "F32", "[1,1]", std::string(4, 'x'), "[4611686018427387904,4611686018427387904]"}}));
    EXPECT_THAT(refusal(dir_.path()), HasSubstr("2^63"));
}

TEST_F(Safetensors, EveryDtypeIsReadOrToldOf) {
    std::vector<Part> parts;
    const std::pair<const char*, size_t> dtypes[] = {
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
        {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
        {"F32", 4},  {"F64", 8}, {"I64", 8}, {"U64", 8},     {"C64", 8}};
    for (const auto& [dtype, size] : dtypes) parts.push_back({dtype, dtype, "[3]", std::string(3 * size, '\1'), ""});
    parts.push_back({"fp4", "F4", "[4]", "ab", ""});
    parts.push_back({"deep", "U8", "[1,1,1,1,1,1,1,1,1]", "c", ""});
    write("m.safetensors", safetensors_file(parts));
    const auto checkpoint = Checkpoint::open(dir_ / "m.safetensors");
    for (const auto& [dtype, size] : dtypes) {
        const SavedTensor* tensor = checkpoint->manifest().find(dtype);
        ASSERT_NE(tensor, nullptr) << dtype;
        EXPECT_EQ(safetensors_name(tensor->dtype), dtype);
        std::string data(3 * size, '\0');
        checkpoint->read(dtype, {reinterpret_cast<std::byte*>(data.data()), {3}, tensor->dtype, {}});
        EXPECT_EQ(data, std::string(3 * size, '\1'));
    }
    EXPECT_THAT(checkpoint->manifest().unreadable.at("fp4"), HasSubstr("F4"));
    EXPECT_THAT(checkpoint->manifest().unreadable.at("deep"), HasSubstr("9 dimensions"));
    State state;
    std::byte byte{};
    state.add_tensor("fp4", {&byte, {1}, DType::u8, {}});
    EXPECT_THROW((void)checkpoint->load(state, {.unexpected = Allow::yes}), Error);
}

TEST_F(Safetensors, TiedNamesComeFromTheMetadata) {
    write("m.safetensors", safetensors_file({a_}, R"("tied":"a","note":"nothing")"));
    const auto checkpoint = Checkpoint::open(dir_.path());
    EXPECT_THAT(checkpoint->names(), ElementsAre("a", "tied"));
    EXPECT_EQ(read<float>(*checkpoint, "tied"), counted(6));
}

// Longer than a segment, begun at an odd byte, and cut by columns: the ways through the reader.
TEST_F(Safetensors, LargeAndUnalignedTensorsAreReadRight) {
    const int64_t rows = 2050;
    const int64_t columns = 1031;
    write("m.safetensors", safetensors_file({{"odd", "U8", "[3]", "abc", ""},
                                             {"w", "F32", "[2050,1031]", bytes_of(counted(rows * columns)), ""},
                                             {"z", "F32", "[2]", bytes_of(counted(2, 5)), ""}}));
    const auto checkpoint = Checkpoint::open(dir_.path());
    EXPECT_EQ(read<float>(*checkpoint, "w"), counted(rows * columns));
    std::vector<float> part(static_cast<size_t>(rows) * 2);
    std::vector<double> wide(2);
    std::vector<float> z(2);
    const ReadPart reads[] = {{"w", {{0, 700}, {rows, 2}}, reinterpret_cast<std::byte*>(part.data())},
                              {"z", {{0}, {2}}, reinterpret_cast<std::byte*>(z.data())}};
    checkpoint->read(reads);
    for (int64_t i = 0; i < rows; ++i) {
        ASSERT_EQ(part[static_cast<size_t>(2 * i)], static_cast<float>(i * columns + 700));
        ASSERT_EQ(part[static_cast<size_t>(2 * i + 1)], static_cast<float>(i * columns + 701));
    }
    EXPECT_THAT(z, ElementsAre(5, 6));
    State state;
    state.add_tensor("z", {reinterpret_cast<std::byte*>(wide.data()), {2}, DType::f64, {}});
    (void)checkpoint->load(state, {.unexpected = Allow::yes, .cast = Allow::yes});
    EXPECT_THAT(wide, ElementsAre(5, 6));
}

TEST_F(Safetensors, ALoadReshardsWhatPartsTell) {
    write("1.safetensors", safetensors_file({{"w", "F32", "[2,3]", bytes_of(counted(6)), "[0,0]"}}));
    write("2.safetensors", safetensors_file({{"w", "F32", "[2,3]", bytes_of(counted(6, 6)), "[2,0]"}}));
    const std::vector<int> mesh{2};
    const std::vector<Placement> placed{Placement::shard(1)};
    const Layout layout = Layout::placed({4, 3}, mesh, placed);
    std::vector<float> mine(4);
    const Tensor piece{reinterpret_cast<std::byte*>(mine.data()), {4, 1}, DType::f32, {}};
    State state;
    state.add_sharded("w", layout, DType::f32, std::span(&piece, 1), 1);
    (void)Checkpoint::open(dir_.path())->load(state);
    EXPECT_THAT(mine, ElementsAre(2, 5, 8, 11));
}

TEST_F(Safetensors, AFileThatChangesUnderTheReaderIsToldOf) {
    write("m.safetensors", safetensors_file({a_}));
    const auto checkpoint = Checkpoint::open(dir_.path());
    const std::string text = slurp(dir_ / "m.safetensors");
    write("m.safetensors", text.substr(0, text.size() - 1));
    EXPECT_THROW((void)read<float>(*checkpoint, "a"), Error);
    EXPECT_EQ(checkpoint->verify(Depth::headers).size(), 1u);
    std::filesystem::remove(dir_ / "m.safetensors");
    EXPECT_EQ(checkpoint->verify(Depth::everything).size(), 1u);
}

TEST_F(Safetensors, HostileFilesAreRefused) {
    const std::string sound = safetensors_file({a_});
    std::string huge = sound;
    huge[7] = '\x80';  // 2^63 bytes of header
    const auto json = [](const std::string& text, size_t data) { return with_length(text) + std::string(data, 'x'); };
    const std::pair<std::string, std::string> hostile[] = {
        {"", "too few"},
        {std::string("\0\0\0", 3), "too few"},
        {huge, "claims 9223372036854775"},
        {std::string(8, '\xff') + "{}", "claims"},
        {with_length(""), "begin with '{'"},
        {with_length("[]"), "begin with '{'"},
        {with_length("{"), "m.safetensors"},
        {with_length(" {}"), "begin with '{'"},
        {json(R"({"a":{"dtype":"U8","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}})", 0), "larger than 2^63"},
        {sound + "x", "end at byte"},
        {sound.substr(0, sound.size() - 1), "m.safetensors"},
        {json(
             R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
             3),
         "begins at byte 1"},
        {json(
             R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
             3),
         "begins at byte 2"},
        {json(
             R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
             1),
         "twice"},
        {json(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1), "byte range is not within"},
        {json(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,99]}})", 1), "byte range is not within"},
        {json(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}})", 1), "negative"},
        {json(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1), "negative"},
        {json(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0), "2^63"},
        {json(R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,0]}})", 0), "m.safetensors"},
        {json(R"({"a":{"dtype":"F32","shape":[0,5],"data_offsets":[0,4]}})", 4), "has 0 bytes, but its byte range"},
        {json(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", 8), "has 4 bytes, but its byte range"},
        {json(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4), "m.safetensors"},
        {json(R"({"a":{"dtype":"F32","shape":[1]}})", 4), "data_offsets"},
        {json(R"({"a":[]})", 0), "'a'"},
        {json(R"({"__metadata__":{"x":1}})", 0), "string"},
        {json(R"({"__metadata__":{"DCP_SHARDING_INFO":"["}})", 0), "DCP_SHARDING_INFO"},
        {json(
             R"({"__metadata__":{"DCP_SHARDING_INFO":"{\"a\":{\"saved_offsets\":[0,0]}}"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
             1),
         "2 saved offsets"},
        {json(
             R"({"__metadata__":{"DCP_SHARDING_INFO":"{\"a\":{\"saved_offsets\":[-1]}}"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
             1),
         "negative"},
        {json(
             R"({"__metadata__":{"DCP_SHARDING_INFO":"{\"a\":{\"saved_offsets\":[9223372036854775807]}}"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
             1),
         "2^63"},
    };
    for (const auto& [text, why] : hostile) {
        write("m.safetensors", text);
        EXPECT_THAT(refusal(dir_ / "m.safetensors"), HasSubstr(why)) << text.substr(0, 200);
    }
    std::string deep(1000, '[');
    write("m.safetensors", with_length("{\"a\":" + deep));
    EXPECT_THAT(refusal(dir_ / "m.safetensors"), HasSubstr("m.safetensors"));
}

TEST_F(Safetensors, WhatIsNoRegularFileIsRefused) {
    std::filesystem::create_directory(dir_ / "model.safetensors");
    EXPECT_THAT(refusal(dir_.path()), HasSubstr("not a regular file"));
    std::filesystem::remove(dir_ / "model.safetensors");
    std::filesystem::create_symlink("b.safetensors", dir_ / "a.safetensors");
    std::filesystem::create_symlink("a.safetensors", dir_ / "b.safetensors");
    EXPECT_THAT(refusal(dir_.path(), Code::io), HasSubstr("symbolic links"));
}

}  // namespace
}  // namespace tsr::testing
